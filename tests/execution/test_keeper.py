"""The reaper: what a killed process left running is ended, and what it left lying about is deleted."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loopwright.execution.local.reaper import Reaper
from loopwright.testing.executors import alive

# Starts a command that has a daemon of its own, which left its session; both carry the marker.
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
for _ in range(1500):
    os.mkdir("d")
    os.chdir("d")
print("deep", flush=True)
time.sleep(1000)
"""


def until(condition, within_s=30.0):
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
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
    until(lambda: not any(map(alive, pids)) and not directory.exists())


def test_what_is_closed_leaves_nothing_either():
    reaper = Reaper("test")
    reaper.start()
    directory, pid = reaper.directory, _children()[-1]
    reaper.start()  # it is there already
    assert _children()[-1] == pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid))
    reaper.start()  # another takes its place
    other = _children()[-1]
    assert other != pid
    deep(directory)
    reaper.close()
    reaper.close()
    assert not alive(other)
    assert not directory.exists()


def deep(place):
    """Directories in one another, more than a function could go down by calling itself."""
    place = os.open(place, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=place)
        inner = os.open("d", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)


def _children():
    return sorted(int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
