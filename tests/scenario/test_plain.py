"""Plain runs: order, concurrency, steps and iterations."""

import json

import pytest

import loopwright
from loopwright.core.errors import ScenarioError
from loopwright.core.outcome import Outcome
from loopwright.ledger.ledger import Ledger


def plain(name, script="true", **keys):
    return {"name": name, "workload": {"type": "command", "command": ["sh", "-c", script]}, **keys}


def scenario(*runs, **system):
    return {"name": "plain", "system": system, "run": list(runs)}


def trials_of(output, name):
    with Ledger.read(output / name / "ledger.db") as ledger:
        return list(ledger.trials())


def problems_of(*runs, **system):
    with pytest.raises(ScenarioError) as caught:
        loopwright.load(scenario(*runs, **system))
    return str(caught.value)


def test_g09_dependencies_that_cannot_hold_are_found_at_load_time():
    """Given a cycle, an unknown run, an agent-driven run or a mixture, nothing starts."""
    agent = {"type": "grid"}
    searched = {"type": "command", "command": ["echo", "{n}"], "args": {"n": [1, 2]}, "metrics": {}}
    search = {"name": "search", "agent": agent, "workload": searched}
    text = problems_of(
        plain("a", depends_on={"b": "after_start"}),
        plain("b", depends_on=["a", "bb"]),
        plain("c", depends_on=["search"]),
        {**search, "depends_on": ["c"], "iterations": 2},
    )
    assert "depends_on (run 'b'): there is no run 'bb'. Known: a, b, c, search. Did you mean 'b'?" in text
    assert "these runs wait for one another: " in text
    assert "depends_on (run 'c'): 'search' has an agent; a run can only wait for plain runs." in text
    assert "a run with an agent cannot depend on others" in text
    assert "iterations (run 'search'): is for runs without an agent; use `repeats`." in text
    assert "runs with and without an agent are mixed; a, b, c has none" in text
    assert "after_start" in problems_of(plain("a"), plain("b", depends_on={"a": "later"}))
    steps = problems_of(plain("a", pre=["no-such-program {x}"], iterations=2, repeats=2))
    assert "[[run]] pre: unknown argument {x}" in steps
    assert "'no-such-program' is not on the PATH" in steps
    assert "iterations: means the same; remove `repeats`" in steps


@pytest.mark.parametrize("value", [5, "a", ["a", 3], [["a"]], [{"run": "a"}]])
def test_dependencies_of_the_wrong_shape_are_one_problem(value):
    """Given something other than names or a table, the message shows both."""
    expected = "[[run]] depends_on (run 'b'): give a list of names, or a table such as { server = \"after_start\" }."
    assert problems_of(plain("a"), plain("b", depends_on=value)).removeprefix("scenario: ") == expected


def test_keys_of_the_wrong_type_are_problems_in_the_words_of_toml():
    """Given a number instead of a table, and text instead of a list, the message says so."""
    assert "[run.workload] type: is missing" in problems_of({**plain("a"), "workload": 5})
    assert "[[run]] pre: must be a list, not 'echo'." in problems_of(plain("a", pre="echo"))
    assert "[[run]] noise: must be a table, not 5." in problems_of(plain("a", noise=5))


def test_c05_runs_that_run_at_the_same_time_do_not_share_devices():
    """Given two plain runs with GPUs of which one starts with the other, the scenario is refused."""
    one, other = plain("a"), plain("b", depends_on={"a": "after_start"})
    for run in (one, other):
        run["workload"]["gpus"] = 1
    assert "only one run can use GPUs of this machine, not a, b" in problems_of(one, other, gpus=2)


def test_runs_wait_for_success_or_for_any_end(tmp_path):
    """Given a failed run, what needs its success is not started, and what needs its end is."""
    note = f"echo $0 >> {tmp_path}/order"
    runs = [
        plain(
            "last", f"{note}; echo last >> {tmp_path}/order", depends_on={"skipped": "after_any", "good": "after_ok"}
        ),
        plain("skipped", depends_on=["bad"]),
        plain("never", depends_on={"skipped": "after_ok"}),
        plain("bad", f"echo bad >> {tmp_path}/order; exit 3"),
        plain("good", f"echo good >> {tmp_path}/order"),
    ]
    assert loopwright.run(scenario(*runs), tmp_path / "out", progress=False).code == 1
    assert (tmp_path / "order").read_text().replace("sh\n", "").split() == ["bad", "good", "last"]
    assert not (tmp_path / "out/skipped").exists()
    assert not (tmp_path / "out/never").exists()


