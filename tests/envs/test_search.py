"""The search environment: reserve, run, commit, and the feedback for the agent."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest
from tests.contracts.harness import AnySpace

from loopwright.core.errors import InvalidAction
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.trial import Identity, Inverse, Objectives, Penalties, Result, Trial
from loopwright.envs.search import SearchEnv, TrialRules
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.shared_cache import SharedCache
from loopwright.ledger.steps import Step
from loopwright.ledger.trial_book import Observer, TrialBook
from loopwright.spaces.space import Draws
from loopwright.workloads.base import Job, Workload

Measure = Callable[[Job], Awaitable[Result]]


class Measuring(Workload):
    """Calls a function, and records the trials that it was called for."""

    def __init__(self, function: Measure) -> None:
        self.function, self.measured = function, list[int]()

    async def run(self, job: Job) -> Result:
        self.measured.append(job.trial)
        return await self.function(job)


class Numbers(AnySpace):
    """Numbers below 100."""

    constraints = ("x < 100",)

    def validate(self, action):
        if isinstance(action["x"], str):
            raise InvalidAction(f"x: {action['x']!r} is not a number")
        return action

    def violated(self, action, regime):
        return "constraint 'x < 100' is not met" if action["x"] >= 100 else None


class Diary(Observer):
    """Records its notifications."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, int, str | None]] = []

    def before(self, trial: Trial) -> None:
        self.lines.append(("before", trial.number, trial.outcome))

    def after(self, trial: Trial) -> None:
        self.lines.append(("after", trial.number, trial.outcome))


async def itself(job: Job) -> Result:
    return Result(Outcome.OK, {"y": float(job.arguments["x"])})


async def crash(job: Job) -> Result:
    return Result(Outcome.CRASHED, reason="exit code 1")


@pytest.fixture
def make(tmp_path):
    """Makes environments, each with its own run and ledger."""
    ledgers = []

    def make(
        function: Measure = itself,
        *observers: Observer,
        shared=None,
        reward=Identity,
        budget=None,
        count_cached=True,
        **rules,
    ) -> SearchEnv:
        directory = tmp_path / str(len(ledgers))
        directory.mkdir()
        ledgers.append(Ledger.create(directory / "ledger.db"))
        book = TrialBook("run", directory, ledgers[-1], budget=budget, count_cached=count_cached, observers=observers)
        return SearchEnv(
            book,
            space=Numbers(),
            workload=Measuring(function),
            draws=Draws(0, {}, {}),
            objectives=Objectives((reward(metrics=("y",)),)),
            metric_names=("y",),
            rules=TrialRules(**rules),
            shared=shared,
        )

    yield make
    for ledger in ledgers:
        ledger.close()


def step(env: SearchEnv, *xs, **options) -> list:
    """Take steps one after another."""

    async def main() -> list:
        return [await env.step({"x": x}, **options) for x in xs]

    return asyncio.run(main())


def rows(env: SearchEnv) -> list[Trial]:
    return list(env.book.ledger.trials())


