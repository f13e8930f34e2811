"""The command workload: runs a program with parameters, in a separate directory for each trial.

A command is split into words before values are inserted, so that no value is interpreted by a shell. Metrics are
numbers from its output, from a file it wrote, or from its resource usage.
"""

import asyncio
import csv
import json
import math
import mmap
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import regex

from loopwright.core.errors import LaunchError, did_you_mean, storage
from loopwright.core.outcome import Outcome
from loopwright.core.progress import PROGRESS_VARIABLE
from loopwright.core.trial import Result, key_of
from loopwright.execution.base import Command, Completion, Executor, Slot, SlotPool, Usage
from loopwright.workloads.base import (
    RESERVED_FILES,
    CommandTemplate,
    Job,
    Site,
    Workload,
    WorkloadConfig,
    fresh_directory,
    last_lines,
    launch_failure,
    link_into,
    link_products,
    recreate,
)
from loopwright.workloads.command_config import CommandConfig, MetricConfig
from loopwright.workloads.progress import ProgressReader
from loopwright.workloads.services import ServiceFailed, Services

_MATCH_NOW_S = 0.02
"""How long patterns are matched in the event loop; almost all are done by then. The rest moves to a thread."""
_MATCH_S = 10.0
"""After how many seconds of matching a trial fails."""
_NOT_LINKED = (".done", "setup.stdout", "setup.stderr")


class MetricMissing(Exception):
    """A metric that could not be read; the message says where it was expected."""


class PatternTimeout(Exception):
    """A regular expression that took too long; the message names it, the size of its input and the fix."""


