"""Agents: a command in a sandbox, or a function of the user's. Both report how they ended."""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from loopwright.core.errors import LaunchError
from loopwright.core.imports import import_function
from loopwright.core.task import Task
from loopwright.execution.base import Command, Executor
from loopwright.execution.local.process_tree import signal_name
from loopwright.execution.local.processes import MARKER_VARIABLE
from loopwright.execution.sandbox import SandboxInstance
from loopwright.gateway.client import RemoteSession
from loopwright.rollouts.loops.base import describe_error
from loopwright.rollouts.pools.base import answered
from loopwright.rollouts.remote.config import RemoteConfig, taken
from loopwright.workloads.template import CommandTemplate

_KEPT = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", MARKER_VARIABLE)
_TAIL_BYTES = 16 * 1024
"""How much of the end of each output stream is evidence."""
_SHOWN = 300
_MOST_RETURNED = 64 * 1024
_GIVE_UP_S = 2.0
"""Seconds that a function has to heed its cancellation."""


@dataclass(frozen=True, slots=True)
class AgentExit:
    """How an agent ended by itself."""

    failure: str = ""
    """Why that was no good end; empty if it was one."""
    infra: bool = False
    """Whether it could not be started, for a reason that is the machine's."""
    seen: Mapping[str, Any] = field(default_factory=dict)
    """What is known of its end, as plain data: `exit_code`, `signal`, or what a function `returned`."""


@dataclass(frozen=True, slots=True)
class AgentJob:
    """One trial for an agent: its task, its session, and the sandbox that it works in."""

    task: Task
    instruction: str
    env: Mapping[str, str]
    """Variables of the task's own environment."""
    session: RemoteSession
    sandbox: SandboxInstance
    directory: Path
    """Where its output streams go, out of its own reach."""
    trial: int | None
    marker: str
    """By it all processes of the trial are found again."""

    @property
    def home(self) -> Path:
        """A home for its agent, where the sandbox has none."""
        return self.directory / "home"

    def places(self, home: Path) -> dict[str, str]:
        """What its agent is told, by the names that a command has for it."""
        sandbox, session = self.sandbox, self.session
        return {
            "instruction": self.instruction,
            "id": self.task.id,
            "home": str(home),
            "task_path": str(self.task.extra.get("local_task_path", "")),
            "workspace": sandbox.path_inside(sandbox.workspace),
            "openai_base_url": sandbox.url_inside(session.openai_base_url),
            "anthropic_base_url": sandbox.url_inside(session.anthropic_base_url),
            "key": session.key,
        }


def instruction(task: Task) -> str:
    """What an agent is asked to do: the last thing that the task's user says."""
    said = next((message for message in reversed(task.messages) if message["role"] == "user"), task.messages[-1])
    content = said.get("content")
    if isinstance(content, list):  # parts, of which texts are the ones that a command line can hold
        return "\n".join(str(part["text"]) for part in content if isinstance(part, Mapping) and "text" in part)
    return str(content or "")


class ExternalAgent(ABC):
    """Works on one job at a time per call; calls are many at a time."""

    @abstractmethod
    async def work(self, job: AgentJob) -> AgentExit:
        """Attempt it. When this is cancelled, whatever was begun is ended first."""

    def printed(self, job: AgentJob) -> dict[str, str]:
        """The ends of its output streams, by name."""
        return {}


