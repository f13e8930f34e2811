"""The Python workload: calls a function that returns metrics, in a worker process that can be killed."""

import itertools
import os
import sys
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from loopwright.core.errors import LaunchError, Problem
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Result
from loopwright.execution.base import CallResult, FunctionCall
from loopwright.execution.local.callables import inspect_callable
from loopwright.spaces.parameter import nested
from loopwright.workloads.base import Job, Site, Workload, WorkloadConfig, fresh_directory, launch_failure, link_into


class PythonConfig(WorkloadConfig):
    """A Python function whose keyword arguments are searched."""

    type: Literal["python"] = "python"
    function: str = Field(pattern=r"^[\w.]+:[\w.]+$")
    """`module:function`, which takes keyword arguments and returns a dict of metrics; looked up in `path` first. The
    arguments `trainer.lr` and `trainer.size` are one keyword argument, a dict."""
    path: tuple[str, ...] = (".",)
    """Directories, relative to the scenario, that are searched for modules before the installed ones."""
    metrics: tuple[str, ...] = ()
    """Metrics that every call must return; by default all returned metrics are recorded."""

    def metric_names(self) -> tuple[str, ...] | None:
        return self.metrics or None

    def problems(self, scenario_dir: Path) -> list[Problem]:
        problems = super().problems(scenario_dir)
        signature = inspect_callable(self.function, self.import_paths(scenario_dir), dict(os.environ))
        if signature.problem is not None:
            return [*problems, Problem("function", f"{self.function!r}: {signature.problem}")]
        names = nested(self.args)
        for name in signature.unknown(names):
            problems.append(Problem(f"args.{name}", f"{self.function!r} takes no argument {name!r}."))
        for name in signature.missing(names):
            problems.append(Problem("args", f"{self.function!r} requires the argument {name!r}."))
        return problems

    def import_paths(self, scenario_dir: Path) -> tuple[Path, ...]:
        """The directories of `path`."""
        return tuple((scenario_dir / name).resolve() for name in self.path)


class PythonWorkload(Workload):
    """Calls a function once per trial, in a pool of worker processes."""

    Config: ClassVar[type[WorkloadConfig]] = PythonConfig
    not_compared: ClassVar[set[str]] = Workload.not_compared | {"type", "path"}
    config: PythonConfig

    def __init__(self, config: PythonConfig, site: Site) -> None:
        super().__init__(config, site)
        self._pool = site.system.call_executor(site.directory, config.gpus)
        self._paths = config.import_paths(site.scenario_dir)
        self._not_passed = config.parameters.keys() - config.args.keys()

    def fingerprint(self, *sources: Path) -> str:
        module = self.config.function.partition(":")[0].replace(".", "/")
        candidates = (
            candidate
            for base in (*self._paths, *map(Path, sys.path))
            for candidate in (base / f"{module}.py", base / module / "__init__.py")
            if candidate.is_file()
        )
        return super().fingerprint(*sources, *itertools.islice(candidates, 1))

    async def run(self, job: Job) -> Result:
        # The worker creates the directory, unless there are files to link or an earlier attempt to rename.
        if not job.handle and (self.config.files or (job.is_retry and job.directory.exists())):
            fresh_directory(job.directory)
            link_into(job.directory, self.site.scenario_dir, self.config.files)
        arguments = nested({name: value for name, value in job.arguments.items() if name not in self._not_passed})
        call = FunctionCall(
            function=self.config.function,
            path=self._paths,
            arguments=arguments,
            environment=self.environment(job.arguments),
            directory=job.directory,
            parameters=job.parameters_json,
            timeout_s=self.config.timeout_s,
            marker=job.marker,
            handle=job.handle,
            nodes=job.arguments["nodes"] if self.config.nodes is not None else 1,
            gpus=self.config.gpus,
            checkpoint=job.checkpoint,
            on_report=job.report,
        )
        try:
            return self._evaluate(await self._pool.call(call, job.on_start))
        except LaunchError as error:
            return launch_failure(error)

    def _evaluate(self, call: CallResult) -> Result:
        usage = call.usage
        if call.timed_out:
            return Result(Outcome.TIMEOUT, reason=f"timed out after {self.config.timeout_s:g} s", usage=usage)
        if call.stopped:
            return Result(Outcome.STOPPED, usage=usage)
        if call.worker_exit is not None:
            return Result(Outcome.CRASHED, reason=f"the worker process ended: {call.worker_exit}", usage=usage)
        if call.error is not None:
            return Result(Outcome.CRASHED, reason=call.error.strip().splitlines()[-1][:300], usage=usage)
        metrics = dict(call.value or {})
        missing = [name for name in self.config.metrics if name not in metrics]
        bad = missing + [f"{n} ({v})" for n, v in metrics.items() if v != v or v in (float("inf"), float("-inf"))]
        if bad:
            names = "one number" if metrics.keys() == {"value"} else ", ".join(metrics) or "no metrics"
            reason = f"the function returned no finite value for {', '.join(bad)}"
            reason += f"; it returned {names}" if missing else ""
            return Result(Outcome.METRIC_MISSING, reason=reason, usage=usage)
        return Result(Outcome.OK, metrics, usage=usage)

    async def close(self) -> None:
        await self._pool.close()

    def kill(self) -> None:
        self._pool.kill_all()
