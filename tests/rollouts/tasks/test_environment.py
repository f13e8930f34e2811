"""Environments of other frameworks, as far as they need no framework: what they bring, how they fail, their score."""

import asyncio
import sys
from types import SimpleNamespace

import pytest

from loopwright.core.outcome import Fault, Outcome
from loopwright.gateway.sessions.session import SessionLimits
from loopwright.rollouts.judgers import JudgeFailed, Payload, parse_judger
from loopwright.rollouts.judgers.facts import EnvironmentJudger
from loopwright.rollouts.remote.agent import AgentExit
from loopwright.rollouts.remote.blame import TimeLimit, assign_blame
from loopwright.rollouts.tasks import TasksError
from loopwright.rollouts.tasks.inspect import InspectTasks
from loopwright.rollouts.tasks.verifiers import VerifiersTasks, load
from loopwright.scenario.overrides import override

VERIFIERS = {"type": "verifiers", "env": "sums"}
INSPECT = {"type": "inspect", "task": "sums.py@sums"}
JSONL = {"type": "jsonl", "path": "tasks.jsonl"}
SINGLE = {"type": "single_turn"}


def completed(rollout, **tables):
    return override({"run": [{"name": "a", "rollout": rollout, **tables}]}, {}, {})["run"][0]


class TestWhatTasksBring:
    def test_a_run_of_only_an_environment_needs_no_loop_and_no_judger(self):
        rollout = completed({"tasks": VERIFIERS})["rollout"]
        assert rollout["loop"]["function"] == "loopwright.rollouts.tasks.verifiers:attempt"
        assert rollout["judger"] == {"type": "environment"}

    def test_what_the_scenario_names_wins(self):
        loop, judger = {**VerifiersTasks.brings["loop"], "max_turns": 2}, {"type": "length"}
        rollout = completed({"tasks": VERIFIERS, "loop": loop, "judger": judger})["rollout"]
        assert (rollout["loop"], rollout["judger"]) == (loop, judger)
        assert "loop" not in rollout["tasks"]

    def test_beside_other_sources_an_environment_keeps_its_own(self):
        rollout = completed({"tasks": [JSONL, VERIFIERS, INSPECT], "loop": SINGLE, "judger": {"type": "length"}})[
            "rollout"
        ]
        assert [entry.get("loop", SINGLE).get("function") for entry in rollout["tasks"]] == [
            None,
            VerifiersTasks.brings["loop"]["function"],
            InspectTasks.brings["loop"]["function"],
        ]
        assert rollout["loop"] == SINGLE

    def test_held_out_environments_bring_theirs(self):
        run = completed({"tasks": JSONL, "loop": SINGLE, "judger": {"type": "length"}}, eval={"tasks": INSPECT})
        assert run["eval"]["tasks"]["judger"] == {"type": "environment"}

    def test_tasks_of_an_override_bring_theirs(self):
        raw = {"run": [{"name": "a", "rollout": {"tasks": VERIFIERS}}]}
        overrides = {"run.rollout.loop.max_turns": 3, "run.a.rollout.tasks": INSPECT, "run.rollout.tasks.limit": 2}
        rollout = override(raw, overrides, {})["run"][0]["rollout"]
        assert rollout["tasks"] == {**INSPECT, "limit": 2} | {key: rollout["tasks"][key] for key in ("loop", "judger")}
        assert rollout["loop"] == {**InspectTasks.brings["loop"], "max_turns": 3}

    def test_other_sources_bring_nothing(self):
        assert completed({"tasks": JSONL})["rollout"] == {"tasks": JSONL}


@pytest.mark.parametrize(
    ("source", "package", "extra"),
    [
        (VerifiersTasks(env="sums"), "verifiers", "verifiers"),
        (InspectTasks(task="sums"), "inspect_ai._eval.loader", "inspect"),
    ],
)
def test_a_missing_package_names_the_extra(tmp_path, monkeypatch, source, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    load.cache_clear()
    with pytest.raises(TasksError, match=rf"pip install 'loopwright\[{extra}\]'"):
        source.load(tmp_path)


def test_a_verifiers_without_environments_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", type(sys)("verifiers"))
    load.cache_clear()
    with pytest.raises(TasksError, match="has no `load_environment`"):
        VerifiersTasks(env="sums").load(tmp_path)


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [(Fault.INFRA, Outcome.LOST), (Fault.WORKLOAD, Outcome.CRASHED), (Fault.POLICY, Outcome.TRUNCATED)],
)
def test_a_function_that_knows_who_is_at_fault_is_believed(fault, outcome):
    session = SimpleNamespace(episode=SimpleNamespace(turns=1, sampled=2), broken="", restored=False)
    blame = assign_blame(AgentExit("it broke", fault=fault), session, SessionLimits(), TimeLimit(9, "deadline_s"))
    assert (blame.outcome, blame.fault) == (outcome, fault)


class TestJudger:
    def judge(self, returned, **config):
        judger = EnvironmentJudger(parse_judger({"type": "environment", **config}))
        return asyncio.run(judger.judge(Payload({"evidence": {"agent": {"returned": returned}}})))

    def test_parts_and_their_sum(self):
        reward = self.judge({"reward": 1.2, "parts": {"correct": 1.0, "brief": 0.2}})
        assert (reward.value, reward.parts) == (1.2, {"correct": 1.0, "brief": 0.2})

    def test_one_part_can_be_what_counts(self):
        assert self.judge({"reward": 1.2, "parts": {"correct": 1.0, "brief": 0.2}}, reward="brief").value == 0.2

    @pytest.mark.parametrize(
        ("returned", "config", "words"),
        [
            (None, {}, "gave no score"),
            ({"error": "scorer 'a' raised"}, {}, "scorer 'a' raised"),
            ({"reward": 1.0, "parts": {"correct": 1.0}}, {"reward": "corect"}, "Did you mean 'correct'"),
        ],
    )
    def test_without_a_score_there_is_no_verdict(self, returned, config, words):
        with pytest.raises(JudgeFailed, match=words):
            self.judge(returned, **config)
