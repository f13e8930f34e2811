"""Signals that a process inherits as ignored: it keeps ignoring them, and its children do not."""

import subprocess
import sys

CHILD = """
import os, signal, subprocess, sys
from loopwright.core.runtime import is_ignored, shield_children

print(is_ignored(signal.SIGINT), is_ignored(signal.SIGTERM))
shield_children()
print(is_ignored(signal.SIGINT), is_ignored(signal.SIGTERM))
os.kill(os.getpid(), signal.SIGINT)
print(subprocess.run(["sh", "-c", "kill -INT $$"]).returncode == -signal.SIGINT)
"""


def test_an_ignored_signal_stays_ignored_and_children_get_the_default():
    command = ["sh", "-c", 'trap "" INT; exec "$0" -c "$1"', sys.executable, CHILD]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "True", "False", "True"]


def test_a_handler_of_the_program_is_left_alone():
    program = (
        "import signal; from loopwright.core.runtime import shield_children; "
        "signal.signal(signal.SIGTERM, print); shield_children(); print(signal.getsignal(signal.SIGTERM) is print)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
