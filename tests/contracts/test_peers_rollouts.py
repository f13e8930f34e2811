"""Known problems of other rollout systems, one test each."""

import asyncio
from collections import Counter
from pathlib import Path

from loopwright.core.episode import Episode
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.task import Task
from loopwright.engines.base import Sampling
from loopwright.engines.scripted import ScriptedConfig, ScriptedEngine
from loopwright.gateway.sessions.session import Session
from loopwright.rollouts.build import build_judger_client
from loopwright.rollouts.judgers import parse_judger
from loopwright.rollouts.judgers.base import JudgeFailed
from loopwright.rollouts.loops.base import AgentLoop, LoopConfig, SingleTurn, SingleTurnConfig
from loopwright.rollouts.loops.worker import LoopWorker, RolloutRequest
from loopwright.testing import simulate
from tests.rollouts.harness import World, episode_of, instantly, tasks


def lost_episode(task: Task) -> Episode:
    return Episode(task).failed(Outcome.LOST, Fault.INFRA, "the engine died")


def working(loop: type[AgentLoop], directory: Path, **config: float) -> LoopWorker:
    engine = ScriptedEngine(ScriptedConfig(slip=0), directory)
    return LoopWorker(loop(LoopConfig(type="x", **config), directory), engine)


def test_an_infrastructure_failure_is_not_trained_as_reward_zero(tmp_path):
    async def roll(request: RolloutRequest) -> Episode:
        return lost_episode(request.task)

    async def main():
        async with World(tmp_path, roll, budget=12) as world:
            assert await world.producer.batch(1, 1) == []
            assert {t.reward for t in world.ledger.trials()} == {None}
            assert world.judge.judged == [], "there was nothing to judge"

    simulate(main())


def test_a_judge_outage_is_not_zero_and_does_not_distort_the_mean(tmp_path):
    def verdict(episode: Episode) -> float:
        if len(world.judge.judged) == 3:
            raise JudgeFailed("out")
        return 1.0

    async def main():
        nonlocal world
        world = World(tmp_path, instantly, verdict=verdict, budget=4)
        async with world:
            (group,) = await world.producer.batch(1, 1)
            assert len(group.episodes) == 3
            assert group.baseline == 1.0

    world: World
    simulate(main())


def test_one_raising_loop_does_not_abort_the_batch(tmp_path):
    class Raises(AgentLoop):
        async def run(self, task: Task, session: Session) -> Episode:
            if task.label == "0":
                raise ValueError("this task breaks the loop")
            return await SingleTurn.run(self, task, session)

    async def main():
        worker = working(Raises, tmp_path)
        async with World(tmp_path, instantly, group_size=2, sources={"t": tasks(3)}, worker=worker) as world:
            groups = await world.producer.batch(3, 1)
            assert len(groups) == 3
            broken = [t for t in world.ledger.trials() if t.outcome is Outcome.CRASHED]
            assert broken
            assert all("this task breaks the loop" in t.reason and t.fault is Fault.WORKLOAD for t in broken)

    asyncio.run(main())


def test_one_bad_sample_does_not_lose_its_group(tmp_path):
    calls = Counter[str]()

    async def roll(request: RolloutRequest) -> Episode:
        calls[request.task.id] += 1
        return lost_episode(request.task) if calls[request.task.id] <= 2 else episode_of(request.task, 0)

    async def main():
        async with World(tmp_path, roll, group_size=8, concurrency=1) as world:
            (group,) = await world.producer.batch(1, 1)
            assert len(group.episodes) == 8
            assert calls.total() == 8 + 2

    simulate(main())


def test_a_resume_loses_no_prompt_however_long(tmp_path):
    async def roll(request: RolloutRequest) -> Episode:
        await asyncio.sleep(400 if int(request.task.label) % 2 else 1)
        return episode_of(request.task, 0)

    async def before():
        async with World(tmp_path, roll, type="async", over_sample=1.0, max_staleness=3) as world:
            await world.producer.batch(2, 1)
            world.env.buffer.settle(1)
            return {group.prompt.task.id for group in world.producer._open.values()}

    async def after():
        async with World(tmp_path, roll, type="async", over_sample=1.0, max_staleness=3) as world:
            world.producer.restore(1)
            task_ids = set[str]()
            step = 1
            while asyncio.get_running_loop().time() < 500:
                step += 1
                task_ids |= {group.prompt.task.id for group in await world.producer.batch(4, step)}
            return task_ids

    under_way = simulate(before())
    assert any(int(name.split("/")[1]) % 2 for name in under_way)
    assert under_way <= simulate(after())


