"""Building: the one place that wires a run's objects together."""

import os
import platform
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from loopwright.agents.search.grid_random import Grid, GridConfig
from loopwright.core.agent import Agent, AgentConfig
from loopwright.core.canonical import key_of
from loopwright.core.errors import LedgerError, storage
from loopwright.core.reward import Objectives, Penalties
from loopwright.envs.live.config import LiveConfig
from loopwright.envs.live.env import LiveEnv
from loopwright.envs.live.server import GymServer
from loopwright.envs.search import SearchEnv, TrialRules
from loopwright.execution.local.processes import end_leftovers
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.shared_cache import SharedCache
from loopwright.ledger.trial_book import TrialBook
from loopwright.rollouts.build import fingerprint as rollout_fingerprint
from loopwright.rollouts.build import rollout_env
from loopwright.rollouts.env import RolloutEnv
from loopwright.rollouts.tasks.mix import TaskMix
from loopwright.scenario.load import LoadedScenario, import_observer
from loopwright.scenario.schema import RunConfig, SystemConfig
from loopwright.spaces.space import Draws
from loopwright.workloads.base import Site, WorkloadConfig, workloads

AnyEnv = SearchEnv | LiveEnv | RolloutEnv


@dataclass(frozen=True)
class Unreached:
    """A live environment whose server is not there: all that can be told of it."""

    book: TrialBook
    metric_names: tuple[str, ...] = LiveEnv.metric_names
    objectives: Objectives = LiveEnv.objectives


@dataclass
class Built:
    """A run that is ready to go."""

    env: AnyEnv
    agent: Agent
    shared: SharedCache | None

    def close(self) -> None:
        """Let go of the files."""
        if self.shared is not None:
            self.shared.close()
        self.env.book.ledger.close()


def build(loaded: LoadedScenario, config: RunConfig, output: Path, *, accept_changes: bool = False) -> Built:
    """Wire one run together; if its ledger exists, it goes on from there."""
    # A run without an agent is a grid over a space of one point.
    agent_config = config.agent or GridConfig()
    agent_class = config.agent_class or Grid
    shared = shared_cache(loaded, config, output)
    env = build_env(loaded, config, output, agent_config, shared, accept_changes=accept_changes)
    try:
        describe(loaded, config, env, agent_config)
        agent = agent_class(env, agent_config, parallel=loaded.scenario.system.parallel)
    except BaseException:
        env.book.ledger.close()
        if shared is not None:
            shared.close()
        raise
    return Built(env, agent, shared)


def build_env(
    loaded: LoadedScenario,
    config: RunConfig,
    output: Path,
    agent: AgentConfig,
    shared: SharedCache | None = None,
    *,
    accept_changes: bool = False,
    server: GymServer | None = None,
) -> AnyEnv:
    """The environment of a run, with its ledger open."""
    observers = [import_observer(path, loaded.directory) for path in config.observers]

    def open_book(fingerprint: str) -> TrialBook:
        directory = (output / config.name).absolute()
        ledger = _ledger(directory, loaded.scenario.system, fingerprint, accept_changes=accept_changes)
        return TrialBook(
            config.name,
            directory,
            ledger,
            budget=agent.trials,
            count_cached=agent.count_cached,
            observers=observers,
        )

    if config.rollout is not None and config.engine is not None:
        held_out = config.eval.tasks if config.eval else ()
        tasks = TaskMix.load(config.rollout.tasks, agent.seed, loaded.directory, held_out)
        fingerprint = rollout_fingerprint(config.rollout, config.engine, tasks, loaded.directory)
        return rollout_env(
            open_book(fingerprint),
            config.rollout,
            config.engine,
            tasks,
            scenario_dir=loaded.directory,
            seed=agent.seed,
            gateway=config.gateway,
            evaluation=config.eval,
        )
    if config.live is not None:
        return _live_env(loaded, config, config.live, agent, open_book, server)
    assert config.workload is not None  # noqa: S101  the loader sees to it
    return _trial_env(loaded, config, config.workload, agent, open_book, output, shared)


OpenBook = Callable[[str], TrialBook]
"""Opens the trial book of a run whose inputs have this fingerprint."""


def _live_env(
    loaded: LoadedScenario,
    config: RunConfig,
    live: LiveConfig,
    agent: AgentConfig,
    open_book: OpenBook,
    server: GymServer | None,
) -> LiveEnv:
    fingerprint = key_of(live.env_class, live.address, live.fixed())
    # At an address every answer has a deadline of its own.
    timeout_s = live.timeout_s if server is not None or live.address is None else None
    book = open_book(fingerprint)
    draws = Draws(agent.seed, live.args, config.env_params)
    try:
        server = server or live.connect(loaded.directory)
        return LiveEnv(
            book,
            server=server,
            draws=draws,
            penalties=_penalties(config),
            record=live.record,
            timeout_s=timeout_s,
        )
    except BaseException:
        # The report has this run all the same.
        describe(loaded, config, Unreached(book), agent)
        book.ledger.close()
        raise


