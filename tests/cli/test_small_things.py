import subprocess
import sys

import pytest
from typer.testing import CliRunner

from loopwright import Reward
from loopwright.cli import app

SCENARIO = """
name = "small"
[[run]]
name = "a"
agent = { type = "grid" }
reward = { type = "negative", metrics = ["loss"] }
[run.workload]
type = "command"
command = "COMMAND"
metrics = { loss = { regex = 'loss=([0-9.]+)' } }
constraints = ["x < LIMIT"]
[run.workload.args]
x = [1, 2]
uselong = [true, false]
long = { values = [1, 2], when = "uselong" }
"""


def invoke(verb, tmp_path, command="echo loss={x} --long={long}", limit="9", agent="grid", x="[1, 2]"):
    file = tmp_path / "small.toml"
    text = SCENARIO.replace("COMMAND", command).replace("LIMIT", limit).replace("x = [1, 2]", f"x = {x}")
    file.write_text(text.replace('"grid"', f'"{agent}"' if agent == "grid" else f'"{agent}", trials = 40'))
    return CliRunner().invoke(app, [verb, str(file)])


def test_verify_reports_shell_operators_and_constraints_that_nothing_satisfies(tmp_path):
    result = invoke("verify", tmp_path, "echo loss={x} --long={long} | cat > file", limit="1")

    assert result.exit_code == 2
    assert "'>' needs a shell" in result.output
    assert "'|' needs a shell" in result.output
    assert "no combination of the arguments satisfies them" in result.output


@pytest.mark.parametrize("words", [["run"], ["tasks", "scan"]], ids=" ".join)
def test_help_names_arguments_without_types_of_python(words):
    output = CliRunner().invoke(app, [*words, "--help"]).output

    assert "Arguments:\n  " in output
    assert "<" not in output


def test_verify_reports_shell_operators_beside_a_wrong_key(tmp_path):
    file = tmp_path / "small.toml"
    text = SCENARIO.replace("COMMAND", "echo loss={x} {typo} --long={long} | cat").replace("LIMIT", "9")
    file.write_text(text.replace("([0-9.]+)", "([0-9.]+").replace('type = "command"', 'type = "command"\ntime_s = 3'))

    output = CliRunner().invoke(app, ["verify", str(file)]).output

    for words in ("is not a regular expression", "'time_s'", "'|' needs a shell", "unknown argument {typo}"):
        assert words in output
    file.write_text(text.replace("x = [1, 2]", "x = []"))
    assert "unknown argument {x}" not in CliRunner().invoke(app, ["verify", str(file)]).output


@pytest.mark.parametrize(("limit", "has_hint"), [("-1", True), ("0.5", False)])
def test_verify_hints_at_constraints_that_no_random_point_of_a_range_satisfies(tmp_path, limit, has_hint):
    result = invoke("verify", tmp_path, limit=limit, agent="tpe", x="{ low = 0, high = 1 }")

    assert result.exit_code == 0
    assert ("none of 10,000 random points satisfies them" in result.output) is has_hint


@pytest.mark.parametrize(("agent", "is_refused"), [("tpe", False), ("grid", True)])
def test_only_a_grid_is_confined_to_the_points_of_a_range(tmp_path, agent, is_refused):
    result = invoke("verify", tmp_path, limit="1 and x > 0", agent=agent, x="{ low = 0, high = 1, points = 2 }")

    assert ("no combination of the arguments satisfies them" in result.output) is is_refused


def test_constraints_that_no_regime_satisfies_are_refused(tmp_path):
    invoke("verify", tmp_path, limit="1", agent="random")
    file = tmp_path / "small.toml"
    file.write_text(file.read_text().replace("[run.workload]", "env_params = { x = {} }\n[run.workload]"))

    output = CliRunner().invoke(app, ["verify", str(file)]).output

    assert "no combination of the arguments satisfies them" in output


@pytest.mark.parametrize(
    ("command", "is_refused"),
    [("sleep {x}; echo {long}", True), ("find {x} -exec cat {long} \\\\;", False), ("echo '{x};' {long}", False)],
)
def test_verify_reports_a_semicolon_after_a_word(tmp_path, command, is_refused):
    assert ("';' needs a shell" in invoke("verify", tmp_path, command).output) is is_refused


