"""Q, R06, R10, R11, S15, S18: what is recommended was measured again; noise is averaged over; failures teach."""

from collections import Counter
from itertools import count
from random import Random

import pytest

from loopwright import Study, tune, uniform
from loopwright.core.errors import ScenarioError
from loopwright.core.outcome import Outcome
from loopwright.ledger.ledger import Ledger
from loopwright.scenario.load import load
from loopwright.selection import recommend, stored_trials
from tests.contracts.harness import campaign, scenario, trials


def noisy(directory, trials=60, *, agent="random", seed=1, space=None, sigma=1.0):
    noise = Random(seed)

    def measure(x):
        return 10 - (x - 3) ** 2 + noise.gauss(0, sigma)

    space = space or {"x": uniform(0, 6)}
    return tune(
        measure, space, maximize=True, trials=trials, agent=agent, seed=seed, output=directory / "out", in_process=True
    )


def phases(study):
    return Counter(trial.phase for trial in study.trials())


def test_q01_what_is_recommended_has_an_interval_and_a_count_everywhere(tmp_path):
    study = noisy(tmp_path)
    best = study.best
    assert best.confirmed
    assert best.measurements >= 3
    assert best.interval[0] < best.value < best.interval[1]
    assert all(trial.phase == "confirm" for trial in study.trials() if trial.number in best.trials)
    folder = study.output / study.run
    assert f"{best.measurements} measurements" in (folder / "best.toml").read_text()
    assert "recommended" in study._repr_html_()
    page = study.report().path.read_text()
    assert "Recommended, after" in page
    assert "luckiest trial" in page


@pytest.mark.parametrize("agent", ['{ type = "grid" }', '{ type = "random", trials = 12 }'])
def test_q01_without_confirmation_it_says_measured_once(tmp_path, agent):
    assert campaign(tmp_path, scenario(agent, "echo y={x}", {"x": "[1, 2, 3]"})) == 0
    assert not any(trial.phase for trial in trials(tmp_path))
    best = Study.read(tmp_path / "out").best
    assert (best.interval, best.measurements, best.confirmed) == (None, 1, False)
    assert "# best: y = 3 (measured once), in trial" in (tmp_path / "out/r/best.toml").read_text()
    assert "measured once" in (tmp_path / "out/report.html").read_text()


def test_q02_finalists_are_measured_again_in_rounds_beside_the_baseline(tmp_path):
    study = noisy(tmp_path, trials=100)
    rows = [trial for trial in study.trials() if trial.phase == "confirm"]
    assert max(trial.number for trial in study.trials() if not trial.phase) < rows[0].number
    assert all(trial.cached_from is None and trial.repeat > 0 for trial in rows)
    baseline = study.trials()[0].action
    per_round = len({trial.group for trial in rows})
    first = rows[:per_round]
    assert len({trial.group for trial in first}) == per_round, "every finalist once, before any is measured again"
    assert any(trial.action == baseline for trial in first)


@pytest.mark.parametrize("slope", [0.0, 0.05], ids=["steady", "drifting"])
def test_q02_a_canary_notices_a_machine_that_drifts(tmp_path, slope):
    """Given a machine that becomes faster with every trial, the report says so; a steady one is not suspected."""
    noise, calls = Random(3), count()

    def measure(x):
        return 10 - (x - 3) ** 2 + slope * next(calls) + noise.gauss(0, 0.05)

    study = tune(
        measure, {"x": uniform(0, 6)}, maximize=True, trials=100, agent="random", output=tmp_path, in_process=True
    )
    rows = study.trials()
    canaries = [trial for trial in rows if trial.phase == "canary"]
    assert len(canaries) >= 2
    assert {trial.action["x"] for trial in canaries} == {rows[0].action["x"]}
    page = study.report().path.read_text()
    assert ("The machine drifted" in page) == bool(slope)


def test_q02_finalists_run_to_their_end_under_a_stop_rule(tmp_path):
    """Given a rule that stops most trials, what is recommended was confirmed by whole measurements."""

    def train(x):
        for step in range(1, 10):
            yield step, {"loss": abs(x - 3) + 1 / step}
        return {"loss": abs(x - 3)}

    study = tune(
        train,
        {"x": uniform(0, 6)},
        minimize="loss",
        trials=60,
        agent="random",
        stop={"rule": "median", "metric": "loss", "mode": "min"},
        output=tmp_path,
        in_process=True,
    )
    outcomes = Counter((trial.phase, str(trial.outcome)) for trial in study.trials())
    assert outcomes["", "stopped"] > 10
    assert outcomes["confirm", "ok"] >= 3
    assert outcomes["confirm", "stopped"] == outcomes["canary", "stopped"] == 0
    assert study.best.confirmed


