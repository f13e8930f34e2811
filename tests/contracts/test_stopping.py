"""Stopping early: a stopped trial is never best, keeps its curve, and is told to the sampler as stopped."""

import json
import math
import sys
from pathlib import Path

import optuna
import pytest

import loopwright
from loopwright.agents.search.samplers import SamplerAgent
from loopwright.core.errors import ScenarioError
from loopwright.core.outcome import Outcome
from loopwright.envs.stopping import StopConfig
from loopwright.ledger.ledger import Ledger

TRAIN = """
import sys
x = float(sys.argv[1])
for step in range(1, 10):
    print(f"step {step} loss {x + 1 / step!r}", flush=True)
print(f"final {x + 1 / step!r}")
"""
FUNCTION = """
import loopwright
def train(x):
    for step in range(1, 10):
        loopwright.report(step, loss=x + 1 / step, other=step)
    return {"loss": x + 1 / step}
def generate(x):
    for step in range(1, 10):
        yield {"loss": x + 1 / step, "other": step}
"""
STOP = {"rule": "median", "metric": "loss", "mode": "min", "options": {"n_startup_trials": 2}}


def scenario(workload: dict, stop: dict | None = STOP, **run) -> dict:
    return {
        "name": "s",
        "run": [
            {
                "name": "r",
                "agent": {"type": "tpe", "trials": 12, "seed": 3},
                "reward": {"type": "negative", "metrics": ["loss"]},
                "workload": {"args": {"x": {"low": 0.0, "high": 5.0}}, **workload},
                **({"stop": stop} if stop is not None else {}),
                **run,
            }
        ],
    }


COMMAND = {
    "type": "command",
    "command": [sys.executable, "train.py", "{x}"],
    "files": ["train.py"],
    "metrics": {"loss": {"regex": "final ([0-9.]+)"}},
    "progress": {"regex": r"step (?P<step>\d+) loss (?P<loss>[0-9.]+)"},
}
WORKLOADS = {
    "command": COMMAND,
    "report": {"type": "python", "function": "steps:train", "metrics": ["loss"]},
    "generator": {"type": "python", "function": "steps:generate", "metrics": ["loss"]},
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "steps.py").write_text(FUNCTION)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(table: dict, output: Path) -> tuple[loopwright.Study, dict[int, dict]]:
    study = loopwright.run(table, output, progress=False)
    with Ledger.read(output / "r" / "ledger.db") as ledger:
        return study, {number: json.loads(data) for number, data in ledger.payloads("curve")}


@pytest.mark.parametrize("name", WORKLOADS)
def test_q03_a_stopped_trial_keeps_its_curve_and_is_never_best(home, name, monkeypatch):
    """Given a rule, trials above the median stop; the same ones for every source of progress."""
    told = []
    learn = SamplerAgent.learn
    monkeypatch.setattr(SamplerAgent, "learn", lambda self, feedback: (learn(self, feedback), told.append(self)))
    study, curves = run(scenario(WORKLOADS[name]), home / "out")
    stopped = [trial for trial in study.trials() if trial.outcome is Outcome.STOPPED]
    assert stopped
    assert all(trial.reward is None and trial.fault is None and not trial.metrics for trial in stopped)
    assert all(trial.reason.startswith("median: loss = ") for trial in stopped)
    assert not set(study.best.trials) & {trial.number for trial in stopped}
    assert sorted(curves) == [trial.number for trial in study.trials()]
    for trial in study.trials():
        curve = curves[trial.number]
        assert curve["steps"] == list(range(1, len(curve["steps"]) + 1))
        assert curve["metrics"]["loss"] == pytest.approx([trial.action["x"] + 1 / step for step in curve["steps"]])
        assert len(curve["steps"]) == 9 or trial in stopped
    page = (home / "out" / "report.html").read_text()
    assert page.count("<polyline") == 12
    assert page.count(", stopped</title>") == len(stopped)
    states = {trial.number + 1: trial for trial in told[-1]._study.get_trials()}
    assert {n for n, t in states.items() if t.state is optuna.trial.TrialState.PRUNED} == {t.number for t in stopped}
    for trial in stopped:
        ((step, value),) = states[trial.number].intermediate_values.items()
        assert (step, value) == (curves[trial.number]["steps"][-1], -curves[trial.number]["metrics"]["loss"][-1])
    if name != "command":
        return
    _, others = run(scenario(WORKLOADS["report"]), home / "other")
    steps = {number: curve["steps"] for number, curve in others.items()}
    assert steps == {number: curve["steps"] for number, curve in curves.items()}


