"""What every kind of run shares: how its table is read, how its ledger is opened, and what is recorded about it."""

import os
import platform
import shutil
import subprocess
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from loopwright.agents import agents
from loopwright.core.agent import Agent, AgentConfig
from loopwright.core.errors import LedgerError, Problem, did_you_mean, storage
from loopwright.core.imports import import_function
from loopwright.core.trial import Penalties, RewardFunction, rewards
from loopwright.envs.live.campaign_env import LiveCampaignEnv
from loopwright.envs.live.env import LiveEnv
from loopwright.envs.live.server import GymServer
from loopwright.envs.search import SearchEnv
from loopwright.execution.local.processes import end_leftovers
from loopwright.execution.system import SystemConfig
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.trial_book import Observer, TrialBook
from loopwright.rollouts.env import RolloutEnv
from loopwright.scenario.checker import Checker
from loopwright.scenario.schema import RunBasics, RunConfig, Scenario
from loopwright.spaces.parameter import flat
from loopwright.spaces.space import EnvParamConfig, problem_with

AnyEnv = SearchEnv | LiveEnv | LiveCampaignEnv | RolloutEnv
_WORKLOAD_KEYS = ("type", "command", "setup", "function", "timeout_s", "env_class", "address", "record")


@dataclass(frozen=True)
class LoadedScenario:
    """A checked scenario, with its source and the directory that its paths are relative to."""

    scenario: Scenario
    runs: "tuple[RunKind, ...]"
    """The runs of the scenario, each as its kind."""
    raw: Mapping[str, Any]
    """The tables as they were checked, overrides included."""
    text: str
    """The source as TOML, without overrides."""
    path: Path | None
    """The file; None if the source was a dict."""
    directory: Path
    overrides: Mapping[str, Any]
    """What `set=` or `--set` changed, by dotted key."""
    label: str
    """Where it came from, for messages and records."""
    hints: Sequence[tuple[str, Problem]]
    """What is legal but probably not meant, each with the name of its run."""


@dataclass(frozen=True)
class BuildContext:
    """What a run is built from, and where."""

    loaded: LoadedScenario
    output: Path
    agent: AgentConfig
    resources: ExitStack
    """Closes what the run opens."""
    accept_changes: bool = False
    """Whether a ledger may continue although the run's inputs have changed."""
    server: GymServer | None = None
    """Replaces the server that a live run names."""
    agent_class: type[Agent] | None = None
    """The agent that acts in the environment; None if the caller does."""
    env: Callable[..., Any] | None = None
    """Replaces the environment that the run names."""
    on_start: Callable[[], None] = lambda: None
    """Called when the process or job of a plain run exists."""


