"""The contracts S01–S15 of search and trials, each named after its number."""

import csv
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from loopwright.agents import agents
from loopwright.agents.search.grid_random import RandomConfig, RandomSearch
from loopwright.core.agent import Agent, AgentConfig
from loopwright.core.errors import InvalidAction
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.trial import Action, Negative, Observation, Result, Trial
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.trial_book import Observer
from loopwright.scenario.dispatch import drive
from tests.contracts.harness import AnySpace, FunctionEnv, ListedAgent, campaign, penalties, resumed, scenario, trials

ECHO = "echo y={x}"
CRASHED = Result(Outcome.CRASHED, reason="exit code 1")


def points(*values: float) -> list[Action]:
    return [{"x": value} for value in values]


class OwnLoopConfig(AgentConfig):
    type: Literal["own-loop"] = "own-loop"
    code: int = 0


class OwnLoop(Agent):
    """An agent with its own training loop, like RL and LLM agents."""

    Config: ClassVar[type[AgentConfig]] = OwnLoopConfig
    events: ClassVar[list[str]] = []
    failing: ClassVar[dict[str, Exception]] = {}

    def run(self) -> int:
        self.events.append(f"run {self.env.book.name}")
        if "run" in self.failing:
            raise self.failing["run"]
        return int(self.config.code)

    def shutdown(self) -> None:
        self.events.append("shutdown")
        if "shutdown" in self.failing:
            raise self.failing["shutdown"]


@pytest.fixture
def own_loop(monkeypatch: pytest.MonkeyPatch) -> type[OwnLoop]:
    monkeypatch.setattr(OwnLoop, "events", [])
    monkeypatch.setattr(OwnLoop, "failing", {})
    agents.add("own-loop", OwnLoop)
    return OwnLoop


def two_runs(first: str, second: str) -> str:
    one = scenario(first, ECHO, {"x": "[1, 2]"})
    other = one.replace('name = "r"', 'name = "s"').replace(first, second)
    return one + other[other.index("[[run]]") :]


# -- S01 to S04: dispatch, the loop, the counter ----------------------------------------------------------------


def test_s01_an_agent_with_its_own_loop_is_started_by_run_too(tmp_path, own_loop):
    code = campaign(tmp_path, two_runs('{ type = "own-loop", code = 4 }', '{ type = "grid" }'))
    assert own_loop.events == ["run r", "shutdown"]
    assert code & 4, "the code of a run accumulates"
    assert len(trials(tmp_path, "s")) == 2, "the next run starts"


def test_s02_the_default_loop_gives_the_agent_all_feedback(tmp_path):
    env = FunctionEnv(tmp_path, lambda action: 2.0 * action["x"], budget=2)
    agent = ListedAgent(env, points(1, 2, 3))
    assert agent.run() == 0
    first, second = agent.feedback
    assert (first.trial, first.action, first.outcome, first.regime) == (1, {"x": 1}, Outcome.OK, {})
    assert first.reward is not None
    assert first.reward.value == 2.0
    assert first.observation.metrics == {"y": 2.0}
    assert first.previous.metrics == {"y": None}
    assert (first.done, second.done) == (False, True)
    assert agent.seen[1].metrics == {"y": 2.0}, "the agent gets the last trial's feedback"
    assert len(agent.feedback) == 2, "the budget ends the run"


def test_s02_none_ends_the_run_before_the_budget(tmp_path):
    env = FunctionEnv(tmp_path, lambda action: 1.0, budget=100)
    assert ListedAgent(env, points(1, 2)).run() == 0
    assert env.book.step == 2


def test_s02_several_trials_are_in_flight_and_feedback_comes_as_they_finish(tmp_path):
    waits = {"1": "0.4", "2": "0"}
    text = scenario(
        '{ type = "grid" }', "sh -c 'sleep $0; echo y=$1' {wait} {x}", {"x": "[1]", "wait": '["0.4", "0"]'}, parallel=2
    )
    assert campaign(tmp_path, text) == 0
    by_end = sorted(trials(tmp_path), key=lambda trial: trial.finished_at or 0)
    assert [trial.number for trial in by_end] == [2, 1], waits


