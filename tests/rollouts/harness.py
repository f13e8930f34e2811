"""An environment for production tests: rollouts and verdicts are functions, and time is simulated."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from loopwright.core.episode import ROOT, Episode, Node, Span
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.task import Task
from loopwright.core.trial import Reward
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.trial_book import TrialBook
from loopwright.rollouts.env import RolloutEnv, SourceRunner
from loopwright.rollouts.judgers.base import JudgeFailed
from loopwright.rollouts.loops.worker import RolloutRequest, WeightUpdate
from loopwright.rollouts.pools.base import Worker
from loopwright.rollouts.pools.local import LocalPool
from loopwright.rollouts.produce_config import ProduceConfig
from loopwright.rollouts.producer import GroupProducer
from loopwright.rollouts.tasks.mix import TaskMix

Roll = Callable[[RolloutRequest], Awaitable[Episode]]


def tasks(count: int, name: str = "t") -> list[Task]:
    return [Task(f"{name}/{i}", ({"role": "user", "content": str(i)},), label=str(i)) for i in range(count)]


def episode_of(task: Task, *versions: int, text: str = "x", outcome: Outcome = Outcome.OK) -> Episode:
    """An episode whose tokens were sampled by these versions of the policy."""
    ids = tuple(range(len(versions)))
    spans = tuple(Span(i, i + 1, version) for i, version in enumerate(versions))
    node = Node(1, {"role": "assistant", "content": text}, ids, (-0.5,) * len(ids), spans, "stop")
    fault = Fault.POLICY if outcome is Outcome.TRUNCATED else None
    return Episode(task, (ROOT, Node(0, task.messages[0]), node), outcome, fault)


class FunctionWorker(Worker):
    def __init__(self, roll: Roll) -> None:
        self.roll, self.version, self.updates = roll, 0, list[WeightUpdate]()

    async def handle(self, request: RolloutRequest) -> Episode:
        return await self.roll(request)

    async def apply_update(self, update: WeightUpdate) -> int:
        self.updates.append(update)
        self.version = update.version
        return self.version


class FunctionJudge:
    """Judges by calling a function; one that raises JudgeFailed gives no verdict."""

    def __init__(self, verdict: Callable[[Episode], float], *, compares: bool = False) -> None:
        self.verdict, self.compares, self.judged = verdict, compares, list[Episode]()

    async def start(self) -> None: ...

    async def judge(self, episode: Episode) -> Reward:
        self.judged.append(episode)
        value = self.verdict(episode)
        return Reward(value, {"verdict": value})

    async def judge_group(self, episodes: Sequence[Episode]) -> list[Reward | JudgeFailed]:
        self.judged.extend(episodes)
        ranks = sorted(range(len(episodes)), key=lambda i: self.verdict(episodes[i]))
        return [Reward(float(ranks.index(i))) for i in range(len(episodes))]

    async def close(self) -> None: ...


class World:
    """A ledger on disk and everything above it; created again, it acts as a process that resumes after a crash."""

    def __init__(
        self,
        directory: Path,
        roll: Roll,
        *,
        verdict: Callable[[Episode], float] = lambda _: 1.0,
        compares: bool = False,
        budget: int | None = None,
        group_size: int = 4,
        concurrency: int = 64,
        sources: dict[str, list[Task]] | None = None,
        weights: dict[str, float] | None = None,
        seed: int = 0,
        worker: Worker | None = None,
        held_out: dict[str, list[Task]] | None = None,
        source_produce: dict[str, ProduceConfig] | None = None,
        **produce: Any,
    ) -> None:
        path = directory / "ledger.db"
        self.ledger = Ledger.open(path) if path.exists() else Ledger.create(path)
        sources = sources or {"t": tasks(1000)}
        self.worker: Any = worker or FunctionWorker(roll)
        self.judge = FunctionJudge(verdict, compares=compares)
        self.env = RolloutEnv(
            TrialBook("r", directory, self.ledger, budget=budget),
            tasks=TaskMix(sources, weights or dict.fromkeys(sources, 1.0), seed, held_out),
            loop=LocalPool(lambda: self.worker),
            judger=self.judge,
            produce=ProduceConfig(**produce),
            concurrency=concurrency,
            seed=seed,
            sources={
                name: SourceRunner(self.judge, asyncio.Semaphore(concurrency), concurrency, 600.0, produce=own)
                for name, own in (source_produce or {}).items()
            },
        )
        self.producer = GroupProducer(self.env, self.env.produce, group_size=group_size)

    async def __aenter__(self) -> "World":
        await self.env.loop.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.producer.pause(0)
        await self.env.loop.close()
        self.ledger.close()


def instantly(request: RolloutRequest) -> Awaitable[Episode]:
    async def roll() -> Episode:
        await asyncio.sleep(0)
        return episode_of(request.task, 0)

    return roll()


async def timed(main: Awaitable[Any]) -> tuple[Any, float]:
    """The result of a coroutine, and the seconds that it took by the event loop's clock."""
    clock = asyncio.get_running_loop().time
    start = clock()
    return await main, clock() - start
