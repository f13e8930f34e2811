"""Runs commands as Slurm jobs, follows all of them with one query per interval, and adopts those of a dead process.

Each job has a base name in the run's `jobs` directory: BASE.json says what to run, BASE.done how it ended. A handle
names the job before it is submitted, so that a resumed run finds every job.
"""

import asyncio
import json
import logging
import shlex
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loopwright.core.errors import ClusterError, LaunchError, storage
from loopwright.execution.base import Command, Completion, Executor, OnStart
from loopwright.execution.local.executor import Slots
from loopwright.execution.slurm.options import SlurmOptions
from loopwright.execution.slurm.outcome import KILLED, completion_of, ending_of
from loopwright.execution.slurm.queue import HOPELESS, JobInfo, Queue, SubmitError

log = logging.getLogger(__name__)

_TICK_S = 0.05
_SETTLE_S = 15.0
"""How long we look for the result of a job that has ended: shared file systems show new files late."""
_LAG_S = 60.0
"""How long a job may be neither in the queue nor in accounting before it counts as lost; and how long Slurm may take no
job although it has none of ours."""
_PATIENCE_S = 900.0
"""How long Slurm may be out of reach before a submission counts as failed."""
_MAX_ARRAY = 500
_EMPTY = "#!/bin/sh\n"
_SCRIPT = """#!/bin/sh
base={base}."${{SLURM_ARRAY_TASK_ID:-0}}"
tries=0
until [ -e "$base.json" ]; do tries=$((tries + 1)); [ $tries -gt 5 ] && exit 96; sleep 1; done
exec >"$base.log" 2>&1 || exit 97
exec {python} -P -m loopwright.execution.slurm.job_main "$base"
"""


@dataclass(eq=False)
class SlurmJob:
    """One command on its way through Slurm."""

    command: Command
    on_start: OnStart
    ended: "asyncio.Future[Completion]"
    name: str = ""
    """The job's name in Slurm, which it may share with other indices of an array."""
    index: int = 0
    info: JobInfo | None = None
    """The job as the queue showed it last."""
    submitted: bool = False
    cancelling: bool = False
    killed: bool = False
    final_s: float | None = None
    """Since when it is known to have ended."""
    missing_s: float | None = None
    """Since when the queue does not show it."""
    refused_s: float | None = None
    """When Slurm last took no further job although it had some of ours, or first took none."""
    polls: int = 0
    """How many answers of the queue it has seen."""
    record_polls: int | None = None
    """How many of them before its command had failed."""
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def request(self) -> tuple[int, int, float | None]:
        """Jobs with the same request can be submitted together."""
        return self.command.nodes, self.command.gpus, self.command.timeout_s


