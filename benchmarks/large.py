"""Large runs: `report` of 10,000 trials; `report`, `resume` and `check` of 200,000 of a `random` search."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from benchmarks.measure import Ratio
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Result, Reward
from loopwright.scenario.dispatch import begin, build
from loopwright.scenario.load import load

TRIALS, LEFT = 200_000, 10
MOST_S, MOST_MB = 10, 200
REPORTED, REPORT_S, REPORT_MB = 10_000, 2, 10
SCENARIO = f"""
name = "large"
[[run]]
name = "bowl"
agent = {{ type = "random", trials = {TRIALS + LEFT}, seed = 1 }}
reward = {{ type = "negative", metrics = ["loss"] }}
[run.workload]
type = "python"
function = "function:bowl"
[run.workload.args]
x = {{ low = -5.0, high = 5.0 }}
y = {{ low = -5.0, high = 5.0 }}
z = {{ low = 0.0, high = 9.0 }}
"""


def fill(directory: Path, trials: int = TRIALS) -> Path:
    """The output directory of a search that was killed before its end."""
    (directory / "function.py").write_text(Path(__file__).with_name("function.py").read_text())
    file, output = directory / "scenario.toml", directory / "out"
    file.write_text(SCENARIO)
    loaded = load(file)
    output.mkdir()
    begin(loaded, output)
    built = build(loaded, loaded.runs[0], output)
    book, random = built.env.book, Random(1)
    try:
        for number in range(1, trials + 1):
            action = {"x": random.uniform(-5, 5), "y": random.uniform(-5, 5), "z": random.uniform(0, 9)}
            trial = book.new_trial(action, group=number, key=f"{number:064x}")
            book.ledger.reserve([trial], hold=True)
            loss = action["x"] ** 2 + action["y"] ** 2 + action["z"]
            reward = Reward(-loss, {"loss": loss})
            book.commit(trial, Result(Outcome.OK, {"loss": loss}, usage={"wall_s": 1e-4}, reward=reward))
            if number % 1000 == 0:
                book.ledger.flush()
    finally:
        built.resources.close()
    return output


def cost(verb: str, output: Path) -> tuple[float, float, float]:
    """Wall time and processor time in seconds, and the most memory in MB, of one command."""
    start_s = time.perf_counter()
    command = Path(sys.executable).with_name("loopwright")
    process = subprocess.Popen([command, verb, output], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"`loopwright {verb}` ended with {process.returncode}"
    return time.perf_counter() - start_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def run() -> list[Ratio]:
    """Each command once, in a process of its own."""
    ratios = []
    with tempfile.TemporaryDirectory() as directory:
        output = fill(Path(directory), REPORTED)
        wall_s, cpu_s, _ = cost("report", output)
        size_mb, name = (output / "report.html").stat().st_size / 1e6, f"large: `report` of {REPORTED:,} trials"
        detail = f"{wall_s:.1f} s on the clock"
        ratios.append(Ratio(f"{name}, processor time", cpu_s, REPORT_S, unit="s", detail=detail))
        ratios.append(Ratio(f"{name}, size", size_mb, REPORT_MB, unit="MB"))
    with tempfile.TemporaryDirectory() as directory:
        output = fill(Path(directory))
        for verb in ("check", "report", "resume"):
            wall_s, cpu_s, most_mb = cost(verb, output)
            name = f"large: `{verb}` of {TRIALS:,} trials"
            ratios.append(
                Ratio(f"{name}, processor time", cpu_s, MOST_S, unit="s", detail=f"{wall_s:.1f} s on the clock")
            )
            ratios.append(Ratio(f"{name}, memory", most_mb, MOST_MB, unit="MB"))
    return ratios
