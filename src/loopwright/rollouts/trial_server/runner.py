"""The runner: takes trials from the queue, several at a time, and leaves none behind."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from loopwright.core.errors import StorageError
from loopwright.gateway.client import GatewayLost
from loopwright.rollouts.loops.base import describe_error
from loopwright.rollouts.pools.base import PoolDown
from loopwright.rollouts.remote.gateway_host import GatewayAccess, GatewayHost
from loopwright.rollouts.remote.worker import RemoteRequest, RemoteWorker
from loopwright.rollouts.trial_server.artifacts import Artifacts
from loopwright.rollouts.trial_server.queue import TrialEntry, TrialQueue
from loopwright.rollouts.trial_server.result import build_result
from loopwright.rollouts.trial_server.submission import Submission

log = logging.getLogger(__name__)
_MAX_IDLE_WORKERS = 4
"""Idle workers that are kept for the next trial of their kind."""
_RETRY_S = 5.0
"""Seconds until a failed write is retried."""


class _Ending(NamedTuple):
    """How a trial ended."""

    status: str
    reason: str
    result: bytes | None = None
    artifacts: Mapping[str, bytes] = {}


class TrialRunner:
    """Runs queued trials, and wakes waiting clients whenever the status of a trial changes."""

    def __init__(
        self,
        queue: TrialQueue,
        scenario_dir: Path,
        *,
        concurrency: int,
        artifact_bytes: int,
        host: GatewayHost | None = None,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self.queue, self._host, self._say = queue, host, say
        self._concurrency, self._artifact_bytes = concurrency, artifact_bytes
        self._workers = _Workers(scenario_dir, concurrency, host)
        self._running: dict[str, tuple[asyncio.Future[_Ending], asyncio.Future[None]]] = {}
        """Two tasks per trial: one runs it and can be cancelled, the other then records how it ended."""
        self._changes: dict[str, asyncio.Event] = {}
        self.outcomes: Counter[str] = Counter()
        """Outcomes of the trials that ended since the server was started."""
        self._closing = False

    def start_queued(self) -> None:
        """Start queued trials up to the concurrency limit."""
        try:
            while not self._closing and len(self._running) < self._concurrency and (claimed := self.queue.claim()):
                entry, body = claimed
                trial = asyncio.ensure_future(self._run(entry, body))
                recording = asyncio.ensure_future(self._record(entry.id, trial))
                self._running[entry.id] = (trial, recording)
                recording.add_done_callback(partial(self._on_end, entry.id))
                self._notify(entry.id)
        except StorageError as error:
            log.warning("cannot start trials; retrying in %g s: %s", _RETRY_S, error)
            asyncio.get_running_loop().call_later(_RETRY_S, self.start_queued)

    def _on_end(self, id: str, _: object) -> None:
        del self._running[id]
        self._notify(id)
        self.start_queued()

    # -- waiting and cancelling ---------------------------------------------------------------------------------

    async def wait(self, id: str, wait_s: float, last_status: str | None = None) -> TrialEntry:
        """The entry of a trial, once its status is final or differs from `last_status`, or after `wait_s`."""
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            entry = self.queue.find(id)
            if entry.is_final or (last_status is not None and entry.status != last_status):
                return entry
            change = self._changes.setdefault(id, asyncio.Event())
            try:
                async with asyncio.timeout_at(deadline):
                    await change.wait()
            except TimeoutError:
                return entry

    async def cancel(self, id: str) -> TrialEntry:
        """End a trial with all its processes. A final status does not change."""
        trial, recording = self._running.get(id, (None, None))
        try:
            self.queue.cancel(id)  # first, so that a kill in between does not restart the trial
        finally:
            if trial is not None:
                trial.cancel()
        self._notify(id)
        if recording is not None:
            await asyncio.wait({recording})
        return self.queue.find(id)

    def _notify(self, id: str) -> None:
        change = self._changes.pop(id, None)
        if change is not None:
            change.set()

    # -- one trial ----------------------------------------------------------------------------------------------

    async def _run(self, entry: TrialEntry, body: bytes) -> _Ending:
        try:
            submission = Submission.model_validate(orjson.loads(body))
            artifacts = Artifacts(submission.artifacts, self._artifact_bytes)
            access = submission.gateway_access()
            if access is None:
                if self._host is None:
                    raise GatewayLost("the submission has no gateway, and this trial server has no engine any more")
                access = await self._host.access()
            worker = await self._workers.acquire(submission, access)
            try:
                collect = artifacts.collect if submission.artifacts else None
                episode = await worker.handle(RemoteRequest(access, submission.rollout_request(), collect))
            finally:
                await self._workers.release(worker)
            self.outcomes[str(episode.outcome)] += 1
            result: dict[str, Any] = build_result(entry, submission, episode, time.time())
            files = dict(artifacts.files)  # a copy: a collection that took too long may still be running
            result["artifacts"] = {
                "kept": {name: len(data) for name, data in files.items()},
                "left_off": artifacts.left_off,
            }
            return _Ending("ended", episode.reason, orjson.dumps(result), files)
        except (GatewayLost, PoolDown) as error:
            return _Ending("lost", str(error))
        except Exception as error:
            log.exception("trial %s failed", entry.id)
            return _Ending("lost", describe_error(error))

    async def _record(self, id: str, trial: "asyncio.Future[_Ending]") -> None:
        await asyncio.wait({trial})
        if not trial.cancelled():
            ending = trial.result()
        elif self._closing and self.queue.requeue(id):
            return
        else:
            ending = _Ending("cancelled", "it was cancelled")
        while True:
            try:
                await asyncio.to_thread(self.queue.finish, id, *ending)
                counts = [self.queue.counts().get(status, 0) for status in ("queued", "running", "ended")]
                reason = f": {ending.reason}" if ending.reason else ""
                self._say(
                    f"trial {id} {ending.status}{reason}; {counts[0]} queued, {counts[1]} running, {counts[2]} ended"
                )
                return
            except StorageError as error:
                log.warning("cannot record the end of trial %s; retrying in %g s: %s", id, _RETRY_S, error)
                await asyncio.sleep(_RETRY_S)

    async def close(self) -> None:
        """Stop all trials; they are queued again for the next server with this output directory."""
        self._closing = True
        for trial, _ in self._running.values():
            trial.cancel()
        if self._running:
            await asyncio.wait([recording for _, recording in self._running.values()])
        await self._workers.close()


class _Workers:
    """Remote workers, one for all trials with the same agent, run and gateway."""

    def __init__(self, scenario_dir: Path, concurrency: int, host: GatewayHost | None) -> None:
        self._scenario_dir, self._concurrency, self._host = scenario_dir, concurrency, host
        self._by_key: dict[bytes, RemoteWorker] = {}
        self._users: dict[RemoteWorker, int] = {}

    async def acquire(self, submission: Submission, access: GatewayAccess) -> RemoteWorker:
        """The worker for a trial; SandboxError if its sandbox is not available here."""
        common = submission.model_dump_json(include={"loop", "run", "verify", "passed"})
        key = orjson.dumps([common, access.url, access.token])
        if key not in self._by_key:
            # In a thread: the worker checks whether its sandbox is available, which takes a while.
            worker = await asyncio.to_thread(self._build, submission)
            self._by_key.setdefault(key, worker)  # another trial may have built one meanwhile
        worker = self._by_key[key] = self._by_key.pop(key)  # the most recently used worker is last
        self._users[worker] = self._users.get(worker, 0) + 1
        return worker

    def _build(self, submission: Submission) -> RemoteWorker:
        return RemoteWorker(
            submission.loop.model_copy(update={"concurrency": self._concurrency}),
            self._scenario_dir,
            run=submission.run,
            passed_env=submission.passed,
            run_tests=submission.verify,
            sessions=self._host.local_sessions() if self._host is not None and submission.gateway is None else None,
        )

    async def release(self, worker: RemoteWorker) -> None:
        """A trial has ended its use of a worker."""
        self._users[worker] -= 1
        idle = [(key, each) for key, each in self._by_key.items() if not self._users[each]]
        for key, each in idle[: max(0, len(idle) - _MAX_IDLE_WORKERS)]:
            del self._by_key[key], self._users[each]
            await each.close()

    async def close(self) -> None:
        """Close all workers."""
        for worker in self._by_key.values():
            await worker.close()
        self._by_key.clear()
