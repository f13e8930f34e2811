"""Steps around a workload: commands that run before and after each trial, each in its own directory."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from pydantic import Field, field_validator, model_validator

from loopwright.core.config import Config
from loopwright.core.errors import LaunchError, Problem, did_you_mean, storage
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Result
from loopwright.execution.base import Command, Executor
from loopwright.workloads.base import (
    CommandTemplate,
    Job,
    Workload,
    WorkloadConfig,
    fingerprint_of,
    launch_failure,
    link_into,
    recreate,
)
from loopwright.workloads.command import CommandWorkload, describe_ending
from loopwright.workloads.command_config import check_template, missing_program

TRIAL_VARIABLE = "LOOPWRIGHT_TRIAL_DIRECTORY"
"""Where a step finds the trial's directory, which exists once the workload has started."""


class StepConfig(Config):
    """A command that runs before or after the workload."""

    command: str | tuple[str, ...]
    """The command, with the arguments of the workload as placeholders; or the step as a whole, as one string."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds after which the step is ended; by default those of the workload."""

    _check_command = field_validator("command")(check_template)

    @model_validator(mode="before")
    @classmethod
    def _command_only(cls, value: Any) -> Any:
        return {"command": value} if isinstance(value, str | list | tuple) else value


def problems_of(key: str, steps: Iterable[StepConfig], workload: WorkloadConfig) -> list[Problem]:
    """Everything about steps that can be checked before they run."""
    problems = []
    for step in steps:
        template = CommandTemplate(step.command)
        for name in sorted(template.names - workload.parameters.keys()):
            hint = did_you_mean(name, list(workload.parameters))
            problems.append(Problem(key, f"unknown argument {{{name}}}. {hint} Write literal braces twice."))
    return problems


def missing_programs(key: str, steps: Iterable[StepConfig], workload: WorkloadConfig, directory: Path) -> list[Problem]:
    """The programs of steps that this machine does not have."""
    templates = (CommandTemplate(step.command) for step in steps)
    return [problem for template in templates for problem in missing_program(key, template, workload, directory)]


class SteppedWorkload(Workload):
    """Runs `pre` steps, the workload, and `post` steps.

    The workload runs only if each `pre` step succeeds. The `post` steps run whatever its outcome, unless the run is
    stopped. A step that fails makes the trial a failure.
    """

    def __init__(
        self,
        workload: Workload,
        pre: Sequence[StepConfig] = (),
        post: Sequence[StepConfig] = (),
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_start` is called each time the workload's own process or job exists."""
        super().__init__(workload.config, workload.site)
        self._workload, self._pre, self._post, self._on_start = workload, pre, post, on_start
        self._executor: Executor | None = None
        if isinstance(workload, CommandWorkload):
            self._executor = workload.executor  # so that steps have the devices of their trial's slot
        elif pre or post:
            self._executor = self.site.system.executor(self.site.directory)

    def fingerprint(self, *sources: Path) -> str:
        own = self._workload.fingerprint(*sources)
        if not self._pre and not self._post:
            return own
        return fingerprint_of(f"{own}{[step.model_dump_json() for step in (*self._pre, *self._post)]}{len(self._pre)}")

    async def run(self, job: Job) -> Result:
        if not self._pre and not self._post:
            return await self._run_workload(job)
        result = None
        try:
            for number, step in enumerate(self._pre, 1):
                ending = await self._stage(job, f"pre-{number}", step)
                if ending.outcome is not Outcome.OK:
                    result = ending
                    break
            result = result or await self._stage(job, "workload")
            if result.outcome is Outcome.LOST:
                return result
            for number, step in enumerate(self._post, 1):
                ending = await self._stage(job, f"post-{number}", step)
                if ending.outcome is not Outcome.OK and result.outcome is Outcome.OK:
                    result = replace(ending, usage=result.usage)
        except LaunchError as error:
            return launch_failure(error)
        return result

    async def _stage(self, job: Job, name: str, step: StepConfig | None = None) -> Result:
        """Run a step or the workload, unless the process that died has seen its end.

        The job that the process left behind belongs to the stage which recorded it.
        """
        directory = self.site.directory / "steps" / str(job.trial) / name
        ending, handle = directory / ".result.json", directory / ".handle"
        with storage(directory):
            if job.handle and ending.exists():
                table = orjson.loads(ending.read_bytes())
                return Result(Outcome(table["outcome"]), table["metrics"], table["reason"], usage=table["usage"])
            adopts = job.handle and handle.exists() and handle.read_text() == job.handle
        if not adopts:
            recreate(directory)

        def started(job_handle: str) -> None:
            with storage(directory):
                handle.write_text(job_handle)
            job.on_start(job_handle)

        stage = replace(job, handle=job.handle if adopts else "", on_start=started)
        result = await (self._run_workload(stage) if step is None else self._run_step(directory, step, stage))
        if result.outcome is not Outcome.LOST:
            part = directory / ".result.json.part"
            with storage(directory):
                part.write_bytes(orjson.dumps(result))
                part.rename(ending)
        return result

    async def _run_workload(self, job: Job) -> Result:
        def started(handle: str) -> None:
            job.on_start(handle)
            self._on_start()

        return await self._workload.run(replace(job, on_start=started))

    async def _run_step(self, directory: Path, step: StepConfig, job: Job) -> Result:
        if self._executor is None:
            raise RuntimeError("a workload with steps has an executor")
        job.flush_reservation()
        if not job.handle:
            link_into(directory, self.site.scenario_dir, self.config.files)
        timeout_s = step.timeout_s if step.timeout_s is not None else self.config.timeout_s
        command = Command(
            argv=tuple(CommandTemplate(step.command).words(job.arguments)),
            directory=directory,
            environment={**self.environment(job.arguments), TRIAL_VARIABLE: str(job.directory)},
            stdout=directory / "stdout",
            stderr=directory / "stderr",
            timeout_s=timeout_s,
            marker=job.marker,
            handle=job.handle,
            nodes=job.arguments["nodes"] if self.config.nodes is not None else 1,
            gpus=self.config.gpus,
        )
        done = await self._executor.run(command, job.on_start)
        if done.exit_code == 0 and not done.timed_out:
            return Result(Outcome.OK)
        outcome = Outcome.TIMEOUT if done.timed_out else Outcome.CRASHED
        ending = describe_ending(done, timeout_s, directory / "stderr")
        return Result(outcome, reason=f"the step in steps/{job.trial}/{directory.name} failed: {ending}")

    async def close(self) -> None:
        await self._workload.close()
        if self._executor is not None and not isinstance(self._workload, CommandWorkload):
            await self._executor.close()

    def kill(self) -> None:
        self._workload.kill()
        if self._executor is not None:
            self._executor.kill_all()
