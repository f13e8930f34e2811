"""A study: typed results, ask and tell that survive a crash, and a report."""

import subprocess
import sys
import textwrap

import pytest

import loopwright as lw
from loopwright.api.ask_tell import AskTellError
from loopwright.core.errors import LedgerError
from loopwright.core.outcome import Outcome


def scenario(trials=6, *, repeats=1, constraints=(), agent="tpe", args=None):
    return {
        "name": "blocks",
        "run": [
            {
                "name": "blocks",
                "agent": {"type": agent, "trials": trials, "seed": 1},
                "reward": {"type": "negative", "metrics": ["seconds"]},
                "repeats": repeats,
                "workload": {
                    "type": "external",
                    "constraints": list(constraints),
                    "args": args or {"tile": [8, 16, 32, 64], "unroll": [1, 2]},
                },
            }
        ],
    }


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def drain(study, seconds=lambda params: params["tile"] / 8):
    count = 0
    while (trial := study.ask()) is not None:
        study.tell(trial, {"seconds": seconds(trial.params)})
        count += 1
    return count


def test_ask_and_tell_use_the_whole_budget():
    with lw.Study.open(scenario(), "out") as study:
        drain(study)

    assert [trial.number for trial in study.trials()] == [1, 2, 3, 4, 5, 6]
    assert study.best.value == min(trial.metrics["seconds"] for trial in study.trials() if trial.metrics)
    assert study.code == 0


def test_duplicates_come_from_the_cache_and_infeasible_points_are_recorded():
    with lw.Study.open(scenario(40, agent="random", constraints=["tile < 64"]), "out") as study:
        pending = drain(study)

    outcomes = [trial.outcome for trial in study.trials()]
    assert len(outcomes) == 40
    assert pending == 6, "three tiles, two unrolls"
    assert Outcome.INFEASIBLE in outcomes


def test_a_failed_trial_has_no_metrics():
    with lw.Study.open(scenario(2), "out") as study:
        study.fail(study.ask(), "out of memory")
        drain(study)

    failed = study.trials()[0]
    assert (failed.outcome, failed.reason, dict(failed.metrics), failed.reward) == (
        Outcome.CRASHED,
        "out of memory",
        {},
        None,
    )


def test_several_trials_may_be_pending():
    with lw.Study.open(scenario(4, agent="grid"), "out") as study:
        first, second = study.ask(), study.ask()
        study.tell(second, {"seconds": 2.0})
        study.tell(first, {"seconds": 1.0})
        drain(study)

    assert [trial.metrics["seconds"] for trial in study.trials()][:2] == [1.0, 2.0]


def test_repeats_are_handed_out_one_by_one_and_give_an_interval():
    values = iter([1.0, 2.0, 3.0] * 10)
    with lw.Study.open(scenario(6, repeats=3), "out") as study:
        drain(study, lambda params: next(values))

    low, high = study.best.interval
    assert low < study.best.value < high
    assert len(study.best.trials) == 3


def test_a_trial_told_twice_is_refused():
    with lw.Study.open(scenario(2), "out") as study:
        trial = study.ask()
        study.tell(trial, {"seconds": 1.0})
        with pytest.raises(AskTellError, match=f"trial {trial.number} is not pending"):
            study.tell(trial, {"seconds": 1.0})


def test_only_a_trial_from_ask_can_be_told():
    with lw.Study.open(scenario(2), "out") as study:
        trial = study.ask()
        with pytest.raises(AskTellError, match="pass the trial that `ask` returned, not 1"):
            study.tell(trial.number, {"seconds": 1.0})


def test_metrics_that_are_not_numbers_fail_the_trial():
    with lw.Study.open(scenario(2), "out") as study:
        study.tell(study.ask(), {"seconds": float("nan")})
        study.tell(study.ask(), {"seconds": "fast"})

    assert [trial.outcome for trial in study.trials()] == [Outcome.METRIC_MISSING, Outcome.CRASHED]


def test_a_metric_of_another_name_fails_the_trial_and_is_named():
    with lw.Study.open(scenario(2), "out") as study:
        study.tell(study.ask(), {"time": 1.0})

    (trial,) = study.trials()
    assert (trial.outcome, "the metric 'seconds' is missing" in trial.reason) == (Outcome.METRIC_MISSING, True)
    assert repr(study) == "<Study 'blocks' in out: 1 trial, 0 ok>"
    assert study._repr_html_() == "<b>blocks</b> in <code>out</code>: 1 trial, 0 ok"


def test_a_study_is_used_inside_its_with_block():
    study = lw.Study.open(scenario(2), "out")
    assert repr(study) == "<Study 'blocks' in out: not started>"
    assert study._repr_html_() == "<b>blocks</b> in <code>out</code>: not started"
    with pytest.raises(AskTellError, match="the study is not open"):
        study.ask()


