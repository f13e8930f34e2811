"""Agents: a command in a sandbox, or a function of the user's. Both report how they ended."""

import asyncio
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from loopwright.core.errors import LaunchError, LoopwrightError
from loopwright.core.imports import import_function
from loopwright.core.outcome import Fault
from loopwright.core.task import Task
from loopwright.execution.base import Command, Executor
from loopwright.execution.local.process_tree import signal_name
from loopwright.execution.local.processes import MARKER_VARIABLE
from loopwright.execution.sandbox import SandboxInstance
from loopwright.rollouts.loops.base import describe_error
from loopwright.rollouts.pools.base import contain_failures
from loopwright.rollouts.remote.config import RemoteConfig
from loopwright.rollouts.remote.gateway_host import AgentSession
from loopwright.rollouts.remote.verify import read_tail
from loopwright.workloads.base import CommandTemplate

_INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", MARKER_VARIABLE)
_TAIL_BYTES = 16 * 1024
"""How much of the end of each output stream is evidence."""
_MESSAGE_CHARS = 300
_MAX_RETURN_BYTES = 64 * 1024
_CANCEL_S = 2.0
"""Seconds that a function has to react to its cancellation."""


class RolloutFailed(LoopwrightError, RuntimeError):
    """Raised by an agent's function that knows who caused its failure; `returned` is for the judger."""

    def __init__(self, message: str, fault: Fault, returned: Any = None) -> None:
        super().__init__(message)
        self.fault, self.returned = fault, returned


@dataclass(frozen=True, slots=True)
class AgentExit:
    """How an agent ended by itself."""

    failure: str = ""
    """Why it failed; empty if it did not."""
    infra: bool = False
    """Whether it could not be started for a reason that lies with the machine."""
    fault: Fault | None = None
    """Who caused the failure, if the agent knows."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Plain data about its end: `exit_code`, `signal`, or what a function `returned`."""


@dataclass(frozen=True, slots=True)
class AgentJob:
    """One trial for an agent: its task, its session, and the sandbox that it works in."""

    task: Task
    instruction: str
    env: Mapping[str, str]
    """Variables of the task's environment."""
    session: AgentSession
    sandbox: SandboxInstance
    directory: Path
    """Where its output streams are written, out of its reach."""
    trial: int | None
    marker: str
    """Identifies all processes of the trial."""

    @property
    def home(self) -> Path:
        """The agent's home directory if the sandbox does not provide one."""
        return self.directory / "home"

    def placeholders(self, scenario_dir: Path) -> dict[str, str]:
        """The values that a command can refer to, by name."""
        sandbox, session = self.sandbox, self.session
        return {
            "instruction": self.instruction,
            "id": self.task.id,
            "home": str(scenario_dir),
            "task_path": str(self.task.extra.get("local_task_path", "")),
            "workspace": sandbox.path_inside(sandbox.workspace),
            "openai_base_url": sandbox.url_inside(session.openai_base_url),
            "anthropic_base_url": sandbox.url_inside(session.anthropic_base_url),
            "key": session.key,
        }


def last_user_message(task: Task) -> str:
    """The text of the task's last user message: the agent's instruction."""
    last = next((message for message in reversed(task.messages) if message["role"] == "user"), task.messages[-1])
    content = last.get("content")
    if isinstance(content, list):  # only text parts fit on a command line
        return "\n".join(str(part["text"]) for part in content if isinstance(part, Mapping) and "text" in part)
    return str(content or "")


class ExternalAgent(ABC):
    """Attempts jobs, many at a time."""

    needs_directory = True
    """Whether its jobs need a workspace and a home."""

    @abstractmethod
    async def work(self, job: AgentJob) -> AgentExit:
        """Attempt a job. When cancelled, it ends everything it started before it returns."""

    def output(self, job: AgentJob) -> dict[str, str]:
        """The ends of its output streams, by name."""
        return {}