def test_s03_only_the_environment_advances_the_counter_and_reset_never_rewinds_it(tmp_path):
    env = FunctionEnv(tmp_path, lambda action: 1.0)

    class Resetting(ListedAgent):
        def select_action(self, observation: Observation) -> Action | None:
            for _ in range(5):  # RLlib and SB3 reset at any time
                assert self.env.reset() is observation
            return super().select_action(observation)

    Resetting(env, points(1, 2, 3)).run()
    assert [trial.number for trial in env.book.ledger.trials()] == [1, 2, 3]
    source = Path(__file__).parents[2] / "src"
    callers = [path for path in source.rglob("*.py") if ".increment_step()" in path.read_text()]
    assert {path.relative_to(source / "loopwright").as_posix() for path in callers} == {
        "ledger/trial_book.py",
        "envs/live/env.py",
    }


def test_s04_the_number_is_reserved_before_path_and_rows_for_every_kind_of_trial(tmp_path):
    text = scenario(
        '{ type = "random", trials = 8, seed = 3 }', ECHO, {"x": "[1, 2, 3]"}, 'workload.constraints = ["x < 3"]'
    )
    assert campaign(tmp_path, text) == 0
    rows = trials(tmp_path)
    assert [row.number for row in rows] == list(range(1, 9))
    assert any(row.cached_from for row in rows)
    assert any(row.outcome is Outcome.INFEASIBLE for row in rows)
    ran = [row for row in rows if row.outcome is Outcome.OK and row.cached_from is None]
    for row in ran:
        record = json.loads((tmp_path / f"out/r/trials/{row.number}/parameters.json").read_text())
        assert record["trial"] == row.number
        assert record["arguments"] == row.action


# -- S05 to S07: failure ----------------------------------------------------------------------------------------


def test_s05_a_bug_stops_the_scenario_and_is_raised_unchanged(tmp_path, own_loop):
    bug = ZeroDivisionError("a bug in the agent")
    own_loop.failing["run"] = bug
    with pytest.raises(ZeroDivisionError) as raised:
        campaign(tmp_path, two_runs('{ type = "own-loop" }', '{ type = "grid" }'))
    assert raised.value is bug
    assert any(entry.name == "run" for entry in raised.traceback), "with its own traceback"
    assert not (tmp_path / "out/s").exists(), "no further run starts"
    failure = (tmp_path / "out/dse_failure.txt").read_text()
    assert "run: r" in failure
    assert "ZeroDivisionError: a bug in the agent" in failure
    assert "a bug in the agent" in (tmp_path / "out/report.html").read_text()
    assert "reports are still made" in (Agent.run.__doc__ or "")