class CommandAgent(ExternalAgent):
    """A program, started afresh for each trial in a small environment."""

    def __init__(self, config: RemoteConfig, home: Path, passed: Mapping[str, str], executor: Executor) -> None:
        self._config, self._home, self._passed, self._executor = config, home, passed, executor
        self._template = CommandTemplate(config.command or ())

    async def work(self, job: AgentJob) -> AgentExit:
        places = job.places(self._home)
        command = Command(
            argv=tuple(self._template.words(places)),
            directory=job.sandbox.workspace,
            environment=self.environment(job, places),
            stdout=job.directory / "stdout",
            stderr=job.directory / "stderr",
            marker=job.marker,
        )
        try:
            completion = await self._executor.run(job.sandbox.wrap(command), unrecorded)
        except LaunchError as error:
            return AgentExit(str(error), error.infra)
        if job.sandbox.setup_failed(completion):
            said = _tail(job.directory / "stderr").strip()[-_SHOWN:]
            return AgentExit(f"the agent's sandbox could not be set up: {said}", infra=True)
        if completion.signal is not None:
            reason = job.sandbox.exceeded_limit or f"by {signal_name(completion.signal)}"
            return AgentExit(f"the agent was ended: {reason}", seen={"signal": completion.signal})
        code = completion.exit_code
        return AgentExit(f"the agent exited with {code}" if code else "", seen={"exit_code": code})

    def environment(self, job: AgentJob, places: Mapping[str, str]) -> dict[str, str]:
        """All that its process is told: little of ours, and how to reach the policy in both dialects."""
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        workspace, openai, key = places["workspace"], places["openai_base_url"], places["key"]
        # Not the workspace: what programs leave in their home is nothing for the task's tests.
        home = {} if job.sandbox.has_own_paths else {"HOME": str(job.home), "TMPDIR": str(job.home)}
        return {
            **kept,
            **home,
            **job.env,  # first: a task that brings a key of its own must not lead its agent past the gateway
            "OPENAI_BASE_URL": openai,
            "OPENAI_API_BASE": openai,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": places["anthropic_base_url"],
            "ANTHROPIC_API_KEY": key,
            "LOOPWRIGHT_HOME": str(self._home),
            "LOOPWRIGHT_SESSION": job.session.id,
            "LOOPWRIGHT_TRIAL_NUMBER": "" if job.trial is None else str(job.trial),
            "LOOPWRIGHT_TASK": job.task.id,
            "LOOPWRIGHT_WORKSPACE": workspace,
            "LOOPWRIGHT_ARGS": orjson.dumps(dict(self._config.args)).decode(),
            **self._passed,
            **self._config.env,
        }

    def printed(self, job: AgentJob) -> dict[str, str]:
        return {name: tail for name in ("stdout", "stderr") if (tail := _tail(job.directory / name))}


class FunctionAgent(ExternalAgent):
    """An async function in this process."""

    def __init__(self, config: RemoteConfig, home: Path) -> None:
        self._config = config
        self._function: Callable[..., Any] = import_function(config.function or "", home)
        self._home = home

    async def work(self, job: AgentJob) -> AgentExit:
        places = job.places(self._home)
        task = deepcopy(replace(job.task, label=None))  # its own to change; the label is the judger's
        names = {"task": task, "base_url": places["openai_base_url"], "api_key": places["key"]}
        given = taken(self._function, {**places, **names, **deepcopy(dict(self._config.args))})
        call = asyncio.ensure_future(answered(self._function(**given)))
        try:
            await asyncio.wait({call})
        except asyncio.CancelledError:
            call.cancel()
            await asyncio.wait({call}, timeout=_GIVE_UP_S)  # what heeds nothing goes on without a session
            call.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
        if call.cancelled():
            return AgentExit("the agent cancelled itself")
        if (error := call.exception()) is not None:
            return AgentExit(f"the agent raised {describe_error(error)}")
        return AgentExit(seen=_plain(call.result()))


def _plain(returned: Any) -> dict[str, Any]:
    """What a function returned, as evidence: nothing where it is no plain data, or too much of it."""
    with suppress(TypeError):
        data = orjson.dumps(returned)
        if returned is not None and len(data) <= _MOST_RETURNED:
            return {"returned": orjson.loads(data)}
    return {}


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def unrecorded(pid: int, start_ticks: int) -> None:
    """A trial is begun again, not gone on with, and the reaper finds its processes by their marker."""
