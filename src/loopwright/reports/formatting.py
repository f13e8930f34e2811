"""Numbers, values and durations as people read them."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import orjson

T = TypeVar("T")
_UNITS = {
    "s": "s",
    "seconds": "s",
    "ms": "ms",
    "us": "µs",
    "ns": "ns",
    "bytes": "B",
    "kb": "kB",
    "mb": "MB",
    "gb": "GB",
    "kib": "KiB",
    "mib": "MiB",
    "gib": "GiB",
    "percent": "%",
    "pct": "%",
    "hz": "Hz",
    "ghz": "GHz",
    "gflops": "GFLOP/s",
    "watts": "W",
    "joules": "J",
}


def number(value: Any, digits: int = 5) -> str:
    """A number to five digits, with a true minus sign; a dash for None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "–" if value is None else short(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    is_whole = abs(value) < 1e15 and (value == int(value) or abs(value) >= 10**digits)
    text = f"{value:,.0f}" if is_whole else f"{value:.{digits}g}"
    return text.replace(",", "\u202f").replace("-", "−")


def ends(low: float, high: float) -> str:
    """`low to high`, with as many digits as it takes to tell the ends of a narrow interval apart."""
    width, largest = high - low, max(abs(low), abs(high))
    if 0 < width < largest / 10**4 and math.isfinite(largest):
        # Two digits of the width, in both ends.
        decimals = max(0, 1 - math.floor(math.log10(width)))
        return f"{low:,.{decimals}f} to {high:,.{decimals}f}".replace(",", "\u202f").replace("-", "−")
    return f"{number(low)} to {number(high)}"


def measured(value: Any, name: str) -> str:
    """A number with the unit that its name implies."""
    unit = unit_of(name)
    return f"{number(value)}\u00a0{unit}" if unit else number(value)


def spread(value: float, deviation: float, name: str) -> str:
    """A number and its standard deviation, in one unit."""
    unit = unit_of(name)
    return f"{number(value)} ± {number(deviation, 2)}" + (f"\u00a0{unit}" if unit else "")


def unit_of(name: str) -> str:
    """The unit in a metric's name: `ttft_s` and its negative are in seconds; `mb_per_s` is MB/s, `tokens_per_s` /s."""
    bare = name.removeprefix("−").lower()
    if not bare.isidentifier():
        # An expression: the unit of its last name is not the unit of the whole.
        return ""
    head, _, last = bare.rpartition("_")
    unit = _UNITS.get(last, "")
    if unit and head.endswith("_per"):
        counted_unit = _UNITS.get(head.removesuffix("_per").rpartition("_")[2], "")
        return f"{counted_unit}/{unit}"
    return unit


def exact(value: Any) -> str:
    """A value as JSON, with all its digits; text stays as it is."""
    return value if isinstance(value, str) else orjson.dumps(value, default=repr).decode()


def short(value: Any, most: int = 300) -> str:
    """A value as text, cut if it is too long to read."""
    text = exact(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def assignments(values: Mapping[str, Any]) -> str:
    """`a = 1, b = 2`."""
    return ", ".join(f"{name} = {short(value, 80)}" for name, value in values.items())


def pairs(values: Mapping[str, Any]) -> str:
    """`a=1  b=2`, for a terminal."""
    return "  ".join(f"{name}={short(value)}" for name, value in values.items()) or "(nothing to choose)"


def duration(seconds: float) -> str:
    """A time span with its unit."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min".replace(",", "\u202f") if hours else f"{minutes} min {rest} s"


def size(size_bytes: float) -> str:
    """A number of bytes in the largest unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.3g} {unit}" if size_bytes < 1000 else f"{size_bytes:.0f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} TiB"


def percent(share: float) -> str:
    """A share as a percentage."""
    return "< 0.01 %" if 0 < share < 0.0001 else f"{number(100 * share, 3)} %"


def counted(count: int, noun: str) -> str:
    """`1 episode`, `2 episodes`."""
    return f"1 {noun}" if count == 1 else f"{number(count)} {noun}s"


def evenly(items: Iterable[T], most: int) -> list[T]:
    """At most this many items, evenly spread, the first and the last included."""
    every = list(items)
    if len(every) <= most:
        return every
    return [every[round(place * (len(every) - 1) / max(1, most - 1))] for place in range(most)]
