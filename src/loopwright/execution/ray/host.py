"""The node's side: an actor that runs commands and calls as local processes, and ends what it started."""

import asyncio
import ctypes
import os
import pickle
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from loopwright.core.errors import LaunchError, StorageError
from loopwright.execution.base import CallResult, Command, Completion, FunctionCall
from loopwright.execution.files import remove
from loopwright.execution.local.executor import LocalExecutor
from loopwright.execution.local.processes import MARKER_VARIABLE
from loopwright.execution.local.reaper import Reaper
from loopwright.execution.local.worker_pool import WorkerPool
from loopwright.execution.ray.transfer import Stamps, pack, stamps, unpack


@dataclass(frozen=True)
class HostSettings:
    """How an actor runs trials; actors with the same settings are used for several runs."""

    files: str
    output_bytes: int
    grace_s: float
    artifact_bytes: int
    gpus: float


@dataclass(frozen=True)
class Package:
    """The files that a trial needs and that its node does not see."""

    directory: bytes = b""
    modules: tuple[bytes, ...] = ()
    """The Python files of each entry of a call's path."""


@dataclass(frozen=True)
class HostAnswer:
    """How a command or a call ended on a node."""

    value: Completion | CallResult | None = None
    files: bytes = b""
    """What it has written, where the node does not share the driver's file system."""
    error: str = ""
    infra: bool = False
    cancelled: bool = False


