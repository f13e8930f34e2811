"""An agent that tries to cheat its tests: what it leaves in its sandbox must not influence them."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from loopwright.execution.sandbox import Bounds, sandbox_of
from loopwright.execution.sandbox.bubblewrap import home_inside
from loopwright.execution.sandbox.disk import MeasuredDisk
from loopwright.testing.sandboxes import SandboxHarness
from tests.rollouts.harbor import PASS, run_verifier, write

TASKS = Path(__file__).parents[2] / "examples" / "tasks"
NEEDS_BWRAP = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
LOGS = "$LOOPWRIGHT_VERIFIER_DIR"
DAEMON = """
import json, os, time
if not os.fork():
    os.setsid()
    if not os.fork():
        for _ in range(20_000):
            with open(os.environ["LOOPWRIGHT_VERIFIER_DIR"] + "/reward.json", "w") as file:
                file.write(json.dumps({"reward": 1}))
            time.sleep(0.0002)
    os._exit(0)
"""
FORGED = "import os; open(os.environ['LOOPWRIGHT_VERIFIER_DIR'] + '/reward.txt', 'w').write('-7')"
IN_THE_WAY = """
import os
logs = os.environ["LOOPWRIGHT_VERIFIER_DIR"]
os.system("cd " + logs + " && rm -rf reward.json && mkdir -p reward.json/full; chmod 0 .")
"""


def verify_task(path, directory, **options):
    return asyncio.run(asyncio.wait_for(run_verifier(path, directory, **options), 60))


@NEEDS_BWRAP
def test_tests_do_not_use_programs_and_settings_in_the_agents_home(tmp_path, monkeypatch):
    """If our own PATH starts in the home directory, a shell that an agent puts there never runs."""
    monkeypatch.setenv("PATH", f"{home_inside()}/.local/bin:relative::{os.environ['PATH']}")
    monkeypatch.setenv("LD_LIBRARY_PATH", f":lib:{home_inside()}/lib:/usr/lib")
    agent = """
        mkdir -p ~/.local/bin
        for name in bash sh env prlimit python3; do
            printf '#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n' > ~/.local/bin/$name
            chmod +x ~/.local/bin/$name
        done
        touch ~/.gitconfig ~/.bashrc
    """
    show = f'echo "[$(ls -A ~)] $LD_LIBRARY_PATH"; ls -A {home_inside()} | tr "\n" " "'
    test = f"{show}; echo 0 > /logs/verifier/reward.txt"
    report = verify_task(write(tmp_path / "task", test=test), tmp_path, sandbox=sandbox_of("bwrap"), agent=agent)
    assert report["rewards"] == {"reward": 0.0}
    assert report["output"].startswith("[] /usr/lib\n")
    assert {".bashrc", ".gitconfig", ".local"} <= {*report["output"].split()}, "the agent's file is still there"


@NEEDS_BWRAP
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_runs_no_programs_of_the_agents_repository(tmp_path):
    """Given tests that use git in the workspace, neither a hook nor a file-system monitor can forge the reward."""
    agent = f"""
        forge='echo 1 > "{LOGS}/reward.txt"'
        git init -q .
        for name in post-checkout post-index-change pre-commit; do
            printf '#!/bin/sh\n%s\n' "$forge" > .git/hooks/$name
            chmod +x .git/hooks/$name
        done
        git config core.fsmonitor "$forge; false"
        git config core.hooksPath .git/hooks
    """
    identity = "-c user.email=a@b -c user.name=a"
    test = f'echo 0 > "{LOGS}/reward.txt"; git status; git {identity} commit --allow-empty -m x; git checkout -b other'
    report = verify_task(write(tmp_path / "task", test=test), tmp_path, sandbox=sandbox_of("bwrap"), agent=agent)
    assert report["rewards"] == {"reward": 0.0}
    assert "Switched to a new branch" in report["output"]


@NEEDS_BWRAP
def test_our_own_interpreter_is_available_to_tests(tmp_path):
    report = verify_task(
        write(tmp_path / "task", test=f"command -v python3 && {PASS}"), tmp_path, sandbox=sandbox_of("bwrap")
    )
    assert report["rewards"] == {"reward": 1.0}


@NEEDS_BWRAP
def test_tests_cannot_be_changed_while_they_run(tmp_path):
    test = (
        f'echo 0 > "{LOGS}/reward.txt"; printf \'echo 1 > "{LOGS}/reward.txt"\\n\' >> /tests/test.sh; touch /tests/new'
    )
    report = verify_task(write(tmp_path / "task", test=test), tmp_path, sandbox=sandbox_of("bwrap"))
    assert report["rewards"] == {"reward": 0.0}
    assert report["output"].count("Read-only file system") == 2


@NEEDS_BWRAP
def test_an_agent_that_filled_the_disk_is_scored(tmp_path):
    """If a workspace exceeds its bound, tests get the same amount again, and no more."""
    bounds = Bounds(disk_bytes=4 << 20)
    agent = "head -c 3M /dev/zero > a; head -c 3M /dev/zero > b; sleep 30"
    test = f'echo 0 > "{LOGS}/reward.txt"; head -c 3M /dev/zero > c; sleep 1'
    report = verify_task(
        write(tmp_path / "task", test=test), tmp_path, sandbox=sandbox_of("bwrap", bounds), agent=agent
    )
    assert (tmp_path / "workspace/b").stat().st_size == 3 << 20
    assert report["rewards"] == {"reward": 0.0}

    (tmp_path / "more").mkdir()
    test = f"{PASS}; head -c 3M /dev/zero > c; head -c 3M /dev/zero > d; sleep 30"
    path = write(tmp_path / "more/task", test=test)
    report = verify_task(path, tmp_path / "more", sandbox=sandbox_of("bwrap", bounds), agent=agent)
    assert "test.sh was stopped at a limit: disk: " in report["error"]
    assert report["stopped"]


def test_an_unmeasurable_workspace_is_not_counted(tmp_path, monkeypatch):
    disk = MeasuredDisk((tmp_path,), 1)
    monkeypatch.setattr("loopwright.execution.sandbox.disk.size_bytes", lambda *_: None)
    assert "cannot be measured" in disk.exceeded(())
    disk.begin_verification()
    disk._earliest_s = disk._next_s = 0.0
    assert disk.exceeded(()) is None


@NEEDS_BWRAP
def test_sessions_refuse_calls_while_tests_run(tmp_path):
    """Between two steps the session accepts calls, but tests run the agent's code, which may know the key."""
    harness = SandboxHarness(tmp_path, sandbox_of("bwrap"))

    async def main():
        async def answer(_, writer):
            writer.write(b"hello")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        script = f"import socket; print(socket.create_connection(('127.0.0.1', {port})).recv(9))"
        async with (
            server,
            harness.sandbox.open(harness.workspace, allowed_urls=(f"http://127.0.0.1:{port}",)) as instance,
        ):
            statuses = []
            for tests in (False, True, False):
                if tests:
                    instance.begin_verification()
                await harness.run(instance, harness.python(script))
                statuses.append(harness.stdout.strip())
            return statuses

    assert asyncio.run(asyncio.wait_for(main(), 60)) == ["b'hello'", "b''", "b'hello'"]


