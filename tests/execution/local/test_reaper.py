"""The reaper: the processes that a killed process left are ended, and its directory is deleted."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loopwright.execution.local.reaper import Reaper
from loopwright.testing.executors import alive

# Starts two daemons with the marker, each in a new session, and fills the directory.
DRIVER = """
import os, subprocess, sys, time
from loopwright.execution.local.reaper import Reaper
reaper = Reaper("test")
reaper.start()
environment = {**os.environ, "LOOPWRIGHT_TRIAL": f":{reaper.marker}.1"}
daemon = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(1000)"
for _ in range(2):
    subprocess.Popen([sys.executable, "-IS", "-c", daemon], env=environment)
(reaper.directory / "file").touch()
print(reaper.directory, flush=True)
os.chdir(reaper.directory)
for _ in range(1100):
    os.mkdir("d")
    os.chdir("d")
print("deep", flush=True)
time.sleep(1000)
"""


def wait_until(condition, timeout_s=30.0):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_leaves_neither_processes_nor_files(number):
    with subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True) as driver:
        lines = [driver.stdout.readline().strip() for _ in range(4)]
        directory = Path(next(line for line in lines if "/" in line))
        pids = [int(line) for line in lines if line.isdigit()]
        assert all(map(alive, pids))
        assert (directory / "file").exists()
        driver.send_signal(number)
    wait_until(lambda: not any(map(alive, pids)) and not directory.exists())


def test_close_leaves_nothing_either():
    before = _children()
    reaper = Reaper("test")
    reaper.start()
    directory, (pid,) = reaper.directory, _children() - before
    reaper.start()  # already running
    assert _children() - before == {pid}
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid))
    reaper.start()  # starts a new process
    (other,) = _children() - before
    assert other != pid
    nest_directories(directory)
    reaper.close()
    reaper.close()
    assert not alive(other)
    assert not directory.exists()


def nest_directories(path):
    """Create directories nested deeper than Python's recursion limit."""
    directory = os.open(path, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("d", dir_fd=directory)
        inner = os.open("d", os.O_RDONLY, dir_fd=directory)
        os.close(directory)
        directory = inner
    os.close(directory)


def _children():
    """Process ids of our children. The newest is not always the highest: ids wrap around at the maximum."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}
