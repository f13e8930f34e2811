"""The Python workload: a callable that gets arguments and gives metrics, in a worker process that can be killed."""

import os
import sys
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from loopwright.core.errors import LaunchError, Problem
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.trial import Result
from loopwright.execution.base import CallResult, FunctionCall
from loopwright.execution.local.callables import inspect_callable
from loopwright.execution.local.worker_pool import WorkerPool
from loopwright.spaces.parameter import Fixed
from loopwright.workloads.base import (
    Job,
    Site,
    Workload,
    WorkloadConfig,
    fingerprint_of,
    fresh_directory,
    link_into,
)
from loopwright.workloads.template import as_text


class PythonConfig(WorkloadConfig):
    """A Python callable whose keyword arguments are searched."""

    type: Literal["python"] = "python"
    function: str = Field(pattern=r"^[\w.]+:[\w.]+$")
    """`module:callable`: keyword arguments in, a dict of metrics out; imported from the scenario's directory first."""
    path: tuple[str, ...] = (".",)
    """Where modules are looked for before the installed ones, relative to the scenario."""
    metrics: tuple[str, ...] = ()
    """The metrics that every call must return; without them whatever it returns is taken."""

    def metric_names(self) -> tuple[str, ...] | None:
        return self.metrics or None

    def problems(self, home: Path) -> list[Problem]:
        found = super().problems(home)
        signature = inspect_callable(self.function, self._paths(home), dict(os.environ))
        if signature.problem is not None:
            return [*found, Problem("function", f"{self.function!r}: {signature.problem}")]
        for name in signature.unknown(self.args):
            found.append(Problem(f"args.{name}", f"{self.function!r} takes no argument {name!r}."))
        for name in signature.missing(self.args):
            found.append(Problem("args", f"{self.function!r} needs an argument {name!r}."))
        return found

    def _paths(self, home: Path) -> tuple[Path, ...]:
        return tuple((home / name).resolve() for name in self.path)


class PythonWorkload(Workload):
    """Calls a function per trial in one of a few worker processes."""

    Config: ClassVar[type[WorkloadConfig]] = PythonConfig
    config: PythonConfig

    def __init__(self, config: PythonConfig, site: Site) -> None:
        super().__init__(config, site)
        self._pool = WorkerPool(
            size=site.parallel,
            output_bytes=site.output_bytes,
            grace_s=site.grace_s,
            memory_bytes=site.memory_bytes,
            pin_cpus=site.pin_cpus,
        )
        self._paths = config._paths(site.scenario_dir)
        self._base = {**os.environ, **{n: as_text(p.value) for n, p in config.env.items() if isinstance(p, Fixed)}}

    def fingerprint(self) -> str:
        text = self.config.model_dump_json(include={"function", "files", "metrics"})
        return fingerprint_of(text, *self.inputs())

    def inputs(self) -> list[Path]:
        module = self.config.function.partition(":")[0].replace(".", "/")
        source = next(
            (
                candidate
                for base in (*self._paths, *map(Path, sys.path))
                for candidate in (base / f"{module}.py", base / module / "__init__.py")
                if candidate.is_file()
            ),
            None,
        )
        return [*super().inputs(), *([source] if source else [])]

    def _directory(self, job: Job) -> None:
        # Made by the worker, unless there is something to put into it or an earlier attempt to move aside.
        if self.config.files or (job.is_retry and job.directory.exists()):
            fresh_directory(job.directory)
            link_into(job.directory, self.site.scenario_dir, self.config.files)

    async def run(self, job: Job) -> Result:
        self._directory(job)
        environment = self._base
        if self.config.env:
            named = {n: as_text(job.arguments[n]) for n in self.config.env if n in job.arguments}
            environment = {**self._base, **named}
        arguments = {name: value for name, value in job.arguments.items() if name not in self.config.env}
        call = FunctionCall(
            function=self.config.function,
            path=self._paths,
            arguments=arguments,
            environment=environment,
            directory=job.directory,
            parameters=job.parameters_json,
            timeout_s=self.config.timeout_s,
            marker=job.marker,
        )
        try:
            return self._judge(await self._pool.call(call, job.on_start))
        except LaunchError as error:
            return Result(Outcome.LOST, reason=str(error), fault=Fault.INFRA)

    def _judge(self, returned: CallResult) -> Result:
        usage = returned.usage.as_dict()
        if returned.timed_out:
            return Result(Outcome.TIMEOUT, reason=f"it was ended after {self.config.timeout_s:g} s", usage=usage)
        if returned.worker_exit is not None:
            return Result(Outcome.CRASHED, reason=f"the worker process ended: {returned.worker_exit}", usage=usage)
        if returned.error is not None:
            return Result(Outcome.CRASHED, reason=returned.error.strip().splitlines()[-1][:300], usage=usage)
        metrics = dict(returned.value or {})
        missing = [name for name in self.config.metrics if name not in metrics]
        missing += [f"{n} (it is {v})" for n, v in metrics.items() if v != v or v in (float("inf"), float("-inf"))]
        if missing:
            return Result(Outcome.METRIC_MISSING, reason=f"the callable gave no {', '.join(missing)}", usage=usage)
        return Result(Outcome.OK, metrics, usage=usage)

    async def close(self) -> None:
        await self._pool.close()

    def kill(self) -> None:
        self._pool.kill_all()
