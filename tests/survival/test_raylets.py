"""A machine that goes away in mid-batch takes its workers along, and no call."""

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("optimised", [False, True], ids=["plain", "python -O"])
def test_l07_a_raylet_killed_in_mid_batch_loses_no_call(optimised):
    # In a process of its own: a driver knows one cluster at a time.
    flags = ["-O"] if optimised else []
    command = [sys.executable, *flags, "-m", "tests.survival.raylets"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "200 calls" in done.stdout
    assert "none lost" in done.stdout
