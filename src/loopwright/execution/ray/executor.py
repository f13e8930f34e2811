"""Runs commands and calls on Ray. Each trial in flight has a host: a task on a node, which dies with this process.

A host holds its resources for the whole run, so that no trial waits for a new process. Ray places hosts and ends them;
trials go over a channel. A trial whose host is lost is lost; the next one gets a new host, on any node that has room.
"""

import asyncio
import itertools
import logging
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import LocalRayletDiedError, NodeDiedError, OutOfMemoryError, RayTaskError, WorkerCrashedError

from loopwright.core.errors import ClusterError, LaunchError, storage
from loopwright.execution.base import CallExecutor, CallResult, Command, Completion, Executor, FunctionCall, OnStart
from loopwright.execution.ray.channel import ChannelUser, HostChannel, Listener
from loopwright.execution.ray.connection import RayConnection, find_shortage
from loopwright.execution.ray.host import HostSettings, serve
from loopwright.execution.ray.messages import Blobs, HostAnswer, Package, Work, read_answer, trial_message
from loopwright.execution.ray.options import RayOptions
from loopwright.execution.ray.transfer import pack, unpack

log = logging.getLogger(__name__)
_PATIENCE_S = 30.0
"""After how long without any host we say that the cluster has no room."""
_POLL_S = 0.5
_MAX_STARTS = 8
"""How many hosts may die in a row before one was ready."""
_EXPLAIN_S = 5.0
"""How long Ray may take to say why a host is lost."""
_task: Any = ray.remote(max_retries=0, max_calls=0)(serve)


class HostLost(ConnectionError):
    """A host has disconnected, or its task has ended."""


_DEATHS = HostLost, NodeDiedError, WorkerCrashedError, OutOfMemoryError, LocalRayletDiedError


