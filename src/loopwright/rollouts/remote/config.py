"""What `loop = { type = "remote" }` holds: the agent, its environment, and its limits."""

import inspect
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from loopwright.core.config import FUNCTION, Config, Size
from loopwright.core.errors import Problem, did_you_mean
from loopwright.core.imports import import_function
from loopwright.core.task import Task
from loopwright.execution.sandbox import Bounds, Sandbox, SandboxError, sandbox_of
from loopwright.gateway.client import endpoint
from loopwright.gateway.settings import SERVER_TOKEN, read_token
from loopwright.rollouts.loops.base import Loop, LoopConfig
from loopwright.rollouts.remote.harbor_agent import HarborAgent
from loopwright.rollouts.tasks.harbor.source import TaskLocator
from loopwright.rollouts.tasks.sources import TasksError
from loopwright.workloads.base import CommandTemplate

PLACEHOLDERS = ("instruction", "id", "task_path", "workspace", "home", "openai_base_url", "anthropic_base_url", "key")
"""Placeholders that a command may contain in braces."""
FUNCTION_ARGUMENTS = (*PLACEHOLDERS, "task", "base_url", "api_key")
"""Arguments that a function may name; `base_url` and `api_key` are the names in OpenAI's SDK."""


class BoundsConfig(Config):
    """Limits for all processes of one trial together; without a key, unlimited."""

    cpu_s: float | None = Field(default=None, gt=0)
    """Seconds of CPU time."""
    memory: Size | None = Field(default=None, gt=0)
    """Memory, for example "2GiB"."""
    processes: int | None = Field(default=None, ge=1)
    """Number of processes and threads at a time."""
    disk: Size | None = Field(default=None, gt=0)
    """Disk space, for example "1GiB"."""

    def bounds(self) -> Bounds:
        """The limits as a sandbox takes them."""
        return Bounds(self.cpu_s, self.memory, self.processes, self.disk)


