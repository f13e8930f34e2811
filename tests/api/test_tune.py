"""`loopwright.tune` and `loopwright.run`: a search in ten lines of Python, durable like any other."""

import asyncio
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import loopwright as lw
from loopwright.core.errors import LedgerError, LoopwrightError
from loopwright.core.outcome import Outcome
from tests.api.functions import other, parabola
from tests.survival.campaign import read_all

SPACE = {"x": lw.uniform(-10.0, 10.0), "shift": [0, 1]}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_function_is_tuned_in_worker_processes():
    study = lw.tune(parabola, SPACE, minimize="loss", trials=12, parallel=2, output="out")

    assert len(study.trials()) == 12
    assert study.best.params.keys() == {"x", "shift"}
    assert study.best.value == min(trial.metrics["loss"] for trial in study.trials())
    assert study.best.interval is None, "it was measured once"
    assert study.code == 0


def test_noise_is_averaged_over_and_the_best_is_confirmed():
    def noisy(x, seed):
        return {"loss": (x - 3) ** 2 + seed}

    space, noise = {"x": [3, 5]}, {"seed": (1, 2, 3)}
    confirmed = lw.tune(
        noisy, space, minimize="loss", trials=20, noise=noise, confirm={"share": 0.5}, in_process=True, output="a"
    )
    searched = lw.tune(
        noisy, space, minimize="loss", trials=40, noise=noise, confirm=False, in_process=True, output="b"
    )

    assert confirmed.best.params == {"x": 3}
    assert confirmed.best.confirmed
    assert {trial.noise["seed"] for trial in confirmed.trials()} == {1, 2, 3}
    assert {trial.phase for trial in searched.trials()} == {""}


def test_a_closure_is_shipped_to_worker_processes_and_can_be_resumed_from_the_command_line():
    centre = 3

    def distance(x):
        import os

        return {"distance": abs(x - centre), "pid": os.getpid()}

    study = lw.tune(distance, {"x": lw.integer(0, 100)}, minimize="distance", trials=3, output="out")
    command = [sys.executable, "-m", "loopwright", "resume", "out", "--quiet", "--set", "run.agent.trials=5"]
    subprocess.run(command, check=True, capture_output=True)

    pids = {trial.metrics["pid"] for trial in study.trials()}
    assert len(study.trials()) == 5
    assert len(pids) == 2, "one worker of each process"


def test_a_function_that_cannot_be_pickled_runs_in_this_process():
    lock, threads = threading.Lock(), set()

    def guarded(x):
        with lock:
            threads.add(threading.get_ident())
            return x * x

    study = lw.tune(guarded, {"x": [1, 2, 3]}, minimize=True, trials=3, agent="grid", output="out")

    assert threads
    assert (study.best.params, study.best.value) == ({"x": 1}, 1)


def test_in_process_is_a_choice_and_refuses_a_timeout():
    study = lw.tune(parabola, SPACE, minimize="loss", trials=3, output="out", in_process=True)
    assert study.trials()[0].outcome is Outcome.OK

    with pytest.raises(ValueError, match="timeout_s needs a function that can be imported or pickled"):
        lw.tune(parabola, SPACE, minimize="loss", trials=3, output="other", in_process=True, timeout_s=1)


def test_a_study_in_this_process_says_how_it_is_continued():
    lw.tune(parabola, SPACE, minimize="loss", trials=2, output="out", in_process=True)

    resumed = subprocess.run([sys.executable, "-m", "loopwright", "resume", "out"], capture_output=True, text=True)

    assert resumed.returncode == 2
    assert "belongs to the Python program that started this study" in resumed.stderr


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_a_crash_is_a_failed_trial(in_process, kind):
    def fragile(x):
        if x == 2:
            raise kind("too fragile")
        return float(x)

    study = lw.tune(fragile, {"x": [1, 2]}, maximize=True, trials=2, agent="grid", output="out", in_process=in_process)

    (failed,) = (trial for trial in study.trials() if trial.outcome is Outcome.CRASHED)
    assert "too fragile" in failed.reason
    assert study.best.params == {"x": 1}


