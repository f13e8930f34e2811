"""Runs commands and calls in Ray actors, one per trial in flight, which die with this process.

An actor holds its resources for the whole run, so that no trial waits for a new process, and the next run of the
scenario uses it again. A trial whose actor dies is lost; the next one gets a new actor, on any node that has room.
"""

import asyncio
import logging
import pickle
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from loopwright.core.errors import ClusterError, LaunchError, storage
from loopwright.execution.base import CallExecutor, CallResult, Command, Completion, Executor, FunctionCall, OnStart
from loopwright.execution.ray.connection import RayConnection, find_shortage
from loopwright.execution.ray.host import HostAnswer, HostSettings, Package, TrialHost
from loopwright.execution.ray.options import RayOptions
from loopwright.execution.ray.transfer import pack, unpack

log = logging.getLogger(__name__)
_PATIENCE_S = 30.0
"""After how long without any actor we say that the cluster has no room."""
_POLL_S = 0.5
_MAX_STARTS = 8
"""How many actors may die in a row before one was ready."""
_Actor: Any = ray.remote(concurrency_groups={"control": 1})(TrialHost)  # type: ignore[call-overload]


@dataclass(eq=False)
class Host:
    """An actor that is ready for trials."""

    actor: Any
    node: str
    shares_files: bool
    last: Command | FunctionCall | None = None
    """The last trial that it was given."""

    def message(self, key: str, work: Command | FunctionCall) -> bytes:
        """A trial, or what differs from the last one: most of it is the same in the whole run."""
        last, self.last = self.last, work
        if last is None:
            return pickle.dumps((key, work))
        # Arguments always: 1, 1.0 and True are equal.
        changes = {name: new for name, new in vars(work).items() if name == "arguments" or new != getattr(last, name)}
        return pickle.dumps((key, changes))


