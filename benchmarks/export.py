"""`loopwright export --rows`: long conversations become rows in time that matters to nobody, and memory stays flat."""

import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.measure import Ratio
from loopwright.core.episode import ROOT, Episode, Node, Span
from loopwright.core.outcome import Outcome
from loopwright.core.task import Task
from loopwright.core.trial import Result, Reward, Trial
from loopwright.ledger.ledger import Ledger

EPISODES, FEW, TURNS, TOKENS = 20_000, 2_000, 50, 8
EXPORT = """
import resource, sys, time
from loopwright.cli import main
start, (output, format) = time.monotonic(), sys.argv[1:]
sys.argv[1:] = ["export", output, "--rows", "--format", format]
try:
    main()
except SystemExit as exit:
    assert not exit.code, exit.code
usage = resource.getrusage(resource.RUSAGE_SELF)
print(time.monotonic() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
"""


def conversation(turns: int = TURNS) -> Episode:
    """An episode of many turns, with a few tokens sampled in each."""
    nodes, ids = [ROOT], tuple(range(TOKENS))
    for turn in range(turns):
        nodes.append(Node(len(nodes) - 1, {"role": "user", "content": f"Go on, {turn}."}, ids, (0.0,) * TOKENS))
        message = {"role": "assistant", "content": f"Step {turn} is done."}
        nodes.append(Node(len(nodes) - 1, message, ids, (-0.25,) * TOKENS, (Span(0, TOKENS, turn // 10),), "stop"))
    episode = Episode(Task("t/0", ({"role": "user", "content": "Work."},), data_source="t"), tuple(nodes))
    return replace(episode, group=1).judged(Reward(0.5, {"exact": 0.5}))


def fill(directory: Path, episodes: int) -> None:
    """The ledger of a run with this many episodes."""
    directory.mkdir()
    data = conversation().to_bytes()
    with Ledger.create(directory / "ledger.db") as ledger:
        ledger.set_state("run", {"name": "r", "kind": "rollout", "rollout": {"tasks": ["t"]}})
        for number in range(1, episodes + 1):
            action = {"source": "t", "index": 0, "task": "t/0"}
            trial = Trial(number, action, "", group=1 + number // 8, reserved_at=time.time())
            ledger.reserve([trial], hold=True)
            ledger.commit(trial, Result(Outcome.OK, {}, reward=Reward(0.5), episode=data), hold=True)
        ledger.flush()


def export(output: Path, format: str) -> tuple[float, float, float]:
    """Seconds, seconds of CPU time, and the peak memory in MiB of an export in a process of its own."""
    command = [sys.executable, "-c", EXPORT, str(output), format]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(lines[-3]), float(lines[-2]), float(lines[-1])


def run() -> list[Ratio]:
    """The time for 20,000 episodes of 50 turns, and the memory for them against that for a tenth."""
    with tempfile.TemporaryDirectory() as directory:
        few, many = Path(directory, "few"), Path(directory, "many")
        for output, episodes in ((few, FEW), (many, EPISODES)):
            output.mkdir()
            fill(output / "r", episodes)
        ratios = []
        for format in ("jsonl", "parquet"):
            (_, _, few_mib), (seconds, cpu_s, many_mib) = export(few, format), export(many, format)
            detail = f"{few_mib:.0f} MiB for {FEW:,}, {many_mib:.0f} MiB for {EPISODES:,}"
            name = f"export --rows as {format}: {EPISODES:,} episodes of {TURNS} turns"
            ratios.append(Ratio(name, seconds, 60.0, unit="s", detail=f"{cpu_s:.0f} s of CPU time"))
            ratios.append(Ratio(f"export --rows as {format}: memory", many_mib / few_mib, 1.2, detail=detail))
        return ratios
