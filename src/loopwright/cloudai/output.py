"""What the programs of CloudAI's tests print, as metrics. Each reader takes the whole output of a test."""

import re
import statistics
from collections.abc import Callable, Sequence

_FIO_OPERATION = re.compile(r"^\s*(read|write|trim):\s+IOPS=([\d.]+)([kMG]?),\s+BW=([\d.]+)([A-Za-z/]+)")
_FIO_LATENCY = re.compile(r"^\s+(c?lat)\s+\((\w+)\):.*\bavg=\s*([\d.]+)")
_THOUSANDS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_MIB = {
    **{unit: 1024.0**power for power, unit in enumerate(("KiB/s", "MiB/s", "GiB/s", "TiB/s"), -1)},
    **{unit: 1000.0**power / 1024**2 for power, unit in enumerate(("B/s", "KB/s", "MB/s", "GB/s", "TB/s"))},
    "kB/s": 1000 / 1024**2,
}
_MICROSECONDS = {"nsec": 1e-3, "usec": 1.0, "msec": 1e3, "sec": 1e6}
_AGGREGATES: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "mean": statistics.fmean,
    "min": min,
    "max": max,
    "first": lambda values: values[0],
}


def _numbers(words: Sequence[str]) -> list[float] | None:
    try:
        return [float(word) for word in words]
    except ValueError:
        return None


def read_nccl(output: str, _: Sequence[str] = ()) -> dict[str, float]:
    """nccl-tests: the mean over all message sizes of the time in place and out of place, in microseconds."""
    rows = []
    for line in output.splitlines():
        words = line.split()
        if len(words) == 13 and words[0].isdigit() and (times := _numbers([words[5], words[9]])):
            rows.append(times)
    metrics = {}
    if rows:
        out_of_place, in_place = (statistics.fmean(column) for column in zip(*rows, strict=True))
        metrics = {"default": in_place, "latency_in_place": in_place, "latency_out_of_place": out_of_place}
    if match := re.search(r"# Avg bus bandwidth\s*:\s*([\d.]+)", output):
        metrics["avg_busbw_gb_s"] = float(match[1])
    return metrics


def read_ucc(output: str, _: Sequence[str] = ()) -> dict[str, float]:
    """ucc_perftest: the first message size, in microseconds, as CloudAI takes it."""
    for line in output.splitlines():
        words = line.split()
        if len(words) == 8 and (row := _numbers(words)):
            return {"default": row[2], "time_avg": row[2], "time_max": row[4], "bandwidth_avg_gb_s": row[5]}
    return {}


def read_osu(output: str, _: Sequence[str] = ()) -> dict[str, float]:
    """OSU micro-benchmarks: the largest message size."""
    header, row = "", None
    for line in output.splitlines():
        if re.match(r"#\s*Size\s", line):
            header = line
        elif header and (words := line.split()) and (numbers := _numbers(words[:3])) and len(numbers) > 1:
            row = numbers
    if row is None:
        return {}
    if "Latency" in header:
        return {"default": row[1], "latency_us": row[1]}
    more = {"messages_s": row[2]} if "Messages/s" in header and len(row) > 2 else {}
    return {"default": row[1], "bandwidth_mb_s": row[1], **more}


def read_fio(output: str, options: Sequence[str] = ("all", "bw", "sum")) -> dict[str, float]:
    """fio's summaries: bandwidth in MiB/s, latency in microseconds; `default` as `metric_operation` and so on say."""
    rows: list[dict[str, float | str]] = []
    for line in output.splitlines():
        if match := _FIO_OPERATION.match(line):
            name, count, unit, bandwidth, per = match.groups()
            rows.append(
                {"operation": name, "iops": float(count) * _THOUSANDS[unit], "bw": float(bandwidth) * _MIB[per]}
            )
        elif rows and (match := _FIO_LATENCY.match(line)):
            kind, unit, average = match.groups()
            if kind == "lat" or "latency" not in rows[-1]:  # the total counts, where there is one
                rows[-1]["latency"] = float(average) * _MICROSECONDS[unit]
    metrics = {
        f"{row['operation']}_{name}": float(row[name])
        for row in rows
        for name in ("bw", "iops", "latency")
        if name in row
    }
    operation, name, aggregate = options
    selection = rows[:1] if operation == "first" else [r for r in rows if operation in ("all", r["operation"])]
    values = [float(row[name]) for row in selection if name in row]
    return metrics | ({"default": _AGGREGATES[aggregate](values)} if values and aggregate in _AGGREGATES else {})
