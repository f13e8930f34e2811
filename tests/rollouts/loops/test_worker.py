"""The loop worker: every failure of a rollout is recorded in its episode, with the fault."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from loopwright.core.episode import Episode
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.task import Task
from loopwright.core.trial import Reward
from loopwright.engines.base import ContextFull, EngineError, Sampling
from loopwright.engines.scripted import ScriptedConfig, ScriptedEngine
from loopwright.gateway.sessions.session import BudgetSpent
from loopwright.rollouts.loops.base import AgentLoop, LoopConfig
from loopwright.rollouts.loops.worker import LoopWorker, RolloutRequest, WeightUpdate
from loopwright.rollouts.pools.local import LocalPool
from loopwright.testing import simulate
from tests.rollouts.harness import timed

TASK = Task("t", ({"role": "user", "content": "Go."},))


class FunctionLoop(AgentLoop):
    def __init__(self, run, **settings):
        super().__init__(LoopConfig(type="function", **settings), Path())
        self._run, self.closed = run, False

    async def run(self, task, session):
        return await self._run(task, session)

    async def close(self):
        self.closed = True


def rolled(run, *, engine=None, **settings):
    """The episode of a loop that runs this function, in simulated time."""

    async def main():
        policy = ScriptedEngine(ScriptedConfig(slip=0.0, **(engine or {})), Path())
        return await LoopWorker(FunctionLoop(run, **settings), policy).handle(RolloutRequest(TASK, "0"))

    episode, seconds = simulate(timed(main()))
    assert Episode.from_bytes(episode.to_bytes()) == episode
    return episode, seconds


async def talk(task, session):
    await session.turn(task.messages)
    return session.episode(task)


async def hang(task, session):
    await session.turn(task.messages)
    await asyncio.sleep(10_000)


def test_l02_the_requests_sampling_overrides_the_loops():
    loop = Sampling(temperature=0.7, max_tokens=3, stop=("!",))
    assert RolloutRequest(TASK, "0").merge_sampling(loop) == loop
    merged = RolloutRequest(TASK, "0", Sampling(temperature=0)).merge_sampling(loop)
    assert merged == Sampling(temperature=0, max_tokens=3, stop=("!",))
    assert merged.model_fields_set == {"temperature", "max_tokens", "stop"}

    async def main():
        policy = ScriptedEngine(ScriptedConfig(slip=0.0, replies=("long words",)), Path())
        worker = LoopWorker(FunctionLoop(talk, sampling=loop), policy)
        return await worker.handle(RolloutRequest(TASK, "0", Sampling(temperature=0)))

    assert simulate(main()).sampled == 3


class TestDeadlines:
    def test_an_engine_that_samples_slowly_only_takes_longer(self):
        episode, seconds = rolled(talk, engine={"replies": ("x" * 250,), "token_s": 1.0}, deadline_s=100)
        assert (episode.outcome, episode.fault, episode.sampled) == (Outcome.OK, None, 251)
        assert seconds == pytest.approx(251)

    def test_an_engine_that_returns_nothing_is_lost(self):
        episode, _ = rolled(talk, engine={"delay_s": 1000}, deadline_s=100)
        assert (episode.outcome, episode.fault) == (Outcome.LOST, Fault.INFRA)
        assert episode.sampled == 0

    @pytest.mark.parametrize("deadline_s", [10, 100])
    def test_an_engine_that_stalls_in_a_later_turn_is_lost(self, deadline_s):
        async def run(task, session):
            first = await session.turn(task.messages)
            await session.engine.pause()
            await session.turn([*task.messages, first.message, *task.messages])

        episode, _ = rolled(run, deadline_s=deadline_s)
        assert (episode.outcome, episode.fault) == (Outcome.LOST, Fault.INFRA)
        assert episode.sampled > 0

    def test_a_rollout_that_never_ends_is_given_up_after_ten_deadlines(self):
        async def run(task, session):
            messages = list(task.messages)
            while True:
                turn = await session.turn(messages)
                messages += [turn.message, *task.messages]

        episode, seconds = rolled(run, engine={"delay_s": 7}, deadline_s=60)
        assert (episode.outcome, episode.fault) == (Outcome.LOST, Fault.INFRA)
        assert "set `max_turns` or `max_tokens`" in episode.reason
        assert seconds == pytest.approx(600)

    def test_a_loop_that_hangs_is_the_workloads_fault(self):
        episode, _ = rolled(hang, deadline_s=5)
        assert (episode.outcome, episode.fault) == (Outcome.TIMEOUT, Fault.WORKLOAD)
        assert episode.sampled > 0, "earlier tokens are kept"

    def test_a_loop_that_hangs_after_cancelling_a_turn_is_the_workloads_fault(self):
        async def run(task, session):
            try:
                async with asyncio.timeout(1):
                    await session.turn(task.messages)
            except TimeoutError:
                await asyncio.sleep(10_000)

        episode, _ = rolled(run, engine={"delay_s": 100}, deadline_s=60)
        assert (episode.outcome, episode.fault) == (Outcome.TIMEOUT, Fault.WORKLOAD)

    def test_a_loop_that_returns_within_the_grace_period_keeps_its_episode(self):
        async def run(task, session):
            try:
                return await hang(task, session)
            except asyncio.CancelledError:
                return session.episode(task)

        episode, _ = rolled(run, deadline_s=5)
        assert episode.outcome is Outcome.OK

    def test_a_timeout_inside_the_loop_is_not_the_deadline(self):
        async def run(task, session):
            raise TimeoutError("mine")

        episode, _ = rolled(run)
        assert (episode.outcome, episode.reason) == (Outcome.CRASHED, "TimeoutError: mine")


class Mute(Exception):
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (Mute(), "Mute"),
        (ValueError("\ud800"), "ValueError: ?"),
        (SystemExit(3), "SystemExit(3)"),
        (BaseExceptionGroup("", [BaseException("own")]), "BaseException('own')"),
        (asyncio.CancelledError(), "cancelled its own call"),
        (ExceptionGroup("two", [ExceptionGroup("", [ValueError("a")]), KeyError("b")]), "ValueError: a"),
    ],
    ids=["error", "without words", "without text", "exit", "base", "cancellation", "group"],
)
def test_a_loop_that_raises_is_crashed(error, reason):
    async def run(task, session):
        await session.turn(task.messages)
        raise error

    episode, _ = rolled(run)
    assert (episode.outcome, episode.fault) == (Outcome.CRASHED, Fault.WORKLOAD)
    assert reason in episode.reason
    assert episode.turns == 1


def test_a_loop_that_returns_something_else_is_crashed():
    async def run(task, session):
        return "an answer"

    episode, _ = rolled(run)
    assert episode.outcome is Outcome.CRASHED
    assert episode.reason == "TypeError: FunctionLoop.run returned a str instead of an Episode"


@pytest.mark.parametrize(
    ("error", "outcome", "fault"),
    [
        (BudgetSpent("spent"), Outcome.TRUNCATED, Fault.POLICY),
        (ContextFull(8, 9), Outcome.TRUNCATED, Fault.POLICY),
        (EngineError("gone"), Outcome.LOST, Fault.INFRA),
    ],
)
@pytest.mark.parametrize("how", ["as itself", "in a group", "as a cause"])
def test_an_error_of_the_session_keeps_its_fault_when_wrapped(error, outcome, fault, how):
    async def run(task, session):
        if how == "as itself":
            raise error
        if how == "in a group":
            raise ExceptionGroup("some", [ValueError("other"), ExceptionGroup("more", [error])])
        raise RuntimeError("my turn failed") from error

    episode, _ = rolled(run)
    assert (episode.outcome, episode.fault, episode.reason) == (outcome, fault, str(error))


def test_a_budget_spent_in_one_of_several_tasks_is_the_policys_fault():
    async def run(task, session):
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(session.turn(task.messages))
        return session.episode(task)

    episode, _ = rolled(run, max_turns=2)
    assert (episode.outcome, episode.fault) == (Outcome.TRUNCATED, Fault.POLICY)


def test_a_cancelled_rollout_has_no_outcome():
    async def main():
        worker = LoopWorker(FunctionLoop(hang), ScriptedEngine(ScriptedConfig(), Path()))
        flight = asyncio.ensure_future(worker.handle(RolloutRequest(TASK, "0")))
        await asyncio.sleep(1)
        flight.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flight

    simulate(main())


class TestNews:
    def test_reports_its_state(self):
        async def main():
            engine = ScriptedEngine(ScriptedConfig(slip=0.0), Path())
            worker = LoopWorker(FunctionLoop(talk), engine)
            assert await worker.apply_update(WeightUpdate(2, paused=True)) == 2
            flight = asyncio.ensure_future(worker.handle(RolloutRequest(TASK, "0")))
            await asyncio.sleep(5)
            assert not flight.done()
            await worker.apply_update(WeightUpdate(2))
            assert (await flight).oldest_version == 2

        simulate(main())

    def test_of_new_weights_reaches_a_running_turn(self):
        async def main():
            engine = ScriptedEngine(ScriptedConfig(slip=0.0, replies=("x" * 40,), token_s=0.1), Path())
            worker = LoopWorker(FunctionLoop(talk), engine)
            flight = asyncio.ensure_future(worker.handle(RolloutRequest(TASK, "0")))
            await asyncio.sleep(2)
            await worker.apply_update(WeightUpdate(1))
            episode = await flight
            assert [span.version for span in episode.nodes[-1].spans] == [0, 1]
            assert episode.answer == "x" * 40

        simulate(main())


@pytest.mark.parametrize("talks", [False, True])
def test_a_loop_that_ignores_its_cancellation_is_interrupted(talks):
    """Its rollout ends five seconds after its deadline; its neighbours, and the worker, go on."""

    async def run(task, session):
        while task.id != "good":
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                if talks:
                    await session.turn(task.messages)
        return await talk(task, session)

    async def main():
        worker = LoopWorker(FunctionLoop(run, deadline_s=2), ScriptedEngine(ScriptedConfig(slip=0.0), Path()))
        pool = LocalPool(lambda: worker)
        await pool.start()
        good = RolloutRequest(replace(TASK, id="good"), "0")
        episodes = await asyncio.gather(*map(pool.call, (RolloutRequest(TASK, "0"), good)))
        episodes.append(await pool.call(good))
        await pool.close()
        return episodes

    (stubborn, *others), seconds = simulate(timed(main()))
    assert (stubborn.outcome, stubborn.fault) == (Outcome.TIMEOUT, Fault.WORKLOAD)
    assert stubborn.reason == "not finished within 2 s; FunctionLoop.run ignored its cancellation for 5 s"
    assert seconds == pytest.approx(7, abs=0.1)
    assert [each.outcome for each in others] == [Outcome.OK, Outcome.OK]


def test_closing_closes_both_even_if_one_fails():
    class Stubborn(FunctionLoop):
        async def close(self):
            raise RuntimeError("will not close")

    class Closing(ScriptedEngine):
        closed = False

        async def close(self):
            self.closed = True

    async def main():
        engine = Closing(ScriptedConfig(), Path())
        with pytest.raises(RuntimeError, match="will not"):
            await LoopWorker(Stubborn(talk), engine).close()
        assert engine.closed

    simulate(main())


def test_a_cyclic_exception_chain_fails_only_its_rollout():
    async def run(task, session):
        error = KeyError("odd")
        raise error from error

    episode, _ = rolled(run)
    assert (episode.outcome, episode.fault, episode.reason) == (Outcome.CRASHED, Fault.WORKLOAD, "KeyError: 'odd'")


def test_a_reward_set_by_the_loop_is_removed_by_a_fault():
    async def run(task, session):
        await session.turn(task.messages)
        return replace(session.episode(task).judged(Reward(1.0)), outcome=Outcome.LOST, fault=Fault.INFRA)

    episode, _ = rolled(run)
    assert (episode.reward, episode.trainable, episode.in_baseline) == (None, False, False)
    assert episode.sampled > 0