class CommandWorkload(Workload):
    """Runs one command per trial through an executor, and its setup once per distinct set of arguments."""

    Config: ClassVar[type[WorkloadConfig]] = CommandConfig
    not_compared: ClassVar[set[str]] = Workload.not_compared | {"type", "setup_timeout_s"}
    config: CommandConfig

    def __init__(self, config: CommandConfig, site: Site, executor: Executor | None = None) -> None:
        super().__init__(config, site)
        self._command = CommandTemplate(config.command)
        others = self._command.names - config.args.keys() - config.env.keys()
        names = config.slot_names() if others or config.service else set()
        self._uses_checkpoint, self._slot_names = "checkpoint" in names, names - {"checkpoint"}
        ports = max((int(name[5:] or 1) for name in self._slot_names if name.startswith("port")), default=1)
        self.executor = executor or site.system.executor(site.directory, config.gpus, ports)
        self._metrics = config.all_metrics() if config.read else config.metrics
        self._measures_memory = any(metric.resource == "max_rss_bytes" for metric in self._metrics.values())
        self._setup = CommandTemplate(config.setup) if config.setup is not None else None
        self._locks: dict[str, asyncio.Lock] = {}
        self._setup_failures: dict[str, Result] = {}
        self._services: Services | None = None
        if config.service or self._slot_names:
            if self.executor.slots is None:
                raise LaunchError(f"[run.workload] {', '.join(config.local_only())}: the executor has no slots.")
            if config.service:
                directory = site.directory / "services"
                self._services = Services(config.service, self.executor, self.executor.slots, directory, self._link)

    async def run(self, job: Job) -> Result:
        job.flush_reservation()
        if not job.handle:  # otherwise the job that is adopted works there
            fresh_directory(job.directory)
            with storage(job.directory):
                (job.directory / "parameters.json").write_bytes(job.parameters_json)
            if self.config.files:
                link_into(job.directory, self.site.scenario_dir, self.config.files)
        try:
            if self._setup is not None and (failure := await self._prepare(job, self._setup)) is not None:
                return failure
            if self._uses_checkpoint:
                checkpoint = job.checkpoint or job.directory / "checkpoint"
                with storage(checkpoint):
                    checkpoint.mkdir(exist_ok=True)
                job = replace(job, arguments={"checkpoint": str(checkpoint), **job.arguments})
            if self._services is not None or self._slot_names:
                return await self._run_in_slot(job)
            if self.config.progress is not None:
                return await self._run_watched(job, self._trial_command(job), None)
            return await self._evaluate(job, await self.executor.run(self._trial_command(job), job.on_start))
        except LaunchError as error:
            return launch_failure(error)

    def _trial_command(self, job: Job, slot: Slot | None = None) -> Command:
        return Command(
            argv=tuple(self._command.words({**slot.values, **job.arguments} if slot else job.arguments)),
            directory=job.directory,
            environment=self.environment(job.arguments),
            stdout=job.directory / "stdout",
            stderr=job.directory / "stderr",
            timeout_s=self.config.timeout_s,
            marker=job.marker,
            slot=slot,
            handle=job.handle,
            nodes=job.arguments["nodes"] if self.config.nodes is not None else 1,
            gpus=self.config.gpus,
            measures_memory=self._measures_memory,
        )

    async def _run_in_slot(self, job: Job) -> Result:
        """Run a trial whose command and services share a slot."""
        slots = cast("SlotPool", self.executor.slots)
        slot = await slots.acquire()
        try:
            if self._services is None:
                slot = slots.with_free_ports(slot)
                return await self._run_watched(job, self._trial_command(job, slot), None)
            return await self._run_with_services(job, slot, self._services)
        finally:
            slots.release(slot)

    async def _run_with_services(self, job: Job, slot: Slot, services: Services) -> Result:
        result = None
        try:
            slot, running = await services.start(job, slot, self.environment(job.arguments))
        except ServiceFailed as failure:
            return failure.result
        try:
            result = await self._run_watched(job, self._trial_command(job, slot), services.watch(running))
            if result.outcome is not Outcome.STOPPED:
                result = await services.explain(result, running)
        finally:
            is_usable = result is not None and result.outcome is Outcome.OK
            await services.finish(running, slot, job, is_usable=is_usable)
        return result

    async def _run_watched(self, job: Job, command: Command, services: Coroutine[Any, Any, Result] | None) -> Result:
        """Run a command that is ended as soon as a service ends, or when its progress says so."""
        progress, start_s = None, time.monotonic()
        watching = None if services is None else asyncio.ensure_future(services)
        if (config := self.config.progress) is not None and job.report is not None:
            progress = ProgressReader(config, job.directory, job.report)
            if config.file is not None:
                path = str(job.directory / config.file)
                command = replace(command, environment={**command.environment, PROGRESS_VARIABLE: path})
        reading = None if progress is None else asyncio.ensure_future(progress.watch())
        main = asyncio.ensure_future(self.executor.run(command, job.on_start))
        tasks = {task for task in (main, watching, reading) if task is not None}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            result = await self._evaluate(job, main.result()) if main.done() else None
            # A trial that is to stop is stopped, also if it has ended: what is learned must not depend on timing.
            if progress is not None and reading is not None and (result is not None or reading.done()):
                progress.ended.set()
                if (stopped := await reading) is not None:
                    return replace(stopped, usage=result.usage if result else {"wall_s": time.monotonic() - start_s})
            return cast("Result", result if result is not None or watching is None else watching.result())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _link(self, directory: Path, job: Job) -> None:
        """Link the input files and the products of the setup into the directory of a service."""
        link_into(directory, self.site.scenario_dir, self.config.files)
        if self._setup is not None:
            with storage(directory):
                link_products(self._setup_of(job)[0], directory, excluded=(*_NOT_LINKED, *RESERVED_FILES))

    async def _evaluate(self, job: Job, completion: Completion) -> Result:
        """The result of a command that has ended."""
        usage, config = completion.usage, self.config
        if completion.timed_out or completion.exit_code not in config.success.exit_codes:
            outcome = Outcome.TIMEOUT if completion.timed_out else Outcome.CRASHED
            reason = describe_ending(completion, config.timeout_s, job.directory / "stderr")
            return Result(outcome, reason=reason, usage=usage)
        try:
            return read_metrics(self._metrics, job.directory, usage, _MATCH_NOW_S, config.success.regex)
        except PatternTimeout:
            return await self._read_in_thread(job.directory, usage)

    async def _read_in_thread(self, directory: Path, usage: Usage) -> Result:
        """Read the metrics outside the event loop, so that other trials continue and signals are handled."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()

        def evaluate() -> None:
            try:
                result = read_metrics(self._metrics, directory, usage, _MATCH_S, self.config.success.regex)
            except PatternTimeout as error:
                result = Result(Outcome.METRIC_MISSING, reason=str(error), usage=usage)
            with suppress(RuntimeError):  # the run has ended without us
                loop.call_soon_threadsafe(finish, result)

        def finish(result: Result) -> None:
            if not done.done():  # the trial was aborted
                done.set_result(result)

        # Not the loop's executor, which a stopped run would wait for.
        threading.Thread(target=evaluate, name="loopwright-match", daemon=True).start()
        return await done

    async def _prepare(self, job: Job, setup: CommandTemplate) -> Result | None:
        """Run the setup if needed, and link its files into the trial's directory; returns its failure."""
        directory, arguments = self._setup_of(job)
        key = directory.name
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._setup_failures and not (directory / ".done").exists():
                failure = await self._run_setup(job, setup, arguments, directory)
                if failure is not None:
                    self._setup_failures[key] = failure
        if key in self._setup_failures:
            return self._setup_failures[key]
        with storage(job.directory):
            link_products(directory, job.directory, excluded=(*_NOT_LINKED, *RESERVED_FILES))
        return None

    def _setup_of(self, job: Job) -> tuple[Path, dict[str, Any]]:
        """The directory and the arguments of a trial's setup."""
        names = self._setup.names if self._setup is not None else ()
        arguments = {name: job.arguments[name] for name in sorted(names) if name in job.arguments}
        return self.site.directory / "setup" / key_of(arguments, self._first_fingerprint)[:16], arguments

    @cached_property
    def _first_fingerprint(self) -> str:
        """The fingerprint before the first setup."""
        return self.fingerprint()

    async def _run_setup(
        self, job: Job, setup: CommandTemplate, arguments: Mapping[str, Any], directory: Path
    ) -> Result | None:
        if not job.handle:
            recreate(directory)
            link_into(directory, self.site.scenario_dir, self.config.files)
        command = Command(
            argv=tuple(setup.words(arguments)),
            directory=directory,
            environment=self.environment(arguments),
            stdout=directory / "setup.stdout",
            stderr=directory / "setup.stderr",
            timeout_s=self.config.setup_timeout_s,
            marker=job.marker,
            handle=job.handle,
        )
        completion = await self.executor.run(command, job.on_start)
        if completion.exit_code == 0 and not completion.timed_out:
            with storage(directory):
                (directory / ".done").touch()
            return None
        outcome = Outcome.TIMEOUT if completion.timed_out else Outcome.CRASHED
        ending = describe_ending(completion, self.config.setup_timeout_s, directory / "setup.stderr")
        return Result(outcome, reason=f"the setup in setup/{directory.name} failed: {ending}")

    async def close(self) -> None:
        if self._services is not None:
            await self._services.close()
        await self.executor.close()

    def kill(self) -> None:
        self.executor.kill_all()