def test_a_quoted_operator_is_an_argument_and_a_pure_switch_needs_no_place(tmp_path):
    result = invoke("verify", tmp_path, "sh -c 'echo loss=$0 | cat' {x} '|' {long}")

    assert "needs a shell" not in result.output
    assert "uselong" not in result.output
    assert invoke("verify", tmp_path).exit_code == 0


def test_verify_reports_a_script_that_is_lost_when_an_argument_of_it_is_absent(tmp_path):
    result = invoke("verify", tmp_path, "sh -c 'echo loss={x} {long}'")

    assert result.exit_code == 2
    assert "-c loses its value when long is absent; pass {long} after the script, or give" in result.output


def test_dry_run_shows_objective_and_metrics(tmp_path):
    output = invoke("dry-run", tmp_path).output

    assert "minimises   loss" in output
    assert "metrics     loss" in output


def test_dry_run_shows_commands_of_feasible_trials_only(tmp_path):
    grid, sampler = (invoke("dry-run", tmp_path, limit="2", agent=agent).output for agent in ("grid", "tpe"))

    assert "echo loss=1 --long=1" in grid
    assert "loss=2" not in grid + sampler
    forbidden = invoke("dry-run", tmp_path, limit="2", x="[2, 1]").output
    assert "infeasible, not run: constraint 'x < 2' is not met" in forbidden


def test_dry_run_shows_noise_services_and_what_a_slot_will_provide(tmp_path):
    file = tmp_path / "small.toml"
    text = SCENARIO.replace("COMMAND", "echo loss={x} --long={long} {seed} {port}").replace("LIMIT", "9")
    text = text.replace("[run.workload]", "noise = { seed = [71, 72] }\n[run.workload]")
    file.write_text(text + '[run.workload.service]\ncommand = "sleep {port} {x}"\n')

    lines = CliRunner().invoke(app, ["dry-run", str(file)]).output.splitlines()

    assert sum(line.endswith(("71 PORT", "72 PORT")) for line in lines) == 3
    assert "      beside service: sleep PORT 1" in lines


def test_the_terminal_gets_no_codes_of_a_program_that_failed(tmp_path):
    file = tmp_path / "small.toml"
    (tmp_path / "message").write_text("\x1b[2J\u202eno")
    failing = f"sh -c 'cat {tmp_path}/message >&2; exit 7' {{x}} {{long}}"
    file.write_text(SCENARIO.replace("COMMAND", failing).replace("LIMIT", "9") + "\n[run.fail]\nsame = 2\n")
    command = [sys.executable, "-m", "loopwright", "run", str(file), "--output", str(tmp_path / "out")]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert r"ERROR: stopped: the last 2 trials failed alike" in done.stderr
    assert r"\x1b[2J\u202eno" in done.stderr
    assert not {"\x1b", "\u202e"} & set(done.stderr + done.stdout)


def test_the_summary_tells_trials_that_a_rule_stopped_from_those_that_failed(tmp_path):
    file = tmp_path / "small.toml"
    text = SCENARIO.replace("COMMAND", "sh -c 'echo loss={x}; sleep 0.{x}' {long}").replace("LIMIT", "9")
    rule = 'stop = { rule = "threshold", metric = "loss", options = { upper = 1.5 } }\n[run.workload]\n'
    file.write_text(text.replace("[run.workload]\n", f"{rule}progress = {{ regex = 'loss=(?P<loss>.)' }}\n", 1))

    done = CliRunner().invoke(app, ["run", str(file), "--output", str(tmp_path / "out"), "--quiet"])

    assert "a: 3 ok and 3 stopped early of 6 trials" in done.output, done.output


def test_rewards_compare_by_value():
    assert Reward(1.0, {"a": 1.0}) < Reward(2.0) <= Reward(2.0, {"b": 2.0})
    assert max(Reward(1.0), Reward(3.0), Reward(2.0)).value == 3.0


def test_a_mistyped_verb_is_corrected(loopwright):
    done = loopwright("resmue", "out")
    assert (done.returncode, "Did you mean 'resume'" in done.stderr) == (2, True)


def test_a_verb_that_needs_an_extra_names_it():
    code = """
import sys
sys.modules["gymnasium"] = None
sys.argv = ["loopwright", "act", "--help"]
from loopwright.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    message = "error: `loopwright act` needs an extra that is not installed. Run: pip install 'loopwright[rl]'\n"
    assert done.stderr == message
