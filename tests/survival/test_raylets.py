"""A machine that dies during a batch takes its workers along, but no call is lost."""

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("optimised", [False, True], ids=["plain", "python -O"])
def test_l07_a_raylet_killed_during_a_batch_loses_no_call(optimised):
    # In a separate process: a driver can be connected to one cluster only.
    flags = ["-O"] if optimised else []
    command = [sys.executable, *flags, "-m", "tests.survival.raylets"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "200 calls" in done.stdout
    assert "none lost" in done.stdout
