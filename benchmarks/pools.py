"""Pools: dispatch through the router of a pool on Ray, against bare calls of Ray actors that do the same."""

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import ray

from benchmarks.measure import Ratio, best_of
from loopwright.core.episode import Episode
from loopwright.core.outcome import Outcome
from loopwright.core.runtime import run as run_loop
from loopwright.core.task import Task
from loopwright.core.trial import Trial
from loopwright.engines.scripted import ScriptedConfig, ScriptedEngine
from loopwright.execution.ray.connection import RayConnection
from loopwright.gateway.sessions.session import Session
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.trial_book import TrialBook
from loopwright.rollouts.build import build_judger_client
from loopwright.rollouts.env import RolloutEnv
from loopwright.rollouts.group import Group
from loopwright.rollouts.judgers import parse_judger
from loopwright.rollouts.loops.base import AgentLoop, LoopConfig
from loopwright.rollouts.loops.worker import LoopWorker, RolloutRequest
from loopwright.rollouts.pools.base import Worker
from loopwright.rollouts.pools.ray.pool import RayPool
from loopwright.rollouts.producer import GroupProducer
from loopwright.rollouts.tasks.mix import TaskMix

WORKERS, CALLS, CONCURRENCY, ROUNDS = 2, 3_000, 64, 6
REQUEST = {"messages": [{"role": "user", "content": "What is 2 + 3? " * 20}], "label": "5", "seed": 1, "extra": None}
ANSWER = {"ids": list(range(200)), "logprobs": [-0.25] * 200, "reward": 1.0}


class Echo(Worker):
    """Answers at once, with as much as a short episode holds."""

    async def handle(self, request: Any) -> Any:
        return ANSWER


class BareEcho:
    """The same without a pool."""

    async def handle(self, request: Any) -> Any:
        return ANSWER


async def drive(call: Callable[[int], Awaitable[Any]]) -> None:
    numbers = iter(range(CALLS))

    async def work() -> None:
        for number in numbers:
            await call(number)

    await asyncio.gather(*(work() for _ in range(CONCURRENCY)))


def _is_fatal(number: int) -> bool:
    return number % 20 == 7


class FatalWorker(LoopWorker):
    """Ends its process in 5 % of the rollouts, at every attempt of them."""

    async def handle(self, request: RolloutRequest) -> Episode:
        number = request.trial or 0
        await asyncio.sleep(Random(f"duration:{number}").uniform(0.1, 0.3))
        if _is_fatal(number):
            os._exit(1)
        return await super().handle(request)


class Empty(AgentLoop):
    """Makes nothing of a task."""

    async def run(self, task: Task, session: Session) -> Episode:
        return session.episode(task)


def build_fatal_worker() -> LoopWorker:
    loop = Empty(LoopConfig(type="benchmark"), Path())
    return FatalWorker(loop, ScriptedEngine(ScriptedConfig(), Path()))


async def produce_beside_crashes(directory: Path) -> tuple[list[Trial], list[Group]]:
    """All trials and the groups to train on: 60 groups of 4, 16 rollouts in flight."""
    batch, steps, size = 4, 15, 4
    ledger = Ledger.create(directory / "ledger.db")
    env = RolloutEnv(
        TrialBook("benchmark", directory, ledger),
        tasks=TaskMix({"t": [Task(f"t/{n}", ({"role": "user", "content": ""},)) for n in range(1000)]}),
        loop=RayPool(build_fatal_worker, workers=WORKERS, cpus=0.5),
        judger=build_judger_client(parse_judger({"type": "length"}), Path()),
        concurrency=batch * size,
    )
    groups: list[Group] = []
    async with env.running():
        producer = GroupProducer(env, env.produce, group_size=size, min_group=size)
        for step in range(1, steps + 1):
            groups += await producer.batch(batch, step)
        await producer.pause(0)
    trials = list(ledger.trials())
    ledger.close()
    return trials, groups


def crashes() -> list[Ratio]:
    """What is lost on two workers if 5 % of the rollouts call `os._exit`."""
    with RayConnection(cpus=WORKERS), tempfile.TemporaryDirectory() as directory:
        trials, groups = run_loop(produce_beside_crashes(Path(directory)))
    ended = [trial for trial in trials if trial.outcome is not Outcome.ABORTED]
    lost = [trial for trial in ended if trial.reward is None]
    fatal = sum(_is_fatal(trial.number) for trial in ended)
    detail = f"{len(lost)} of {len(ended)} rollouts, of which {fatal} end their process"
    whole = 100 * sum(group.judged == group.size for group in groups) / len(groups)
    return [
        Ratio(
            "pools: lost if 5 % of the rollouts end their process", 100 * len(lost) / len(ended), 6, "%", detail=detail
        ),
        Ratio("pools: whole groups among those trained on", whole, 100, "%", at_least=True),
    ]


def run() -> list[Ratio]:
    """Same request and answer, same number of actors, same concurrency; the pool's calls have a deadline besides."""
    with RayConnection(cpus=WORKERS), asyncio.Runner() as runner:
        kind: Any = ray.remote(BareEcho)
        actors = [kind.options(num_cpus=0.5, max_concurrency=1000).remote() for _ in range(WORKERS)]
        pool = RayPool(Echo, workers=WORKERS, cpus=0.5)
        runner.run(pool.start())

        async def bare(number: int) -> Any:
            return await actors[number % WORKERS].handle.remote(REQUEST)

        async def through_pool(_: int) -> Any:
            return await pool.call(REQUEST, timeout_s=60)

        contenders = {
            "pool": lambda: runner.run(drive(through_pool)),
            "bare": lambda: runner.run(drive(bare)),
        }
        best_of(1, contenders)
        best = best_of(ROUNDS, contenders)
        runner.run(pool.close())
    detail = f"{CALLS / best['pool']:,.0f} calls/s, bare Ray {CALLS / best['bare']:,.0f}"
    name = f"pools: dispatch to {WORKERS} actors against bare Ray calls"
    return [Ratio(name, best["bare"] / best["pool"], 0.7, at_least=True, detail=detail), *crashes()]