class CommandAgent(ExternalAgent):
    """A program, started for each trial in a minimal environment."""

    def __init__(
        self, config: RemoteConfig, scenario_dir: Path, passed_env: Mapping[str, str], executor: Executor
    ) -> None:
        self._config, self._scenario_dir, self._passed_env = config, scenario_dir, passed_env
        self._executor = executor
        harbor_agent = config.harbor_agent(scenario_dir)
        self._template = CommandTemplate(config.command or () if harbor_agent is None else harbor_agent.command)

    async def work(self, job: AgentJob) -> AgentExit:
        values = job.placeholders(self._scenario_dir)
        command = Command(
            argv=tuple(self._template.words(values)),
            directory=job.sandbox.workspace,
            environment=self._environment(job, values),
            stdout=job.directory / "stdout",
            stderr=job.directory / "stderr",
            marker=job.marker,
        )
        try:
            # Its processes need not be recorded: a trial is repeated, not resumed, and the reaper finds them by marker.
            completion = await self._executor.run(job.sandbox.wrap(command), lambda _: None)
        except LaunchError as error:
            return AgentExit(str(error), error.infra)
        if await asyncio.to_thread(job.sandbox.setup_failed, completion):
            message = read_tail(job.directory / "stderr", _TAIL_BYTES).strip()[-_MESSAGE_CHARS:]
            is_infra = not await asyncio.to_thread(job.sandbox.is_ruined)  # by an earlier step of the agent
            return AgentExit(f"the agent's sandbox failed: {message}", infra=is_infra)
        if completion.signal is not None:
            reason = job.sandbox.exceeded_limit or signal_name(completion.signal)
            return AgentExit(f"the agent was killed: {reason}", details={"signal": completion.signal})
        code = completion.exit_code
        return AgentExit(f"the agent exited with {code}" if code else "", details={"exit_code": code})

    def _environment(self, job: AgentJob, values: Mapping[str, str]) -> dict[str, str]:
        """The agent's variables: few of ours, and how to reach the policy in both dialects."""
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        openai, key = values["openai_base_url"], values["key"]
        # Not the workspace: files that programs leave in their home directory must not reach the task's tests.
        home = {} if job.sandbox.has_own_paths else {"HOME": str(job.home), "TMPDIR": str(job.home)}
        return {
            **inherited,
            **home,
            **job.env,  # before the keys: a task's own API key must not lead the agent past the gateway
            "OPENAI_BASE_URL": openai,
            "OPENAI_API_BASE": openai,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": values["anthropic_base_url"],
            "ANTHROPIC_API_KEY": key,
            "LOOPWRIGHT_HOME": str(self._scenario_dir),
            "LOOPWRIGHT_SESSION": job.session.id,
            "LOOPWRIGHT_TRIAL_NUMBER": "" if job.trial is None else str(job.trial),
            "LOOPWRIGHT_TASK": job.task.id,
            "LOOPWRIGHT_WORKSPACE": values["workspace"],
            "LOOPWRIGHT_ARGS": orjson.dumps(dict(self._config.args)).decode(),
            **self._passed_env,
            **self._config.env,
        }

    def output(self, job: AgentJob) -> dict[str, str]:
        return {name: tail for name in ("stdout", "stderr") if (tail := read_tail(job.directory / name, _TAIL_BYTES))}


class FunctionAgent(ExternalAgent):
    """An async function in this process."""

    def __init__(self, config: RemoteConfig, scenario_dir: Path) -> None:
        self._config, self._scenario_dir = config, scenario_dir
        self._function: Callable[..., Any] = import_function(config.function or "", scenario_dir)
        self._parameters = inspect.signature(self._function).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in self._parameters.values())
        takes_directory = takes_all or not {"workspace", "home"}.isdisjoint(self._parameters)
        self.needs_directory = takes_directory or config.sandbox != "none"

    async def work(self, job: AgentJob) -> AgentExit:
        values = job.placeholders(self._scenario_dir)
        # A copy that it may change. The label is for the judger only.
        task = Task(job.task.id, *deepcopy((job.task.messages, None, job.task.data_source, job.task.extra)))
        available = {**values, "task": task, "base_url": values["openai_base_url"], "api_key": values["key"]}
        available |= deepcopy(dict(self._config.args))
        if not any(each.kind is each.VAR_KEYWORD for each in self._parameters.values()):
            available = {name: value for name, value in available.items() if name in self._parameters}
        call = asyncio.ensure_future(contain_failures(self._function(**available)))
        try:
            await asyncio.wait({call})
        except asyncio.CancelledError:
            call.cancel()
            await asyncio.wait({call}, timeout=_CANCEL_S)  # if it ignores this, it continues without a session
            call.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
        if call.cancelled():
            return AgentExit("the agent cancelled itself")
        error = call.exception()
        if isinstance(error, RolloutFailed):
            return AgentExit(str(error), fault=error.fault, details=_returned(error.returned))
        if error is not None:
            return AgentExit(f"the agent raised {describe_error(error)}")
        return AgentExit(details=_returned(call.result()))


def _returned(result: Any) -> dict[str, Any]:
    """What a function returned, as evidence; only plain data is."""
    with suppress(TypeError):
        data = orjson.dumps(result)
        if result is not None and len(data) <= _MAX_RETURN_BYTES:
            return {"returned": orjson.loads(data)}
    return {}
