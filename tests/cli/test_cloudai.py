"""CloudAI's files on the command line."""

import os
import signal
import subprocess
import sys
import time

import pytest

from loopwright.core.outcome import Outcome
from loopwright.ledger.ledger import Ledger


def test_the_command_line(tmp_path, loopwright):
    """One campaign through `run`, `verify`, `dry-run` and `convert`."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "system.toml").write_text('name = "h"\nscheduler = "standalone"\noutput_path = "results"\n')
    bash = 'name = "b"\ndescription = "d"\ntest_template_name = "BashCmd"\n[cmd_args]\ncmd = ["true", "echo {x}"]\n'
    (tmp_path / "tests" / "b.toml").write_text(bash)
    (tmp_path / "s.toml").write_text('name = "s"\n[[Tests]]\nid = "b"\ntest_name = "b"\n')
    files = ("--cloudai", "system.toml", "tests", "s.toml")
    assert loopwright("verify", *files).stdout == "s.toml: good (b)\n"
    assert "bash -c 'echo {x}'" in loopwright("dry-run", *files).stdout
    done = loopwright("run", *files, "--quiet")
    assert (done.returncode, "b: 2 ok of 2 trials" in done.stdout) == (0, True), done.stderr
    assert len(list(tmp_path.glob("results/s_*/b/ledger.db"))) == 1
    done = loopwright("convert", "cloudai", *files[1:], "-o", "study.toml")
    assert done.returncode == 0, done.stderr
    assert loopwright("verify", "study.toml").returncode == 0
    assert loopwright("run", "s.toml", "tests").returncode == 2
    assert loopwright("verify", "--cloudai", "system.toml", "no-such", "s.toml").returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["ppo", "grid_search"])
def test_a_search_with_hooks_survives_a_kill(tmp_path, loopwright, agent):
    """Given CloudAI's agents and a hook, a campaign killed in mid-trial resumes and numbers each trial once."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "hook" / "test").mkdir(parents=True)
    (tmp_path / "system.toml").write_text('name = "h"\nscheduler = "standalone"\noutput_path = "results"\n')
    bash = 'name = "{}"\ndescription = "d"\ntest_template_name = "BashCmd"\n{}\n[cmd_args]\ncmd = {}\n'
    search = f'agent = "{agent}"\nagent_steps = 6\nagent_metrics = ["default"]\nagent_reward_function = "inverse"'
    commands = [f"sleep 0.{number}" for number in range(2, 8)]
    (tmp_path / "tests" / "b.toml").write_text(bash.format("b", search, commands))
    (tmp_path / "hook" / "h.toml").write_text('name = "look"\n[[Tests]]\nid = "h"\ntest_name = "first"\n')
    (tmp_path / "hook" / "test" / "f.toml").write_text(bash.format("first", "", f'"echo hook >> {tmp_path}/log"'))
    (tmp_path / "s.toml").write_text('name = "s"\npre_test = "look"\n[[Tests]]\nid = "b"\ntest_name = "b"\n')
    files = ("--cloudai", "system.toml", "tests", "s.toml", "--hook-dir", "hook")
    command = [sys.executable, "-m", "loopwright", "run", *files, "-o", "out", "--quiet"]
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    log = tmp_path / "log"
    while not log.exists() or len(log.read_text().split()) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = loopwright("resume", "out", "--quiet")
    assert done.returncode == 0, done.stderr
    with Ledger.read(tmp_path / "out" / "b" / "ledger.db") as ledger:
        trials = list(ledger.trials())
    assert [(trial.number, trial.outcome) for trial in trials] == [(n, Outcome.OK) for n in range(1, 7)]
    assert all(trial.cached_from or trial.metrics["default"] >= 0.2 for trial in trials)