class Host(ChannelUser):
    """The driver's view of a host. It runs one trial at a time."""

    node: str
    shares_files: bool
    _channel: HostChannel

    def __init__(self, listener: Listener, submit: Callable[[bytes], Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self.is_lost = False
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.answer: asyncio.Future[HostAnswer] | None = None
        """How its trial ends."""
        self._last: Work | None = None
        self._task = submit(listener.expect(self))
        self.ended: asyncio.Future[None] = asyncio.wrap_future(self._task.future())
        self.ended.add_done_callback(lambda _: self.on_end())

    def use(self, key: str, work: Work, package: Package | None) -> "asyncio.Future[HostAnswer]":
        """Start a trial."""
        self._channel.send(*trial_message(key, work, self._last, package))
        self._last = work
        return self.await_answer()

    def await_answer(self) -> "asyncio.Future[HostAnswer]":
        """How its trial ends; again, if the last future was cancelled. HostLost if the host is lost meanwhile."""
        self.answer = self._loop.create_future()
        if self.is_lost:
            self.on_end()
        return self.answer

    def send(self, **message: str) -> None:
        """Send a message that is not about a new trial; safe in a signal handler."""
        if not self.is_lost:
            self._loop.call_soon_threadsafe(self._channel.send, message)

    def kill(self) -> None:
        """End the task without its help, if it has not ended."""
        if not self.ended.done():
            ray.cancel(self._task, force=True)
            self.ended.cancel()

    async def explain(self) -> BaseException | None:
        """Why the host was lost, if Ray knows."""
        await asyncio.wait([self.ended], timeout=_EXPLAIN_S)
        return self.ended.exception() if self.ended.done() and not self.ended.cancelled() else None

    def on_connect(self, channel: HostChannel) -> None:
        self._channel = channel

    def on_message(self, message: Mapping[str, Any], blobs: Blobs) -> None:
        if not self.ready.done():
            self.node, self.shares_files = message["node"], message["shares_files"]
            self.ready.set_result(None)
        elif self.answer is not None and not self.answer.done():
            self.answer.set_result(read_answer(message, blobs))

    def on_end(self, error: Exception | None = None) -> None:
        self.is_lost = True
        reason = "it disconnected" if error is None else f"it sent what cannot be read: {error}"
        for future in (self.ready, self.answer):
            if future is not None and not future.done():
                future.set_exception(HostLost(reason))
                future.exception()  # it may be that nobody asks


class RayExecutor(Executor, CallExecutor):
    """Up to `parallel` hosts, started when they are needed, for commands and calls. A trial gets a free one, the last
    one used first; workers of functions stay warm between calls.
    """

    def __init__(self, system: RayOptions, directory: Path, gpus: int = 0) -> None:
        self._system, self._request = system, dict(system.request(gpus))
        self._settings = HostSettings(
            files=system.files,
            output_bytes=system.output,
            grace_s=system.grace_s,
            artifact_bytes=system.artifacts,
            gpus=self._request.get("GPU", 0),
        )
        self._connection = RayConnection(None, system.address, system.runtime_env)
        self._listener: Listener | None = None
        self._run, self._numbers = uuid.uuid4().hex, itertools.count(1)
        """What each trial's key is made of."""
        token = directory / f".ray-{self._run}"
        with storage(token):
            directory.mkdir(parents=True, exist_ok=True)
            token.touch()
        self._token = token
        self._hosts: set[Host] = set()
        """All hosts that are ready: idle, or in use."""
        self._idle: list[Host] = []
        self._busy: set[Host] = set()
        self._waiting: deque[asyncio.Future[Host]] = deque()
        self._failed_starts = 0
        self._starting: set[asyncio.Task[Host]] = set()
        self._module_packs: dict[tuple[Path, ...], tuple[bytes, ...]] = {}

    async def run(self, command: Command, on_start: OnStart) -> Completion:
        completion: Completion = await self._use(command, on_start)
        return completion

    async def call(self, call: FunctionCall, on_start: OnStart) -> CallResult:
        result: CallResult = await self._use(call, on_start)
        return result

    async def _use(self, work: Work, on_start: OnStart) -> Any:
        """Run a command or a call on a host; returns how it ended."""
        host = await self._acquire()
        key = f"{self._run}-{next(self._numbers)}"
        try:
            on_start(f"ray:{host.node}:{key}")
            self._busy.add(host)
            answer = await self._wait(
                host, key, host.use(key, work, None if host.shares_files else self._package(work))
            )
        except HostLost as lost:
            cause = await host.explain()
            self._drop(host)
            if isinstance(cause, RayTaskError):
                raise cause from None
            reason = _last_line(cause or lost)
            raise LaunchError(f"the trial was lost with its host on {host.node}: {reason}", infra=True) from cause
        finally:
            self._busy.discard(host)
            self._release(host)
        if answer.cancelled:
            raise LaunchError(f"the trial was ended on Ray node {host.node}", infra=True, cancelled=True)
        if answer.error:
            where = f"Ray node {host.node}: " if answer.infra else ""
            raise LaunchError(f"{where}{answer.error}", infra=answer.infra)
        if answer.files:
            with storage(work.directory):
                unpack(answer.files, work.directory)
        return answer.value

    async def _wait(self, host: Host, key: str, answer: "asyncio.Future[HostAnswer]") -> HostAnswer:
        """The answer of a host. If cancelled, end the trial there first."""
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.cancelled():
                answer = host.await_answer()
                host.send(do="cancel", key=key)
            while not answer.done():
                with suppress(asyncio.CancelledError):  # a second one changes nothing
                    await asyncio.wait([answer])
            if answer.exception() is not None:
                self._drop(host)
            raise

    def _package(self, work: Work) -> Package:
        """The trial's directory, and the Python files of a function's path, for nodes that do not see them."""
        limit, paths = self._system.artifacts, work.path if isinstance(work, FunctionCall) else ()
        if paths not in self._module_packs:
            self._module_packs[paths] = tuple(pack(path, limit, suffixes=(".py",)) for path in paths)
        return Package(pack(work.directory, limit), self._module_packs[paths])

    def kill_all(self) -> None:
        for host in list(self._busy):
            host.send(do="kill")

    async def close(self) -> None:
        """End all trials and hosts."""
        self.kill_all()
        if answers := [host.answer for host in self._busy if host.answer is not None]:
            await asyncio.wait(answers)
        for task in list(self._starting):
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for host in self._hosts:
            host.send(do="close")
        if self._hosts:
            await asyncio.wait([host.ended for host in self._hosts], timeout=self._settings.grace_s + 5)
        for host in self._hosts:
            host.kill()
        if self._listener is not None:
            await self._listener.close()
        self._token.unlink(missing_ok=True)
        self._connection.close()

    # -- hosts --------------------------------------------------------------------------------------------------

    async def _acquire(self) -> Host:
        while self._idle:
            if not (host := self._idle.pop()).is_lost:
                return host
            self._drop(host)
        future: asyncio.Future[Host] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._start_missing()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._release(future.result())
            raise

    def _release(self, host: Host) -> None:
        if host not in self._hosts:
            self._start_missing()
            return
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(host)
                return
        # Last in, first out: the most recently used host has a warm worker.
        self._idle.append(host)

    def _drop(self, host: Host) -> None:
        """Forget a host that is lost, and end it if it is not."""
        self._hosts.discard(host)
        host.kill()

    def _start_missing(self) -> None:
        """Start as many hosts as there are trials that wait, and room for."""
        waiting = sum(not future.done() for future in self._waiting)
        room = self._system.parallel - len(self._hosts)
        for _ in range(min(waiting, room) - len(self._starting)):
            task = asyncio.ensure_future(self._start())
            self._starting.add(task)
            task.add_done_callback(self._started)

    def _started(self, task: "asyncio.Task[Host]") -> None:
        self._starting.discard(task)
        if task.cancelled():
            return
        if (error := task.exception()) is None:
            self._failed_starts = 0
            self._hosts.add(task.result())
            self._release(task.result())
        elif isinstance(error, _DEATHS) and (failures := self._failed_starts) < _MAX_STARTS:
            self._failed_starts = failures + 1
            self._start_missing()  # its node was lost meanwhile
        else:
            if type(error) is not ClusterError:  # Ray's copy of one is a subclass, with a traceback as its text
                error = ClusterError(f"no trial can run on this Ray cluster: {_last_line(error)}")
            while self._waiting:
                if not (future := self._waiting.popleft()).done():
                    future.set_exception(error)

    async def _start(self) -> Host:
        """Start a host and wait until it is ready. ClusterError if no node can ever have it."""
        await self._check_size()
        amounts = dict(self._request)
        task = _task.options(
            num_cpus=amounts.pop("CPU", 0),
            num_gpus=amounts.pop("GPU", 0),
            memory=amounts.pop("memory", None),
            resources=amounts,
            scheduling_strategy="SPREAD" if self._system.strategy == "SPREAD" else "DEFAULT",
            name="loopwright trials",
        )
        if self._listener is None:
            self._listener = Listener(
                ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
                self._system.artifacts,
            )
        where, token = self._listener.address, str(self._token)
        host = Host(self._listener, lambda key: task.remote(self._settings, where, key, token))
        try:
            done, _ = await asyncio.wait([host.ready], timeout=_PATIENCE_S)
            if not done and not self._hosts:
                log.warning("waiting for room on the Ray cluster: each trial takes %s", self._request)
            await asyncio.shield(host.ready)
        except HostLost as lost:
            cause = await host.explain()
            host.kill()
            raise cause or lost from None
        except BaseException:
            host.kill()
            raise
        return host

    async def _check_size(self) -> None:
        """Wait until a node is large enough for a host, free or not."""
        for _ in range(int(self._system.wait_s / _POLL_S) + 1):
            if not (shortage := find_shortage(self._request)):
                return
            await asyncio.sleep(_POLL_S)
        raise ClusterError(shortage)


def _last_line(error: BaseException) -> str:
    """What an error of Ray says in the end; before that is a traceback."""
    text = str(getattr(error, "cause", None) or error).strip()
    return text.splitlines()[-1][:300] if text else type(error).__name__
