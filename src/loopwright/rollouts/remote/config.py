"""What `loop = { type = "remote" }` holds: the agent, its environment, and what it may use."""

import inspect
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from loopwright.core.config import FUNCTION, Config, size_bytes
from loopwright.core.errors import Problem, did_you_mean
from loopwright.core.imports import import_function
from loopwright.core.task import Task
from loopwright.execution.sandbox import Bounds, Sandbox, SandboxError, sandbox_of
from loopwright.gateway.client import endpoint
from loopwright.gateway.settings import SERVER_TOKEN, token_in
from loopwright.rollouts.loops.base import Loop, LoopConfig
from loopwright.rollouts.tasks.base import TasksError
from loopwright.rollouts.tasks.harbor.source import TaskLocator
from loopwright.workloads.template import CommandTemplate

PLACES = ("instruction", "id", "task_path", "workspace", "home", "openai_base_url", "anthropic_base_url", "key")
"""What can stand in braces in a command."""
GIVEN = (*PLACES, "task", "base_url", "api_key")
"""What a function can take by name; `base_url` and `api_key` are what OpenAI's SDK calls them."""


class BoundsConfig(Config):
    """What all processes of one trial may use; without a key, as much as there is."""

    cpu_s: float | None = Field(default=None, gt=0)
    """Seconds of CPU time."""
    memory: int | None = Field(default=None, gt=0)
    """Memory, for example "2GiB"."""
    processes: int | None = Field(default=None, ge=1)
    """Processes and threads at a time."""
    disk: int | None = Field(default=None, gt=0)
    """Disk space, for example "1GiB"."""

    @field_validator("memory", "disk", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        return size_bytes(value)

    def bounds(self) -> Bounds:
        """As a sandbox takes them."""
        return Bounds(self.cpu_s, self.memory, self.processes, self.disk)


class RemoteConfig(LoopConfig):
    """Somebody else's agent, captured by the gateway that its base URL leads to."""

    evidence: ClassVar[tuple[str, ...]] = ("agent", "verifier")
    type: Literal["remote"] = "remote"
    command: tuple[str, ...] | None = Field(default=None, min_length=1)
    """The agent's program and its arguments, a list; no shell reads them. `{instruction}`, `{id}`, `{task_path}`,
    `{workspace}`, `{home}` (the scenario's directory), `{openai_base_url}`, `{anthropic_base_url}` and `{key}` are
    filled in; `{{` is a brace. It works in a new directory for each trial."""
    function: str | None = Field(default=None, pattern=FUNCTION)
    """Or `module:function`, an async function of yours. It gets what it names of `task`, `instruction`, `base_url`,
    `api_key`, `anthropic_base_url`, `workspace`, `id`, and all of `args`."""
    args: Mapping[str, Any] = Field(default_factory=dict)
    """Arguments for the function, copied for each trial; a command finds them as JSON in LOOPWRIGHT_ARGS."""
    env: Mapping[str, str] = Field(default_factory=dict)
    """Further variables of the command's environment, which has little more than PATH and the base URLs with their
    keys."""
    pass_env: tuple[str, ...] = ()
    """Variables of our own environment that the command gets too, for example ["HOME"]."""
    sandbox: str = "none"
    """What the command may see and reach: `none`, `bwrap`, `docker` or `docker:IMAGE`."""
    readable: tuple[str, ...] = ()
    """Directories, relative to the scenario, that it may read in a sandbox, such as the agent's own."""
    bounds: BoundsConfig = BoundsConfig()
    """What the processes of one trial may use; it takes a sandbox to hold them."""
    output: int = Field(default=2**20, ge=4096)
    """How much of each output stream is taken, for example "1MiB"; its end is in the episode's evidence."""
    deadline_s: float = Field(default=600.0, gt=0)
    """Seconds for one rollout: to open its session and its room, for the agent, the task's tests, and to clean up."""
    verify_s: float | None = Field(default=None, gt=0)
    """Seconds of the deadline that are kept for the task's tests, where it has any; without it, a quarter."""
    task_root: str | None = None
    """Where a Harbor task is looked for by its instance id, if it is not at the path that its row names."""
    task_template: str | None = None
    """And after that: a path with `{instance_id}` in it."""
    concurrency: int = Field(default=8, ge=1)
    """How many agents are at work at a time, over all workers."""
    server: str | None = None
    """A trial server (`loopwright trials serve`) that runs the agents, for example "http://cpu-box:8500"; paths and
    programs are then those of its machine."""
    token_file: str | None = None
    """A file with the trial server's token, relative to the scenario; without it, REMOTE_SERVER_TOKEN has it."""
    queue_s: float = Field(default=600.0, gt=0)
    """Seconds that a trial may wait at the trial server, beyond its deadline."""
    artifacts: tuple[str, ...] = Field(default=(), max_length=100)
    """Files of the workspace that the trial server keeps, as patterns: `*` stands for anything, `/` as well."""

    @field_validator("output", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        return size_bytes(value)

    @field_validator("command")
    @classmethod
    def _known_places(cls, command: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in sorted(CommandTemplate(command).names - set(PLACES)) if command else ():
            raise ValueError(f"nothing is called {{{name}}}. {did_you_mean(name, PLACES)} Write {{{{ for a brace")
        return command

    @model_validator(mode="after")
    def _one_agent(self) -> Self:
        if (self.command is None) == (self.function is None):
            raise ValueError("say what the agent is: either `command` or `function`")
        if self.sandbox == "none" and self.bounds != BoundsConfig():
            raise ValueError('`bounds` need walls that hold them: set `sandbox` to "bwrap" or "docker"')
        if self.server is not None:
            endpoint(self.server, "trial server", 8500)
        given = [name for name in ("token_file", "artifacts") if getattr(self, name)]
        if self.server is None and given:
            raise ValueError(f"`{given[0]}` has no meaning without `server`")
        if self.verify_s is not None and self.verify_s >= self.deadline_s:
            raise ValueError(f"`verify_s` leaves the agent no time: `deadline_s` is {self.deadline_s:g}")
        return self

    def walls(self, home: Path) -> Sandbox:
        """The sandbox that it asks for; SandboxError if there is none of that name, or agents would see too much."""
        if self.sandbox != "none" and any(home.resolve().is_relative_to(place) for place in self._readable(home)):
            raise SandboxError(
                f"`readable` would show agents all of {home}: the tasks with their tests, tokens, the output. "
                "Name the agent's own directory only."
            )
        return sandbox_of(self.sandbox, self.bounds.bounds(), tuple(home / name for name in self.readable))

    def exposes(self, path: Path, home: Path) -> bool:
        path = path.resolve()
        shown = self._readable(home)
        return self.sandbox != "none" and any(path.is_relative_to(p) or p.is_relative_to(path) for p in shown)

    def _readable(self, home: Path) -> list[Path]:
        return [(home / name).resolve() for name in self.readable]

    def problems(self, home: Path) -> list[Problem]:
        if self.server is not None:
            return self._server_problems(home)
        found = []
        if self.function is not None:
            found += [Problem("function", f"{self.function!r}: {why}.") for why in _refusals(self, home)]
            if self.sandbox != "none":
                found.append(Problem("sandbox", "a function runs in our own process, which no sandbox can hold."))
        try:
            sandbox = self.walls(home)
            if not self.workers:  # workers may be on machines that have it
                sandbox.check()
        except SandboxError as error:
            found.append(Problem("sandbox", str(error)))
        missing = [] if self.workers else [name for name in self.readable if not (home / name).is_dir()]
        found += [Problem("readable", f"there is no directory {name!r} in {home}.") for name in missing]
        if self.command and not self.workers and self.sandbox == "none":
            program = self.command[0].replace("{home}", str(home))
            if "{" not in program and shutil.which(program, path=self.env.get("PATH")) is None:
                found.append(Problem("command", f"there is no program {program!r}. Install it or give its path."))
        return found

    def _server_problems(self, home: Path) -> list[Problem]:
        """What can be told here of agents that run elsewhere."""
        found = []
        if self.function is not None:
            found.append(Problem("function", "a trial server runs commands only; write the agent as a `command`."))
        if self.workers:
            found.append(Problem("workers", "has no meaning with `server`, which has workers of its own."))
        try:
            server_token(self.token_file, home)
        except ValueError as error:
            found.append(Problem("token_file", f"{error}."))
        return found

    def task_problem(self, task: Task, home: Path) -> str:
        if self.workers or self.server is not None:
            return ""  # they may be on machines that have it
        try:
            found = TaskLocator(home, self.task_root, self.task_template).read(task)
            if found is not None:
                found.check_variables()
        except TasksError as error:
            return str(error)
        if found is None:
            return "neither its local_task_path nor `task_root` or `task_template` says where its tests are"
        if self.exposes(found.path, home):
            return f"`readable` would show its agent the tests in {found.path}"
        return "" if found.tested else f"{found.path} has no tests/test.sh"


def server_token(file: str | None, home: Path) -> str | None:
    """The trial server's token; ValueError if the file holds none."""
    return os.environ.get(SERVER_TOKEN) or None if file is None else token_in(home / Path(file).expanduser())


def _refusals(config: RemoteConfig, home: Path) -> list[str]:
    """Why the function cannot be an agent."""
    try:
        function = import_function(config.function or "", home)
    except (ImportError, ValueError) as error:
        return [str(error)]
    if not inspect.iscoroutinefunction(function):
        return ["is no async function; write `async def`"]
    parameters = inspect.signature(function).parameters
    takes = {name for name, each in parameters.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    anything = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    needs = {name for name in takes if parameters[name].default is inspect.Parameter.empty}
    known = [*GIVEN, *config.args]
    found = [f"asks for {name!r}, which nobody gives it. {did_you_mean(name, known)[:-1]}" for name in needs - {*known}]
    found += [] if anything else [f"does not take {name!r} of `args`" for name in sorted(config.args.keys() - takes)]
    return sorted(found)


def taken(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What a function takes of what it could be given."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}


class RemoteLoop(Loop):
    """Somebody else's agent: what it does with the policy is known from its session alone."""

    Config: ClassVar[type[LoopConfig]] = RemoteConfig