def test_each_token_carries_the_version_that_sampled_it(tmp_path):
    config = ScriptedConfig(replies=("abcdefgh" * 20,), token_s=0.1, slip=0.0)

    async def main():
        engine = ScriptedEngine(config, tmp_path)
        worker = LoopWorker(SingleTurn(SingleTurnConfig(), tmp_path), engine)
        async with World(tmp_path, instantly, group_size=1, type="async", worker=worker) as world:
            waiting = asyncio.ensure_future(world.producer.batch(1, 1))
            await asyncio.sleep(5)
            await world.producer.update(1)
            (group,) = await waiting
            (episode,) = group.episodes.values()
            assert engine.version == 1
            (row,) = episode.rows()
            assert episode.answer == "abcdefgh" * 20, "the turn continued"
            assert set(row.versions) == {0, 1}
            assert list(row.versions) == sorted(row.versions)
            assert 30 <= row.versions.index(1) <= 70

    simulate(main())


def test_a_sub_agent_and_a_retry_are_branches_and_every_token_is_trained_once(tmp_path):
    async def main():
        engine = ScriptedEngine(ScriptedConfig(slip=0.1), tmp_path)
        session = Session(engine, Sampling(), seed="1")
        ask = [{"role": "user", "content": "hello"}]
        first = await session.turn(ask)
        await session.turn([*ask, first.message, {"role": "user", "content": "go on"}])
        await session.turn([{"role": "system", "content": "you are a helper"}, *ask])  # a sub-agent
        await session.turn(ask)  # the agent dropped its answer and asked again
        episode = session.episode(Task("t", tuple(ask)))
        rows = episode.rows()
        assert len(rows) == 3
        assert sum(sum(row.response_mask) for row in rows) == episode.sampled

    asyncio.run(main())


def test_many_rows_of_one_rollout_count_once_in_the_baseline(tmp_path):
    class Twice(AgentLoop):
        async def run(self, task: Task, session: Session) -> Episode:
            await session.turn(task.messages)
            if session.episode(task).answer == "no":
                await session.turn([{"role": "user", "content": "again"}])
            return session.episode(task)

    async def main():
        verdict = lambda episode: float(len(episode.rows()) == 2)  # noqa: E731
        worker = working(Twice, tmp_path)
        async with World(tmp_path, instantly, group_size=16, verdict=verdict, worker=worker) as world:
            (group,) = await world.producer.batch(1, 1)
            rows = Counter(len(e.rows()) for e in group.episodes.values())
            assert rows.keys() == {1, 2}
            assert group.baseline == rows[2] / 16

    asyncio.run(main())


def test_a_loop_that_never_returns_ends_at_its_deadline(tmp_path):
    class Hangs(AgentLoop):
        async def run(self, task: Task, session: Session) -> Episode:
            await asyncio.Event().wait()
            raise AssertionError

    async def main():
        worker = working(Hangs, tmp_path, deadline_s=5)
        async with World(tmp_path, instantly, group_size=2, budget=2, worker=worker) as world:
            assert await world.producer.batch(1, 1) == []
            assert asyncio.get_running_loop().time() < 60
            assert {(t.outcome, t.fault) for t in world.ledger.trials()} == {(Outcome.TIMEOUT, Fault.WORKLOAD)}

    simulate(main())


def test_a_synchronous_judge_does_not_block_the_event_loop(tmp_path):
    (tmp_path / "slow_judge_of_peers.py").write_text(
        "import threading\ngo = threading.Event()\ndef judge(answer):\n    return float(go.wait(30))\n"
    )

    async def main():
        judge = build_judger_client(parse_judger({"type": "python", "function": "slow_judge_of_peers:judge"}), tmp_path)
        await judge.start()
        waiting = asyncio.ensure_future(judge.judge(episode_of(Task("t", ({"role": "user", "content": "x"},)), 0)))
        await asyncio.sleep(0.05)
        assert not waiting.done()

        import slow_judge_of_peers

        slow_judge_of_peers.go.set()  # only a running event loop gets here
        assert (await waiting).value == 1.0
        await judge.close()

    asyncio.run(main())
