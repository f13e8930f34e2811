"""Rollouts: episodes per second, judging beside the event loop, the buffer at any size, and what asynchrony saves."""

import asyncio
import atexit
import pickle
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.measure import Ratio, best_of
from loopwright.core.episode import ROOT, Episode, Node, Span
from loopwright.core.runtime import run as run_loop
from loopwright.core.task import Task
from loopwright.core.trial import Trial
from loopwright.engines.base import Engine, Sampling
from loopwright.engines.inprocess.engine import TransformersConfig, TransformersEngine
from loopwright.engines.scripted import ScriptedConfig, ScriptedEngine
from loopwright.gateway.sessions.session import Session
from loopwright.ledger.groups import Groups
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.trial_book import TrialBook
from loopwright.rollouts.build import build_judger_client
from loopwright.rollouts.env import RolloutEnv
from loopwright.rollouts.judgers import parse_judger
from loopwright.rollouts.judgers.base import Payload
from loopwright.rollouts.loops.base import AgentLoop, LoopConfig, SingleTurn
from loopwright.rollouts.loops.worker import LoopWorker, RolloutRequest, WeightUpdate
from loopwright.rollouts.pools.base import Worker
from loopwright.rollouts.pools.local import LocalPool
from loopwright.rollouts.produce_config import ProduceConfig
from loopwright.rollouts.producer import GroupProducer
from loopwright.rollouts.tasks.mix import TaskMix
from loopwright.testing import simulate

GROUP_SIZE, TOKENS = 8, 64
TASKS = [Task(f"t/{i}", ({"role": "user", "content": str(i)},), label=str(i)) for i in range(1000)]
HOME = Path(__file__).parent


class Empty(AgentLoop):
    """Makes nothing of a task."""

    async def run(self, task: Task, session: Session) -> Episode:
        return session.episode(task)


class Lasting(TransformersEngine):
    """Serves one production after another: a model is loaded once."""

    async def close(self) -> None: ...


class TimedWorker(Worker):
    """Rollouts whose durations are log-normal with σ = 0.5; their tokens have the versions at their start and end."""

    def __init__(self) -> None:
        self.version = 0

    async def handle(self, request: RolloutRequest) -> Episode:
        first = self.version
        await asyncio.sleep(Random(request.seed).lognormvariate(0, 0.5))
        spans = (Span(0, 1, first), Span(1, 2, self.version))
        answer = Node(1, {"role": "assistant", "content": "42"}, (1, 2), (-1.0, -1.0), spans, "stop")
        return Episode(request.task, (ROOT, Node(0, request.task.messages[0]), answer))

    async def apply_update(self, update: WeightUpdate) -> None:
        self.version = update.version


def slow_judge(answer: str) -> float:
    """A judge that blocks its caller."""
    time.sleep(0.05)
    return float(bool(answer))