class RunKind(RunConfig, ABC):
    """A run as one of the four kinds. The loader decides which; nothing after it asks again.

    A kind reads its tables, checks them together, builds its environment, and says what the ledger records about it.
    """

    kind: ClassVar[Literal["search", "live", "rollout", "training"]]
    needs: ClassVar[tuple[str, ...]]
    """The tables without which `check` makes no sense."""
    agent_class: type[Agent] | None = Field(default=None, exclude=True)
    """The agent's class; None without an agent, or if its table is broken."""

    # -- loading ------------------------------------------------------------------------------------------------

    @classmethod
    def read(cls, raw: dict[str, Any], agent: type[Agent] | None, checker: Checker) -> "RunKind | None":
        """The run that a table describes, or None if the checker has found problems."""
        before = len(checker.problems)
        parts: dict[str, Any] = {}
        if "agent" in raw:
            parts["agent"] = checker.model("[run.agent]", raw["agent"], agent.Config) if agent else None
            parts["agent_class"] = agent if parts["agent"] is not None else None
        parts["reward"] = _rewards(raw.get("reward", []), checker)
        parts |= cls.read_parts(raw, checker)
        draws = raw.get("env_params", {})
        if isinstance(draws, dict):
            configs = {n: checker.model(f"[run.env_params.{n}]", table, EnvParamConfig) for n, table in draws.items()}
            parts["env_params"] = None if None in configs.values() else configs
        else:
            checker.add("[run.env_params]", "must be a table of tables, such as [run.env_params.size].")
            parts["env_params"] = None
        parts["rewards"] = checker.model("[run.rewards]", raw.get("rewards", {}), Penalties)
        basics = {key: value for key, value in raw.items() if key in RunBasics.model_fields}
        # A wrong name must not hide other problems.
        run = checker.model("[[run]]", basics, RunBasics) or RunBasics.model_construct(name="")
        if run.iterations > 1:
            run = run.model_copy(update={"repeats": run.iterations})  # the same, under the word for plain runs
        checker.unknown_keys("[[run]]", raw, RunConfig)
        if all(parts[key] is not None for key in (*cls.needs, "reward", "env_params")):
            config = cls.model_construct(**dict(run), **parts)
            config.check(raw, checker)
            if config.env is not None:
                if cls.kind not in ("search", "live"):
                    checker.add("[[run]] env", "has no meaning in a run with rollouts; remove it.")
                try:
                    import_function(config.env, checker.directory)
                except (ImportError, ValueError) as error:
                    checker.add("[[run]] env", f"{config.env!r}: {error}.")
            for path in config.observers:
                try:
                    import_observer(path, checker.directory)
                except (ImportError, AttributeError, TypeError, ValueError) as error:
                    checker.add("[[run]] observers", f"{path!r}: {error}.")
            return config if len(checker.problems) == before else None
        return None

    @classmethod
    @abstractmethod
    def read_parts(cls, raw: dict[str, Any], checker: Checker) -> dict[str, Any]:
        """The configs of the tables that only this kind has."""

    @abstractmethod
    def check(self, raw: dict[str, Any], checker: Checker) -> None:
        """Report what is wrong with the tables together. `agent` is None if it is missing or broken."""

    def check_draws(self, raw: dict[str, Any], parameters: Mapping[str, Any], checker: Checker) -> None:
        """Report environment parameters that cannot be drawn, or that the agent cannot use."""
        for name, config in self.env_params.items():
            where = f"[run.env_params.{name}]"
            if name not in parameters:
                checker.add(where, f"there is no argument {name!r}. {did_you_mean(name, list(parameters))}")
            elif problem := problem_with(parameters[name], config):
                checker.add(where, f"argument {name!r} {problem}.")
        if self.env_params and self.agent_class is None:
            checker.add("[run.env_params]", "needs an agent; a run without one has nothing to learn from draws.")
        elif self.env_params and self.agent_class is not None and not self.agent_class.samples_env_params:
            able = [name for name, other in agents.working().items() if other.samples_env_params]
            checker.add(
                "[run.env_params]",
                f"agent {raw['agent']['type']!r} does not sample them; agents that do: {', '.join(able)}.",
            )

    def unreachable(self, system: SystemConfig) -> list[Problem]:
        """What this run needs that cannot be reached now; asked by `loopwright verify`, not when a run starts."""
        return []

    def hints(self) -> list[Problem]:
        """What is legal but probably not meant; collected when the scenario is loaded."""
        return []

    @staticmethod
    def check_not_rollout(raw: dict[str, Any], checker: Checker) -> None:
        """Report tables that only runs with rollouts have."""
        for key in ("engine", "gateway", "eval"):
            if key in raw:
                checker.add(f"[run.{key}]", "has no meaning without [run.rollout].")

    @staticmethod
    def check_not_search(raw: dict[str, Any], checker: Checker) -> None:
        """Report keys that only runs with a workload have."""
        for key in ("stop", "fidelity", "episode", "depends_on", "pre", "post", "iterations"):
            if key in raw:
                checker.add(f"[[run]] {key}", "has no meaning without [run.workload].")

    # -- building -----------------------------------------------------------------------------------------------

    @abstractmethod
    def build_env(self, context: BuildContext) -> AnyEnv:
        """The environment, with its ledger open."""

    def open_book(self, context: BuildContext, fingerprint: str, **details: Any) -> TrialBook:
        """The run's trial book, over a new ledger or over that of an earlier process; closed with the context.

        Processes that an earlier process left running are ended first. The ledger records `details` about the run.
        """
        observers = [import_observer(path, context.loaded.directory) for path in self.observers]
        directory = (context.output / self.name).absolute()
        path = directory / "ledger.db"
        synchronous: Literal["FULL", "NORMAL"] = (
            "FULL" if context.loaded.scenario.system.durability == "full" else "NORMAL"
        )
        if path.exists():
            ledger = Ledger.open(path, synchronous=synchronous)
            self._end_leftovers(ledger, context.loaded.scenario.system)
            ledger.close_episodes()
            if ledger.state("fingerprint") != fingerprint and not context.accept_changes:
                ledger.close()
                raise LedgerError(
                    f"the inputs of run {self.name!r} have changed since it started, so old and new trials cannot be "
                    "compared. Start again in another --output, or continue anyway with `resume --accept-changes`."
                )
            ledger.set_state("fingerprint", fingerprint)
        else:
            with storage(directory):
                directory.mkdir(parents=True, exist_ok=True)
            state = {"id": uuid.uuid4().hex, "fingerprint": fingerprint}
            has_conversations = self.kind in ("rollout", "training")
            ledger = Ledger.create(path, synchronous=synchronous, state=state, private=has_conversations)
        context.resources.callback(ledger.close)
        self.describe(context, ledger, details)
        agent = context.agent
        return TrialBook(
            self.name,
            directory,
            ledger,
            budget=agent.budget,
            count_cached=agent.count_cached,
            observers=observers,
        )

    def _end_leftovers(self, ledger: Ledger, system: SystemConfig) -> None:
        """End what an earlier process left running here. Jobs of a cluster continue, and their trials adopt them."""
        local, on_ray, jobs = dict[int, str](), dict[int, str](), dict[int, str]()
        for trial, (_, handle) in ledger.open_attempts().items():
            # What runs on Ray dies with its driver.
            attempts = local if handle[0].isdigit() else on_ray if handle.startswith("ray:") else jobs
            attempts[trial] = handle
        for handle in jobs.values():
            if not system.adopts(handle):
                ledger.close()
                raise LedgerError(
                    f"run {self.name!r} has jobs on another system ({handle}), which may still run. Continue it with "
                    f'[system] type = "{handle.partition(":")[0]}".'
                )
        # Jobs that are adopted may run on this machine, and have the same marker.
        marker = ledger.state("id") if not jobs else ""
        end_leftovers([*local.values(), *ledger.state("services", [])], marker)
        ledger.close_attempts([*local, *on_ray])

    # -- describing ---------------------------------------------------------------------------------------------

    def describe(self, context: BuildContext, ledger: Ledger, details: Mapping[str, Any]) -> None:
        """Record everything a report needs, so that it can be made from the ledger alone."""
        table = next(table for table in context.loaded.raw["run"] if table["name"] == self.name)
        part = next(table[key] for key in ("workload", "live", "rollout") if key in table)
        agent = self.agent_class
        nodes = {"nodes": part["nodes"]} if "nodes" in part else {}
        about = {
            "name": self.name,
            "kind": self.kind,
            "agent": context.agent.model_dump(mode="json") if self.agent else None,
            "parameters": {**flat(part.get("args", {})), **part.get("env", {}), **nodes},
            "env_params": {name: config.model_dump(mode="json") for name, config in self.env_params.items()},
            "noise": self.noise,
            "constraints": part.get("constraints", []),
            "workload": {"type": self.kind} | {key: part[key] for key in _WORKLOAD_KEYS if key in part},
            "live": self.live is not None,
            "rollout": None,
            "fingerprint": ledger.state("fingerprint"),
            "budget": context.agent.budget,
            "repeats": self.repeats,
            "parallel": context.loaded.scenario.system.parallel,
            "conditions_on_regime": agent is not None and agent.conditions_on_regime and bool(self.env_params),
            **details,
        }
        ledger.set_state("run", about)
        if self.workload is not None:
            source = {"name": context.loaded.scenario.name, "home": str(context.loaded.directory), "run": table}
            ledger.set_state("source", {**source, "system": context.loaded.raw.get("system", {})})
        if ledger.state("provenance") is not None:
            return
        commit = None  # of the scenario's directory, marked if there are changes
        if git := shutil.which("git"):
            command = [git, "-C", str(context.loaded.directory), "describe", "--always", "--dirty", "--abbrev=12"]
            with suppress(OSError, subprocess.TimeoutExpired):
                process = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
                commit = process.stdout.strip() or None
        provenance = {
            "loopwright": version("loopwright"),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "host": platform.node(),
            "cpus": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "name": context.loaded.scenario.name,
            "scenario": context.loaded.label,
            "started_at": time.time(),
            "git": commit,
        }
        ledger.set_state("provenance", provenance)


def import_observer(path: str, directory: Path) -> Observer:
    """Make an observer from `module:Class`, looked for in the scenario's directory first."""
    observer = import_function(path, directory)()
    if not isinstance(observer, Observer):
        raise TypeError(f"{path.partition(':')[2]} is not a loopwright.Observer")
    return observer


def _rewards(raw: Any, checker: Checker) -> tuple[RewardFunction, ...] | None:
    tables = raw if isinstance(raw, list) else [raw]
    functions = []
    for table in tables:
        function = checker.registered("[[run]] reward", table, rewards)
        functions.append(checker.model("[[run]] reward", table, function) if function else None)
    valid = tuple(function for function in functions if function is not None)
    return valid if len(valid) == len(tables) else None
