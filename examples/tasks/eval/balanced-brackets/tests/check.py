"""Runs each case in a separate process: one that hangs or crashes fails only its own case."""

import contextlib
import ctypes
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUN = """
import json, sys
sys.path.insert(0, ".")
from brackets import balanced
print(json.dumps(balanced(*json.loads(sys.argv[1]))))
"""
CASES = [
    (["([]{})"], True),
    (["([)]"], False),
    (["("], False),
    (["]"], False),
    (['print("(")'], True),
    (["a[b(c)] = {}"], True),
]


def passed(arguments, expected):
    # Output to a file: reading a pipe would wait until every child process has closed it.
    with tempfile.TemporaryFile() as out:
        # Isolated (-I): a json.py beside the code under test is not the module that reports its result. And without our
        # variables, which name the directory of these cases.
        command = [sys.executable, "-I", "-c", RUN, json.dumps(arguments)]
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.DEVNULL}
        try:
            done = subprocess.run(command, **streams, env={"PATH": os.environ["PATH"]}, timeout=5)
            out.seek(0)
            return done.returncode == 0 and json.loads(out.read().splitlines()[-1]) == expected
        except (subprocess.TimeoutExpired, ValueError, IndexError):
            return False


def kill_leftovers():
    """Kill what the code under test left running, so that it cannot write a reward; returns whether all has ended."""
    for _ in range(100):
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                if int(stat.read_bytes().rpartition(b")")[2].split()[1]) == os.getpid():
                    os.kill(int(stat.parent.name), signal.SIGKILL)
            except OSError:  # it has ended by itself
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        time.sleep(0.01)
    return False


def write(reward):
    """Write the reward, and move away any that the code under test may have written."""
    logs = Path(os.environ["LOOPWRIGHT_VERIFIER_DIR"])
    with contextlib.suppress(PermissionError):
        logs.chmod(0o777)
    for name in ("reward.json", "reward.txt"):
        with contextlib.suppress(FileNotFoundError):
            (logs / name).rename(logs / f"left-{secrets.token_hex(8)}")
    (logs / "reward.json").write_text(json.dumps({"reward": reward}))


# PR_SET_CHILD_SUBREAPER: orphaned processes become children of this one.
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
good = sum(passed(arguments, expected) for arguments, expected in CASES)
write(float(good == len(CASES)) if kill_leftovers() else 0.0)
