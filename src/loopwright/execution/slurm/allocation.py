"""Runs commands as steps of one Slurm job, the allocation, which is submitted once and outlives this process."""

import shlex
import uuid
from collections.abc import Callable
from pathlib import Path

from loopwright.core.errors import ClusterError, LaunchError, storage
from loopwright.execution.base import Completion
from loopwright.execution.slurm.executor import SlurmExecutor, SlurmJob
from loopwright.execution.slurm.outcome import KILLED
from loopwright.execution.slurm.queue import JobInfo, SubmitError

_SCRIPT = """#!/bin/sh
base={base}
tries=0
until [ -d "$base.requests" ]; do tries=$((tries + 1)); [ $tries -gt 5 ] && exit 96; sleep 1; done
exec >"$base.log" 2>&1 || exit 97
exec {python} -P -m loopwright.execution.slurm.allocation_main "$base"
"""


class AllocationExecutor(SlurmExecutor):
    """Asks the allocation for steps, by files. A resumed run continues with the allocation that still runs."""

    _name = ""

    async def close(self) -> None:
        """End all commands and the allocation."""
        await super().close()
        (self._directory / "allocation").unlink(missing_ok=True)  # the next one starts its own
        if (info := self._table.get((self._name, 0), None)) is not None and not info.is_final:
            await self.queue.cancel([info.id])

    def _key(self, job: SlurmJob) -> tuple[str, int]:
        return job.name, 0

    def _update(self, job: SlurmJob, info: JobInfo, now_s: float) -> None:
        super()._update(job, info, now_s)
        suffixes = ("json", "log", "done")
        requested = self._request(job, "json").exists() or any(self._path(job, suffix).exists() for suffix in suffixes)
        if job.command.handle and not (requested or info.is_final or job.ended.done()):
            self._resubmit(job)  # recorded, and then our predecessor died

    def _is_explained(self, job: SlurmJob, completion: Completion) -> bool:
        # Slurm ends the steps of an allocation first: the next answer of the queue says whether it was that.
        if job.record_polls is None:
            job.record_polls = job.polls
        failed = completion.exit_code != 0 and not completion.timed_out
        return not failed or (job.polls > job.record_polls and job.final_s is None)

    def _give_up(self, job: SlurmJob, info: JobInfo) -> None:
        self._fail_all(ClusterError(f"Slurm never starts the allocation, job {info.id}: {info.reason}."))

    def _end(self, job: SlurmJob, completion: Completion | None) -> None:
        """End a command whose allocation has ended."""
        state = job.info.state if job.info is not None else "GONE"
        stopped = job.killed or job.cancelling
        lost = LaunchError(f"the allocation ended ({state})", infra=True, cancelled=state == "CANCELLED")
        failed = completion is not None and completion.exit_code != 0 and state not in ("COMPLETED", "FAILED")
        end = KILLED if stopped else lost if completion is None or failed else completion
        never_ran = state == "FAILED" and not (self._directory / f"{job.name}.log").exists()
        if never_ran and not stopped:
            self._fail_all(
                ClusterError(
                    f"the allocation does not see {self._directory}. Choose an --output that all compute nodes share "
                    "and may write to."
                )
            )
        self._finish(job, end)

    async def _cancel(self) -> None:
        for job in [job for job in self._jobs if job.cancelling and job not in self._asked]:
            if job in self._waiting:
                self._waiting.remove(job)
                self._finish(job, KILLED)
            elif job.submitted:
                self._asked.add(job)
                if self._request(job, "json").exists():  # the allocation has not started, or not looked yet
                    self._request(job, "json").unlink(missing_ok=True)
                    self._finish(job, KILLED)
                else:
                    self._request(job, "cancel").touch()

    async def _submit(self, batch: list[SlurmJob]) -> None:
        info = await self._allocate(lambda: not all(job.cancelling or job.ended.done() for job in batch))
        for job in batch:
            job.name, job.index = self._name, uuid.uuid4().int >> 80
            if job.cancelling or info is None:
                self._finish(job, KILLED)
            elif self._record(job):
                self._write_spec(job, self._request(job, "json"))
                job.info, job.submitted = info, True

    def _request(self, job: SlurmJob, suffix: str) -> Path:
        return self._directory / f"{job.name}.requests" / f"{job.name}.{job.index}.{suffix}"

    async def _allocate(self, is_wanted: Callable[[], bool]) -> JobInfo | None:
        """The allocation that runs or waits; otherwise a new one. None if it is no longer wanted."""
        name_file = self._directory / "allocation"
        if self._polled_s == 0.0:
            await self._find("", is_wanted)  # wait for the first answer of the queue
        name = self._name or (name_file.read_text() if name_file.exists() else "")
        info = self._table.get((name, 0))
        if info is not None and not info.is_final:
            self._name = name
            return info
        self._name = name = f"lw-{uuid.uuid4().hex[:16]}"
        with storage(self._directory):
            (self._directory / f"{name}.requests").mkdir()
            name_file.write_text(name)
        base = shlex.quote(str(self._directory / name))
        script = _SCRIPT.format(base=base, python=shlex.quote(self._system.python))
        argv = self._system.sbatch(name, self._system.nodes, self._system.gpus or 0, None, ["--exclusive"])
        try:
            number = await self._take(name, argv, script, is_wanted)
        except SubmitError as error:
            raise ClusterError(f"Slurm refuses the allocation: {error}. Check [system].") from error
        if not number:
            (self._directory / f"{name}.requests").rmdir()
            return None
        info = self._table[name, 0] = JobInfo(number, "PENDING")
        return info
