"""Slopes for docs/scale.md: what a trial costs as a ledger grows, and what a trial in flight costs in memory."""

import tempfile
import time
import tracemalloc
from pathlib import Path

from benchmarks.ledger import Filling
from benchmarks.measure import Ratio
from benchmarks.rollouts import GROUP_SIZE, Empty, produce
from loopwright import Study
from loopwright.core.runtime import run as run_loop
from loopwright.engines.base import Sampling
from loopwright.engines.scripted import ScriptedConfig, ScriptedEngine
from loopwright.gateway.sessions.session import Session

SIZES = (1_000, 10_000, 100_000)
BATCH = 1_000
ROUNDS = 5
IN_FLIGHT = (500, 4_000)
ROLLOUT_GROUPS = (100, 1_000)
SESSIONS, SESSION_WORDS = (50, 250), 100
SCENARIO = {
    "name": "scale",
    "system": {"parallel": 4096},
    "run": [
        {
            "name": "wide",
            "agent": {"type": "random", "trials": 4096},
            "reward": {"type": "identity", "metrics": ["y"]},
            "workload": {
                "type": "external",
                "metrics": ["y"],
                "args": {"x": {"low": 0, "high": 1}, "tile": {"low": 1, "high": 1000000, "dtype": "int"}},
            },
        }
    ],
}


def _ledger() -> list[Ratio]:
    """Processor time and disk space per trial at each size. Processor time, since the machine may be busy."""
    costs_ms, bytes_each = [], 0.0
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "ledger.db")
        filling = Filling(path)
        with filling.ledger:
            for size in SIZES:
                filling.add(size - filling.number)
                rounds = []
                for _ in range(ROUNDS):
                    start_s = time.process_time()
                    filling.add(BATCH)
                    rounds.append((time.process_time() - start_s) / BATCH * 1000)
                costs_ms.append(min(rounds))
        bytes_each = path.stat().st_size / filling.number
    figures = [
        Ratio(f"scale: processor time of a trial in a ledger of {size:,}", cost_ms, None, unit="ms")
        for size, cost_ms in zip(SIZES, costs_ms, strict=True)
    ]
    growth = Ratio(f"scale: a trial at {SIZES[-1]:,} against one at {SIZES[0]:,}", costs_ms[-1] / costs_ms[0], 1.5)
    return [*figures, growth, Ratio("scale: disk space of a trial", bytes_each, None, unit="bytes")]


def _in_flight() -> list[Ratio]:
    """Memory of each trial that is handed out and not yet measured, between two numbers of them."""
    points = []
    with tempfile.TemporaryDirectory() as directory, Study.open(SCENARIO, directory) as study:
        tracemalloc.start()
        pending = []
        for number in range(1, max(IN_FLIGHT) + 1):
            pending.append(study.ask())
            if number in IN_FLIGHT:
                points.append((number, tracemalloc.get_traced_memory()[0]))
        tracemalloc.stop()
    (few, few_bytes), (many, many_bytes) = points
    each = (many_bytes - few_bytes) / (many - few)
    return [Ratio("scale: memory of a trial in flight", each / 1024, 64, unit="KiB", detail=f"{few:,} to {many:,}")]


def _producer() -> list[Ratio]:
    """Processor time of an empty rollout, judged and recorded, in a short production and in a long one."""
    costs_ms = []
    for groups in ROLLOUT_GROUPS:
        rounds = []
        for _ in range(ROUNDS):
            start_s = time.process_time()
            run_loop(produce(groups, Empty, {}, judger={"type": "length"}, batch=8)).close()
            rounds.append((time.process_time() - start_s) / (groups * GROUP_SIZE) * 1000)
        costs_ms.append(min(rounds))
    figures = [
        Ratio(f"scale: processor time of a rollout, of {groups * GROUP_SIZE:,}", cost_ms, None, unit="ms")
        for groups, cost_ms in zip(ROLLOUT_GROUPS, costs_ms, strict=True)
    ]
    return [
        *figures,
        Ratio("scale: a rollout in a long production against a short one", costs_ms[1] / costs_ms[0], 1.5),
    ]


def _sessions() -> Ratio:
    """Memory of a session with one turn, between two numbers of them."""
    engine = ScriptedEngine(ScriptedConfig(replies=("word " * SESSION_WORDS,)), Path())
    points = []

    async def main() -> None:
        sessions = []
        for number in range(1, max(SESSIONS) + 1):
            session = Session(engine, Sampling(max_tokens=8 * SESSION_WORDS), seed=str(number))
            await session.turn([{"role": "user", "content": "word " * SESSION_WORDS}])
            sessions.append(session)
            if number in SESSIONS:
                points.append((number, tracemalloc.get_traced_memory()[0]))

    tracemalloc.start()
    run_loop(main())
    tracemalloc.stop()
    (few, few_bytes), (many, many_bytes) = points
    each = (many_bytes - few_bytes) / (many - few) / 1024
    return Ratio(f"scale: memory of a session of {2 * SESSION_WORDS} words", each, None, unit="KiB")


def run() -> list[Ratio]:
    """All figures."""
    return [*_ledger(), *_in_flight(), *_producer(), _sessions()]