class TestAStep:
    def test_is_numbered_run_and_recorded(self, make):
        env = make()
        feedbacks = step(env, 3, 4)
        assert [(f.trial, f.values, f.outcome) for f in feedbacks] == [(1, (3.0,), "ok"), (2, (4.0,), "ok")]
        assert [(row.number, row.reward.value, dict(row.metrics)) for row in rows(env)] == [
            (1, 3.0, {"y": 3.0}),
            (2, 4.0, {"y": 4.0}),
        ]

    def test_is_reserved_before_anything_is_awaited(self, make):
        env = make()
        waiting = env.step({"x": 1})
        assert [(row.number, row.outcome) for row in rows(env)] == [(1, None)]
        waiting.close()

    def test_that_is_invalid_is_a_trial_like_any_other(self, make):
        env = make()
        (feedback,) = step(env, "three")
        assert (feedback.outcome, feedback.fault, feedback.values) == (Outcome.INVALID, Fault.POLICY, None)
        assert "'three' is not a number" in rows(env)[0].reason

    def test_that_breaks_a_constraint_names_it(self, make):
        env = make()
        (feedback,) = step(env, 100)
        assert feedback.outcome is Outcome.INFEASIBLE
        assert rows(env)[0].reason == "constraint 'x < 100' is not met"
        assert not env.workload.measured

    def test_whose_metrics_have_no_reward_has_no_reward(self, make):
        env = make(reward=Inverse)
        (feedback,) = step(env, 0)
        assert (feedback.outcome, feedback.fault, feedback.reward) == (Outcome.METRIC_MISSING, Fault.WORKLOAD, None)
        assert (rows(env)[0].reward, dict(rows(env)[0].metrics)) == (None, {})

    def test_that_raises_is_a_bug_and_leaves_its_trial_unfinished(self, make):
        async def bug(job: Job) -> Result:
            raise LookupError("a bug")

        env = make(bug)
        with pytest.raises(LookupError, match="a bug"):
            step(env, 1)
        assert [row.number for row in env.book.ledger.unfinished()] == [1]

    def test_that_is_cancelled_is_recorded_as_aborted(self, make):
        async def body() -> None:
            flight = asyncio.ensure_future(env.step({"x": 1}))
            await asyncio.sleep(0)
            flight.cancel()
            await asyncio.wait([flight])

        env = make(lambda job: asyncio.Event().wait())
        asyncio.run(body())
        assert (rows(env)[0].outcome, rows(env)[0].fault) == (Outcome.ABORTED, Fault.SYSTEM)

    def test_distinguishes_a_penalty_from_a_reward(self, make):
        env = make(crash, penalties=Penalties(metric_failure=-50.0, constraint_failure=-9.0))
        crashed, infeasible = step(env, 1, 100)
        assert (crashed.values, crashed.reward, infeasible.values, infeasible.reward) == ((-50.0,), None, (-9.0,), None)
        assert [row.reward for row in rows(env)] == [None, None]

    def test_ends_even_if_its_directory_cannot_be_deleted(self, make):
        env = make(keep="failed")
        for name in ("1", ".1.deleted/of an earlier process"):
            (env.book.directory / "trials" / name).mkdir(parents=True)
        (feedback,) = step(env, 3)
        assert feedback.outcome is Outcome.OK

    def test_says_when_the_budget_is_used_up(self, make):
        assert [feedback.done for feedback in step(make(budget=2), 1, 2)] == [False, True]


class TestTheCache:
    def test_answers_an_equal_trial(self, make):
        env = make()
        first, second = step(env, 3, 3.0)
        assert env.workload.measured == [1]
        assert (second.trial, second.values) == (2, first.values)
        assert [row.cached_from for row in rows(env)] == [None, "1"]

    def test_does_not_answer_with_a_crash(self, make):
        env = make(crash)
        step(env, 3, 3)
        assert env.workload.measured == [1, 2]

    def test_can_be_off(self, make):
        env = make(cache="off")
        step(env, 3, 3)
        assert env.workload.measured == [1, 2]

    def test_is_skipped_for_a_fresh_measurement(self, make):
        env = make()
        step(env, 3)
        step(env, 3, 3, fresh=True)
        assert env.workload.measured == [1, 2, 3]
        assert [row.repeat for row in rows(env)] == [0, 1, 2]

    def test_of_another_workload_is_another_cache(self, make, tmp_path):
        shared = SharedCache(tmp_path / "cache.db")
        one, same, other = (make(shared=shared, cache="shared", fingerprint=text) for text in ("a", "a", "b"))
        for env in (one, same, other):
            step(env, 3)
        shared.close()
        assert [bool(env.workload.measured) for env in (one, same, other)] == [True, False, True]
        assert rows(same)[0].cached_from == f"{one.book.directory}#1"

    def test_is_shared_with_other_runs_only_once_it_is_on_disk(self, make, tmp_path):
        on_disk = []

        class Watched(SharedCache):
            def put(self, key, source, metrics):
                with Ledger.read(env.book.ledger.path) as beside:
                    on_disk.extend(trial.outcome for trial in beside.trials())

        shared = Watched(tmp_path / "cache.db")
        env = make(shared=shared, cache="shared")
        step(env, 3)
        shared.close()
        assert on_disk == ["ok"]

    def test_is_free_where_cached_trials_do_not_count(self, make):
        env = make(budget=2, count_cached=False)
        assert [feedback.done for feedback in step(env, 1, 1, 1, 2)] == [False, False, False, True]