def test_q02_the_whole_front_is_confirmed(tmp_path):
    text = (
        scenario('{ type = "random", trials = 60, seed = 3 }', "echo y={x} z=-{x}", {"x": "[1, 2, 3, 4]"})
        .replace(
            'reward = { type = "identity", metrics = ["y"] }',
            'reward = [{ type = "identity", metrics = ["y"] }, { type = "identity", metrics = ["z"] }]',
        )
        .replace(
            "metrics = { y = { regex = 'y=([-0-9.]+)' } }",
            "metrics = { y = { regex = 'y=(\\S+)' }, z = { regex = 'z=(\\S+)' } }",
        )
    )
    assert campaign(tmp_path, text) == 0
    front = Study.read(tmp_path / "out").front
    assert len(front) == 4
    assert all(best.confirmed and best.measurements >= 2 for best in front)


def test_q02_a_difference_that_is_plain_needs_no_further_repeats(tmp_path):
    study = noisy(tmp_path, trials=200, sigma=0.0)
    assert phases(study)["confirm"] < 30, "a workload without noise is measured three times"
    assert study.best.interval[0] == study.best.interval[1]


def test_q04_a_failed_point_counts_as_bad_for_the_sampler(tmp_path):
    def measure(x, y):
        if x > 0.5:
            raise ValueError("out of memory")
        return x - (y - 0.3) ** 2

    space = {"x": uniform(0, 1), "y": uniform(0, 1)}
    study = tune(measure, space, maximize=True, trials=75, output=tmp_path / "out", in_process=True)
    searched = [trial for trial in study.trials() if not trial.phase]
    assert sum(trial.outcome is not Outcome.OK for trial in searched[-30:]) <= 6


def test_q04_a_group_ends_at_its_first_failed_repeat(tmp_path):
    text = scenario('{ type = "grid" }', "sh -c 'echo run >> ../../runs; exit 3' {x}", {"x": "[1, 2]"}, "repeats = 3")
    assert campaign(tmp_path, text) == 1
    assert len((tmp_path / "out/r/runs").read_text().split()) == 2
    assert [trial.reason[:7] for trial in trials(tmp_path)].count("not run") == 4


def test_s15_the_confirmation_comes_out_of_the_budget(tmp_path):
    for agent, budget in (("random", 60), ("tpe", 50)):
        study = noisy(tmp_path / agent, trials=budget, agent=agent)
        counts = phases(study)
        assert len(study.trials()) <= budget
        assert counts[""] == budget * 0.8
        assert counts["confirm"] + counts["canary"] <= budget * 0.2


@pytest.mark.parametrize(("line", "code"), [("", 20), ("fail = { same = 5 }", 5)])
def test_s18_identical_failures_end_the_run_with_the_reason(tmp_path, line, code):
    text = scenario(
        '{ type = "random", trials = 60 }',
        "sh -c 'echo no such model {x} >&2; exit 2'",
        {"x": "{ low = 0.0, high = 1.0 }"},
        line,
    )
    assert campaign(tmp_path, text) == 1
    assert len(trials(tmp_path)) == code
    with Ledger.read(tmp_path / "out/r/ledger.db") as ledger:
        failure = ledger.state("failure")
    assert f"the last {code} trials failed alike and none has succeeded: crashed" in failure
    assert "no such model" in failure


def test_s18_a_success_keeps_a_run_alive_unless_configured_otherwise(tmp_path):
    command = "sh -c 'test {x} -lt 2 && echo y=1'"
    values = {"x": str(list(range(1, 40)))}
    assert campaign(tmp_path, scenario('{ type = "grid" }', command, values)) == 0
    assert len(trials(tmp_path)) == 39
    assert campaign(tmp_path, scenario('{ type = "grid" }', command, values, "fail = { same = 10 }"), "two") == 1
    assert len(trials(tmp_path, output="two")) == 11


# -- regimes and noise ----------------------------------------------------------------------------------------------