def test_the_same_call_resumes_and_may_ask_for_more_trials():
    first = lw.tune(parabola, SPACE, minimize="loss", trials=4, output="out")
    again = lw.tune(parabola, SPACE, minimize="loss", trials=6, output="out")

    assert [trial.number for trial in again.trials()] == [1, 2, 3, 4, 5, 6]
    assert [trial.action for trial in first.trials()][:4] == [trial.action for trial in again.trials()][:4]


def test_another_space_objective_or_function_is_refused():
    lw.tune(parabola, SPACE, minimize="loss", trials=2, output="out")

    with pytest.raises(LedgerError, match="another space for run 'parabola'"):
        lw.tune(parabola, {**SPACE, "shift": [0, 2]}, minimize="loss", trials=2, output="out")
    with pytest.raises(LedgerError, match="another objective"):
        lw.tune(parabola, SPACE, maximize="loss", trials=2, output="out")
    with pytest.raises(LedgerError, match="without a run 'other'"):
        lw.tune(other, SPACE, minimize="loss", trials=2, output="out")


def test_changed_code_or_captured_values_are_refused():
    def scaled(factor):
        return lambda x: factor * x

    lw.tune(scaled(2), {"x": [1, 2]}, minimize=True, trials=2, output="out")
    lw.tune(scaled(2), {"x": [1, 2]}, minimize=True, trials=2, output="out")

    with pytest.raises(LedgerError, match="have changed since"):
        lw.tune(scaled(3), {"x": [1, 2]}, minimize=True, trials=2, output="out")

    # The refused function has not replaced the stored one.
    command = [sys.executable, "-m", "loopwright", "resume", "out", "--quiet", "--set", "run.agent.trials=4"]
    subprocess.run(command, check=True, capture_output=True)
    assert {trial.metrics["value"] / trial.action["x"] for trial in lw.Study.read("out").trials()} == {2}


@pytest.mark.parametrize("objective", [{}, {"minimize": "a", "maximize": "b"}])
def test_the_direction_is_required(objective):
    with pytest.raises(TypeError, match="either minimize or maximize"):
        lw.tune(parabola, SPACE, trials=2, **objective)


def test_a_wrong_argument_is_refused_before_anything_runs():
    with pytest.raises(lw.ScenarioError, match="takes no argument 'y'"):
        lw.tune(parabola, {"x": [1, 2], "shift": 0, "y": [1, 2]}, minimize="loss", trials=2, output="out")


def test_without_an_output_each_study_gets_a_directory():
    studies = [lw.tune(parabola, SPACE, minimize="loss", trials=1) for _ in range(2)]

    assert {study.output.parent for study in studies} == {Path("out")}
    assert studies[0].output != studies[1].output


def test_it_works_inside_a_running_event_loop_as_in_a_notebook():
    async def cell():
        study = lw.tune(parabola, SPACE, minimize="loss", trials=2, output="out")
        return study, lw.dispatch(lw.load("out/scenario.toml"), "again")

    async def cell_again():
        lw.dispatch(lw.load("out/scenario.toml"), "again")

    study, code = asyncio.run(cell())
    assert (len(study.trials()), code) == (2, 0)
    with pytest.raises(LoopwrightError, match="again already contains a campaign"):
        asyncio.run(cell_again())


def test_a_scenario_runs_from_a_dict_with_overrides():
    scenario = {
        "name": "echo",
        "run": [
            {
                "name": "echo",
                "agent": {"type": "random", "trials": 10},
                "reward": {"type": "identity", "metrics": ["v"]},
                "workload": {
                    "type": "command",
                    "command": "echo v: {x}",
                    "metrics": {"v": {"regex": "v: ([0-9.]+)"}},
                    "args": {"x": [1, 2, 3]},
                },
            }
        ],
    }

    study = lw.run(scenario, "out", set={"run.agent.trials": 3})

    assert len(study.trials()) == 3
    assert (Path("out") / "report.html").is_file()