@pytest.mark.parametrize("rule", ["asha", "hyperband", "median"])
def test_q03_a_resumed_run_decides_as_an_undisturbed_one(home, rule):
    """Given a run in two parts, its outcomes and curves are those of a run in one."""
    options = {"max_resource": 9} if rule == "hyperband" else {}
    table = scenario(WORKLOADS["generator"], {"rule": rule, "metric": "loss", "options": options})
    _, whole = run(table, home / "whole")
    loopwright.run(table, home / "parts", set={"run.agent.trials": 7}, progress=False)
    study = loopwright.run(table, home / "parts", resume=True, progress=False)
    with Ledger.read(home / "parts/r/ledger.db") as ledger:
        assert {number: json.loads(data) for number, data in ledger.payloads("curve")} == whole
    assert len(study.trials()) == len(whole) == 12


def test_q03_a_fidelity_promotes_from_the_checkpoint_of_the_trial(home):
    """Given a fidelity, a trial runs at rising values, continues from its own checkpoint, and may stop in between."""
    command = "sh -c 'echo {epochs} >> {checkpoint}/log; tail -n 1 {checkpoint}/log; echo loss {x}'"
    workload = {"type": "command", "command": command, "metrics": {"loss": {"regex": "loss ([0-9.]+)"}}}
    fidelity = {"epochs": {"low": 1, "high": 9, "eta": 3}}
    study, curves = run(scenario(workload, {"rule": "asha", "metric": "loss"}, fidelity=fidelity), home / "out")
    outcomes = {trial.number: trial.outcome for trial in study.trials()}
    assert set(outcomes.values()) == {Outcome.OK, Outcome.STOPPED}
    for number, curve in curves.items():
        levels = [1, 3, 9] if outcomes[number] is Outcome.OK else curve["steps"]
        assert curve["steps"] == levels
        assert (home / f"out/r/trials/{number}/checkpoint/log").read_text().split() == list(map(str, levels))
    assert all("epochs" not in trial.action for trial in study.trials())


@pytest.mark.parametrize(
    ("workload", "stop", "run", "words"),
    [
        ({}, {"rule": "ashaa", "metric": "loss"}, {}, "Did you mean 'asha'?"),
        ({}, {"rule": "asha", "metric": "loss", "options": {"min": 3}}, {}, "asha has no option 'min'"),
        ({}, {"rule": "threshold", "metric": "loss"}, {}, "threshold: "),
        ({}, {"rule": "hyperband", "metric": "loss"}, {}, "hyperband needs options = { max_resource"),
        ({}, {"rule": "asha", "metric": "los"}, {}, "'los' is not reported"),
        ({"progress": None}, {"rule": "asha", "metric": "loss"}, {}, "progress: is missing; `stop` needs it"),
        ({"progress": {"regex": "loss (.*)"}}, None, {}, "needs a named group around each number"),
        ({}, None, {"fidelity": {"n": {"low": 1, "high": 9}}}, "[run.fidelity]: needs a rule"),
        ({}, STOP, {"fidelity": {"x": {"low": 1, "high": 9}}}, "'x' is also in [run.workload.args]"),
        ({}, STOP, {"fidelity": {"n": {"low": 9, "high": 9}}}, "low = 9 must be below high = 9"),
    ],
)
def test_q03_a_rule_that_cannot_work_is_refused_at_load_time(home, workload, stop, run, words):
    """Given a rule without progress, or with wrong settings, the scenario names the key and the fix."""
    table = {key: value for key, value in {**COMMAND, **workload}.items() if value is not None}
    with pytest.raises(ScenarioError) as error:
        loopwright.load(scenario(table, stop, **run))
    assert words in str(error.value)


