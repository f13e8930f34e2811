"""The node's side: a Ray task that runs commands and calls as local processes, and ends what it started."""

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from loopwright.core.errors import ClusterError, LaunchError, StorageError
from loopwright.execution.base import CallResult, Completion, FunctionCall
from loopwright.execution.files import remove
from loopwright.execution.local.executor import LocalExecutor
from loopwright.execution.local.processes import MARKER_VARIABLE
from loopwright.execution.local.reaper import Reaper
from loopwright.execution.local.worker_pool import WorkerPool
from loopwright.execution.ray.channel import ChannelUser, HostChannel, connect
from loopwright.execution.ray.messages import Blobs, HostAnswer, Package, Work, answer_message, read_trial
from loopwright.execution.ray.transfer import Stamps, pack, stamps, unpack


@dataclass(frozen=True)
class HostSettings:
    """How a host runs trials."""

    files: str
    output_bytes: int
    grace_s: float
    artifact_bytes: int
    gpus: float


class TrialHost(ChannelUser):
    """Runs one trial at a time for a driver, until the driver closes the connection."""

    _channel: HostChannel

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._executor = LocalExecutor(output_bytes=settings.output_bytes, grace_s=settings.grace_s)
        self._pool = WorkerPool(1, output_bytes=settings.output_bytes, grace_s=settings.grace_s)
        self._reaper = Reaper("ray", detached=True)
        self._key = ""
        self._last: Work | None = None
        self._trial: asyncio.Task[HostAnswer] | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(self, address: tuple[str, int], key: bytes, token: str) -> None:
        """Connect to the driver, and run trials. The driver has put the token into the run's directory."""
        node, files = ray.util.get_node_ip_address(), self._settings.files  # type: ignore[no-untyped-call]
        try:
            await connect(address, key, self, self._settings.artifact_bytes)
        except OSError as error:
            reason = error.strerror or str(error) or "no answer"
            raise ClusterError(f"{node} cannot connect to the driver at {address[0]}:{address[1]}: {reason}") from error
        try:
            sees_token = files == "auto" and Path(token).exists()  # noqa: ASYNC240  A local look.
            self._channel.send({"node": node, "shares_files": files == "shared" or sees_token})
            self._reaper.start()  # while the driver prepares the first trial
            await self._ended
        finally:
            await self._executor.close()
            await self._pool.close()
            self._reaper.close()
            self._channel.close()

    # -- messages of the driver ---------------------------------------------------------------------------------

    def on_connect(self, channel: HostChannel) -> None:
        self._channel = channel

    def on_message(self, message: Mapping[str, Any], blobs: Blobs = ()) -> None:
        match message["do"]:
            case "use":
                self._use(message, blobs)
            case "cancel" if message["key"] == self._key and self._trial is not None:
                self._trial.cancel()  # it is then answered
            case "kill":
                self._executor.kill_all()
                self._pool.kill_all()
            case "close" if not self._ended.done():
                self._ended.set_result(None)

    def _use(self, message: Mapping[str, Any], blobs: Blobs) -> None:
        """Start a command or a call."""
        work, package = read_trial(message, blobs, self._last)
        # The same environment as long as the driver sends no other: workers with another one are not used again.
        if "environment" in message["fields"]:
            work = replace(work, environment=self._with_devices(work.environment))
        self._last, self._key = work, message["key"]
        self._trial = asyncio.ensure_future(self._answer(work, package))
        self._trial.add_done_callback(self._on_answer)

    def on_end(self, error: Exception | None = None) -> None:
        """The driver is gone, or we are, or it has sent what we cannot read."""
        self.on_message({"do": "kill"})
        if error is not None and not self._ended.done():
            self._ended.set_exception(error)
        self.on_message({"do": "close"})

    # -- one trial ----------------------------------------------------------------------------------------------

    async def _answer(self, work: Work, package: Package | None) -> HostAnswer:
        try:
            if package is None:
                return HostAnswer(await self._run(work))
            return await self._run_packed(work, package, self._reaper.directory / self._key)
        except LaunchError as error:
            return HostAnswer(error=str(error), infra=error.infra)
        except (StorageError, OSError) as error:
            return HostAnswer(error=str(error), infra=True)

    def _on_answer(self, trial: "asyncio.Task[HostAnswer]") -> None:
        self._trial = None
        if self._ended.done():
            return
        if not trial.cancelled() and (error := trial.exception()) is not None:
            self._ended.set_exception(error)  # Ray gives it to the driver
            return
        answer = HostAnswer(cancelled=True) if trial.cancelled() else trial.result()
        try:
            self._channel.send(*answer_message(answer))
        except LaunchError as error:
            self._channel.send(*answer_message(HostAnswer(error=str(error))))

    async def _run(self, work: Work) -> Completion | CallResult:
        if isinstance(work, FunctionCall):
            return await self._pool.call(work, _ignore)
        return await self._executor.run(work, _ignore)

    async def _run_packed(self, work: Work, package: Package, directory: Path) -> HostAnswer:
        """Run a trial in a directory of this node, and return what it wrote there."""
        try:
            unpack(package.directory, directory)
            before = stamps(directory)
            value = await self._run(self._moved(work, package, directory, before))
            if isinstance(work, FunctionCall) and _has_only_parameters(directory, work.parameters):
                return HostAnswer(value)  # a call that left nothing needs no directory
            return HostAnswer(value, pack(directory, self._settings.artifact_bytes, before=before))
        finally:
            with suppress(OSError):
                remove(directory)

    def _moved(self, work: Work, package: Package, directory: Path, before: Stamps) -> Any:
        """A trial as this node runs it."""
        if isinstance(work, FunctionCall):
            if not before:
                directory.rmdir()  # the worker makes it
            modules = [self._reaper.directory / f"modules-{number}" for number in range(len(package.modules))]
            for data, path in zip(package.modules, modules, strict=True):
                if not path.exists():
                    unpack(data, path)
            return replace(work, directory=directory, path=tuple(modules))
        here = str(work.directory), str(directory)
        return replace(
            work,
            directory=directory,
            stdout=directory / work.stdout.relative_to(work.directory),
            stderr=directory / work.stderr.relative_to(work.directory),
            argv=tuple(word.replace(*here) for word in work.argv),
            environment={name: value.replace(*here) for name, value in work.environment.items()},
        )

    def _with_devices(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment with the GPUs that Ray gave to this task, and with our reaper's marker."""
        marker = f"{environment.get(MARKER_VARIABLE, '')}:{self._reaper.marker}.0"
        variables = {**environment, MARKER_VARIABLE: marker}
        if self._settings.gpus:
            devices = ",".join(map(str, ray.get_runtime_context().get_accelerator_ids().get("GPU", ())))
            variables |= {"ROCR_VISIBLE_DEVICES": devices}
            if not os.path.exists("/dev/kfd"):  # noqa: PTH110  AMD's runtime would apply both, one after the other.
                variables["CUDA_VISIBLE_DEVICES"] = devices
        return variables


def _has_only_parameters(directory: Path, parameters: bytes) -> bool:
    file = directory / "parameters.json"
    return stamps(directory).keys() == {file.name} and file.read_bytes() == parameters


def _ignore(handle: str) -> None:
    """The driver has recorded the trial already."""


def serve(settings: HostSettings, address: tuple[str, int], key: bytes, token: str) -> None:
    """The task: run trials for the driver at this address until it disconnects or dies."""

    async def main() -> None:
        await TrialHost(settings).serve(address, key, token)

    with _signals_not_ignored():
        asyncio.run(main())


@contextmanager
def _signals_not_ignored() -> Iterator[None]:
    """Have trials not inherit that Ray's workers block and ignore signals."""
    numbers = signal.SIGINT, signal.SIGHUP, signal.SIGQUIT
    ignored = [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)  # unlike an ignored signal, not inherited
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
