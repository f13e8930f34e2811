"""A kill while finalists are measured again: the race continues with the same trials."""

import os
import signal

import pytest

from tests.survival.campaign import SCENARIO, Campaign, end_of, wait_for

TEXT = SCENARIO.format(
    parallel=2,
    agent='{ type = "random", trials = 40, seed = 3 }',
    reward='{ type = "identity", metrics = ["y"] }',
    run="noise = { b = [1, 2, 3] }",
    workload="",
    args="a = [1, 2, 4, 5, 6, 7, 8, 9]",
    more="",
)


@pytest.mark.slow
def test_q02_after_kill_9_in_the_confirmation_the_same_trials_are_made(tmp_path):
    undisturbed = Campaign(tmp_path / "one", TEXT)
    assert undisturbed.call().code == 0
    killed = Campaign(tmp_path / "two", TEXT)
    for verb, rows in (("run", 33), ("resume", 35), ("resume", 37)):
        process = killed.start(verb)
        killed.holding(process)
        wait_for(lambda rows=rows: killed.ledger.exists() and len(killed.trials()) >= rows)
        os.killpg(process.pid, signal.SIGKILL)
        end_of(process)
    assert killed.call("resume").code == 0
    assert any(trial.phase == "confirm" for trial in killed.trials())
    assert killed.result() == undisturbed.result()
