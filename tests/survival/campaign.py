"""A campaign as a user runs it: a scenario on disk, the command line in a separate process, then a ledger."""

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
_PATIENCE_S = 900.0

WORK = """#!/bin/sh
# A child that would outlive its trial, a point that fails, a delay in which to be killed, and a result.
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
class CommandResult:
    """The result of a command."""

    code: int
    out: str
    err: str


class Campaign:
    """One scenario and one output directory."""

    def __init__(self, directory: Path, scenario: str, *, work: str = WORK, output: Path | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.scenario = directory / "survivor.toml"
        self.scenario.write_text(scenario)
        self.output = output or directory / "out"
        self.ledger = self.output / "work" / "ledger.db"
        program = directory / "work.sh"
        program.write_text(work)
        program.chmod(0o755)

    # -- the command line ---------------------------------------------------------------------------------------

    def start(self, verb: str = "run", **options: object) -> "subprocess.Popen[str]":
        """Start to run or resume, in a new process group."""
        arguments = [self.scenario, "--output", self.output] if verb == "run" else [self.output]
        defaults = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        return subprocess.Popen([*COMMAND, verb, *map(str, arguments)], **{**defaults, **options})

    def call(self, verb: str = "run") -> CommandResult:
        """Run or resume to the end."""
        return end_of(self.start(verb))

    def holding(self, process: "subprocess.Popen[str]") -> None:
        """Wait until this process has locked the output directory, which is when its campaign starts."""
        lock = self.output / ".lock"
        wait_for(lambda: process.poll() is not None or (lock.exists() and lock.read_text() == str(process.pid)))

    # -- what became of it --------------------------------------------------------------------------------------

    def trials(self) -> list[Trial]:
        """The trials in the ledger."""
        with Ledger.read(self.ledger) as ledger:
            return list(ledger.trials())

    def result(self) -> list[tuple[object, ...]]:
        """The fields of all trials that must not depend on interruptions."""
        return [
            (t.number, t.group, t.repeat, t.action, t.outcome, t.reason, t.reward, t.cached_from, t.draw, t.regime)
            for t in self.trials()
        ]

    def numbers(self) -> list[int]:
        """The trials' numbers."""
        return [trial.number for trial in self.trials()]

    def left_running(self) -> list[str]:
        """The processes of this campaign's trials that are still running."""
        if not self.ledger.exists():
            return []
        with Ledger.read(self.ledger) as ledger:
            mark = f":{ledger.state('id')}.".encode()
        return [command for environment, command in processes() if mark in environment]


def end_of(process: "subprocess.Popen[str]") -> CommandResult:
    """Wait for a command to end."""
    out, err = process.communicate(timeout=_PATIENCE_S)
    return CommandResult(process.returncode, out or "", err or "")


def wait_for(condition: "object") -> None:
    """Wait until the condition is true; fail if it never is."""
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.002)


def read_all(descriptor: int) -> str:
    """Everything written to a terminal until its last writer closes it."""
    output = b""
    try:
        while chunk := os.read(descriptor, 65536):
            output += chunk
    except OSError:  # Linux reports the closed other side this way
        pass
    finally:
        os.close(descriptor)
    return output.decode()


def processes() -> list[tuple[bytes, str]]:
    """(environment, command line) of all running processes."""
    entries = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if command:
                entries.append((environment, f"{entry.name} {command}"))
    return entries


def kill_repeatedly(campaign: Campaign, kills: int, *, within_s: float, seed: int) -> int:
    """Kill the campaign's process group at random moments and resume, repeatedly, then let it finish.

    Returns how many kills hit a running campaign; it may finish before the requested number of kills.
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
        result = end_of(process)
        assert result.code in (0, -signal.SIGKILL), result.err
        if over:
            break
    last = campaign.call("resume" if (campaign.output / "campaign.json").exists() else "run")
    assert last.code == 0, last.err
    return hits