async def produce(
    groups: int,
    loop: type[AgentLoop],
    engine: dict[str, Any] | Engine,
    *,
    judger: dict[str, Any],
    batch: int = 16,
    **how: Any,
) -> Ledger:
    """Produce so many groups, batch by batch, with a ledger in memory."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="loopwright-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    ledger = Ledger.create(directory / "ledger.db")
    if isinstance(engine, dict):
        engine = ScriptedEngine(ScriptedConfig(**engine), HOME)
    worker = LoopWorker(loop(LoopConfig(type="benchmark", sampling=Sampling(max_tokens=TOKENS)), HOME), engine)
    env = RolloutEnv(
        TrialBook("benchmark", directory, ledger),
        tasks=TaskMix({"t": TASKS}, {"t": 1.0}, 0),
        loop=LocalPool(lambda: worker),
        judger=build_judger_client(parse_judger(judger), HOME),
        produce=ProduceConfig(**how),
        concurrency=batch * GROUP_SIZE,
    )
    async with env.running():
        producer = GroupProducer(env, env.produce, group_size=GROUP_SIZE)
        trained = step = 0
        while trained < groups:
            step += 1
            trained += len(await producer.batch(batch, step))
            env.buffer.settle(step)
        await producer.pause(0)
    return ledger


def episodes_per_s() -> Ratio:
    groups, rounds = 1000, 5
    work = partial(produce, groups, Empty, {}, judger={"type": "length"}, batch=8)
    best_s = best_of(rounds, {"ours": lambda: run_loop(work()).close()})["ours"]
    rate = groups * GROUP_SIZE / best_s
    return Ratio("rollouts: empty episodes, judged, in the ledger", rate, 5000, unit="episodes/s", at_least=True)


def judging_lag() -> Ratio:
    """How late the event loop is while every thread sits in a judge that blocks."""
    lags: list[float] = []

    async def main() -> None:
        async def watch() -> None:
            while True:
                before = time.perf_counter()
                await asyncio.sleep(0.005)
                lags.append(time.perf_counter() - before - 0.005)

        watcher = asyncio.ensure_future(watch())
        judger = {"type": "python", "function": "rollouts:slow_judge", "concurrency": 32}
        engine = {"delay_s": 0.05, "delay_sigma": 1.0}
        (await produce(320, SingleTurn, engine, judger=judger, type="async")).close()
        watcher.cancel()

    run_loop(main())
    p99_ms = 1000 * statistics.quantiles(lags, n=100)[98]
    return Ratio("rollouts: event-loop lag p99 beside a judge that blocks", p99_ms, 20, unit="ms")


def judging_bytes() -> Ratio:
    """What crosses to a judger that needs the answer only, for a long episode against a short one."""

    def episode(tokens: int) -> Episode:
        ids, spans = tuple(range(tokens)), (Span(0, tokens, 0),)
        question = Node(0, {"role": "user", "content": "x" * tokens}, ids, (0.0,) * tokens)
        answer = Node(1, {"role": "assistant", "content": "42"}, ids, (-1.0,) * tokens, spans, "stop")
        return Episode(TASKS[0], (ROOT, question, answer))

    long, short = (len(pickle.dumps(Payload.of(episode(n), ("answer",)))) for n in (100_000, 100))
    detail = f"{long} and {short} bytes"
    return Ratio("rollouts: bytes to a judge, 100,000 tokens against 100", long / short, 1.0, detail=detail)


def buffer_flat(small: Groups, large: Groups) -> Ratio:
    """Put and take with a million groups in the ledger, against a thousand, in turns."""
    numbers = iter(range(10_000_000, 20_000_000))

    def work(buffer: Groups) -> None:
        for number in (next(numbers) for _ in range(2000)):
            trial = Trial(number, {"task": "t"}, "", number)
            buffer.open(number, "t", [trial])
            buffer.ready(number, 1)
            buffer.take(1, 1)
        buffer.settle(1)

    best = best_of(10, {"small": partial(work, small), "large": partial(work, large)})
    detail = f"{best['large'] / 2000 * 1e6:.0f} µs each"
    ratio = best["large"] / best["small"]
    return Ratio("rollouts: ledger with 1,000,000 groups against 1,000", ratio, 1.5, detail=detail)


def buffers() -> list[Ratio]:
    def in_ledger(ledger: Ledger, count: int) -> Groups:
        groups = Groups(ledger)
        with ledger.transaction as connection:
            connection.executemany(
                "INSERT INTO groups (grp, source, status, version) VALUES (?, 't', 'ready', 0)",
                ((number,) for number in range(count)),
            )
        return groups

    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        sizes = (1_000, 1_000_000)
        ledgers = [Ledger.create(Path(directory) / f"{size}.db") for size in sizes]
        ratios = [buffer_flat(*map(in_ledger, ledgers, sizes))]
        for ledger in ledgers:
            ledger.close()
    return ratios


def asynchrony() -> Ratio:
    """Durations are log-normal with σ = 1; both have the same concurrency, batches and groups."""
    engine = {"delay_s": 0.05, "delay_sigma": 1.0}
    work = partial(produce, 96, SingleTurn, engine, judger={"type": "length"}, batch=16)
    best = best_of(
        2,
        {
            "async": lambda: run_loop(work(type="async", over_sample=0.25)).close(),
            "sync": lambda: run_loop(work(type="sync")).close(),
        },
    )
    detail = f"{best['async']:.1f} s and {best['sync']:.1f} s"
    ratio = best["async"] / best["sync"]
    return Ratio(
        "rollouts: asynchronous production against synchronous, log-normal durations", ratio, 0.6, detail=detail
    )


def expiry() -> list[Ratio]:
    """A learner that takes as long for a batch as the engine, in simulated time: durations are log-normal, σ = 0.5."""
    before, batch, steps = 3.70, 8, 60

    async def learn(directory: Path) -> tuple[float, float]:
        ledger = Ledger.create(directory / "ledger.db")
        worker = TimedWorker()
        env = RolloutEnv(
            TrialBook("benchmark", directory, ledger),
            tasks=TaskMix({"t": TASKS}),
            loop=LocalPool(lambda: worker),
            judger=build_judger_client(parse_judger({"type": "length"}), HOME),
            concurrency=batch * 4,
        )
        trained, start_s = 0, asyncio.get_running_loop().time()
        async with env.running():
            producer = GroupProducer(env, ProduceConfig(type="async"), group_size=4)
            for step in range(1, steps + 1):
                trained += len(await producer.batch(batch, step))
                await asyncio.sleep(1.13)  # the mean duration of a rollout
                await producer.update(step)
                env.buffer.settle(step)
            rate = trained / (asyncio.get_running_loop().time() - start_s)
            await producer.pause(0)
        expired = env.buffer.counts().get("expired", 0)
        ledger.close()
        return 100 * expired / (trained + expired), rate

    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        expired, rate = simulate(learn(Path(directory)))
    detail = f"{rate:.2f} groups/s, {before:.2f} when surplus was produced"
    return [
        Ratio("rollouts: expired groups beside a learner as slow as the engine", expired, 5, "%"),
        Ratio(
            "rollouts: throughput beside it, against production with surplus",
            rate / before,
            0.95,
            at_least=True,
            detail=detail,
        ),
    ]


def regenerated() -> Ratio:
    """How much is rolled out beyond what is used, when 5 % of the rollouts fail through no fault of the policy."""
    ledger = run_loop(produce(250, SingleTurn, {"fault_rate": 0.05}, judger={"type": "length"}, batch=25))
    rolled = used = 0
    for trial in ledger.trials():
        episode = Episode.from_bytes(ledger.payload(trial.number, "rollout") or b"")
        rolled += len(episode.attempts)
        used += episode.reward is not None
    ledger.close()
    detail = f"{rolled} rollouts for {used} episodes in groups of {GROUP_SIZE}"
    return Ratio("rollouts: repeated at 5 % faults", 100 * (rolled / used - 1), 8, unit="%", detail=detail)


def embedded() -> Ratio:
    """What loop, ledger and capture add to the time that SmolLM2 takes in this process for the same bursts."""
    engine, groups = Lasting(TransformersConfig(prefix_bytes=0), HOME), 2
    engine.batch.stop_ids = frozenset()  # so that all say the same number of tokens
    session = Session(engine, Sampling(max_tokens=TOKENS), seed="")
    prompts = [session.draft(task.messages).prompt for task in TASKS[:groups] for _ in range(GROUP_SIZE)]

    async def bare() -> None:
        async def one(number: int, ids: Sequence[int]) -> None:
            async for _ in engine.generate(ids, session.sampling, seed=str(number)):
                pass

        await asyncio.gather(*(one(number, ids) for number, ids in enumerate(prompts)))

    work = partial(produce, groups, SingleTurn, engine, judger={"type": "length"}, batch=groups)
    best = best_of(3, {"ours": lambda: run_loop(work()).close(), "engine": lambda: run_loop(bare())})
    detail = f"{best['ours']:.2f} s, of which the engine takes {best['engine']:.2f} s"
    share = 100 * (1 - best["engine"] / best["ours"])
    return Ratio("rollouts: loop, ledger and capture beside the embedded engine", share, 10, unit="%", detail=detail)


def run() -> list[Ratio]:
    """All of them."""
    return [
        episodes_per_s(),
        judging_lag(),
        judging_bytes(),
        *buffers(),
        asynchrony(),
        *expiry(),
        regenerated(),
        embedded(),
    ]
