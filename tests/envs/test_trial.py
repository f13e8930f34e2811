"""The trial environment: an action over a workload's parameters in, its metrics out."""

import asyncio
import json

import pytest

from loopwright.core.outcome import Outcome
from loopwright.core.trial import Identity, Objectives
from loopwright.envs.search import SearchEnv
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.trial_book import TrialBook
from loopwright.spaces.space import Draws, EnvParamConfig
from loopwright.testing import FunctionWorkload
from loopwright.workloads.base import Job, Site, WorkloadConfig


class Recording(FunctionWorkload):
    """Records its jobs."""

    jobs: list[Job]

    async def run(self, job: Job):
        self.__dict__.setdefault("jobs", []).append(job)
        job.on_start(f"{100 + job.trial}:1")
        job.on_start(f"{200 + job.trial}:2")
        return await super().run(job)


@pytest.fixture
def make(tmp_path):
    ledger = Ledger.create(tmp_path / "ledger.db", state={"id": "abc"})

    def make(args: dict, drawn: tuple[str, ...] = (), function=lambda **_: {"y": 1.0}, **config) -> SearchEnv:
        space = WorkloadConfig(type="function", args=args, **config).space(frozenset(drawn))
        return SearchEnv(
            TrialBook("run", tmp_path, ledger),
            space=space,
            workload=Recording(function, Site(scenario_dir=tmp_path, directory=tmp_path)),
            draws=Draws(3, space.parameters, dict.fromkeys(drawn, EnvParamConfig())),
            objectives=Objectives((Identity(metrics=("y",)),)),
            metric_names=("y",),
        )

    yield make
    ledger.close()


def step(env: SearchEnv, **action):
    async def main():
        return await env.step(action)

    return asyncio.run(main())


def test_the_workload_gets_chosen_fixed_and_drawn_values(make):
    env = make({"tile": [1, 2], "size": [10, 20], "mode": "fast"}, ("size",))
    context = env.reset().context
    step(env, tile=2)
    (job,) = env.workload.jobs
    assert job.arguments == {"tile": 2, **context, "mode": "fast"}
    assert json.loads(job.parameters_json) == {
        "trial": 1,
        "arguments": dict(job.arguments),
        "action": {"tile": 2},
        "env_params": context,
    }


def test_each_trial_has_its_own_directory_and_marker(make):
    env = make({"x": [1, 2]})
    step(env, x=1)
    step(env, x=2)
    assert [(job.directory.name, job.marker) for job in env.workload.jobs] == [("1", "abc.1"), ("2", "abc.2")]


def test_several_processes_of_a_trial_are_one_attempt(make):
    env = make({"x": [1, 2]})
    step(env, x=1)
    assert [(attempt, outcome) for attempt, _, _, outcome in env.book.ledger.attempts(1)] == [(1, "ok")]


def test_a_value_outside_of_the_space_is_invalid_and_never_runs(make):
    env = make({"x": [1, 2]})
    assert step(env, x=3).outcome is Outcome.INVALID
    assert not hasattr(env.workload, "jobs")


def test_a_broken_constraint_is_infeasible_and_never_runs(make):
    env = make({"x": [1, 2]}, constraints=("x < 2",))
    assert step(env, x=2).outcome is Outcome.INFEASIBLE
    assert not hasattr(env.workload, "jobs")


def test_the_key_covers_fixed_values(make):
    step(make({"x": [1, 2], "mode": "a"}), x=1)
    step(other := make({"x": [1, 2], "mode": "b"}), x=1)
    first, second = other.book.ledger.trials()
    assert first.key != second.key


def test_cardinality_counts_drawn_values(make):
    assert make({"x": [1, 2, 3], "size": [1, 2]}, ("size",)).cardinality == 6
    assert make({"x": {"low": 0, "high": 1}}).cardinality is None