def test_r06_the_best_mean_cvar_and_worst_case_each_have_an_interval(tmp_path):
    # x = 1 is good under both loads, x = 2 better on average but terrible under the rare one.
    command = "sh -c 'case $0$1 in 1*) echo y=5;; 2low) echo y=8;; 2high) echo y=1;; esac' {x} {load}"
    text = scenario(
        '{ type = "random", trials = 60, seed = 1 }',
        command,
        {"x": "[1, 2]", "load": '["low", "high"]'},
        "[run.env_params.load]\nweights = [0.9, 0.1]",
    )
    assert campaign(tmp_path, text) == 0
    with Ledger.read(tmp_path / "out/r/ledger.db") as ledger:
        best = recommend(stored_trials(ledger), ledger.state("run"))
    assert best.front[0].action == {"x": 2}
    assert best.front[0].objectives[0] == pytest.approx(7.3)
    robust = {choice.rule: choice for choice in best.robust}
    assert robust["worst case"].action == robust["CVaR"].action == {"x": 1}
    assert all(choice.estimate.interval is not None for choice in best.robust)
    assert [candidate.action["x"] for candidate in best.by_regime] in ([1, 2], [2, 1])


def test_r10_configurations_are_compared_over_common_regimes_with_the_declared_weights(tmp_path):
    command = "sh -c 'case $0$1 in 1a) echo y=1;; 2a) echo y=0;; 1b) echo y=0;; 2b) echo y=9;; esac' {x} {load}"
    text = scenario(
        '{ type = "random", trials = 28, seed = 10 }',
        command,
        {"x": "[1, 2]", "load": '["a", "b"]'},
        "[run.env_params.load]\nweights = [0.95, 0.05]",
    )
    assert campaign(tmp_path, text) == 0
    assert len({(t.action["x"], t.regime["load"]) for t in trials(tmp_path)}) == 4
    assert Study.read(tmp_path / "out").best.params == {"x": 1}, "0.95 against 0.45"


@pytest.mark.parametrize("agent", ["grid", "random", "tpe", "gp", "cmaes", "nsga2", "bandit"])
def test_r11_noise_is_drawn_recorded_and_hidden_with_every_agent(tmp_path, agent):
    settings = f'{{ type = "{agent}"{"" if agent == "grid" else ", trials = 8"} }}'
    lines = ("noise = { seed = [5, 6, 7] }", "repeats = 2")
    text = scenario(settings, "echo y={x}{seed}", {"x": "[1, 2, 3, 4]"}, *lines)
    assert campaign(tmp_path, text) == 0
    rows = trials(tmp_path)
    assert all(row.action.keys() == {"x"} and row.regime == {} for row in rows)
    assert all(row.metrics["y"] == 10 * row.action["x"] + row.noise["seed"] for row in rows)
    draws = {row.group: [] for row in rows}
    for row in rows:
        draws[row.group].append(row.noise["seed"])
    if "bandit" not in agent:  # which measures an action again, under further draws
        assert len(set(map(tuple, draws.values()))) == 1, "common random numbers"
    assert all(len(set(values)) == 2 for values in draws.values()), "no value twice before every value once"


def test_r11_noise_is_part_of_the_cache_key(tmp_path):
    agent = '{ type = "random", trials = 12 }'
    text = scenario(agent, "echo y={z}{seed}", {"z": "[1, 2]"}, "noise = { seed = [5, 6] }")
    assert campaign(tmp_path, text) == 0
    measured = [trial for trial in trials(tmp_path) if trial.cached_from is None]
    assert len(measured) == len({(t.action["z"], t.noise["seed"]) for t in measured}) == 4


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("noise = { x = [1, 2] }", "'x' is also in [run.workload] args"),
        ("noise = { seed = [1] }", "at least two different values"),
        ("noise = { seed = [1, 1] }", "at least two different values"),
        ("confirm = { finalists = 0 }", "finalists"),
        ("confirm = { share = 0.9 }", "share"),
        ("confirm = { share = 0.1 }", "its share of the trials is less than two"),
        ("fail = { same = 0 }", "same"),
    ],
)
def test_r11_what_cannot_work_is_refused_at_load_time(tmp_path, line, words):
    text = scenario('{ type = "random", trials = 12 }', "echo y={x} {seed}", {"x": "[1, 2]"}, line)
    (tmp_path / "bad.toml").write_text(text if "seed" in line else text.replace(" {seed}", ""))
    with pytest.raises(ScenarioError, match=words.replace("[", r"\[")):
        load(tmp_path / "bad.toml")
