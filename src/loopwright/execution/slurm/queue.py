"""What we ask of Slurm: submit, cancel, and the states of all our jobs in one query."""

import asyncio
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from loopwright.core.errors import ClusterError

PENDING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
ACTIVE = PENDING | {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
"""States of jobs that have not ended; all others are final."""
HOPELESS = frozenset(
    [
        "AccountNotAllowed",
        "BadConstraints",
        "InvalidAccount",
        "InvalidQOS",
        "PartitionConfig",
        "PartitionNodeLimit",
        "PartitionTimeLimit",
        "QOSNotAllowed",
        "QOSTimeLimit",
        "AssocMaxNodePerJobLimit",
        "QOSMaxNodePerJobLimit",
    ]
)
"""Reasons for which a pending job never starts, unless an administrator changes the cluster."""
_TRANSIENT = (
    "unable to contact slurm controller",
    "socket timed out",
    "temporarily",
    "connection refused",
    "connection reset",
    "zero bytes were transmitted",
    "communication",
    "backup controller",
    "transport endpoint",
    "not responding",
    "try again",
    "munge",
)
_TIMEOUT_S = 60.0
_CHUNK = 500


@dataclass(frozen=True)
class JobInfo:
    """A job as the queue shows it."""

    id: str
    state: str
    reason: str = ""
    nodes: str = ""

    @property
    def is_final(self) -> bool:
        """Whether the job has ended."""
        return self.state not in ACTIVE


class SubmitError(Exception):
    """Slurm did not take a job, in its own words; `transient` if it may take it later."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.transient = any(text in message.lower() for text in _TRANSIENT)


class Queue:
    """Slurm's programs. `queries` counts the calls of squeue and sacct."""

    def __init__(self) -> None:
        self.queries = 0
        self._accounting = True

    async def submit(self, argv: Sequence[str], script: str) -> str:
        """Submit a job script; returns the job's id."""
        code, output, errors = await _run(argv, script.encode())
        if code != 0:
            words = " ".join(errors.split()) or f"exit code {code}"
            raise SubmitError(words)
        return output.strip().partition(";")[0]

    async def jobs(self) -> dict[tuple[str, int], JobInfo] | None:
        """All jobs of this user, by name and array index; None if the controller does not answer."""
        self.queries += 1
        code, output, _ = await _run(
            ["squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%i|%T|%r|%N|%j"]
        )
        return _parse(output, 5) if code == 0 else None

    async def past_jobs(self, names: Sequence[str]) -> dict[tuple[str, int], JobInfo]:
        """Jobs that the queue no longer shows, from accounting; empty without accounting, or if it lags behind."""
        if not self._accounting:
            return {}
        self.queries += 1
        code, output, errors = await _run(
            (
                *("sacct", "--allocations", "--noheader", "--parsable2", "--starttime=now-30days"),
                *("--format=JobID,State,Reason,NodeList,JobName", f"--name={','.join(names)}"),
            )
        )
        if code != 0 and "disabled" in errors:
            self._accounting = False
        return _parse(output, 5) if code == 0 else {}

    async def cancel(self, ids: Sequence[str]) -> bool:
        """End jobs: SIGTERM, and SIGKILL after the cluster's KillWait. Returns whether Slurm took the request."""
        good = True
        for start in range(0, len(ids), _CHUNK):
            code, _, errors = await _run(["scancel", *ids[start : start + _CHUNK]])
            good = good and (code == 0 or not SubmitError(errors).transient)
        return good

    def cancel_now(self, ids: Sequence[str]) -> None:
        """The same without waiting; safe in a signal handler."""
        if ids:
            argv = ["scancel", *ids]
            process = subprocess.Popen(argv, start_new_session=True, stderr=subprocess.DEVNULL)
            process.returncode = 0  # nobody waits for it


def _parse(output: str, count: int) -> dict[tuple[str, int], JobInfo]:
    jobs = {}
    for line in output.splitlines():
        parts = line.strip().split("|")
        if len(parts) != count:
            continue
        job_id, state, reason, nodes, name = parts
        index = job_id.partition("_")[2]
        key = name, int(index) if index.isdigit() else 0
        # "CANCELLED by 1000" in accounting; a resubmitted name shows its last job.
        jobs[key] = JobInfo(job_id, state.partition(" ")[0], "" if reason == "None" else reason, nodes)
    return jobs


async def _run(argv: Sequence[str], data: bytes = b"") -> tuple[int, str, str]:
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for us: a submission under way must end
        )
    except FileNotFoundError as error:
        raise ClusterError(
            f"{argv[0]!r} is not on the PATH. Start Loopwright on a login node of the cluster."
        ) from error
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            output, errors = await process.communicate(data)
    except TimeoutError:
        process.kill()
        await process.wait()
        return 1, "", f"{argv[0]} did not answer within {_TIMEOUT_S:g} s: socket timed out"
    return process.returncode or 0, output.decode(errors="replace"), errors.decode(errors="replace")
