"""Campaigns on the cluster of the tests, as a user runs them."""

import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loopwright.core.trial import Trial
from loopwright.ledger.ledger import Ledger
from tests.survival.campaign import Campaign

SCENARIO = """
name = "on-slurm"
[system]
type = "slurm"
parallel = {parallel}
poll_s = 1
{system}
[[run]]
name = "work"
agent = {{ type = "grid" }}
reward = {{ type = "identity", metrics = ["y"] }}
{run}
[run.workload]
type = "command"
files = ["work.sh"]
command = "./work.sh {{n}}"
metrics = {{ y = {{ regex = 'y: (\\d+)' }} }}
{workload}
[run.workload.args]
n = {values}
"""
WORK = """#!/bin/sh
[ -z "$GATE" ] || while [ ! -e "$GATE" ]; do sleep 0.2; done
echo "y: $1"
"""


def campaign(
    directory: Path,
    trials: int,
    *,
    parallel: int,
    system: str = "",
    run: str = "",
    workload: str = "",
    work: str = WORK,
) -> Campaign:
    """A campaign of this many trials; each prints its argument."""
    values = list(range(1, trials + 1))
    text = SCENARIO.format(parallel=parallel, system=system, run=run, workload=workload, values=values)
    return Campaign(directory, text, work=work)


def trials_of(one: Campaign) -> list[Trial]:
    """All trials."""
    with Ledger.read(one.ledger) as ledger:
        return list(ledger.trials())


def attempts_of(one: Campaign) -> dict[int, list[Any]]:
    """The outcomes of the attempts at each trial."""
    with Ledger.read(one.ledger) as ledger:
        return {trial.number: [outcome for *_, outcome in ledger.attempts(trial.number)] for trial in ledger.trials()}


def jobs_of(cluster: Any, *states: str) -> Mapping[str, str]:
    """Our jobs by id, with their state."""
    wanted = f"--states={','.join(states) or 'all'}"
    lines = cluster.run("squeue", "--noheader", "--array", wanted, "--format=%i %T %j").stdout.splitlines()
    return {line.split()[0]: line.split()[1] for line in lines if " lw-" in line}


def eventually(condition: Callable[[], object], process: "subprocess.Popen[str] | None" = None) -> None:
    """Wait until the condition holds."""
    deadline_s = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never became true"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.1)