class RemoteConfig(LoopConfig):
    """Somebody else's agent, recorded by the gateway that its base URL leads to."""

    evidence: ClassVar[tuple[str, ...]] = ("agent", "verifier")
    through_gateway: ClassVar[bool] = True
    type: Literal["remote"] = "remote"
    command: tuple[str, ...] | None = Field(default=None, min_length=1)
    """The agent's program and its arguments as a list; no shell is involved. `{instruction}`, `{id}`, `{task_path}`,
    `{workspace}`, `{home}` (the scenario's directory), `{openai_base_url}`, `{anthropic_base_url}` and `{key}` are
    replaced; write `{{` for a brace. Each trial runs in a new directory."""
    function: str | None = Field(default=None, pattern=FUNCTION)
    """Or `module:function`, an async function. It is passed those of `task`, `instruction`, `base_url`, `api_key`,
    `anthropic_base_url`, `workspace` and `id` that it has as parameters, and all of `args`."""
    agent: str | None = Field(default=None, pattern=r"^[\w.-]+(:\w+)?$")
    """Or one of Harbor's agents by its name, for example "terminus-2". It runs in the sandbox, in Harbor's interpreter;
    `args` are its keyword arguments."""
    harbor: str = ".venvs/harbor"
    """For `agent`: the virtual environment that Harbor is installed in, relative to the scenario."""
    args: Mapping[str, Any] = Field(default_factory=dict)
    """Arguments for the function, copied for each trial; a command gets them as JSON in LOOPWRIGHT_ARGS."""
    env: Mapping[str, str] = Field(default_factory=dict)
    """Further variables for the command, whose environment has little more than PATH, the base URLs and their keys."""
    pass_env: tuple[str, ...] = ()
    """Variables of our environment to pass on to the command, for example ["HOME"]."""
    sandbox: str = "none"
    """The sandbox of the command: `none`, `bwrap`, `docker` or `docker:IMAGE`."""
    readable: tuple[str, ...] = ()
    """Directories, relative to the scenario, that are readable in the sandbox, such as the agent's own."""
    bounds: BoundsConfig = BoundsConfig()
    """Limits for the processes of one trial; a sandbox is needed to enforce them."""
    output: Size = Field(default=2**20, ge=4096)
    """How much of each output stream is recorded, for example "1MiB"; its end is in the episode's evidence."""
    deadline_s: float = Field(default=600.0, gt=0)
    """Seconds for the agent, the task's tests and the clean-up; the boot (session, image, sandbox) has as many before
    that."""
    verify_s: float | None = Field(default=None, gt=0)
    """Seconds of the deadline that are reserved for the task's tests, if it has any; by default a quarter."""
    task_root: str | None = None
    """Directory in which a Harbor task is looked up by its instance id if its row's path does not exist."""
    task_template: str | None = None
    """A path with `{instance_id}` that is tried after that."""
    concurrency: int = Field(default=8, ge=1)
    """How many agents work at a time, over all workers."""
    server: str | None = None
    """A trial server (`loopwright trials serve`) that runs the agents, for example "http://cpu-box:8500"; paths and
    programs are then those of its machine."""
    token_file: str | None = None
    """A file with the trial server's token, relative to the scenario; by default REMOTE_SERVER_TOKEN holds it."""
    queue_s: float = Field(default=600.0, gt=0)
    """Seconds that a trial may wait in the trial server's queue, in addition to its deadline."""
    artifacts: tuple[str, ...] = Field(default=(), max_length=100)
    """Patterns of workspace files that the trial server keeps; `*` matches anything, including `/`."""

    @field_validator("command")
    @classmethod
    def _check_placeholders(cls, command: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in sorted(CommandTemplate(command).names - set(PLACEHOLDERS)) if command else ():
            suggestion = did_you_mean(name, PLACEHOLDERS)
            raise ValueError(f"unknown placeholder {{{name}}}. {suggestion} Write {{{{ for a brace")
        return command

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(each is not None for each in (self.command, self.function, self.agent)) != 1:
            raise ValueError("give the agent as one of `command`, `function` and `agent`")
        if self.agent is None and self.harbor != type(self).model_fields["harbor"].default:
            raise ValueError("`harbor` has no meaning without `agent`")
        if self.sandbox == "none" and self.bounds != BoundsConfig():
            raise ValueError('`bounds` need a sandbox that enforces them: set `sandbox` to "bwrap" or "docker"')
        if self.server is not None:
            endpoint(self.server, "trial server", 8500)
        server_keys = [name for name in ("token_file", "artifacts") if getattr(self, name)]
        if self.server is None and server_keys:
            raise ValueError(f"`{server_keys[0]}` has no meaning without `server`")
        if self.verify_s is not None and self.verify_s >= self.deadline_s:
            raise ValueError(f"`verify_s` leaves the agent no time: `deadline_s` is {self.deadline_s:g}")
        return self

    def build_sandbox(self, scenario_dir: Path) -> Sandbox:
        """The sandbox; SandboxError if its name is unknown, or agents would see too much."""
        paths = self._readable_paths(scenario_dir)
        if self.sandbox != "none" and any(scenario_dir.resolve().is_relative_to(path) for path in paths):
            raise SandboxError(
                f"`readable` would show agents all of {scenario_dir}: the tasks with their tests, tokens, the output. "
                "List only the agent's own directory."
            )
        own = paths[len(self.readable) :]
        readable = (*(scenario_dir / name for name in self.readable), *own)  # by the paths that its command may use
        return sandbox_of(self.sandbox, self.bounds.bounds(), readable)

    def harbor_agent(self, scenario_dir: Path) -> HarborAgent | None:
        """Harbor's agent, if it is one."""
        if self.agent is None:
            return None
        return HarborAgent(self.agent, (scenario_dir / Path(self.harbor).expanduser()).resolve())

    def exposes(self, path: Path, scenario_dir: Path) -> bool:
        path = path.resolve()
        readable = self._readable_paths(scenario_dir)
        return self.sandbox != "none" and any(path.is_relative_to(p) or p.is_relative_to(path) for p in readable)

    def _readable_paths(self, scenario_dir: Path) -> list[Path]:
        harbor_agent = self.harbor_agent(scenario_dir)
        own = () if harbor_agent is None else harbor_agent.readable()
        return [*((scenario_dir / name).resolve() for name in self.readable), *own]

    @property
    def total_s(self) -> float:
        return super().total_s + self.deadline_s  # for the boot

    def problems(self, scenario_dir: Path) -> list[Problem]:
        if self.server is not None:
            return self._server_problems(scenario_dir)
        problems = []
        if self.function is not None:
            messages = self._function_problems(self.function, scenario_dir)
            problems += [Problem("function", f"{self.function!r}: {message}.") for message in messages]
            if self.sandbox != "none":
                problems.append(Problem("sandbox", "a function runs in our own process, outside any sandbox."))
        harbor_agent = None if self.workers else self.harbor_agent(scenario_dir)
        if harbor_agent is not None and (message := harbor_agent.problem()):
            problems.append(Problem("agent", message))
        try:
            sandbox = self.build_sandbox(scenario_dir)
            if not self.workers:  # workers may run on machines that have it
                sandbox.check()
        except SandboxError as error:
            problems.append(Problem("sandbox", str(error)))
        missing = [] if self.workers else [name for name in self.readable if not (scenario_dir / name).is_dir()]
        problems += [Problem("readable", f"directory {name!r} not found in {scenario_dir}.") for name in missing]
        if self.command and not self.workers and self.sandbox == "none":
            program = self.command[0].replace("{home}", str(scenario_dir))
            if "{" not in program and shutil.which(program, path=self.env.get("PATH")) is None:
                problems.append(Problem("command", f"program {program!r} not found. Install it or give its path."))
        return problems

    def _server_problems(self, scenario_dir: Path) -> list[Problem]:
        """What can be checked here about agents that run elsewhere."""
        problems = []
        if self.function is not None:
            problems.append(Problem("function", "a trial server runs commands only; write the agent as a `command`."))
        if self.workers:
            problems.append(Problem("workers", "has no meaning with `server`, which has its own workers."))
        try:
            server_token(self.token_file, scenario_dir)
        except ValueError as error:
            problems.append(Problem("token_file", f"{error}."))
        return problems

    def _function_problems(self, name: str, scenario_dir: Path) -> list[str]:
        """Why the function cannot be an agent."""
        try:
            function = import_function(name, scenario_dir)
        except (ImportError, ValueError) as error:
            return [str(error)]
        if not inspect.iscoroutinefunction(function):
            return ["is not an async function; write `async def`"]
        parameters = inspect.signature(function).parameters
        names = {
            name for name, each in parameters.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        }
        required = {name for name in names if parameters[name].default is inspect.Parameter.empty}
        available = [*FUNCTION_ARGUMENTS, *self.args]
        problems = [
            f"has a parameter {name!r} that nothing provides. {did_you_mean(name, available)[:-1]}"
            for name in required - {*available}
        ]
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            problems += [f"has no parameter {name!r}, which is in `args`" for name in self.args.keys() - names]
        return sorted(problems)

    def refusal(self, task: Task) -> str:
        return "" if self.sandbox.partition(":")[0] == "docker" else str(task.extra.get("needs_docker") or "")

    def task_problem(self, task: Task, scenario_dir: Path) -> str:
        if self.workers or self.server is not None:
            return ""  # they may run on machines that have the task
        try:
            harbor_task = TaskLocator(scenario_dir, self.task_root, self.task_template).read(task)
            if harbor_task is not None:
                harbor_task.check_variables()
        except TasksError as error:
            return str(error)
        if harbor_task is None:
            return "neither its local_task_path nor `task_root` or `task_template` leads to its tests"
        if self.exposes(harbor_task.path, scenario_dir):
            return f"`readable` would show its agent the tests in {harbor_task.path}"
        return "" if harbor_task.has_tests else f"{harbor_task.path} has no tests/test.sh"


def server_token(file: str | None, scenario_dir: Path) -> str | None:
    """The trial server's token; ValueError if the file does not contain one."""
    return os.environ.get(SERVER_TOKEN) or None if file is None else read_token(scenario_dir / Path(file).expanduser())


class RemoteLoop(Loop):
    """Somebody else's agent: what it does is known from its session only."""

    Config: ClassVar[type[LoopConfig]] = RemoteConfig