def describe_ending(completion: Completion, timeout_s: float | None, stderr: Path) -> str:
    """How a command ended, in words, with the last line of its stderr."""
    if completion.reason:
        ending = completion.reason
    elif completion.timed_out:
        ending = f"timed out after {timeout_s:g} s"
    elif completion.signal is not None:
        ending = f"ended by signal {completion.signal}"
    else:
        ending = f"exit code {completion.exit_code}"
    return f"{ending}; stderr ends with: {lines[0]}" if (lines := last_lines(stderr, 1)) else ending


def _at_pointer(pointer: str, path: Path, source: str) -> Any:
    value = _load_json(path, source)
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        try:
            value = value[int(name)] if isinstance(value, list) else value[name]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise MetricMissing(f"the JSON in {source} has no {pointer!r}") from error
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise MetricMissing(f"{pointer!r} in {source} is {value!r}, not a number")
    return value


def _in_column(column: str, path: Path, source: str) -> str:
    with path.open(newline="", errors="replace") as file:
        try:
            rows = csv.reader(file, skipinitialspace=True)
            names = [name.strip() for name in next(rows, [])]
            if column not in names:
                raise MetricMissing(f"the CSV in {source} has no column {column!r}. {did_you_mean(column, names)}")
            last = deque((row for row in rows if row), maxlen=1)
        except csv.Error as error:
            raise MetricMissing(f"{source} is not CSV: {error}") from error
    if not last or len(last[0]) <= (place := names.index(column)):
        raise MetricMissing(f"the CSV in {source} has no value in column {column!r}")
    return last[0][place]


