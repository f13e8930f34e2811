"""A campaign as a user has it: a scenario on disk, the command line in a process of its own, a ledger afterwards."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

from loopwright.core.trial import Trial
from loopwright.ledger.ledger import Ledger

COMMAND = (str(Path(sys.executable).with_name("loopwright")),)
_PATIENCE_S = 300.0

WORK = """#!/bin/sh
# A child that would outlive its trial, a point that fails, some time in which to be killed, and an answer.
sleep 1000 > /dev/null 2>&1 &
[ "$1" = 3 ] && { echo "three is bad" >&2; exit 3; }
sleep 0.0$1
echo "y: $(( $1 * 7 % 11 + $2 )) z: $(( $1 * $2 % 5 ))"
"""

SCENARIO = """
name = "survivor"
[system]
parallel = {parallel}
[[run]]
name = "work"
agent = {agent}
reward = {reward}
{run}
[run.workload]
type = "command"
files = ["work.sh"]
command = "./work.sh {{a}} {{b}}"
metrics = {{ y = {{ regex = 'y: (\\d+)' }}, z = {{ regex = 'z: (\\d+)' }} }}
{workload}
[run.workload.args]
{args}
{more}
"""


@dataclass(frozen=True)
class Ended:
    """How a command line ended."""

    code: int
    out: str
    err: str


class Campaign:
    """One scenario and one output directory."""

    def __init__(self, home: Path, scenario: str, *, work: str = WORK, output: Path | None = None) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.scenario = home / "survivor.toml"
        self.scenario.write_text(scenario)
        self.output = output or home / "out"
        self.ledger = self.output / "work" / "ledger.db"
        program = home / "work.sh"
        program.write_text(work)
        program.chmod(0o755)

    # -- the command line ---------------------------------------------------------------------------------------

    def start(self, verb: str = "run", **options: object) -> "subprocess.Popen[str]":
        """Begin to run or resume, in a process group of its own."""
        arguments = [self.scenario, "--output", self.output] if verb == "run" else [self.output]
        defaults = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        return subprocess.Popen([*COMMAND, verb, *map(str, arguments)], **{**defaults, **options})

    def call(self, verb: str = "run") -> Ended:
        """Run or resume to the end."""
        return end_of(self.start(verb))

    def holding(self, process: "subprocess.Popen[str]") -> None:
        """Wait until this process has the output directory, which is when its campaign begins."""
        lock = self.output / ".lock"
        wait_for(lambda: process.poll() is not None or (lock.exists() and lock.read_text() == str(process.pid)))

    # -- what became of it --------------------------------------------------------------------------------------

    def trials(self) -> list[Trial]:
        """The trials, as the ledger has them."""
        with Ledger.read(self.ledger) as ledger:
            return list(ledger.trials())

    def result(self) -> list[tuple[object, ...]]:
        """All of the trials that must not depend on what happened on the way."""
        return [
            (t.number, t.group, t.repeat, t.action, t.outcome, t.reason, t.reward, t.cached_from, t.draw, t.regime)
            for t in self.trials()
        ]

    def numbers(self) -> list[int]:
        """The trials' numbers."""
        return [trial.number for trial in self.trials()]

    def left_running(self) -> list[str]:
        """The processes that still carry the mark of one of this campaign's trials."""
        if not self.ledger.exists():
            return []
        with Ledger.read(self.ledger) as ledger:
            mark = f":{ledger.state('id')}.".encode()
        return [command for environment, command in processes() if mark in environment]


def end_of(process: "subprocess.Popen[str]") -> Ended:
    """Wait for a command line to end."""
    out, err = process.communicate(timeout=_PATIENCE_S)
    return Ended(process.returncode, out or "", err or "")


def wait_for(condition: "object") -> None:
    """Wait until something is true; that it never is, is a failure."""
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def read_all(descriptor: int) -> str:
    """Everything that a terminal shows until nobody holds it any more."""
    shown = b""
    try:
        while chunk := os.read(descriptor, 65536):
            shown += chunk
    except OSError:  # how Linux says that the other side is closed
        pass
    finally:
        os.close(descriptor)
    return shown.decode()


def processes() -> list[tuple[bytes, str]]:
    """(environment, command line) of everything that runs."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if command:
                found.append((environment, f"{entry.name} {command}"))
    return found


def kill_again_and_again(campaign: Campaign, kills: int, *, within_s: float, seed: int) -> int:
    """Kill the campaign's process group at random moments, resume, and so on, then let it end.

    Returns how many kills hit a campaign at work; it may be over before it was killed as often as wished.
    """
    random = Random(seed)
    hits = 0
    while hits < kills:
        process = campaign.start("resume" if (campaign.output / "campaign.json").exists() else "run")
        campaign.holding(process)
        time.sleep(random.uniform(0, within_s))
        over = process.poll() is not None
        if not over:
            os.killpg(process.pid, signal.SIGKILL)
            hits += 1
        ended = end_of(process)
        assert ended.code in (0, -signal.SIGKILL), ended.err
        if over:
            break
    last = campaign.call("resume" if (campaign.output / "campaign.json").exists() else "run")
    assert last.code == 0, last.err
    return hits