class HostRunner:
    """Runs one trial at a time on the actor's event loop, for one run after another."""

    _executor: LocalExecutor
    _pool: WorkerPool
    _reaper: Reaper

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._key = ""
        self._task: asyncio.Task[Any] | None = None
        self._cancelled: set[str] = set()
        self._last: Command | FunctionCall

    async def start(self, token: str) -> tuple[str, bool]:
        """Prepare for a run."""
        _shield_children()
        settings = self._settings
        self._executor = LocalExecutor(output_bytes=settings.output_bytes, grace_s=settings.grace_s)
        self._pool = WorkerPool(1, output_bytes=settings.output_bytes, grace_s=settings.grace_s)
        self._reaper = Reaper("ray", detached=True)
        self._reaper.start()
        self._cancelled = set()
        sees = settings.files == "shared" or (
            settings.files == "auto" and Path(token).exists()  # noqa: ASYNC240  A local look.
        )
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return address, sees

    async def use(self, key: str, work: Any, package: Package | None) -> HostAnswer:
        """Run a command or call a function: a whole one, or what differs from the last one."""
        changes = work if isinstance(work, dict) else {"environment": work.environment}
        if "environment" in changes:
            changes["environment"] = self._with_devices(changes["environment"])
        # The same environment as long as the driver sends no other: workers with another one are not used again.
        self._last = local = replace(self._last if work is changes else work, **changes)
        if isinstance(local, FunctionCall):
            return await self._call(key, local, package)
        return await self._run(key, local, package)

    async def _run(self, key: str, command: Command, package: Package | None) -> HostAnswer:
        before = None
        if package is not None:
            directory = self._reaper.directory / key
            before = self._unpack(package, directory)
            here = str(command.directory), str(directory)
            command = replace(
                command,
                directory=directory,
                stdout=directory / command.stdout.relative_to(command.directory),
                stderr=directory / command.stderr.relative_to(command.directory),
                argv=tuple(word.replace(*here) for word in command.argv),
                environment={name: value.replace(*here) for name, value in command.environment.items()},
            )
        return await self._answer(key, self._executor.run(command, lambda _: None), before)

    async def _call(self, key: str, call: FunctionCall, package: Package | None) -> HostAnswer:
        before = None
        if package is not None:
            directory = self._reaper.directory / key
            before = self._unpack(package, directory)
            if not before:
                directory.rmdir()  # the worker makes it
            modules = [self._reaper.directory / f"modules-{number}" for number in range(len(package.modules))]
            for data, path in zip(package.modules, modules, strict=True):
                if not path.exists():
                    unpack(data, path)
            call = replace(call, directory=directory, path=tuple(modules))
        return await self._answer(key, self._pool.call(call, lambda _: None), before)

    def cancel(self, key: str) -> None:
        """End a trial with all its processes; its `use` then answers."""
        self._cancelled.add(key)
        if self._task is not None and key == self._key:
            self._task.cancel()

    def kill_all(self) -> None:
        """End all processes now."""
        self._executor.kill_all()
        self._pool.kill_all()

    async def close(self) -> None:
        """End the workers of a run, and delete what was copied here."""
        await self._executor.close()
        await self._pool.close()
        self._reaper.close()

    def _unpack(self, package: Package, directory: Path) -> Stamps:
        unpack(package.directory, directory)
        return stamps(directory)

    def _with_devices(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment with the GPUs that Ray gave to this actor, and with our reaper's marker."""
        marker = f"{environment.get(MARKER_VARIABLE, '')}:{self._reaper.marker}.0"
        variables = {**environment, MARKER_VARIABLE: marker}
        if self._settings.gpus:
            devices = ",".join(map(str, ray.get_runtime_context().get_accelerator_ids().get("GPU", ())))
            variables |= {"ROCR_VISIBLE_DEVICES": devices}
            if not os.path.exists("/dev/kfd"):  # noqa: PTH110  AMD's runtime would apply both, one after the other.
                variables["CUDA_VISIBLE_DEVICES"] = devices
        return variables

    async def _answer(self, key: str, work: Any, before: Stamps | None) -> HostAnswer:
        if key in self._cancelled:
            work.close()
            return HostAnswer(cancelled=True)
        self._key, self._task = key, asyncio.current_task()
        try:
            value = await work
            if before is None:
                return HostAnswer(value)
            return HostAnswer(value, pack(self._reaper.directory / key, self._settings.artifact_bytes, before=before))
        except asyncio.CancelledError:
            return HostAnswer(cancelled=True)
        except LaunchError as error:
            return HostAnswer(error=str(error), infra=error.infra)
        except StorageError as error:
            return HostAnswer(error=str(error), infra=True)
        finally:
            self._task = None
            self._cancelled.discard(key)
            if before is not None:
                with suppress(OSError):
                    remove(self._reaper.directory / key)


class TrialHost:
    """The actor. Dies with its driver.

    Its methods are not coroutines, which take Ray twice the time. `cancel` and `kill_all` have a thread of their own.
    """

    def __init__(self, settings: HostSettings) -> None:
        self._runner, self._loop = HostRunner(settings), asyncio.new_event_loop()

    def start(self, token: str) -> tuple[str, bool]:
        """Prepare for a run. Returns where it runs, and whether it sees the run's directory: the token is in it."""
        return self._loop.run_until_complete(self._runner.start(token))

    def use(self, data: bytes, package: Package | None = None) -> bytes:
        """Run a command or call a function; bytes both ways, which take Ray less time than objects."""
        key, work = pickle.loads(data)  # noqa: S301  From our own driver.
        return pickle.dumps(self._loop.run_until_complete(self._runner.use(key, work, package)))

    @ray.method(concurrency_group="control")
    def cancel(self, key: str) -> None:
        """End a trial with all its processes; its `use` then answers."""
        self._loop.call_soon_threadsafe(self._runner.cancel, key)

    @ray.method(concurrency_group="control")
    def kill_all(self) -> None:
        """End all processes now."""
        self._loop.call_soon_threadsafe(self._runner.kill_all)

    def close(self) -> None:
        """End the workers of a run, and delete what was copied here."""
        self._loop.run_until_complete(self._runner.close())


def _shield_children() -> None:
    """Have trials not inherit that Ray's workers block and ignore SIGINT.

    Python sets handlers in the main thread only, where actors do not run; `abs` is a C function that does no harm.
    """
    libc, numbers = ctypes.CDLL(None), (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    for number in numbers:
        if signal.getsignal(number) is signal.SIG_IGN:
            libc.signal(int(number), ctypes.cast(libc.abs, ctypes.c_void_p))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
