"""`kill -9` while trials run, report and stop, then `resume`: the same trials, outcomes and curves as without it."""

import json

import pytest

from loopwright.core.outcome import Outcome
from loopwright.ledger.ledger import Ledger
from tests.survival.campaign import Campaign, kill_repeatedly
from tests.survival.test_kill import WIDE, scenario

WORK = """#!/bin/sh
for step in 1 2 3 4 5 6 7 8 9; do
    echo "step $step loss $(( 1000 + ($1 - 3) * ($1 - 3) * 40 + $2 - 10 * step ))"
    sleep 0.01
done
echo "y: $(( $1 * 40 + $2 )) z: 1"
"""
PROGRESS = r"progress = { regex = 'step (?P<step>\d+) loss (?P<loss>\d+)' }"


def curves(campaign: Campaign) -> dict[int, object]:
    with Ledger.read(campaign.ledger) as ledger:
        return {number: json.loads(data) for number, data in ledger.payloads("curve")}


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "kills"), [("asha", 8), ("hyperband", 8)])
def test_s13_q03_a_killed_run_stops_the_same_trials(tmp_path, rule, kills):
    """Given a rule and an adaptive agent, kills change neither trials nor outcomes nor curves."""
    options = ", options = { max_resource = 9 }" if rule == "hyperband" else ""
    text = scenario(
        '{ type = "tpe", trials = 16, seed = 5 }',
        WIDE,
        run=f'stop = {{ rule = "{rule}", metric = "loss"{options} }}',
        workload=PROGRESS,
    )
    calm = Campaign(tmp_path / "calm", text, work=WORK)
    assert calm.call().code == 0
    assert {trial.outcome for trial in calm.trials()} == {Outcome.OK, Outcome.STOPPED}
    stormy = Campaign(tmp_path / "stormy", text, work=WORK)

    kill_repeatedly(stormy, kills, within_s=1.5, seed=4)

    assert stormy.result() == calm.result()
    assert curves(stormy) == curves(calm)
    assert stormy.left_running() == []
