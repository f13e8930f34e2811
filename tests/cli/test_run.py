"""`loopwright run` and `resume`: their output and exit codes."""

import json
import re
import tomllib

import pytest

from loopwright.ledger.ledger import Ledger


def test_a_run_prints_the_best_result_and_the_output_directory(loopwright, scenario, tmp_path):
    done = loopwright("run", scenario(), "--output", "out")
    assert done.returncode == 0, done.stderr
    assert "first: 6 ok of 6 trials" in done.stdout
    (best,) = (line.split() for line in done.stdout.splitlines() if line.startswith("  best"))
    assert {"3", "x=3", "mode=two"} <= set(best)
    assert "report: out/report.html" in done.stdout
    files = {path.name for path in (tmp_path / "out" / "first").iterdir()}
    assert {"ledger.db", "trajectory.csv", "best.toml", "trials"} <= files
    assert (tmp_path / "out" / "report.html").is_file()


def test_json_lines_are_valid_and_complete(loopwright, scenario):
    done = loopwright("run", scenario(), "--output", "out", "--json")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events] == ["trial"] * 6 + ["result", "end"]
    assert sorted(event["trial"] for event in events[:6]) == [1, 2, 3, 4, 5, 6]
    assert events[0]["outcome"] == "ok"
    assert events[-2]["best"][0]["reward"] == [3.0]
    assert events[-1] == {"event": "end", "code": 0, "output": "out"}


def test_quiet_prints_only_the_result(loopwright, scenario):
    done = loopwright("run", scenario(), "-o", "out", "--quiet")
    assert done.stderr == ""
    assert done.stdout.splitlines()[0] == "first: 6 ok of 6 trials"


def test_a_run_without_a_result_exits_with_1_and_writes_the_report(loopwright, scenario, tmp_path):
    done = loopwright("run", scenario(command="sh -c 'exit {x}' '{mode}'"), "-o", "out")
    assert done.returncode == 1
    assert "first: 0 ok of 6 trials" in done.stdout
    assert (tmp_path / "out" / "report.html").is_file()


def test_a_bad_scenario_exits_with_2_and_creates_nothing(loopwright, scenario, tmp_path):
    done = loopwright("run", scenario(agent='{ type = "grit" }'), "-o", "out")
    assert done.returncode == 2
    assert "[run.agent] type: unknown agent 'grit'." in done.stderr
    assert "Did you mean 'grid'?" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_directory_in_use_exits_with_1_and_the_next_step(loopwright, scenario):
    loopwright("run", scenario(), "-o", "out", "-q")
    again = loopwright("run", scenario(), "-o", "out")
    assert again.returncode == 1
    assert "already contains a campaign. Continue it with `loopwright resume out`" in again.stderr


def test_resuming_a_complete_run_changes_nothing(loopwright, scenario, tmp_path):
    loopwright("run", scenario(), "-o", "out", "-q")
    with Ledger.read(tmp_path / "out" / "first" / "ledger.db") as ledger:
        before = list(ledger.trials())
    done = loopwright("resume", "out", "-q")
    assert done.returncode == 0, done.stderr
    with Ledger.read(tmp_path / "out" / "first" / "ledger.db") as ledger:
        assert list(ledger.trials()) == before


def test_resuming_with_changed_inputs_is_refused_unless_accepted(loopwright, scenario, tmp_path):
    (tmp_path / "data").write_text("1")
    path = scenario()
    path.write_text(path.read_text().replace('type = "command"', 'type = "command"\nfiles = ["data"]'))
    loopwright("run", path, "-o", "out", "-q")
    (tmp_path / "data").write_text("2")
    refused = loopwright("resume", "out", "-q")
    assert refused.returncode == 1
    assert "have changed" in refused.stderr
    assert loopwright("resume", "out", "-q", "--accept-changes").returncode == 0


def test_resuming_an_empty_directory_exits_with_1(loopwright):
    done = loopwright("resume", "nowhere")
    assert done.returncode == 1
    assert "contains no campaign" in done.stderr


