"""The process table: which processes belong to a trial, and which ones `resume` may end."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from loopwright.execution.local import processes
from loopwright.execution.local.process_tree import ProcessLimits, spawn
from loopwright.execution.local.processes import (
    MARKER_VARIABLE,
    Process,
    descendants,
    end_leftovers,
    has_marker,
    read,
    start_ticks,
)
from loopwright.testing.executors import alive, written_pid

RUN = f"{os.getpid()}-"
"""Makes markers unique, since other test runs may be active on this machine."""
SPAWN = """
import os, signal
from pathlib import Path
from loopwright.execution.local.process_tree import ProcessLimits, spawn
from loopwright.execution.local.processes import IGNORED

def start(script):
    limits = ProcessLimits()
    return spawn(["sh", "-c", script], directory=Path(), environment=os.environ, stdout=2, stderr=2, limits=limits)
"""
SIGNALS = f"""{SPAWN}
print(*(signal.getsignal(number) in IGNORED for number in (signal.SIGINT, signal.SIGTERM)))
child = start("kill -INT $$")
print(*(signal.getsignal(number) in IGNORED for number in (signal.SIGINT, signal.SIGTERM)))
os.kill(os.getpid(), signal.SIGINT)
print(child.process.wait() == -signal.SIGINT)
"""
"""A program that was started with SIGINT ignored, and its child."""


@contextmanager
def process(*argv, marker="", session=True, cwd=None):
    environment = {**os.environ, MARKER_VARIABLE: f":{marker}"} if marker else dict(os.environ)
    child = subprocess.Popen(argv, env=environment, start_new_session=session, cwd=cwd)
    # Its pipe is closed a moment before its new environment can be read.
    while not Path(f"/proc/{child.pid}/environ").read_bytes():
        time.sleep(0.001)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def test_start_ticks_identify_a_process():
    with process("sleep", "100") as child:
        assert start_ticks(child.pid) == start_ticks(child.pid) > 0
        pid = child.pid
    assert start_ticks(pid) is None


def test_a_program_name_may_contain_parentheses_and_spaces(tmp_path):
    odd = tmp_path / "a) Z 1 (b"
    odd.symlink_to("/bin/sleep")
    with process(str(odd), "100") as child:
        entry = read(child.pid)
        assert entry is not None
        assert (entry.parent, entry.session, entry.zombie) == (os.getpid(), child.pid, False)


@pytest.mark.parametrize(
    ("marker", "pattern", "prefix", "expected"),
    [
        ("run.1", "run.1", False, True),
        ("run.12", "run.1", False, False),
        ("run.12", "run.1", True, True),
        ("outer:run.1", "run.1", False, True),
        ("run.1:inner", "run.1", False, True),
        ("other", "run", True, False),
    ],
)
def test_markers_are_compared_as_a_whole_or_by_prefix(marker, pattern, prefix, expected):
    with process("sleep", "100", marker=marker) as child:
        assert has_marker(child.pid, pattern, prefix=prefix) is expected


def test_descendants_are_found_by_session_marker_and_parent(tmp_path):
    script = "sleep 100 & echo $! > a; env -i setsid sleep 100 & echo $! > b; wait"
    with (
        process("sh", "-c", script, marker=f"{RUN}m.1", cwd=tmp_path) as root,
        process("sleep", "100", marker=f"{RUN}m.2") as other,
    ):
        members = {root.pid, written_pid(tmp_path / "a"), written_pid(tmp_path / "b")}
        assert {process.pid for process in descendants([root.pid], [f"{RUN}m.1"])} == members
        assert other.pid not in members
        for pid in members - {root.pid}:
            os.kill(pid, signal.SIGKILL)


def test_a_parent_comes_before_its_children(monkeypatch):
    """Given signals in this order, a shell learns of its end before that of the program for which it waits."""
    table = {
        pid: Process(pid, parent, 3_000_001, 3_000_001, ticks, zombie=False)
        for pid, parent, ticks in [(3_000_001, 1, 5), (3_000_016, 3_000_001, 5), (3_000_008, 3_000_016, 6)]
    }
    monkeypatch.setattr(processes, "read", table.get)
    monkeypatch.setattr(processes, "all_pids", lambda: list(table))
    assert [process.pid for process in descendants([3_000_001], [])] == [3_000_001, 3_000_016, 3_000_008]


def test_our_own_process_is_excluded():
    assert os.getpid() not in {process.pid for process in descendants([os.getpid(), os.getppid(), os.getsid(0)], [])}


def test_leftovers_are_ended_with_their_whole_tree(tmp_path):
    script = "setsid sleep 100 & echo $! > a; sleep 100 & echo $! > b; wait"
    with process("sh", "-c", script, marker=f"{RUN}run-7:3", cwd=tmp_path) as root:
        pids = [root.pid, written_pid(tmp_path / "a"), written_pid(tmp_path / "b")]
        assert end_leftovers([f"{root.pid}:{start_ticks(root.pid)}"], f"{RUN}run-7") == 3
        assert not any(map(alive, pids))


def test_leftovers_are_found_by_marker_alone():
    with (
        process("sleep", "100", marker=f"{RUN}run-8:3") as child,
        process("sleep", "100", marker=f"{RUN}run-9:1") as other,
    ):
        assert end_leftovers([], f"{RUN}run-8") == 1
        assert not alive(child.pid)
        assert alive(other.pid)


def test_s13_a_recycled_pid_is_not_touched():
    with process("sleep", "100") as child:
        assert end_leftovers([f"{child.pid}:{start_ticks(child.pid) - 1}"], f"{RUN}run-10") == 0
        assert alive(child.pid)


def test_an_empty_marker_matches_nothing():
    with process("sleep", "100", marker=f"{RUN}run-11") as child:
        assert end_leftovers([f"{1 << 22}:5"], "") == 0
        assert alive(child.pid)


def test_a_process_that_keeps_forking_is_ended(tmp_path):
    script = "echo $$ > pid; while :; do setsid sh -c 'sleep 0.2; :' & sleep 0.005; done"
    with process("sh", "-c", script, marker=f"{RUN}run-12:1", cwd=tmp_path) as root:
        written_pid(tmp_path / "pid")
        time.sleep(0.1)
        assert end_leftovers([f"{root.pid}:{start_ticks(root.pid)}"], f"{RUN}run-12") > 1
        assert descendants([], [f"{RUN}run-12:1"]) == []


def test_an_ignored_signal_stays_ignored_and_children_get_the_default():
    command = ["sh", "-c", 'trap "" INT; exec "$0" -c "$1"', sys.executable, SIGNALS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "True", "False", "True"]


def test_a_handler_of_the_program_is_unchanged():
    program = f"""{SPAWN}
signal.signal(signal.SIGTERM, print)
start("true").process.wait()
print(signal.getsignal(signal.SIGTERM) is print)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_the_time_of_a_tree_that_is_ended_counts_all_of_it(tmp_path):
    """Given a child that nobody waits for, its processor time is counted when the tree is ended."""
    busy = "import time\nwhile time.process_time() < 0.3: pass\nopen('done', 'w').close()\ntime.sleep(1000)"
    script = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {busy!r}])"

    async def main() -> float:
        with Path(os.devnull).open("w") as null:
            tree = spawn(
                [sys.executable, "-c", script],
                directory=tmp_path,
                environment=dict(os.environ),
                stdout=null.fileno(),
                stderr=null.fileno(),
                limits=ProcessLimits(),
            )
        while not (tmp_path / "done").exists():
            await asyncio.sleep(0.01)
        await tree.end(0.0)
        usage = tree.reap().usage
        return usage["user_s"] + usage["system_s"]

    assert asyncio.run(main()) >= 0.2
