"""Workloads measured in this process: a function that cannot be shipped to a worker, or a loop of your own."""

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from loopwright.core.errors import LaunchError
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Result
from loopwright.execution.local.worker_main import metrics_of
from loopwright.workloads.base import Job, Site, Workload, WorkloadConfig


class ExternalConfig(WorkloadConfig):
    """Arguments without a command: a program of yours measures each trial with `loopwright.Study.open`."""

    type: Literal["external"] = "external"
    metrics: tuple[str, ...] = ()
    """The metrics that every trial must be told; without them any are accepted."""

    def metric_names(self) -> tuple[str, ...] | None:
        return self.metrics or None


class ExternalWorkload(Workload):
    """Has nothing to run by itself: `Study.ask` hands its trials out."""

    Config: ClassVar[type[WorkloadConfig]] = ExternalConfig
    config: ExternalConfig

    def open(self) -> None:
        raise LaunchError('a workload of type "external" is measured by your own program: use loopwright.Study.open')

    async def run(self, job: Job) -> Result:
        raise AssertionError("unreachable: open() raises")


class MeasuredWorkload(Workload):
    """A configured workload whose trials something else measures: an asynchronous function from job to result."""

    def __init__(self, workload: Workload, measure: Callable[[Job], Any]) -> None:
        super().__init__(workload.config, workload.site)
        self._workload, self._measure = workload, measure

    async def run(self, job: Job) -> Result:
        result: Result = await self._measure(job)
        return result

    def fingerprint(self) -> str:
        return self._workload.fingerprint()


class FunctionWorkload(Workload):
    """Calls a function in a thread of this process. It cannot be killed, so it has no timeout."""

    def __init__(self, config: WorkloadConfig, site: Site, function: Callable[..., Any], version: str) -> None:
        super().__init__(config, site)
        self._function, self._version = function, version

    def fingerprint(self) -> str:
        return self._version

    async def run(self, job: Job) -> Result:
        try:
            value = await asyncio.to_thread(self._function, **job.arguments)
            if hasattr(value, "__await__"):
                value = await value
        except Exception as error:  # noqa: BLE001  Whatever the user's function raises is this trial's result.
            return Result(Outcome.CRASHED, reason=f"{type(error).__name__}: {error}"[:300])
        return result_of(value)


def result_of(value: Any) -> Result:
    """The result of a trial whose function returned this value: metrics, one number, or something unusable."""
    answer = metrics_of(value)
    if "error" in answer:
        return Result(Outcome.CRASHED, reason=answer["error"].strip())
    if answer["others"]:
        missing = ", ".join(f"{name} (it is {text})" for name, text in answer["others"].items())
        return Result(Outcome.METRIC_MISSING, reason=f"not finite: {missing}")
    return Result(Outcome.OK, answer["value"])