class TestEqualTrialsInFlight:
    """Two equal trials at the same time: one is measured, the other waits for its result."""

    @staticmethod
    def fly(env: SearchEnv, gate: Callable[[], asyncio.Event], *, cancel_first: bool = False) -> list:
        async def body() -> list:
            gate_ = gate()
            flights = [asyncio.ensure_future(env.step({"x": 1})) for _ in range(3)]
            while not env.workload.measured:
                await asyncio.sleep(0)
            if cancel_first:
                flights[0].cancel()
                await asyncio.wait([flights[0]])
            gate_.set()
            return await asyncio.gather(*flights, return_exceptions=True)

        return asyncio.run(body())

    @pytest.fixture
    def gated(self, make):
        """An environment whose first measurement waits until it may end."""
        gates: list[asyncio.Event] = []

        def gate() -> asyncio.Event:
            gates.append(asyncio.Event())
            return gates[-1]

        def build(outcome: Outcome) -> tuple[SearchEnv, Callable[[], asyncio.Event]]:
            async def measure(job: Job) -> Result:
                await gates[-1].wait()
                return Result(outcome, {"y": 1.0})

            return make(measure), gate

        return build

    def test_are_measured_once(self, gated):
        env, gate = gated(Outcome.OK)
        assert [feedback.values for feedback in self.fly(env, gate)] == [(1.0,)] * 3
        assert env.workload.measured == [1]
        assert [row.cached_from for row in rows(env)] == [None, "1", "1"]

    def test_do_not_block_the_commit_of_finished_trials(self, gated):
        env, gate = gated(Outcome.OK)

        async def body() -> list[str | None]:
            gate_ = gate()
            gate_.set()
            await env.step({"x": 2})
            gate_.clear()
            flights = [asyncio.ensure_future(env.step({"x": 1})) for _ in range(2)]
            await asyncio.sleep(0)
            with Ledger.read(env.book.ledger.path) as beside:
                outcomes = [trial.outcome for trial in beside.trials()]
            gate_.set()
            await asyncio.gather(*flights)
            return outcomes

        assert asyncio.run(body()) == ["ok", None, None]

    def test_are_measured_again_after_a_crash(self, gated):
        env, gate = gated(Outcome.CRASHED)
        self.fly(env, gate)
        assert env.workload.measured == [1, 2, 3]

    def test_do_not_wait_for_one_that_was_aborted(self, gated):
        env, gate = gated(Outcome.OK)
        _, second, third = self.fly(env, gate, cancel_first=True)
        assert (second.outcome, third.outcome) == (Outcome.OK, Outcome.OK)
        assert env.workload.measured == [1, 2]
        assert [row.outcome for row in rows(env)] == ["aborted", "ok", "ok"]


class TestRepeats:
    def test_are_a_group_with_separate_numbers(self, make):
        env = make(repeats=3, budget=6)
        first, second = step(env, 1, 2)
        assert [(row.number, row.group, row.repeat) for row in rows(env)] == [
            (1, 1, 0),
            (2, 1, 1),
            (3, 1, 2),
            (4, 2, 0),
            (5, 2, 1),
            (6, 2, 2),
        ]
        assert [(f.trial, f.group, f.done) for f in (first, second)] == [(1, 1, False), (4, 2, True)]
        assert env.workload.measured == [1, 2, 3, 4, 5, 6]

    def test_give_their_mean_as_feedback(self, make):
        async def growing(job: Job) -> Result:
            return Result(Outcome.OK, {"y": float(job.trial)})

        assert step(make(growing, repeats=3), 0)[0].values == (2.0,)

    def test_of_which_one_fails_have_no_mean(self, make):
        async def sometimes(job: Job) -> Result:
            return await (crash if job.trial == 2 else itself)(job)

        env = make(sometimes, repeats=3)
        (feedback,) = step(env, 1)
        assert (feedback.outcome, feedback.values) == (Outcome.CRASHED, None)
        assert [row.outcome for row in rows(env)] == ["ok", "crashed", "crashed"]
        assert rows(env)[2].reason == "not run: trial 2 of its group failed", "a group ends at its first failure"

    def test_that_were_interrupted_finish_under_their_numbers(self, make):
        env = make(repeats=2)
        env.step({"x": 5}).close()
        (group,) = env.unfinished()

        async def finish():
            return await env.resume(group)

        assert asyncio.run(finish()).values == (5.0,)
        assert [(row.number, row.outcome) for row in rows(env)] == [(1, "ok"), (2, "ok")]