def test_after_kill_9_the_same_trial_is_handed_out_again():
    program = textwrap.dedent(
        f"""
        import os, signal
        import loopwright as lw
        with lw.Study.open({scenario()!r}, "out") as study:
            study.tell(study.ask(), {{"seconds": 1.0}})
            print(study.ask().params, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr

    with lw.Study.open(scenario(), "out") as study:
        trial = study.ask()
        assert (trial.number, str(trial.params)) == (2, killed.stdout.strip())
        study.tell(trial, {"seconds": 1.0})
        drain(study)

    assert [trial.number for trial in study.trials()] == [1, 2, 3, 4, 5, 6]


def test_pending_trials_are_aborted_at_the_end_and_asked_again():
    with lw.Study.open(scenario(2), "out") as study:
        pending = study.ask()
    assert study.trials()[0].outcome is Outcome.ABORTED

    with lw.Study.open(scenario(2), "out") as study:
        assert study.ask() == pending


def test_another_space_is_refused():
    with lw.Study.open(scenario(2), "out") as study:
        drain(study)
    with (
        pytest.raises(LedgerError, match="another space for run 'blocks'"),
        lw.Study.open(scenario(2, args={"tile": [1, 2]}), "out"),
    ):
        pass


def test_overrides_are_compared_too():
    overrides = {"run.workload.args.tile": [1, 2]}
    for _ in range(2):
        with lw.Study.open(scenario(2), "out", set=overrides) as study:
            drain(study)

    with pytest.raises(LedgerError, match="another space"), lw.Study.open(scenario(2), "out"):
        pass


def test_an_agent_with_its_own_loop_cannot_be_asked():
    with pytest.raises(lw.ScenarioError, match="ask and tell need a search agent"):
        lw.Study.open(scenario(64, agent="ppo"), "out")


def test_an_external_workload_cannot_be_run_without_a_program():
    with pytest.raises(lw.LoopwrightError, match=r"use loopwright\.Study\.open"):
        lw.run(scenario(2), "out")


def test_results_are_typed_and_tabular():
    with lw.Study.open(scenario(), "out") as study:
        drain(study)

    frame = study.trials().to_pandas()
    assert list(frame["trial"]) == [1, 2, 3, 4, 5, 6]
    assert {"action.tile", "metric.seconds", "outcome"} <= set(frame.columns)
    assert study.to_polars().height == 6
    assert len(study.trials()[:2]) == 2
    assert "6 trials" in repr(study)
    assert "measured once" in study._repr_html_()


def test_the_report_shows_itself_in_a_notebook():
    with lw.Study.open(scenario(), "out") as study:
        drain(study)
    report = study.report()

    assert report.path.read_text().startswith("<!doctype html>")
    assert report._repr_html_().startswith("<iframe srcdoc=")


def test_without_a_success_there_is_no_best():
    with lw.Study.open(scenario(1), "out") as study:
        study.fail(study.ask(), "broken")

    assert study.code == 1
    with pytest.raises(lw.NoResult, match="1 ended; trial 1 crashed: broken"):
        study.best  # noqa: B018


def test_a_directory_without_a_study_is_named():
    with pytest.raises(LedgerError, match="contains no study"):
        lw.Study.read(".")


def test_a_notebook_shows_the_trials_as_a_table():
    with lw.Study.open(scenario(24, agent="random"), "out") as study:
        study.fail(study.ask(), "<broken>")
        drain(study)

    page = study.trials()._repr_html_()
    assert page.startswith("<table><tr><td>trial</td><td>tile</td><td>unroll</td><td>seconds</td><td>outcome</td></tr>")
    assert (page.count("<tr>"), page.endswith("</table><br>4 more")) == (21, True)
    assert "<td></td><td>crashed</td>" in page


def test_a_result_shows_all_objectives_with_their_evidence(tmp_path):
    """Given a front, each member has every objective in its own unit, with its interval."""

    run = {
        "name": "front",
        "agent": {"type": "grid"},
        "repeats": 2,
        "cache": "off",
        "reward": [{"type": "identity", "metrics": ["ratio"]}, {"type": "negative", "metrics": ["seconds"]}],
        "workload": {
            "type": "command",
            "command": "sh -c 'echo ratio=$0 seconds=$0' {level}",
            "read": [{"names": ["ratio", "seconds"], "regex": "ratio=(.) seconds=(.)"}],
            "args": {"level": [1, 2]},
        },
    }
    study = lw.run({"name": "front", "run": [run]}, tmp_path / "out", progress=False)

    assert str(study.best) == "ratio = 2 (2 to 2, 2 measurements), seconds = 2 (2 to 2, 2 measurements) with level=2"
    assert [best.values for best in study.front] == [{"ratio": 2.0, "seconds": 2.0}, {"ratio": 1.0, "seconds": 1.0}]
    assert study.front[1].intervals == {"ratio": (1.0, 1.0), "seconds": (1.0, 1.0)}
    assert "seconds = 2 (2 to 2, 2 measurements)" in study._repr_html_()
