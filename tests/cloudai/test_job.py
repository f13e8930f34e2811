"""A test with its hooks, as a trial runs it."""

import json
import subprocess
import sys

JOB = [sys.executable, "-m", "loopwright.cloudai.job_main", "Fio"]
OPTIONS = ["--option", "all", "--option", "bw", "--option", "sum"]
LINE = "  read: IOPS=10, BW=5.0MiB/s (5MB/s)"


def run(directory, *arguments):
    return subprocess.run([*JOB, *arguments], cwd=directory, capture_output=True, text=True, check=False)


def test_metrics_are_the_last_line_and_hooks_have_files(tmp_path):
    done = run(tmp_path, "--pre", "echo before", "--post", "echo after; false", *OPTIONS, "--", "echo", LINE)
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == LINE
    assert json.loads(done.stdout.splitlines()[-1]) == {"default": 5.0, "read_bw": 5.0, "read_iops": 10.0}
    assert (tmp_path / "pre_test.1.stdout").read_text() == "before\n"
    assert (tmp_path / "post_test.1.stdout").read_text() == "after\n"


def test_a_failed_hook_fails_the_trial_before_the_test(tmp_path):
    done = run(tmp_path, "--pre", "exit 3", *OPTIONS, "--", "touch", "started")
    assert done.returncode == 1
    assert "pre_test 1 ended with exit code 3; see pre_test.1.stderr" in done.stderr
    assert not (tmp_path / "started").exists()


def test_commands_and_hooks_know_the_trials_directory(tmp_path):
    done = run(tmp_path, "--pre", "echo '$TRIAL_DIRECTORY:/x'", *OPTIONS, "--", "echo", "--mounts=$TRIAL_DIRECTORY:/x")
    assert done.stdout == f"--mounts={tmp_path}:/x\n"
    assert (tmp_path / "pre_test.1.stdout").read_text() == f"{tmp_path}:/x\n"


def test_a_searched_flag_is_given_without_a_value_or_not_at_all(tmp_path):
    done = run(tmp_path, *OPTIONS, "--flag=--a", "--flag=--b", "--", "echo", "--a=true", "--b=false", "--c=true")
    assert done.stdout == "--a --c=true\n"