def test_q03_hostile_progress_is_bounded_and_nan_stops_a_trial(home):
    """Given lines without end, NaN, and a slow pattern, the curve stays small, and the trial ends as it should."""
    (home / "train.py").write_text(
        "import sys\nif sys.argv[1] == 'nan':\n    print('step 1 loss nan')\n"
        "else:\n    print('x' * 2_000_000)\n"
        "    for step in range(12_000): print('step', step, 'loss', step, 'step 5')\n    print('step 1 loss 5')\n"
        "print('final 1')\n"
    )
    args = {"args": {"x": ["long", "nan"]}, "progress": {"regex": r"step (?P<step>\d+) loss (?P<loss>[0-9.nan]+)"}}
    table = scenario({**COMMAND, **args}, {"rule": "asha", "metric": "loss"}, agent={"type": "grid"})
    study, curves = run(table, home / "out")
    assert [trial.outcome for trial in study.trials()] == [Outcome.OK, Outcome.STOPPED]
    assert len(curves[1]["steps"]) < 2000
    assert curves[1]["steps"] == sorted(set(curves[1]["steps"]))
    assert curves[2]["metrics"]["loss"] == [None]
    slow = {"progress": {"regex": r"(x+x+)+y(?P<loss>.)"}, "args": {"x": "a"}}
    (home / "train.py").write_text("print('x' * 5_000)\nprint('final 1')\n")
    table = scenario({**COMMAND, **slow}, None)
    del table["run"][0]["agent"]
    study, _ = run(table, home / "slow")
    assert {trial.outcome for trial in study.trials()} == {Outcome.METRIC_MISSING}
    assert "progress: matching" in study.trials()[0].reason


def test_q03_tune_stops_in_process_functions_and_generators_too(tmp_path):
    """Given `tune(stop=…)`, a function that cannot be shipped is stopped by an exception at its report."""
    cleaned = []

    def train(x):
        try:
            for step in range(1, 10):
                loopwright.report(step, loss=x + 1 / step)
        except loopwright.TrialStopped:
            cleaned.append(x)
            raise
        return {"loss": x}

    study = loopwright.tune(
        train, {"x": loopwright.uniform(0, 5)}, minimize="loss", trials=8, stop="asha", in_process=True, output=tmp_path
    )
    stopped = [trial.action["x"] for trial in study.trials() if trial.outcome is Outcome.STOPPED]
    assert stopped == cleaned != []
    loopwright.report(1, loss=2.0)  # outside a trial: nothing happens


@pytest.mark.parametrize("rule", ["median", "WilcoxonPruner"])
def test_nan_stops_a_trial_without_a_warning(tmp_path, rule):
    def train(x):
        yield from ({"loss": 1.0 if x < 3 else math.nan} for _ in range(3))

    study = loopwright.tune(
        train,
        {"x": [1, 2, 3]},
        minimize="loss",
        trials=3,
        agent="grid",
        stop={"rule": rule, "options": {"n_startup_trials": 1} if rule == "median" else {}},
        in_process=True,
        output=tmp_path,
    )

    assert study.trials()[-1].reason == f"{rule}: loss = nan at step 1"


@pytest.mark.parametrize("mode", ["min", "max"])
def test_asha_keeps_the_best_quarter_rounded_up(mode):
    sign = 1 if mode == "min" else -1
    config = StopConfig(rule="asha", metric="loss", mode=mode, options={"min_resource": 2})
    study = optuna.create_study(direction="minimize" if mode == "min" else "maximize", pruner=config.pruner())
    stopped = []
    for loss in (1.0, 9.0, 8.0, 7.0, 2.0, 3.0):
        trial = study.ask()
        trial.report(0.0, 1)
        assert not trial.should_prune(), "before the first rung"
        trial.report(sign * loss, 3)  # the first step that reaches it
        stopped.append(trial.should_prune())

    assert stopped == [False, True, True, True, False, True]


def test_q03_asha_learns_the_first_rung_from_the_first_complete_trial(tmp_path):
    """Given no `min_resource`, nothing is stopped before a trial is complete, then at a ninth of its steps."""

    def train(x):
        for _ in range(39):
            yield {"loss": x}

    study = loopwright.tune(
        train,
        {"x": [1, 2, 3, 4]},
        minimize="loss",
        trials=4,
        agent="grid",
        stop="asha",
        in_process=True,
        output=tmp_path,
    )
    with Ledger.read(next(tmp_path.glob("*/ledger.db"))) as ledger:
        assert ledger.state("first_rung") == 4
    outcomes = {trial.action["x"]: trial.outcome for trial in study.trials()}
    reasons = {trial.action["x"]: trial.reason for trial in study.trials()}
    assert outcomes[1] is Outcome.OK
    assert outcomes[4] is Outcome.STOPPED
    assert "at step 4" in reasons[4]