def test_the_best_configuration_finds_its_inputs(loopwright, scenario, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "in").write_text("y=7")
    path = scenario(command="cat data/in {x} {mode}")
    path.write_text(
        path.read_text().replace("command =", 'success = { exit_codes = [1] }\nfiles = ["data/in"]\ncommand =')
    )
    loopwright("run", path, "-o", "out", "-q")
    done = loopwright("run", tmp_path / "out" / "first" / "best.toml", "-o", "again", "-q")
    assert done.returncode == 0, done.stderr


def test_the_best_configuration_runs_unchanged(loopwright, scenario, tmp_path):
    more = '[run.workload.env]\nLEVEL = ["low", "high"]'
    loopwright("run", scenario(more=more), "-o", "out", "-q")
    best = tmp_path / "out" / "first" / "best.toml"
    workload = tomllib.loads(best.read_text())["run"][0]["workload"]
    assert (workload["args"], workload["env"]) == ({"x": 3, "mode": "two words"}, {"LEVEL": "low"})
    done = loopwright("run", best, "-o", "again", "-q")
    assert done.returncode == 0, done.stderr
    with Ledger.read(tmp_path / "again" / "first" / "ledger.db") as ledger:
        assert [trial.reward.value for trial in ledger.trials()] == [3.0]


def test_the_best_configuration_runs_where_a_conditional_argument_is_absent(loopwright, tmp_path):
    (tmp_path / "s.toml").write_text("""
name = "s"
[[run]]
name = "r"
agent = { type = "grid" }
reward = { type = "negative", metrics = ["y"] }
[run.workload]
type = "command"
command = "echo y={x} --level={level} --depth={depth}"
metrics = { y = { regex = 'y=([0-9.]+)' } }
[run.workload.args]
x = [2, 1]
mode = ["plain", "deep"]
level = { values = [3, 4], when = "mode == 'deep'" }
depth = { values = [5, 6], when = "level == 4" }
""")
    loopwright("run", "s.toml", "-o", "out", "-q")
    done = loopwright("run", tmp_path / "out" / "r" / "best.toml", "-o", "again", "-q")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "again/r/trials/1/stdout").read_text() == "y=1\n"


def test_a_grid_over_lists_of_one_value_is_one_trial(loopwright, scenario, tmp_path):
    path = scenario()
    table = re.sub(r"(?m)^(x|mode)( *)=.*$", r"\1\2= [3]", path.read_text())
    path.write_text(table)
    done = loopwright("run", path, "-o", "out", "-q")
    assert done.returncode == 0, done.stderr
    assert "1 ok of 1 trial" in done.stdout


def test_overwrite_deletes_the_earlier_campaign_and_nothing_else(loopwright, scenario, tmp_path):
    loopwright("run", scenario(), "-o", "out", "-q")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with Ledger.read(tmp_path / "out" / "first" / "ledger.db") as ledger:
        before = [trial.reserved_at for trial in ledger.trials()]
    done = loopwright("run", scenario(), "-o", "out", "-q", "--overwrite")
    assert done.returncode == 0, done.stderr
    with Ledger.read(tmp_path / "out" / "first" / "ledger.db") as ledger:
        after = [trial.reserved_at for trial in ledger.trials()]
    assert len(after) == len(before)
    assert min(after) > max(before)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("metric", "hint"),
    [("loss", True), ("p99_latency_ms", True), ("wall_s", True), ("tokens_per_s", False), ("glossary", False)],
)
def test_maximising_what_is_usually_minimised_gets_a_hint(loopwright, scenario, metric, hint):
    path = scenario()
    text = re.sub(r"\by\b(?= = \{)", metric, path.read_text())
    path.write_text(
        re.sub(r"^reward.*$", f'reward = {{ type = "identity", metrics = ["{metric}"] }}', text, flags=re.MULTILINE)
    )
    done = loopwright("verify", path)
    assert done.returncode == 0, done.stderr
    assert (f'"identity" maximises {metric}; to minimise it, write type = "negative".' in done.stdout) is hint


def test_a_bandit_that_cannot_try_each_arm_gets_a_hint(loopwright, scenario):
    few, enough = (loopwright("verify", scenario(agent=f'{{ type = "bandit", trials = {n} }}')) for n in (5, 6))
    assert few.returncode == 0, few.stderr
    assert "hint: [run.agent] trials: 5 cannot try each of 6 arms once; give at least 6, or fewer `arms`." in few.stdout
    assert "hint" not in enough.stdout