@pytest.mark.parametrize(("progress", "lines"), [(True, ["square: 4/4 done, 0 failed"]), (None, []), (False, [])])
def test_progress_is_shown_on_request(tmp_path, capsys, progress, lines):
    """Without a request only on a terminal, which stderr is not here."""

    def square(x):
        return x * x

    lw.tune(square, {"x": [1, 2, 3, 4]}, minimize=True, trials=4, agent="grid", output=tmp_path, progress=progress)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.partition(", 0 cached")[0] for line in err.splitlines()][-1:] == lines


def test_mistakes_in_a_call_are_named_by_what_the_caller_wrote(tmp_path):
    with pytest.raises(TypeError, match="tune needs a function, not 'square'"):
        lw.tune("square", {"x": [1, 2]}, minimize=True, trials=2, output=tmp_path)

    def square(x):
        return x * x

    with pytest.raises(lw.ScenarioError, match=r"^tune: space.y: 'square' takes no argument 'y'"):
        lw.tune(square, {"x": [1, 2], "y": [1, 2]}, minimize=True, trials=2, output=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"space": [1, 2]}, TypeError, "the space must be a dict"),
        ({"space": {"x": None, "shift": 0}}, lw.ScenarioError, "^tune: space.x: cannot be None"),
        ({"space": {"x": {1, 2}, "shift": 0}}, lw.ScenarioError, r"^tune: space.x: cannot be \{1, 2\}"),
        ({"space": {"x": [1], "shift": 0}}, lw.ScenarioError, "^tune: space: there is nothing to search"),
        ({"minimize": ["loss"]}, TypeError, r"not \['loss'\]"),
        ({"trials": 0}, lw.ScenarioError, "^tune: trials: must be"),
        ({"parallel": 0}, lw.ScenarioError, "^tune: parallel: must be"),
        ({"agent": object}, TypeError, "agent must be a name"),
        ({"agent": "tpee"}, lw.ScenarioError, "^tune: agent: unknown agent 'tpee'"),
        ({"constraints": [len]}, lw.ScenarioError, "^tune: constraints: cannot be <built-in function len>"),
    ],
)
def test_a_bad_argument_is_named(arguments, error, words):
    with pytest.raises(error, match=words):
        lw.tune(parabola, **{"space": SPACE, "minimize": "loss", "trials": 2, "output": "out"} | arguments)


def test_the_space_may_be_made_of_tuples_ranges_and_numpy():
    space = {"x": np.linspace(0, 1, 3), "shift": range(2), "scale": (np.float64(1.0), np.int64(2))}

    study = lw.tune(lambda x, shift, scale: scale * x + shift, space, minimize=True, trials=12, agent="grid")

    assert {trial.outcome for trial in study.trials()} == {Outcome.OK}
    assert (dict(study.best.params)["x"], study.best.value) == (0.0, 0.0)


def test_one_constraint_needs_no_list():
    study = lw.tune(parabola, SPACE, minimize="loss", trials=5, constraints="x > 100", output="out")

    assert {trial.outcome for trial in study.trials()} == {Outcome.INFEASIBLE}


def test_progress_is_a_bar_on_a_terminal(tmp_path):
    """Given a narrow one, the line is wrapped, and nothing of it is left out."""
    script = "lw.tune(size, {'x': [1, 2]}, minimize=True, trials=2, agent='grid', output='out')"
    outer, inner = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "60"}
    command = [sys.executable, "-c", f"import loopwright as lw\ndef size(x): return abs(x)\n{script}"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=inner, text=True
    ) as process:
        os.close(inner)
        screen = read_all(outer)
        assert (process.stdout.read(), process.wait()) == ("", 0)
    shown = " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", " ", screen).split())
    assert "size: 2/2 done" in shown
    assert "measured once)" in shown