def _trial_env(
    loaded: LoadedScenario,
    config: RunConfig,
    configured: WorkloadConfig,
    agent: AgentConfig,
    open_book: OpenBook,
    output: Path,
    shared: SharedCache | None,
) -> SearchEnv:
    system = loaded.scenario.system
    site = Site(
        scenario_dir=loaded.directory,
        directory=(output / config.name).absolute(),
        parallel=system.parallel,
        pin_cpus=system.pin_cpus,
        memory_bytes=system.memory,
        output_bytes=system.output,
        grace_s=system.grace_s,
    )
    workload = workloads.get(configured.type)(configured, site)
    fingerprint = workload.fingerprint()
    space = configured.space(frozenset(config.env_params))
    needed = sorted({name for function in config.reward for name in function.needs()})
    return SearchEnv(
        open_book(fingerprint),
        space=space,
        workload=workload,
        draws=Draws(agent.seed, space.parameters, config.env_params),
        objectives=Objectives(config.reward),
        metric_names=configured.metric_names() or tuple(needed),
        rules=TrialRules(
            _penalties(config),
            config.repeats,
            config.cache,
            exhaustible=not (config.agent_class or Grid).measures_again,
            fingerprint=fingerprint,
        ),
        shared=shared,
    )


def _penalties(config: RunConfig) -> Penalties:
    return Penalties(config.rewards.metric_failure, config.rewards.constraint_failure)


def _ledger(directory: Path, system: SystemConfig, fingerprint: str, *, accept_changes: bool) -> Ledger:
    """The run's ledger, new or reopened; what a dead process left running is ended first."""
    path = directory / "ledger.db"
    synchronous: Literal["FULL", "NORMAL"] = "FULL" if system.durability == "full" else "NORMAL"
    if not path.exists():
        with storage(directory):
            directory.mkdir(parents=True, exist_ok=True)
        known = {"id": uuid.uuid4().hex, "fingerprint": fingerprint}
        return Ledger.create(path, synchronous=synchronous, state=known)
    ledger = Ledger.open(path, synchronous=synchronous)
    end_leftovers(ledger.open_processes(), ledger.state("id"))
    ledger.close_attempts()
    ledger.close_episode()
    if ledger.state("fingerprint") != fingerprint and not accept_changes:
        ledger.close()
        raise LedgerError(
            f"the inputs of run {directory.name!r} have changed since it began: old and new trials would not compare. "
            "Start anew in another --output, or say that it does not matter: resume --accept-changes."
        )
    ledger.set_state("fingerprint", fingerprint)
    return ledger


def shared_cache(loaded: LoadedScenario, config: RunConfig, output: Path) -> SharedCache | None:
    """What other runs and campaigns have measured, if the run asks for that."""
    if config.cache != "shared":
        return None
    chosen = loaded.scenario.system.shared_cache
    return SharedCache(loaded.directory / Path(chosen).expanduser() if chosen else output / "cache.db")


def describe(loaded: LoadedScenario, config: RunConfig, env: AnyEnv | Unreached, agent: AgentConfig) -> None:
    """Write down in the ledger all that a report needs, so that it can be made from the ledger alone."""
    ledger = env.book.ledger
    raw = next(table for table in loaded.raw["run"] if table["name"] == config.name)
    part = raw.get("workload") or raw.get("live") or raw["rollout"]
    kind = "rollout" if config.rollout is not None else "live"
    shown = ("type", "command", "setup", "function", "timeout_s", "env_class", "address", "record")
    about = {
        "name": config.name,
        "agent": agent.model_dump(mode="json") if config.agent else None,
        "objectives": env.objectives.labels,
        "metrics": env.metric_names,
        "parameters": {**part.get("args", {}), **part.get("env", {})},
        "env_params": {name: c.model_dump(mode="json") for name, c in config.env_params.items()},
        "constraints": part.get("constraints", []),
        "workload": {"type": kind} | {key: part[key] for key in shown if key in part},
        "live": config.live is not None,
        "rollout": _about_rollout(config, agent),
        "fingerprint": ledger.state("fingerprint"),
        "budget": planned(env),
        "repeats": config.repeats,
        "parallel": loaded.scenario.system.parallel,
        "conditions_on_regime": config.agent_class is not None
        and config.agent_class.conditions_on_regime
        and bool(config.env_params),
    }
    ledger.set_state("run", about)
    if config.workload is not None:
        system = loaded.raw.get("system", {})
        source = {"name": loaded.scenario.name, "home": str(loaded.directory), "run": raw, "system": system}
        ledger.set_state("source", source)
    if ledger.state("provenance") is None:
        ledger.set_state("provenance", _provenance(loaded))


def _about_rollout(config: RunConfig, agent: AgentConfig) -> dict[str, Any] | None:
    if config.rollout is None or config.engine is None:
        return None
    return {
        "tasks": [source.label() for source in config.rollout.tasks],
        "loop": config.rollout.loop.model_dump(mode="json"),
        "judger": config.rollout.judger.model_dump(mode="json"),
        "produce": config.rollout.produce.model_dump(mode="json"),
        "engine": config.engine.model_dump(mode="json"),
        "group_size": getattr(agent, "group_size", 1),
    }


def planned(env: AnyEnv | Unreached) -> int | None:
    """How many trials a run will have, where that can be told beforehand."""
    if env.book.budget is not None or not isinstance(env, SearchEnv):
        return env.book.budget
    return env.space.grid_size * env.rules.repeats if env.space.enumerable else None


def _provenance(loaded: LoadedScenario) -> dict[str, Any]:
    return {
        "loopwright": version("loopwright"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "name": loaded.scenario.name,
        "scenario": loaded.label,
        "started_at": time.time(),
        "git": _commit(loaded.directory),
    }


def _commit(home: Path) -> str | None:
    """The commit that the scenario's directory stands at, marked if there are changes."""
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "-C", str(home), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