def test_after_start_runs_beside_its_dependency_and_what_it_needs_runs_first(tmp_path):
    """Given a server that ends when its client is done, both run at the same time, once the server's `pre` is over."""
    gate = tmp_path / "gate"
    runs = [
        plain("other", f"test -e {gate}"),
        plain(
            "client",
            f"test -e {tmp_path}/pre && touch {gate}",
            depends_on={"server": "after_start", "build": "after_ok"},
        ),
        plain("server", f"while [ ! -e {gate} ]; do sleep 0.02; done", pre=[f"touch {tmp_path}/pre"]),
        plain("build", depends_on={"server": "after_start"}),
    ]
    runs[0]["depends_on"] = {"client": "after_any"}
    assert loopwright.run(scenario(*runs), tmp_path / "out", progress=False).code == 0


def test_an_error_in_one_run_stops_those_beside_it(tmp_path):
    """Given a run that cannot be recorded while another runs, that one is aborted and the error raised."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/second").touch()
    runs = [plain("first", "sleep 100"), plain("second", depends_on={"first": "after_start"})]
    with pytest.raises(OSError, match="second"):
        loopwright.run(scenario(*runs), tmp_path / "out", progress=False)
    assert [trial.outcome for trial in trials_of(tmp_path / "out", "first")] == [Outcome.ABORTED]


def test_steps_run_around_each_iteration(tmp_path):
    """Given `pre`, `post` and `iterations`, each trial has its steps, with their own directories and its arguments."""
    run = plain("work", "echo {n}", iterations=3)
    run["workload"]["args"] = {"n": 7}
    run["pre"] = ["echo before {n}"]
    run["post"] = [["sh", "-c", "cat $LOOPWRIGHT_TRIAL_DIRECTORY/stdout"], {"command": "true", "timeout_s": 5}]
    assert loopwright.run(scenario(run), tmp_path / "out", progress=False).code == 0
    assert [trial.outcome for trial in trials_of(tmp_path / "out", "work")] == [Outcome.OK] * 3
    for number in (1, 2, 3):
        steps = tmp_path / "out/work/steps" / str(number)
        assert (steps / "pre-1/stdout").read_text() == "before 7\n"
        assert (steps / "post-1/stdout").read_text() == "7\n"


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"pre": ["true", "sh -c 'exit 3'"]}, "the step in steps/1/pre-2 failed: exit code 3"),
        ({"post": ["false", "true"]}, "the step in steps/1/post-1 failed: exit code 1"),
        (
            {"pre": [{"command": "sleep 100", "timeout_s": 0.1}]},
            "the step in steps/1/pre-1 failed: timed out after 0.1 s",
        ),
    ],
    ids=["pre", "post", "timeout"],
)
def test_a_step_that_fails_fails_its_trial(tmp_path, keys, reason):
    """The workload does not run after a failed `pre`; `post` runs in any case; no further iteration is made."""
    run = plain("work", "touch ran", iterations=2, **keys)
    run["post"] = [*keys.get("post", []), f"touch {tmp_path}/post"]
    assert loopwright.run(scenario(run), tmp_path / "out", progress=False).code == 1
    first, second = trials_of(tmp_path / "out", "work")
    assert first.reason == reason
    assert first.outcome is (Outcome.TIMEOUT if "timed out" in reason else Outcome.CRASHED)
    assert second.reason == "not run: trial 1 of its group failed"
    assert (tmp_path / "post").exists()
    assert (tmp_path / "out/work/trials/1/ran").exists() is ("post" in keys)


def test_a_python_function_has_steps_and_a_failed_iteration_fails_the_run(tmp_path, monkeypatch):
    """Given a function that fails the second time, the run fails, although one iteration succeeded."""
    source = "def work(file):\n    print(file)\n    return {'y': 1 / (2 - len(open(file).read()))}\n"
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    run = {
        "name": "work",
        "iterations": 2,
        "pre": [["sh", "-c", f"printf x >> {tmp_path}/count"]],
        "workload": {"type": "python", "function": "mine:work", "args": {"file": str(tmp_path / "count")}},
    }
    assert loopwright.run(scenario(run), tmp_path / "out", progress=False).code == 1
    assert [trial.outcome for trial in trials_of(tmp_path / "out", "work")] == [Outcome.OK, Outcome.CRASHED]
    assert json.loads((tmp_path / "out/work/trials/1/parameters.json").read_text())["trial"] == 1