def test_s05_a_bug_while_a_run_is_built_is_recorded_too(tmp_path, own_loop, monkeypatch):
    monkeypatch.setattr(own_loop, "__init__", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        campaign(tmp_path, two_runs('{ type = "own-loop" }', '{ type = "grid" }'))
    assert not (tmp_path / "out/s").exists(), "no further run starts"
    failure = (tmp_path / "out/dse_failure.txt").read_text()
    assert "run: r" in failure
    assert "ZeroDivisionError" in failure
    assert "ZeroDivisionError" in (tmp_path / "out/report.html").read_text()


def test_s05_a_run_that_returns_no_code_is_a_bug_named_after_its_class(tmp_path, own_loop, monkeypatch):
    monkeypatch.setattr(own_loop, "run", lambda self: None)
    with pytest.raises(TypeError, match=r"OwnLoop.run\(\) returned None. Return 0"):
        campaign(tmp_path, two_runs('{ type = "own-loop" }', '{ type = "grid" }'))
    assert own_loop.events == ["shutdown"]


def test_s05_a_recoverable_failure_lets_the_next_run_start(tmp_path):
    text = two_runs('{ type = "grid" }', '{ type = "random", trials = 2 }').replace(ECHO, "false {x}", 1)
    assert campaign(tmp_path, text) == 1
    assert [row.outcome for row in trials(tmp_path, "r")] == [Outcome.CRASHED, Outcome.CRASHED]
    assert all(row.outcome is Outcome.OK for row in trials(tmp_path, "s"))


def test_s06_shutdown_always_runs_and_its_failure_hides_nothing(tmp_path, own_loop, caplog):
    env = FunctionEnv(tmp_path, lambda action: 1.0)
    own_loop.failing["shutdown"] = RuntimeError("a socket")
    with caplog.at_level(logging.ERROR):
        assert drive(own_loop(env, OwnLoopConfig())) == 1
        assert drive(own_loop(env, OwnLoopConfig(code=2))) == 3
    assert "a socket" in caplog.text
    own_loop.failing["run"] = KeyError("the first")
    with pytest.raises(KeyError, match="the first"):
        drive(own_loop(env, OwnLoopConfig()))
    assert own_loop.events.count("shutdown") == 3


def test_s07_a_scenario_in_which_every_trial_failed_does_not_exit_0(tmp_path):
    assert campaign(tmp_path, scenario('{ type = "grid" }', "false {x}", {"x": "[1, 2]"})) == 1


# -- S08 to S11: what is recorded -------------------------------------------------------------------------------


def test_s08_a_failed_trial_has_no_metrics_and_no_reward_and_no_function_sees_its_penalty(tmp_path):
    env = FunctionEnv(
        tmp_path,
        lambda action: CRASHED if action["x"] == 1 else 5.0,
        rewards=(Negative(metrics=("y",)),),
        penalties=penalties(metric=-50.0),
    )
    agent = ListedAgent(env, points(1, 2))
    agent.run()
    failed, good = agent.feedback
    assert (failed.reward, failed.values) == (None, (-50.0,))
    assert (good.reward.value, good.values) == (-5.0, (-5.0,))  # type: ignore[union-attr]
    row = env.book.ledger.trial(1)
    assert row is not None
    assert (row.reward, row.metrics, row.fault) == (None, {}, Fault.WORKLOAD)


def test_s08_without_a_penalty_a_search_agent_learns_of_the_failure(tmp_path):
    env = FunctionEnv(tmp_path, lambda action: CRASHED)
    agent = ListedAgent(env, points(1))
    agent.run()
    assert (agent.feedback[0].outcome, agent.feedback[0].values) == (Outcome.CRASHED, None)


@pytest.mark.parametrize("kind", ["random", "tpe", "nsga2", "bandit"])
def test_s08_a_failed_point_is_not_proposed_again(tmp_path, kind):
    text = scenario(
        f'{{ type = "{kind}", trials = 30, seed = 1 }}', "sh -c 'test $0 -lt 3 && echo y=$0' {x}", {"x": "[1, 2, 3, 4]"}
    )
    assert campaign(tmp_path, text) == 0
    failed = [row.action["x"] for row in trials(tmp_path) if row.outcome is Outcome.CRASHED]
    assert failed
    assert len(failed) == len(set(failed))


class Noting(Observer):
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def before(self, trial: Trial) -> None:
        self.calls.append(("before", trial.number))

    def after(self, trial: Trial) -> None:
        self.calls.append(("after", trial.number))


def test_s09_constraint_failures_are_trials_like_any_other(tmp_path):
    class Forbidding(AnySpace):
        constraints = ("x < 2",)

        def violated(self, action, regime):
            return "constraint 'x < 2' is not met" if action["x"] >= 2 else None

        def validate(self, action):
            if action["x"] > 9:
                raise InvalidAction("x: 10 is outside 0..9")
            return action

    noting = Noting()
    env = FunctionEnv(
        tmp_path,
        lambda action: CRASHED if action["x"] == 0 else 1.0,
        noting,
        space=Forbidding(),
        penalties=penalties(constraint=-3.0),
    )
    agent = ListedAgent(env, points(1, 2, 1, 0, 10))
    assert agent.run() == 0
    outcomes = [row.outcome for row in env.book.ledger.trials()]
    assert outcomes == [Outcome.OK, Outcome.INFEASIBLE, Outcome.OK, Outcome.CRASHED, Outcome.INVALID]
    infeasible = agent.feedback[1]
    assert (infeasible.values, infeasible.done) == ((-3.0,), False)
    assert infeasible.observation.metrics.keys() == {"y"}, "the declared shape"
    row = env.book.ledger.trial(2)
    assert row is not None
    assert "x < 2" in row.reason
    assert noting.calls == [(hook, number) for number in range(1, 6) for hook in ("before", "after")]
    assert env.book.ledger.trial(3).cached_from == "1"  # type: ignore[union-attr]


class WildConfig(RandomConfig):
    type: Literal["wild"] = "wild"  # type: ignore[assignment]


class Wild(RandomSearch):
    """Proposes one action outside its space, whatever the regime."""

    Config: ClassVar[type[AgentConfig]] = WildConfig

    def propose(self, n: int, retry: int, observation: Observation) -> Action | None:
        return {"x": 7} if n == 2 else super().propose(n, retry, observation)


def test_s10_an_invalid_action_is_a_trial_not_the_end_of_the_campaign(tmp_path):
    agents.add("wild", Wild)
    assert campaign(tmp_path, scenario('{ type = "wild", trials = 4 }', ECHO, {"x": "[1, 2]"})) == 0
    rows = trials(tmp_path)
    assert len(rows) == 4
    assert (rows[1].outcome, rows[1].fault, rows[1].reward) == (Outcome.INVALID, Fault.POLICY, None)
    assert "7 is not one of 1, 2" in rows[1].reason


def test_s11_trajectory_and_env_csv_have_the_same_trials_in_the_same_order(tmp_path):
    text = scenario(
        '{ type = "random", trials = 12, seed = 2 }',
        "sh -c 'test $0 -lt 3 && echo y=$1' {x} {size}",
        {"x": "[1, 2, 3]", "size": "[10, 20]"},
        'workload.constraints = ["x * size < 60"]',
        "[run.env_params.size]",
    )
    assert campaign(tmp_path, text) == 0
    with (tmp_path / "out/r/trajectory.csv").open() as one, (tmp_path / "out/r/env.csv").open() as other:
        trajectory, env = list(csv.DictReader(one)), list(csv.DictReader(other))
    assert list(trajectory[0])[:6] == ["trial", "action", "reward", "observation", "env_params", "outcome"]
    assert list(env[0]) == ["trial", "size"]
    assert [row["trial"] for row in trajectory] == [row["trial"] for row in env] == [str(n) for n in range(1, 13)]
    assert {row["outcome"] for row in trajectory} >= {"ok", "crashed"}
    for row, env_row in zip(trajectory, env, strict=True):
        assert json.loads(row["env_params"]) == {"size": int(env_row["size"])}
        assert (row["reward"] != "") == (row["outcome"] == "ok")


def test_s11_env_csv_is_written_only_if_something_is_drawn(tmp_path):
    campaign(tmp_path, scenario('{ type = "grid" }', ECHO, {"x": "[1, 2]"}))
    assert (tmp_path / "out/r/trajectory.csv").exists()
    assert not (tmp_path / "out/r/env.csv").exists()


# -- S12 to S15: signals, crashes, cost, budget -----------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_s12_a_signal_aborts_trials_in_flight_and_stops_the_campaign(tmp_path, number, code):
    text = two_runs('{ type = "grid" }', '{ type = "random", trials = 2 }').replace(
        ECHO, "sh -c 'echo y=1; sleep 60' {x}"
    )
    (tmp_path / "scenario.toml").write_text(text.replace("parallel = 1", "parallel = 2"))
    command = [sys.executable, "-m", "loopwright", "run", "scenario.toml", "-o", "out", "--json"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        _wait_for(lambda: len(list(tmp_path.glob("out/r/trials/*/stdout"))) == 2)
        process.send_signal(number)
        process.communicate()
        assert process.returncode == code
    assert [row.outcome for row in trials(tmp_path)] == [Outcome.ABORTED, Outcome.ABORTED]
    assert not (tmp_path / "out/s").exists()
    assert (tmp_path / "out/report.html").exists()
    assert len((tmp_path / "out/r/trajectory.csv").read_text().splitlines()) == 3


def test_s12_a_second_signal_stops_at_once(tmp_path):
    stubborn = "sh -c 'trap \"\" TERM INT; echo y=1; sleep 60 & wait; sleep 60' {x}"
    (tmp_path / "scenario.toml").write_text(
        scenario('{ type = "grid" }', stubborn, {"x": "[1, 2]"}).replace("parallel = 1", "parallel = 1\ngrace_s = 600")
    )
    command = [sys.executable, "-m", "loopwright", "run", "scenario.toml", "-o", "out", "--quiet"]
    with subprocess.Popen(command, cwd=tmp_path) as process:
        _wait_for(lambda: any(path.stat().st_size for path in tmp_path.glob("out/r/trials/1/stdout")))
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    assert trials(tmp_path)[0].outcome is None, "it stays unfinished and will be attempted again"
    _wait_for(lambda: not _running(tmp_path))


def test_s13_after_kill_9_resume_continues_with_the_same_trials(tmp_path):
    """One kill here; tests/survival kills at many moments."""
    text = scenario(
        '{ type = "tpe", trials = 12, seed = 5, startup = 4 }',
        "sh -c 'sleep 0.02; echo y=$0' {x}",
        {"x": "{ low = 0.0, high = 1.0 }"},
    )
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    calm.mkdir()
    killed.mkdir()
    assert campaign(calm, text) == 0
    (killed / "scenario.toml").write_text(text)
    command = [sys.executable, "-m", "loopwright", "run", "scenario.toml", "-o", "out", "--quiet"]
    with subprocess.Popen(command, cwd=killed, start_new_session=True) as process:
        _wait_for(lambda: (killed / "out/r/trials/6").exists())
        os.killpg(process.pid, signal.SIGKILL)
    assert resumed(killed) == 0
    assert [(t.number, t.action, t.outcome) for t in trials(killed)] == [
        (t.number, t.action, t.outcome) for t in trials(calm)
    ]
    assert not _running(killed)


def test_s13_an_aborted_trial_keeps_its_number_and_its_draw(tmp_path):
    (tmp_path / "go").touch()
    text = scenario(
        '{ type = "random", trials = 6, seed = 4 }',
        f"sh -c 'test -e {tmp_path}/go || sleep 60; echo y=$0$1' {{x}} {{size}}",
        {"x": "[1, 2, 3, 4, 5, 6, 7, 8]", "size": "[10, 20]"},
        "[run.env_params.size]",
    )
    assert campaign(tmp_path, text, "calm") == 0
    (tmp_path / "go").unlink()
    command = [sys.executable, "-m", "loopwright", "run", "scenario.toml", "-o", "out", "--quiet"]
    with subprocess.Popen(command, cwd=tmp_path) as process:
        _wait_for(lambda: (tmp_path / "out/r/trials/1/stdout").exists())
        process.terminate()
        assert process.wait() == 143
    (aborted,) = trials(tmp_path)
    assert aborted.outcome is Outcome.ABORTED
    (tmp_path / "go").touch()
    assert resumed(tmp_path) == 0
    same = [(t.number, t.action, t.draw, t.regime, t.outcome) for t in trials(tmp_path, output="calm")]
    assert [(t.number, t.action, t.draw, t.regime, t.outcome) for t in trials(tmp_path)] == same
    with Ledger.read(tmp_path / "out/r/ledger.db") as ledger:
        assert [outcome for _, _, _, outcome in ledger.attempts(1)] == ["aborted", "ok"]


def test_s14_the_look_up_uses_an_index(tmp_path):
    """The time is measured by `benchmarks ledger`; this pins the query plan. The first look-up creates the index."""
    ledger = Ledger.create(tmp_path / "ledger.db")
    assert ledger.find("k") is None
    plan = ledger._rows(
        "EXPLAIN QUERY PLAN SELECT number FROM trials WHERE key = ? AND outcome IN ('ok', 'infeasible') "
        "AND cached_from IS NULL AND key <> '' ORDER BY number LIMIT 1",
        ("k",),
    )
    assert "SEARCH trials USING" in plan[0][3]
    assert "trials_by_key" in plan[0][3]
    ledger.close()


def test_s15_cached_trials_have_numbers_and_count(tmp_path):
    assert campaign(tmp_path, scenario('{ type = "random", trials = 20, seed = 1 }', ECHO, {"x": "[1, 2]"})) == 0
    rows = trials(tmp_path)
    assert [row.number for row in rows] == list(range(1, 21))
    fresh = [row for row in rows if row.cached_from is None]
    assert len(fresh) == 2
    assert {row.cached_from for row in rows if row.cached_from} == {str(row.number) for row in fresh}
    assert all(row.reward for row in rows)


def test_s15_free_cached_trials_end_with_the_space(tmp_path):
    text = scenario('{ type = "random", trials = 20, seed = 1, count_cached = false }', ECHO, {"x": "[1, 2, 3]"})
    assert campaign(tmp_path, text) == 0
    fresh = [row for row in trials(tmp_path) if row.cached_from is None]
    assert sorted(row.action["x"] for row in fresh) == [1, 2, 3]


def test_s15_a_space_is_never_used_up_for_an_agent_that_measures_again(tmp_path):
    text = scenario('{ type = "bandit", trials = 12, count_cached = false }', ECHO, {"x": "[1, 2, 3]"})
    assert campaign(tmp_path, text) == 0
    assert len(trials(tmp_path)) == 12


def test_s15_free_cached_trials_end_after_ten_times_the_budget(tmp_path):
    env = FunctionEnv(tmp_path, lambda action: 1.0, budget=3, count_cached=False)
    agent = ListedAgent(env, points(*[1] * 100))
    agent.run()
    assert env.book.step == 30
    assert env.book.uncounted == 29


# -- helpers ----------------------------------------------------------------------------------------------------


def _wait_for(condition: Any, deadline_s: float = 60.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition never became true"
        time.sleep(0.01)


def _running(directory: Path) -> list[int]:
    """Processes whose working directory is below this one."""
    commands = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str((entry / "cwd").readlink()).startswith(str(directory / "out")):
                commands.append(int(entry.name))
        except OSError:
            continue
    return commands
