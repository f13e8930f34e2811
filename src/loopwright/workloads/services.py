"""Services: programs such as a database that run beside a trial's command, in its slot, and end with it.

A service is started with the trial's arguments, and the trial begins when it is ready. With `reuse`, it stays for the
next trial of its slot that has the same arguments.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import regex

from loopwright.core.errors import LaunchError, storage
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.trial import Result, key_of
from loopwright.execution.base import Command, Completion, Executor, Slot, SlotPool
from loopwright.execution.local.process_tree import signal_name
from loopwright.workloads.base import CommandTemplate, Job, last_lines
from loopwright.workloads.command_config import ServiceConfig

_POLL_S = 0.01, 0.1
_PROBE_S = 2.0
_MATCH_S = 1.0
_SEARCHED_BYTES = 1 << 20
_LAST_WORDS_S = 0.2
"""How long a failed command is given the benefit of the doubt: its service may be ending as well."""


class ServiceFailed(Exception):
    """A trial that cannot run because of a service."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.reason)
        self.result = result


@dataclass(eq=False)
class RunningService:
    """A service that was started, and its log."""

    config: ServiceConfig
    key: str
    """Its arguments, apart from those of the slot."""
    task: "asyncio.Task[Completion]"
    stdout: Path
    stderr: Path
    handle: str = ""
    """Identifies its process, once it runs."""

    def failure(self, when: str) -> Result:
        """The result of a trial during which the service ended."""
        try:
            completion = self.task.result()
        except LaunchError as error:
            outcome, fault = (Outcome.LOST, Fault.INFRA) if error.infra else (Outcome.CRASHED, None)
            return Result(outcome, reason=f"service {self.config.name!r}: {error}", fault=fault)
        ending = f"exit code {completion.exit_code}" if completion.signal is None else signal_name(completion.signal)
        reason = f"service {self.config.name!r} ended {when}: {ending}"
        if completion.exit_code == 0:
            reason += "; it must stay in the foreground"
        return Result(Outcome.CRASHED, reason=reason + self.log_end())

    def log_end(self) -> str:
        """The last lines of its log, for an error message."""
        lines = last_lines(self.stderr) or last_lines(self.stdout)
        return f"; its log ends with: {' | '.join(lines)}" if lines else ""

    async def stop(self) -> None:
        """End the service and everything it started."""
        self.task.cancel()
        await asyncio.wait([self.task])
        if not self.task.cancelled():
            self.task.exception()  # Nobody else asks for it.


class Services:
    """Starts the services of each trial, watches them, and keeps those that are reused, by slot."""

    def __init__(
        self,
        configs: Sequence[ServiceConfig],
        executor: Executor,
        slots: SlotPool,
        directory: Path,
        prepare: Callable[[Path, Job], None],
    ) -> None:
        self._configs, self._executor, self._slots = configs, executor, slots
        self._templates = [CommandTemplate(config.command) for config in configs]
        self._directory, self._prepare = directory, prepare
        self._kept: dict[int, list[RunningService]] = {}
        self._running: list[RunningService] = []
        self._started = 0

    async def start(
        self, job: Job, slot: Slot, environment: Mapping[str, str]
    ) -> tuple[Slot, Sequence[RunningService]]:
        """All services of a trial, ready. Raises ServiceFailed.

        The slot has other ports if something else uses its own.
        """
        services = self._kept.get(slot.number, [])
        keys = [key_of({n: v for n, v in job.arguments.items() if n in t.names}) for t in self._templates]
        if any(service.task.done() or service.key not in keys for service in services):
            await self.stop(services, job)
            services = []
        for service in services:
            self._link_log(service, job)
        if not services:
            slot = self._slots.with_free_ports(slot)
        arguments = {**slot.values, **job.arguments}
        started = list(services)
        try:
            for config, template, key in zip(self._configs, self._templates, keys, strict=True):
                if any(service.config is config for service in services):
                    continue
                probe = _Probe(config, arguments)
                if await probe.is_answered():
                    reason = f"service {config.name!r}: {probe.target} is in use by another process; use {{port}}"
                    raise ServiceFailed(Result(Outcome.CRASHED, reason=reason))
                service = self._launch(config, key, tuple(template.words(arguments)), job, slot, environment)
                started.append(service)
                await probe.wait(service)
        except BaseException:
            await self.finish(started, slot, job, is_usable=False)
            raise
        self._kept[slot.number] = [service for service in started if service.config.reuse]
        return slot, started

    async def watch(self, services: Iterable[RunningService]) -> Result:
        """Wait until one of them ends."""
        tasks = [service.task for service in services]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(service.failure("during the trial") for service in services if service.task.done())

    async def explain(self, result: Result, services: Sequence[RunningService]) -> Result:
        """The result of a command that has ended, or that of a service that failed before it or at the same time."""
        if result.outcome is not Outcome.OK:
            tasks = [service.task for service in services]
            await asyncio.wait(tasks, timeout=_LAST_WORDS_S, return_when=asyncio.FIRST_COMPLETED)
        ended = [service for service in services if service.task.done()]
        # A command may end its service, but not by a crash.
        crashed = [s for s in ended if s.task.exception() is not None or s.task.result().exit_code != 0]
        return crashed[0].failure("during the trial") if crashed else result

    async def finish(self, services: Iterable[RunningService], slot: Slot, job: Job, *, is_usable: bool) -> None:
        """End the services of a trial; also those that are reused, unless they are usable."""
        if not is_usable:
            self._kept.pop(slot.number, None)
        await self.stop([s for s in services if not (is_usable and s.config.reuse)], job)

    async def stop(self, services: Iterable[RunningService], job: Job | None = None) -> None:
        """End these services, at the same time."""
        services = list(services)
        await asyncio.gather(*(service.stop() for service in services))
        self._running = [service for service in self._running if service not in services]
        if services and job is not None:
            self._record(job)

    async def close(self) -> None:
        """End all services."""
        await self.stop(self._running)

    def _launch(
        self,
        config: ServiceConfig,
        key: str,
        argv: tuple[str, ...],
        job: Job,
        slot: Slot,
        environment: Mapping[str, str],
    ) -> RunningService:
        directory = job.directory
        if config.reuse:
            self._started += 1
            directory = self._directory / f"{config.name}-{job.trial}-{self._started}"
            with storage(directory):
                shutil.rmtree(directory, ignore_errors=True)  # left by an earlier process
                directory.mkdir(parents=True)
            self._prepare(directory, job)
        stdout, stderr = directory / f"{config.name}.stdout", directory / f"{config.name}.stderr"
        command = Command(
            argv=argv,
            directory=directory,
            environment=environment,
            stdout=stdout,
            stderr=stderr,
            # Another marker than the command's, whose end must not end the service.
            marker=f"{job.marker}.{config.name}",
            slot=slot,
        )

        def started(handle: str) -> None:
            service.handle = handle
            self._record(job)

        task = asyncio.ensure_future(self._executor.run(command, started))
        service = RunningService(config, key, task, stdout, stderr)
        self._running.append(service)
        if config.reuse:
            self._link_log(service, job)
        return service

    def _link_log(self, service: RunningService, job: Job) -> None:
        with storage(job.directory):
            for path in (service.stdout, service.stderr):
                (job.directory / path.name).symlink_to(path)

    def _record(self, job: Job) -> None:
        job.on_services([service.handle for service in self._running if service.handle])