def _load_json(path: Path, source: str) -> Any:
    content = path.read_bytes()
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        pass
    # Programs often print their result as a last line of JSON.
    lines = content.rstrip().rsplit(b"\n", 1)
    try:
        return json.loads(lines[-1])
    except (ValueError, RecursionError) as error:
        raise MetricMissing(f"neither {source} nor its last line is JSON") from error


def _matches(pattern: str, path: Path, source: str, timeout_s: float, group: int = 0) -> Iterator[bytes | None]:
    """A group of each match in a file. Matching ends after the timeout, and lets other threads run."""
    # Bytes, mapped: output may be large and need not be valid UTF-8.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        try:
            for match in regex.finditer(pattern.encode(), content, timeout=timeout_s, concurrent=True):
                yield match[group]
        except TimeoutError as error:
            raise PatternTimeout(
                f"matching {pattern!r} in {source} ({len(content):,} bytes) took more than {timeout_s:g} s. Avoid "
                "repeats within repeats, such as (a+)+, or let the command print less"
            ) from error


def read_metrics(
    configs: Mapping[str, MetricConfig],
    directory: Path,
    usage: Usage,
    timeout_s: float = _MATCH_S,
    success: str | None = None,
) -> Result:
    """The metrics of a command that has succeeded, or what is missing. Raises PatternTimeout.

    If its stdout does not contain the pattern `success`, it has failed all the same.
    """
    stdout = directory / "stdout"
    if success is not None:
        if not stdout.is_file() or stdout.stat().st_size == 0:  # an empty file cannot be mapped
            is_match = stdout.is_file() and regex.search(success.encode(), b"") is not None
        else:
            is_match = any(True for _ in _matches(success, stdout, "stdout", timeout_s))
        if not is_match:
            return Result(Outcome.CRASHED, reason=f"stdout does not contain {success!r}", usage=usage)
    metrics: dict[str, float] = {}
    missing: list[str] = []
    for name, metric in configs.items():
        try:
            metrics[name] = read_metric(metric, directory, stdout, usage, timeout_s)
        except MetricMissing as error:
            if metric.required and metric.resource != "max_rss_bytes":
                missing.append(f"{name}: {error}")
        except PatternTimeout as error:
            raise PatternTimeout(f"{name}: {error}") from error
    if missing:
        return Result(Outcome.METRIC_MISSING, reason="; ".join(missing), usage=usage)
    return Result(Outcome.OK, metrics, usage=usage)


def read_metric(metric: MetricConfig, directory: Path, stdout: Path, usage: Usage, timeout_s: float) -> float:
    """The value; raises MetricMissing if it cannot be read, PatternTimeout if matching takes too long."""
    if metric.resource is not None:
        if metric.resource not in usage:
            raise MetricMissing(f"{metric.resource} is unknown, since it is below that of Loopwright's own process")
        return float(usage[metric.resource])
    source = metric.file or metric.stream
    path = stdout if source == "stdout" else directory / source
    if not path.is_file():
        raise MetricMissing(f"the command did not write {source}")
    if metric.regex is None:
        text = (
            _in_column(metric.csv, path, source)
            if metric.csv is not None
            else _at_pointer(metric.json_pointer or "", path, source)
        )
    elif path.stat().st_size == 0:
        raise MetricMissing(f"{source} is empty")
    else:
        groups = deque(_matches(metric.regex, path, source, timeout_s, group=metric.group), maxlen=1)
        if not groups or groups[0] is None:
            raise MetricMissing(f"nothing in {source} matches {metric.regex!r}")
        text = groups[0].decode(errors="replace")
    try:
        number = float(text)
    except (TypeError, ValueError) as error:
        raise MetricMissing(f"{text!r} in {source} is not a number") from error
    except OverflowError as error:
        raise MetricMissing(f"the number in {source} is not a finite number: {error}") from error
    if not math.isfinite(number):
        raise MetricMissing(f"{text!r} in {source} is not a finite number")
    return number
