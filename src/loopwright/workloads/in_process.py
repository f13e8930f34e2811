"""Workloads that run in this process: a function that cannot be shipped to a worker, or a loop of the caller's."""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from loopwright.core.errors import LaunchError
from loopwright.core.outcome import Outcome
from loopwright.core.progress import TrialStopped, reporter
from loopwright.core.trial import Result
from loopwright.execution.local.worker_main import consume, metrics_of
from loopwright.workloads.base import Job, Site, Workload, WorkloadConfig


class ExternalConfig(WorkloadConfig):
    """Arguments without a command: your own program measures each trial with `loopwright.Study.open`."""

    type: Literal["external"] = "external"
    metrics: tuple[str, ...] = ()
    """The metrics that every trial must be told; without them any are accepted."""

    def metric_names(self) -> tuple[str, ...] | None:
        return self.metrics or None


class ExternalWorkload(Workload):
    """Hands each job to `measure`. Without it there is nothing to run: `Study.open` provides one."""

    Config: ClassVar[type[WorkloadConfig]] = ExternalConfig

    def __init__(self, config: Any, site: Site, measure: Callable[[Job], Awaitable[Result]] | None = None) -> None:
        super().__init__(config, site)
        self._measure = measure

    async def run(self, job: Job) -> Result:
        if self._measure is None:
            raise LaunchError('workload "external" is measured by your own program: use loopwright.Study.open')
        result = await self._measure(job)
        missing = [name for name in self.config.metric_names() or () if name not in result.metrics]
        if result.outcome is Outcome.OK and missing:
            return Result(Outcome.METRIC_MISSING, reason=f"no metric {', '.join(missing)}")
        return result


class InProcessWorkload(Workload):
    """Calls a function in a thread of this process. It cannot be killed, so it has no timeout.

    class Train(InProcessWorkload):
        version = "1"

        def call(self, arguments: Mapping[str, Any]) -> Any:
            return train(**arguments)
    """

    Config: ClassVar[type[WorkloadConfig]] = ExternalConfig
    version: ClassVar[str] = ""
    """Changes with the function's code: trials of different versions are not compared."""

    @abstractmethod
    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function."""

    def fingerprint(self, *sources: Path) -> str:
        return self.version

    async def run(self, job: Job) -> Result:
        job.flush_reservation()
        loop, stopped = asyncio.get_running_loop(), False

        async def add(step: int, metrics: Mapping[str, float]) -> bool:
            return job.report is not None and job.report(step, metrics)

        def report(step: int, metrics: Mapping[str, float]) -> bool:
            nonlocal stopped
            stopped = stopped or asyncio.run_coroutine_threadsafe(add(step, metrics), loop).result()
            return stopped

        def call() -> Any:
            reporter.set(report)
            value = self.call(job.arguments)
            return consume(value, report) if hasattr(value, "send") and not hasattr(value, "__await__") else value

        try:
            value = await asyncio.to_thread(call)
            if hasattr(value, "__await__"):
                reporter.set(job.report)
                value = await value
        except TrialStopped:
            stopped = True
        except (Exception, SystemExit) as error:  # noqa: BLE001  Whatever the function raises is this trial's result.
            return Result(Outcome.CRASHED, reason=f"{type(error).__name__}: {error}"[:300])
        return Result(Outcome.STOPPED) if stopped else result_of(value)


def result_of(value: Any) -> Result:
    """The result of a trial whose function returned this value: metrics, one number, or something unusable."""
    answer = metrics_of(value)
    if "error" in answer:
        return Result(Outcome.CRASHED, reason=answer["error"].strip())
    if answer["nonfinite"]:
        missing = ", ".join(f"{name} (it is {text})" for name, text in answer["nonfinite"].items())
        return Result(Outcome.METRIC_MISSING, reason=f"not finite: {missing}")
    return Result(Outcome.OK, answer["value"])
