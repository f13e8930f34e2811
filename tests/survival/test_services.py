"""`kill -9` while services run, then `resume`: they are ended, also those that hide their environment."""

import os
import signal

from loopwright.core.outcome import Outcome
from loopwright.ledger.ledger import Ledger
from loopwright.testing.executors import alive
from tests.survival.campaign import Campaign, end_of, wait_for
from tests.survival.test_kill import scenario

SERVICE = """
[run.workload.service]
command = "env -i PATH=/usr/bin:/bin python3 -u -m http.server {port}"
ready = { port = "{port}" }
reuse = true
"""


def test_s13_services_of_a_killed_run_are_ended_by_resume(tmp_path):
    """Given a killed run whose service has no marker in its environment, `resume` ends it and finishes the run."""
    campaign = Campaign(tmp_path, scenario('{ type = "grid" }', "a = [1, 2, 4]\nb = [1]", workload=SERVICE))
    process = campaign.start()

    def services() -> list:
        if not campaign.ledger.exists() or process.poll() is not None:
            return []
        with Ledger.read(campaign.ledger) as ledger:
            return ledger.state("services", [])

    wait_for(services)
    (handle,) = services()
    pid = int(handle.partition(":")[0])
    os.killpg(process.pid, signal.SIGKILL)
    end_of(process)
    assert alive(pid)

    assert campaign.call("resume").code == 0

    assert not alive(pid)
    assert [trial.outcome for trial in campaign.trials()] == [Outcome.OK] * 3
    assert campaign.left_running() == []