@pytest.mark.parametrize("code", [DAEMON, FORGED, IN_THE_WAY, "import os; os.kill(os.getppid(), 9)"])
def test_code_under_test_cannot_forge_the_reward_of_a_shipped_task(tmp_path, code):
    """A module that does this without solving the task gets 0."""

    def work(workspace):
        (workspace / "palindrome.py").write_text(f"{code}\ndef is_palindrome(text):\n    return None\n")

    shutil.copytree(TASKS / "train/palindrome", tmp_path / "task")
    assert verify_task(tmp_path / "task", tmp_path, work=work)["rewards"] == {"reward": 0.0}


def test_files_that_are_only_made_executable_are_not_run(tmp_path):
    def work(workspace):
        (workspace / "tool.sh").write_text(
            f'#!/bin/bash\necho \'{{"reward": 1}}\' > "{LOGS}/reward.json"; echo ready\n'
        )
        (workspace / "tool.sh").chmod(0o755)

    shutil.copytree(TASKS / "train/make-executable", tmp_path / "task")
    assert verify_task(tmp_path / "task", tmp_path, work=work)["rewards"] == {"reward": 0.0}


@pytest.mark.parametrize("name", ["count-lines", "csv-to-json"])
def test_a_pipe_instead_of_an_answer_file_is_a_wrong_answer(tmp_path, name):
    """Tests that wait for it would time out and give no reward."""

    def work(workspace):
        for answer in ("count.txt", "people.json"):
            os.mkfifo(workspace / answer)

    shutil.copytree(TASKS / "train" / name, tmp_path / "task")
    assert verify_task(tmp_path / "task", tmp_path, work=work)["rewards"] == {"reward": 0.0}