class SlurmExecutor(Executor):
    """Keeps up to `parallel` jobs in the queue."""

    def __init__(self, system: SlurmOptions, directory: Path) -> None:
        self._system, self._directory = system, directory / "jobs"
        self.queue = Queue()
        self._permits = Slots(system.parallel)
        self._jobs: dict[SlurmJob, None] = {}
        self._waiting: list[SlurmJob] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._poll_now, self._polled_s = False, 0.0
        self._unwanted: set[str] = set()
        """Ids of jobs to cancel that nobody waits for."""
        self._asked: set[SlurmJob] = set()
        """Jobs that were asked to end."""
        self._next_cancel_s = 0.0
        self._cannot_cancel_s: float | None = None
        """Since when Slurm does not take our cancellations."""
        self._table: dict[tuple[str, int], JobInfo] = {}
        self._accepted = self._is_full = False

    # -- one command --------------------------------------------------------------------------------------------

    async def run(self, command: Command, on_start: OnStart) -> Completion:
        slot = await self._permits.acquire()
        try:
            return await self._run(command, on_start)
        finally:
            self._permits.release(slot)

    async def _run(self, command: Command, on_start: OnStart) -> Completion:
        with storage(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
        job = SlurmJob(command, on_start, asyncio.get_running_loop().create_future())
        if command.handle:
            _, job.name, index = command.handle.split(":")
            job.index, job.submitted = int(index), True
            self._poll_now = True
        else:
            self._waiting.append(job)
        self._jobs[job] = None
        for name, loop in (("follow", self._follow), ("submit", self._submit_all)):
            if name not in self._tasks or self._tasks[name].done():
                task = self._tasks[name] = asyncio.ensure_future(loop())
                task.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            return await asyncio.shield(job.ended)
        except asyncio.CancelledError:
            job.cancelling = True
            while not job.ended.done():
                with suppress(asyncio.CancelledError):  # a second one changes nothing
                    await asyncio.wait([job.ended])
            with suppress(Exception):
                job.ended.result()
            raise
        finally:
            self._jobs.pop(job, None)
            self._asked.discard(job)

    def kill_all(self) -> None:
        for job in self._jobs:
            job.killed = True
        self.queue.cancel_now([job.info.id for job in self._jobs if job.info is not None])

    async def close(self) -> None:
        """Cancel all jobs and wait for their end."""
        for job in self._jobs:
            job.killed = job.cancelling = True
        if self._jobs:
            await asyncio.wait([job.ended for job in self._jobs])
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self.queue.cancel_now(list(self._unwanted))

    # -- following all jobs -------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Look for results often, and at the queue once per interval, as long as there are jobs."""
        try:
            next_poll_s = self._polled_s + self._system.poll_s
            while self._jobs:
                now_s = time.monotonic()
                for job in list(self._jobs):
                    if job.submitted and not job.ended.done():
                        self._look(job)
                if now_s >= next_poll_s and (self._poll_now or any(job.submitted for job in self._jobs)):
                    next_poll_s, self._poll_now = now_s + self._system.poll_s, False
                    await self._poll()
                if now_s >= self._next_cancel_s:
                    await self._cancel()
                # Each tick looks for one file per job; many jobs are looked at less often.
                await asyncio.sleep(min(1.0, max(_TICK_S, len(self._jobs) / 1000)))
        except BaseException as error:
            self._fail_all(error)
            raise

    def _look(self, job: SlurmJob) -> None:
        """End a job whose result is there, or that has ended without one."""
        if not job.record:
            with suppress(FileNotFoundError):
                job.record = json.loads(self._path(job, "done").read_bytes())
        if job.record and job.record["directory"] != str(job.command.directory):
            # The handle is of the setup, which has ended; the command itself was not submitted.
            self._resubmit(job)
            return
        stopped = job.killed or job.cancelling
        try:
            completion = completion_of(job.record)
        except LaunchError as error:
            self._finish(job, error)
            return
        if completion is not None and (stopped or self._is_explained(job, completion)):
            self._finish(job, completion)
        elif job.record and stopped:
            self._finish(job, KILLED)
        elif job.final_s is not None:
            has_result = job.info is not None and job.info.state in ("COMPLETED", "FAILED")
            if job.record or not has_result or time.monotonic() > job.final_s + _SETTLE_S:
                self._end(job, completion)

    def _is_explained(self, job: SlurmJob, completion: Completion) -> bool:
        """Whether the job's state cannot say better how the command ended: a limit of memory, for example."""
        return completion.signal != signal.SIGKILL

    def _end(self, job: SlurmJob, completion: Completion | None) -> None:
        """End a job that Slurm says has ended; its state explains what the record does not."""
        info = job.info or JobInfo("", "GONE")
        try:
            stopped = job.killed or job.cancelling
            self._finish(job, ending_of(info, completion, job.record, self._path(job, "log"), stopped=stopped))
        except LaunchError as error:
            self._finish(job, error)
        except ClusterError as error:
            self._fail_all(error)

    def _finish(self, job: SlurmJob, end: Completion | Exception) -> None:
        if not job.ended.done():
            if isinstance(end, Exception):
                job.ended.set_exception(end)
                job.ended.exception()  # it may be that nobody asks
            else:
                job.ended.set_result(end)

    async def _poll(self) -> None:
        """One query for all jobs, and one of accounting for those that the queue no longer shows."""
        jobs = [job for job in self._jobs if job.submitted]
        now_s = time.monotonic()
        if (table := await self.queue.jobs()) is None:
            return
        self._polled_s, self._table = now_s, table
        missing = []
        for job in jobs:
            job.polls += 1
            if (info := table.get(self._key(job))) is None:
                job.missing_s = job.missing_s or now_s
                missing.append(job)
            else:
                self._update(job, info, now_s)
        if missing and not all(self._path(job, "done").exists() for job in missing):
            past = await self.queue.past_jobs(sorted({job.name for job in missing}))
            for job in missing:
                self._search(job, past.get(self._key(job)), now_s)

    def _update(self, job: SlurmJob, info: JobInfo, now_s: float) -> None:
        if job.command.handle and self._path(job, "void").exists():  # its sbatch was still under way
            self._path(job, "void").rename(self._path(job, "json"))
        # Twice, since the scheduler may not have looked at a new job yet.
        is_hopeless = job.info is not None and {info.reason, job.info.reason} <= HOPELESS
        job.info, job.missing_s = info, None
        if info.is_final:
            job.final_s = job.final_s or now_s
        elif info.state == "PENDING" and is_hopeless:
            self._unwanted.add(info.id)
            self._finish(job, LaunchError(f"Slurm never starts job {info.id}: {info.reason}"))

    def _search(self, job: SlurmJob, info: JobInfo | None, now_s: float) -> None:
        """Decide about a job that the queue does not show."""
        if info is not None and info.is_final:
            self._update(job, info, now_s)
        elif job.command.handle and job.info is None and not self._path(job, "log").exists():
            # Recorded, and then our predecessor died. Its sbatch may still be under way: without its file, a job that
            # it submits ends at once.
            with suppress(FileNotFoundError):
                self._path(job, "json").rename(self._path(job, "void"))
            if job.polls > 1:
                self._resubmit(job)
        elif job.missing_s is not None and now_s > job.missing_s + _LAG_S:
            job.info, job.final_s = JobInfo(job.info.id if job.info else job.name, "GONE"), now_s

    def _resubmit(self, job: SlurmJob) -> None:
        job.name, job.index, job.submitted, job.record, job.missing_s = "", 0, False, {}, None
        self._waiting.append(job)

    async def _cancel(self) -> None:
        """Cancel what is to be cancelled, with one scancel for all."""
        jobs = [job for job in self._jobs if job.cancelling and job not in self._asked]
        for job in [job for job in jobs if job in self._waiting]:
            self._waiting.remove(job)
            self._finish(job, KILLED)
        running = {job: job.info.id for job in jobs if job.info is not None and not job.info.is_final}
        # Jobs of our predecessor that the queue has not shown yet.
        adopted = {job: f"--name={job.name}" for job in jobs if job.info is None and job.submitted}
        if not running and not adopted and not self._unwanted:
            return
        now_s = time.monotonic()
        if await self.queue.cancel([*running.values(), *self._unwanted]):
            self._asked |= running.keys()
            self._unwanted.clear()
            running = {}
            if not adopted:
                self._cannot_cancel_s = None
                return
        self._next_cancel_s = now_s + self._system.poll_s
        self._cannot_cancel_s = self._cannot_cancel_s or now_s
        if now_s > self._cannot_cancel_s + _LAG_S:
            jobs_left = running | adopted
            log.warning("Slurm does not answer; cancel these jobs yourself: scancel %s", " ".join(jobs_left.values()))
            for job in jobs_left:
                self._finish(job, KILLED)

    def _fail_all(self, error: BaseException) -> None:
        for job in list(self._jobs):
            self._finish(job, error if isinstance(error, Exception) else ClusterError("the run was stopped"))
        self.queue.cancel_now([job.info.id for job in self._jobs if job.info is not None and not job.info.is_final])

    # -- submitting ---------------------------------------------------------------------------------------------

    async def _submit_all(self) -> None:
        """Submit what waits: together what came together and asks for the same."""
        try:
            while self._jobs:
                if self._waiting:
                    request = self._waiting[0].request
                    batch = [job for job in self._waiting if job.request == request][:_MAX_ARRAY]
                    self._waiting = [job for job in self._waiting if job not in batch]
                    await self._submit(batch)
                else:
                    await asyncio.sleep(_TICK_S)
        except BaseException as error:
            self._fail_all(error)
            raise

    async def _submit(self, batch: list[SlurmJob]) -> None:
        name = f"lw-{uuid.uuid4().hex[:16]}"
        array = [f"--array=0-{len(batch) - 1}"] if len(batch) > 1 else []
        for index, job in enumerate(list(batch)):
            job.name, job.index = name, index
            self._write_spec(job, self._path(job, "json"))
            if not self._record(job):
                batch.remove(job)
        script = _SCRIPT.format(base=shlex.quote(str(self._directory / name)), python=shlex.quote(self._system.python))
        argv = self._system.sbatch(name, *batch[0].request, array) if batch else []

        def is_wanted() -> bool:
            for job in [job for job in batch if job.cancelling or job.ended.done()]:
                batch.remove(job)
                self._path(job, "json").unlink(missing_ok=True)  # its index of the array ends at once
                self._finish(job, KILLED)
            return bool(batch)

        try:
            number = await self._take(name, argv, script, is_wanted)
        except SubmitError as error:
            await self._refuse(batch, error)
            return
        for job in batch:
            self._accepted = job.submitted = True
            job.info = JobInfo(f"{number}_{job.index}" if array else number, "PENDING")

    async def _take(self, name: str, argv: Sequence[str], script: str, is_wanted: Callable[[], bool]) -> str:
        """Submit a script until Slurm takes it; returns the job's id. SubmitError if Slurm refuses it.

        If it is no longer wanted, the id is empty; a job that Slurm took nevertheless does not find its files.
        """
        number, deadline_s = "", time.monotonic() + _PATIENCE_S
        while not number and is_wanted():
            try:
                number = await self.queue.submit(argv, script)
            except SubmitError as error:
                if not error.transient or time.monotonic() > deadline_s:
                    raise
                log.warning("Slurm does not take jobs: %s. Trying again.", error)
                number = await self._find(name, is_wanted)
        return number

    def _record(self, job: SlurmJob) -> bool:
        """Give the handle to the caller. A job that cannot be recorded does not run."""
        try:
            job.on_start(f"slurm:{job.name}:{job.index}")
        except Exception as error:  # noqa: BLE001  Whatever the caller raises ends this job only.
            self._path(job, "json").unlink(missing_ok=True)
            self._finish(job, error)
            return False
        return True

    async def _find(self, name: str, is_wanted: Callable[[], bool]) -> str:
        """The id of a job that Slurm took although its answer was lost; empty if the next query does not show one, or
        if it is no longer wanted.
        """
        failed_s = time.monotonic()
        while self._polled_s < failed_s:
            if not is_wanted():
                return ""
            self._poll_now = True
            await asyncio.sleep(_TICK_S)
        return next((info.id.partition("_")[0] for key, info in self._table.items() if key[0] == name), "")

    async def _refuse(self, batch: list[SlurmJob], error: SubmitError) -> None:
        """End jobs that Slurm does not take, unless it takes fewer at a time. If it takes none at all, the run ends."""
        if not error.transient:
            if not self._accepted and not await self._would_take(1, 0, None):
                raise ClusterError(f"Slurm refuses every job: {error}. Check [system].") from error
            for job in batch:
                self._path(job, "json").unlink(missing_ok=True)  # of the refused submission
            if await self._would_take(*batch[0].request):
                # An array is larger than the cluster allows, or the user has as many jobs as the cluster allows.
                if len(batch) > 1:
                    middle = len(batch) // 2
                    await self._submit(batch[:middle])
                    await self._submit(batch[middle:])
                    return
                job, now_s = batch[0], time.monotonic()
                if job.refused_s is None or any(other.submitted and not other.ended.done() for other in self._jobs):
                    job.refused_s = now_s
                if now_s < job.refused_s + _LAG_S:
                    if not self._is_full:
                        log.warning("Slurm takes no further job: %s. Waiting for those in its queue.", error)
                    self._is_full = True
                    await asyncio.sleep(self._system.poll_s)
                    self._resubmit(job)
                    return
        for job in batch:
            self._finish(job, LaunchError(f"Slurm refuses the job: {error}", infra=error.transient))

    async def _would_take(self, nodes: int, gpus: int, timeout_s: float | None) -> bool:
        try:
            await self.queue.submit(self._system.sbatch("lw-test", nodes, gpus, timeout_s, ["--test-only"]), _EMPTY)
        except SubmitError:
            return False
        return True

    def _write_spec(self, job: SlurmJob, path: Path) -> None:
        command = job.command
        spec = {
            "argv": [*self._system.srun(command.nodes, command.gpus, once=command.once), *command.argv],
            "directory": str(command.directory),
            "environment": dict(command.environment),
            "stdout": str(command.stdout),
            "stderr": str(command.stderr),
            "timeout_s": command.timeout_s,
            "marker": command.marker,
            "output_bytes": self._system.output,
            "grace_s": self._system.grace_s,
        }
        part = path.with_suffix(".new")
        with storage(path):
            part.touch(0o600)  # the environment may contain secrets
            part.write_text(json.dumps(spec))
            part.rename(path)

    def _key(self, job: SlurmJob) -> tuple[str, int]:
        """Where the queue shows a job."""
        return job.name, job.index

    def _path(self, job: SlurmJob, suffix: str) -> Path:
        return self._directory / f"{job.name}.{job.index}.{suffix}"