class TestObservers:
    def test_are_notified_before_and_after_every_trial(self, make):
        diary = Diary()
        env = make(itself, diary)
        step(env, 1, 1, "x", 100)
        env.workload.function = crash
        step(env, 2)
        outcomes = ["ok", "ok", "invalid", "infeasible", "crashed"]
        assert diary.lines == [
            line for n, outcome in enumerate(outcomes, 1) for line in (("before", n, None), ("after", n, outcome))
        ]

    def test_that_raise_are_switched_off_and_named(self, make, caplog):
        class Broken(Observer):
            def after(self, trial: Trial) -> None:
                raise OSError("the dashboard is down")

        diary = Diary()
        env = make(itself, Broken(), diary)
        with caplog.at_level(logging.ERROR):
            assert [feedback.values for feedback in step(env, 1, 2)] == [(1.0,), (2.0,)]
        (record,) = caplog.records
        assert "Broken" in record.getMessage()
        assert "trial 1" in record.getMessage()
        assert len(diary.lines) == 4

    def test_are_notified_of_training_steps(self, make, caplog):
        steps = []

        class Broken(Observer):
            def after_step(self, kind: str, step: Step) -> None:
                raise OSError("the dashboard is down")

        class Curve(Observer):
            def after_step(self, kind: str, step: Step) -> None:
                steps.append((kind, step.step))

        env = make(itself, Broken(), Curve())
        env.book.observers.notify("after_step", "train", Step(1, 0.0, {}))
        env.book.observers.notify("after_step", "eval", Step(1, 0.0, {}))
        assert steps == [("train", 1), ("eval", 1)]
        assert [record.getMessage() for record in caplog.records] == [
            "observer Broken.after_step failed on step 1 and is switched off"
        ]

    def test_can_read_the_finished_trial_from_the_ledger(self, make):
        outcomes = []

        class Looks(Observer):
            def after(self, trial: Trial) -> None:
                outcomes.append(env.book.ledger.trial(trial.number) == trial)

        env = make(itself, Looks())
        step(env, 1)
        assert outcomes == [True]

    def test_can_be_added_later(self, make):
        one, other = Diary(), Diary()
        env = make(itself, one)
        env.book.observers.append(other)
        step(env, 1)
        assert one.lines == other.lines == [("before", 1, None), ("after", 1, "ok")]


def test_a_reset_is_not_a_trial(make):
    env = make()
    for _ in range(5):
        env.reset()
    assert step(env, 1)[0].trial == 1
    assert env.book.step == 1


def test_the_observation_has_a_slot_for_every_metric_also_before_and_after_a_failure(make):
    env = make(crash)
    assert dict(env.reset().metrics) == {"y": None}
    assert dict(step(env, 1)[0].observation.metrics) == {"y": None}
    env.workload.function = itself
    assert dict(step(env, 2)[0].observation.metrics) == {"y": 2.0}


def test_history_repeats_the_feedback(make):
    env = make(penalties=Penalties(metric_failure=-1.0))
    first = step(env, 1, 100, "x")
    assert [proposal.feedback.values for proposal in env.history()] == [feedback.values for feedback in first]
    assert [proposal.group for proposal in env.history()] == [1, 2, 3]
