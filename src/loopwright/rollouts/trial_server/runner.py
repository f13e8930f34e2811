"""The runner: takes trials from the queue, so many at a time, and never leaves one behind."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from loopwright.core.errors import StorageError
from loopwright.gateway.client import GatewayLost
from loopwright.rollouts.loops.base import describe_error
from loopwright.rollouts.remote.access import GatewayAccess
from loopwright.rollouts.remote.gateway_host import GatewayHost
from loopwright.rollouts.remote.worker import RemoteRequest, RemoteWorker
from loopwright.rollouts.trial_server.artifacts import Artifacts
from loopwright.rollouts.trial_server.queue import TrialEntry, TrialQueue
from loopwright.rollouts.trial_server.result import result_of
from loopwright.rollouts.trial_server.submission import Submission

log = logging.getLogger(__name__)
_IDLE = 4
"""Workers without a trial that are kept for the next one of their kind."""
_AGAIN_S = 5.0
"""Seconds until a disk that takes nothing is tried again."""

_Made = tuple[str, str, bytes | None, Mapping[str, bytes]]
"""How a trial ended: status, reason, result, artifacts."""


class TrialRunner:
    """Runs what is queued. Whoever waits for a trial is told whenever its status changes."""

    def __init__(
        self,
        queue: TrialQueue,
        home: Path,
        *,
        concurrency: int,
        artifact_bytes: int,
        own: GatewayHost | None = None,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self.queue, self.own, self._say = queue, own, say
        self._concurrency, self._artifact_bytes = concurrency, artifact_bytes
        self._workers = _Workers(home, concurrency)
        self._running: dict[str, tuple[asyncio.Future[_Made], asyncio.Future[None]]] = {}
        """Each trial twice: what can be cancelled, and what then writes down how it ended."""
        self._changes: dict[str, asyncio.Event] = {}
        self.outcomes: Counter[str] = Counter()
        """How the trials ended that ended here."""
        self._closing = False

    def fill(self) -> None:
        """Begin what there is room for."""
        try:
            while not self._closing and len(self._running) < self._concurrency and (claimed := self.queue.claim()):
                entry, body = claimed
                making = asyncio.ensure_future(self._made(entry, body))
                running = asyncio.ensure_future(self._run(entry.id, making))
                self._running[entry.id] = (making, running)
                running.add_done_callback(partial(self._ended, entry.id))
                self._changed(entry.id)
        except StorageError as error:
            log.warning("no trial can be begun, and it is tried again: %s", error)
            asyncio.get_running_loop().call_later(_AGAIN_S, self.fill)

    def _ended(self, id: str, _: object) -> None:
        del self._running[id]
        self._changed(id)
        self.fill()

    # -- waiting and cancelling ---------------------------------------------------------------------------------

    async def wait(self, id: str, wait_s: float, seen: str | None = None) -> TrialEntry:
        """How a trial is, once it is over or no longer as it was `seen`, or when the time is up."""
        until = asyncio.get_running_loop().time() + wait_s
        while True:
            entry = self.queue.find(id)
            if entry.over or (seen is not None and entry.status != seen):
                return entry
            change = self._changes.setdefault(id, asyncio.Event())
            try:
                async with asyncio.timeout_at(until):
                    await change.wait()
            except TimeoutError:
                return entry

    async def cancel(self, id: str) -> TrialEntry:
        """End a trial with all its processes. One that is over stays as it is."""
        making, running = self._running.get(id, (None, None))
        try:
            self.queue.cancel(id)  # first: a kill in between must not have it begun again
        finally:
            if making is not None:
                making.cancel()
        self._changed(id)
        if running is not None:
            await asyncio.wait({running})
        return self.queue.find(id)

    def _changed(self, id: str) -> None:
        change = self._changes.pop(id, None)
        if change is not None:
            change.set()

    # -- one trial ----------------------------------------------------------------------------------------------

    async def _run(self, id: str, making: "asyncio.Future[_Made]") -> None:
        await asyncio.wait({making})
        if not making.cancelled():
            await self._finish(id, *making.result())
        elif not self._closing or not self.queue.give_back(id):
            await self._finish(id, "cancelled", "it was cancelled", None, {})

    async def _made(self, entry: TrialEntry, body: bytes) -> _Made:
        try:
            submission = Submission.model_validate(orjson.loads(body))
            artifacts = Artifacts(submission.artifacts, self._artifact_bytes)
            access = await self._access(submission)
            worker = await self._workers.take(submission, access)
            try:
                keep = artifacts.keep if submission.artifacts else None
                episode = await worker.handle(RemoteRequest(access, submission.request(), keep))
            finally:
                await self._workers.give(worker)
            self.outcomes[str(episode.outcome)] += 1
            told: dict[str, Any] = result_of(entry, submission, episode, time.time())
            kept = dict(artifacts.kept)  # whoever keeps took too long may still be at it
            told["artifacts"] = {
                "kept": {name: len(data) for name, data in kept.items()},
                "left_off": artifacts.left_off,
            }
            return "ended", episode.reason, orjson.dumps(told), kept
        except GatewayLost as error:
            return "lost", str(error), None, {}
        except Exception as error:
            log.exception("trial %s failed", entry.id)
            return "lost", describe_error(error), None, {}

    async def _access(self, submission: Submission) -> GatewayAccess:
        if submission.gateway is not None:
            return submission.gateway.access()
        if self.own is None:
            raise GatewayLost("it names no gateway, and this trial server has no engine any more")
        return await self.own.access()

    async def _finish(
        self, id: str, status: str, reason: str, result: bytes | None, artifacts: Mapping[str, bytes]
    ) -> None:
        while True:
            try:
                await asyncio.to_thread(self.queue.finish, id, status, reason, result, artifacts)
                return self._say(f"trial {id} {status}{f': {reason}' if reason else ''}; {self._told()}")
            except StorageError as error:
                log.warning("how trial %s ended cannot be written, and is tried again: %s", id, error)
                await asyncio.sleep(_AGAIN_S)

    def _told(self) -> str:
        counts = self.queue.counts()
        return f"{counts.get('queued', 0)} wait, {counts.get('running', 0)} run, {counts.get('ended', 0)} have ended"

    async def close(self) -> None:
        """End what runs; it is queued again for the next server in this place."""
        self._closing = True
        for making, _ in self._running.values():
            making.cancel()
        if self._running:
            await asyncio.wait([running for _, running in self._running.values()])
        await self._workers.close()


class _Workers:
    """Remote workers, one for all trials with the same agent, run and gateway."""

    def __init__(self, home: Path, concurrency: int) -> None:
        self._home, self._concurrency = home, concurrency
        self._known: dict[bytes, RemoteWorker] = {}
        self._users: dict[RemoteWorker, int] = {}

    async def take(self, submission: Submission, access: GatewayAccess) -> RemoteWorker:
        """The worker for a trial; SandboxError if there can be none here."""
        shared = submission.model_dump_json(include={"loop", "run", "verify", "passed"})
        key = orjson.dumps([shared, access.url, access.token])
        if key not in self._known:
            made = await asyncio.to_thread(self._made, submission)
            self._known.setdefault(key, made)  # unless somebody was faster
        worker = self._known[key] = self._known.pop(key)  # the latest is last
        self._users[worker] = self._users.get(worker, 0) + 1
        return worker

    def _made(self, submission: Submission) -> RemoteWorker:
        """A worker; it looks whether its sandbox can be had, which takes a while."""
        loop = submission.loop.model_copy(update={"concurrency": self._concurrency})
        return RemoteWorker(loop, self._home, run=submission.run, passed=submission.passed, verifies=submission.verify)

    async def give(self, worker: RemoteWorker) -> None:
        """A trial is done with it."""
        self._users[worker] -= 1
        idle = [(key, each) for key, each in self._known.items() if not self._users[each]]
        for key, each in idle[: max(0, len(idle) - _IDLE)]:
            del self._known[key], self._users[each]
            await each.close()

    async def close(self) -> None:
        """Let go of all of them."""
        for worker in self._known.values():
            await worker.close()
        self._known.clear()
