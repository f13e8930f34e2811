"""How a job ended: from the record that it left, and from Slurm's state where the record does not say."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from loopwright.core.errors import ClusterError, LaunchError
from loopwright.execution.base import Completion
from loopwright.execution.slurm.queue import JobInfo

_LOST = {
    "NODE_FAIL": "its node failed",
    "PREEMPTED": "it was preempted",
    "BOOT_FAIL": "its node did not boot",
    "REVOKED": "it was revoked",
    "GONE": "Slurm no longer knows it, and it left no result",
}
_TIMED_OUT = ("TIMEOUT", "DEADLINE")
KILLED = Completion(None, 9, timed_out=False, usage={}, stdout_bytes=0, stderr_bytes=0)
"""How a job ends that we cancelled."""


def completion_of(record: Mapping[str, Any]) -> Completion | None:
    """How the command ended; None without a record of it, or if the job was interrupted."""
    if "launch_error" in record:
        raise LaunchError(record["launch_error"], infra=record["infra"])
    if "usage" not in record:
        return None
    return Completion(**{name: value for name, value in record.items() if name != "directory"})


def ending_of(
    info: JobInfo, completion: Completion | None, record: Mapping[str, Any], log: Path, *, stopped: bool
) -> Completion:
    """How a job ended that Slurm says has ended. Raises LaunchError if it was lost or cancelled.

    Raises ClusterError if its node does not see the run's directory.
    """
    state, job = info.state, f"Slurm job {info.id}" + (f" on {info.nodes}" if info.nodes else "")
    if state == "OUT_OF_MEMORY":
        reason = f"{job} ran out of memory (OUT_OF_MEMORY)"
        return replace(completion or KILLED, exit_code=None, signal=9, timed_out=False, reason=reason)
    if completion is not None:
        return completion
    if stopped:
        return KILLED
    if state in _TIMED_OUT:
        return replace(KILLED, signal=15, timed_out=True, reason=f"{job} reached Slurm's time limit ({state})")
    if state in _LOST:
        raise LaunchError(f"{job} was lost: {_LOST[state]} ({state})", infra=True)
    if state == "CANCELLED" or record.get("interrupted"):
        raise LaunchError(f"{job} was cancelled by somebody else ({state})", infra=True, cancelled=True)
    if not log.exists() and info.reason != "JobLaunchFailure":
        raise ClusterError(
            f"{job} does not see {log.parent}. Choose an --output that all compute nodes share and may write to."
        )
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    cause = text.splitlines()[-1][:300] if text else info.reason or "it left no result"
    raise LaunchError(f"{job} ended before its command did ({state}): {cause}", infra=True)