class HostPool:
    """Up to `parallel` actors, started when they are needed. A trial gets whichever is free first."""

    def __init__(self, system: RayOptions, directory: Path, gpus: int) -> None:
        self._system, self._request = system, dict(system.request(gpus))
        settings = HostSettings(
            files=system.files,
            output_bytes=system.output,
            grace_s=system.grace_s,
            artifact_bytes=system.artifacts,
            gpus=self._request.get("GPU", 0),
        )
        self._settings, self._key = settings, (*self._request.items(), system.strategy, settings)
        self._connection = RayConnection(None, system.address, system.runtime_env, self._key)
        token = directory / f".ray-{uuid.uuid4().hex}"
        with storage(token):
            directory.mkdir(parents=True, exist_ok=True)
            token.touch()
        self._token = token
        self._hosts: set[Host] = set()
        """All actors that are ready: idle, or in use."""
        self._idle: list[Host] = []
        self._waiting: deque[asyncio.Future[Host]] = deque()
        self._busy: dict[Host, asyncio.Future[Any]] = {}
        self._failed_starts = 0
        self._starting: set[asyncio.Task[Host]] = set()
        self._module_packs: dict[tuple[Path, ...], tuple[bytes, ...]] = {}

    async def use(self, work: Command | FunctionCall, on_start: OnStart, package: Callable[[], Package]) -> Any:
        """Run a command or a call on an actor; returns how it ended."""
        host = await self._acquire()
        key = uuid.uuid4().hex
        try:
            on_start(f"ray:{host.node}:{key}")
            files = () if host.shares_files else (package(),)
            done = asyncio.wrap_future(host.actor.use.remote(host.message(key, work), *files).future())
            self._busy[host] = done
            answer = await self._wait(host, key, done)
        except RayActorError as error:
            self._drop(host)
            cause = str(error).strip().splitlines()[-1][:300]
            raise LaunchError(f"the trial was lost with its Ray actor on {host.node}: {cause}", infra=True) from error
        except RayTaskError as error:
            if isinstance(error.cause, OSError):
                raise LaunchError(f"Ray node {host.node}: {error.cause}", infra=True) from error
            raise
        finally:
            self._busy.pop(host, None)
            self._release(host)
        if answer.error:
            where = f"Ray node {host.node}: " if answer.infra else ""
            raise LaunchError(f"{where}{answer.error}", infra=answer.infra)
        if answer.files:
            with storage(work.directory):
                unpack(answer.files, work.directory)
        return answer.value

    async def _wait(self, host: Host, key: str, done: "asyncio.Future[bytes]") -> HostAnswer:
        """The answer of an actor. If cancelled, end the trial there first."""
        try:
            answer: HostAnswer = pickle.loads(await asyncio.shield(done))  # noqa: S301  From our own actor.
        except asyncio.CancelledError:
            if not done.done():
                host.actor.cancel.remote(key)
            while not done.done():
                with suppress(asyncio.CancelledError):  # a second one changes nothing
                    await asyncio.wait([done])
            if isinstance(done.exception(), RayActorError):
                self._drop(host)
            raise
        if answer.cancelled:
            raise LaunchError(f"the trial was ended on Ray node {host.node}", infra=True, cancelled=True)
        return answer

    def modules(self, paths: tuple[Path, ...]) -> tuple[bytes, ...]:
        """The Python files of a function's path, for nodes that do not see them."""
        if paths not in self._module_packs:
            limit = self._system.artifacts
            self._module_packs[paths] = tuple(pack(path, limit, suffixes=(".py",)) for path in paths)
        return self._module_packs[paths]

    def kill_all(self) -> None:
        """End all trials now."""
        for host in list(self._busy):
            host.actor.kill_all.remote()

    async def close(self) -> None:
        """End all trials and actors."""
        self.kill_all()
        if self._busy:
            await asyncio.wait(list(self._busy.values()))
        for task in list(self._starting):
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        hosts, self._idle = self._idle, []
        closing = [asyncio.wrap_future(host.actor.close.remote().future()) for host in hosts]
        if closing:
            await asyncio.wait(closing, timeout=self._settings.grace_s + 5)
            for future in closing:
                future.cancel()
        for host, future in zip(hosts, closing, strict=True):
            if future.cancelled() or future.exception() is not None:
                ray.kill(host.actor)
            else:
                self._connection.keep_actor(host.actor, self._key)
        self._token.unlink(missing_ok=True)
        self._connection.close()

    # -- actors -------------------------------------------------------------------------------------------------

    async def _acquire(self) -> Host:
        if self._idle:
            return self._idle.pop()
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
        # Last in, first out: the most recently used actor has a warm worker.
        self._idle.append(host)

    def _drop(self, host: Host) -> None:
        """Forget an actor that is dead; one that only seems so is killed."""
        self._hosts.discard(host)
        with suppress(Exception):
            ray.kill(host.actor)

    def _start_missing(self) -> None:
        """Start as many actors as there are trials that wait, and room for."""
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
        elif isinstance(error, RayActorError) and (failures := self._failed_starts) < _MAX_STARTS:
            self._failed_starts = failures + 1
            self._start_missing()  # its node was lost meanwhile
        else:
            if isinstance(error, RayActorError):
                cause = str(error).strip().splitlines()[-1]
                error = ClusterError(f"no trial can run on this Ray cluster: its actors die as they start: {cause}")
            while self._waiting:
                if not (future := self._waiting.popleft()).done():
                    future.set_exception(error)

    async def _start(self) -> Host:
        """Start an actor and wait until it is ready. ClusterError if no node can ever have it."""
        actor = self._connection.take_actor() or await self._create()
        ready = asyncio.wrap_future(actor.start.remote(str(self._token)).future())
        try:
            done, _ = await asyncio.wait([ready], timeout=_PATIENCE_S)
            if not done and not self._hosts:
                log.warning("waiting for room on the Ray cluster: each trial takes %s", self._request)
            return Host(actor, *await asyncio.shield(ready))
        except RayTaskError as error:
            cause = str(error.cause or error).strip().splitlines()[-1]
            raise ClusterError(f"no trial can run on this Ray cluster: {cause}.") from error
        except BaseException:
            with suppress(Exception):
                ray.kill(actor)
            ready.add_done_callback(lambda future: future.cancelled() or future.exception())
            raise

    async def _create(self) -> Any:
        await self._check_size()
        amounts = dict(self._request)
        return _Actor.options(
            num_cpus=amounts.pop("CPU", 0),
            num_gpus=amounts.pop("GPU", 0),
            memory=amounts.pop("memory", None),
            resources=amounts,
            scheduling_strategy="SPREAD" if self._system.strategy == "SPREAD" else "DEFAULT",
            max_restarts=0,
        ).remote(self._settings)

    async def _check_size(self) -> None:
        """Wait until a node is large enough for an actor, free or not."""
        for _ in range(int(self._system.wait_s / _POLL_S) + 1):
            if not (shortage := find_shortage(self._request)):
                return
            await asyncio.sleep(_POLL_S)
        raise ClusterError(shortage)


class RayExecutor(Executor):
    """Runs up to `parallel` commands at a time, each on a node of its cluster."""

    def __init__(self, system: RayOptions, directory: Path, gpus: int = 0) -> None:
        self._pool, self._artifact_bytes = HostPool(system, directory, gpus), system.artifacts

    async def run(self, command: Command, on_start: OnStart) -> Completion:
        def package() -> Package:
            return Package(pack(command.directory, self._artifact_bytes))

        completion: Completion = await self._pool.use(command, on_start, package)
        return completion

    def kill_all(self) -> None:
        self._pool.kill_all()

    async def close(self) -> None:
        await self._pool.close()


class RayCalls(CallExecutor):
    """Makes up to `parallel` calls at a time, in workers that stay warm between calls."""

    def __init__(self, system: RayOptions, directory: Path, gpus: int = 0) -> None:
        self._pool, self._artifact_bytes = HostPool(system, directory, gpus), system.artifacts

    async def call(self, call: FunctionCall, on_start: OnStart) -> CallResult:
        def package() -> Package:
            return Package(pack(call.directory, self._artifact_bytes), self._pool.modules(call.path))

        call = replace(call, on_report=None)
        result: CallResult = await self._pool.use(call, on_start, package)
        return result

    def kill_all(self) -> None:
        self._pool.kill_all()

    async def close(self) -> None:
        await self._pool.close()