class _Probe:
    """Tells whether a service is ready: by a port, by HTTP, by its output, or as soon as it runs."""

    def __init__(self, config: ServiceConfig, arguments: Mapping[str, Any]) -> None:
        self._config, self._ready = config, config.ready
        self.target = ""
        """What a ready service answers at."""
        if (target := self._ready.http if self._ready.port is None else str(self._ready.port)) is not None:
            self.target = "".join(CommandTemplate((target,)).words(arguments))
            if self._ready.port is not None and not self.target.isdecimal():
                reason = f"service {config.name!r}: {self.target!r} is not a port"
                raise ServiceFailed(Result(Outcome.CRASHED, reason=reason))

    async def is_answered(self) -> bool:
        """Whether something answers at the port or address."""
        if not self.target:
            return False
        return await (_accepts(int(self.target)) if self._ready.port is not None else _answers(self.target))

    async def wait(self, service: RunningService) -> None:
        """Wait until the service is ready. Raises ServiceFailed if it ends first, or after the timeout."""
        pause_s, deadline_s = _POLL_S[0], time.monotonic() + self._ready.timeout_s
        while True:
            if self.target:
                is_ready = await self.is_answered()
            elif self._ready.regex is not None:
                is_ready = await asyncio.to_thread(_prints, self._ready.regex, (service.stdout, service.stderr))
            else:
                is_ready = bool(service.handle)
            if service.task.done():
                raise ServiceFailed(service.failure("before it was ready"))
            if is_ready:
                return
            if time.monotonic() > deadline_s:
                ending = f"was not ready after {self._ready.timeout_s:g} s{service.log_end()}"
                raise ServiceFailed(Result(Outcome.TIMEOUT, reason=f"service {self._config.name!r} {ending}"))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])


async def _accepts(port: int) -> bool:
    try:
        async with asyncio.timeout(_PROBE_S):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:  # TimeoutError too
        return False
    writer.close()
    return True


async def _answers(url: str) -> bool:
    """Whether a GET of the address is answered with a status below 400."""
    parts = urlsplit(url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        async with asyncio.timeout(_PROBE_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
            try:
                writer.write(f"GET {path} HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n".encode())
                status = (await reader.readline()).split()
            finally:
                writer.close()
    except (OSError, ValueError):
        return False
    return len(status) > 1 and status[1].isdigit() and int(status[1]) < 400


def _prints(pattern: str, paths: Iterable[Path]) -> bool:
    for path in paths:
        if path.is_file():
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _SEARCHED_BYTES))
                try:
                    if regex.search(pattern.encode(), file.read(), timeout=_MATCH_S, concurrent=True):
                        return True
                except TimeoutError:
                    pass
    return False
