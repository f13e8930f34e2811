"""Loading a scenario: every check that can be made before anything runs, and every problem at once."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError

from loopwright.agents import agents, rollout_agents
from loopwright.core.agent import Agent, AgentConfig
from loopwright.core.config import explain
from loopwright.core.errors import Problem, ScenarioError, did_you_mean
from loopwright.core.expression import Expression
from loopwright.core.imports import import_function
from loopwright.core.registry import Registry, look_for_types
from loopwright.core.reward import RewardFunction, rewards
from loopwright.engines.base import EngineConfig, engines
from loopwright.envs.live.config import LiveConfig
from loopwright.ledger.observer import Observer
from loopwright.rollouts.config import RolloutConfig
from loopwright.rollouts.evaluation import EvalConfig
from loopwright.rollouts.remote.gateway_config import (
    EXTERNAL_ENGINE,
    GATEWAY_HOSTS,
    ExternalGatewayConfig,
    GatewayHostConfig,
    TrialServerGatewayConfig,
)
from loopwright.rollouts.tasks.sources import shared_tasks
from loopwright.scenario.overrides import is_remote, override
from loopwright.scenario.schema import PenaltiesConfig, RunBasics, RunConfig, Scenario, SystemConfig
from loopwright.spaces.space import EnvParamConfig, Space, problem_with
from loopwright.workloads.base import WorkloadConfig, workloads

M = TypeVar("M", bound=BaseModel)
_NOT_WITH_ROLLOUTS = {
    "workload": "a trial is a rollout there; give the workload a [[run]] of its own",
    "live": "a trial is a rollout there; give the live environment a [[run]] of its own",
    "reward": "the judger gives the reward; describe it under `judger`",
    "rewards": "a failed rollout is left out, not punished; leave this out",
    "env_params": "what differs between rollouts is in their tasks; leave this out",
    "repeats": "the agent's `group_size` says how often a task is attempted",
    "cache": "rollouts are never answered from a cache; leave this out",
}


@dataclass(frozen=True)
class LoadedScenario:
    """A checked scenario, with its source and the directory that its paths are relative to."""

    scenario: Scenario
    raw: Mapping[str, Any]
    """The tables as they were checked, overrides included."""
    text: str
    """The source as TOML, without overrides."""
    path: Path | None
    """The file; None if the source was a dict."""
    directory: Path
    overrides: Mapping[str, Any]
    """What `set=` or `--set` changed, by dotted key."""

    @property
    def label(self) -> str:
        """Where it came from, for messages and records."""
        return "scenario from Python" if self.path is None else str(self.path)


def load(
    source: str | Path | Mapping[str, Any],
    *,
    directory: str | Path | None = None,
    set: Mapping[str, Any] | None = None,
) -> LoadedScenario:
    """Read and check a scenario, a TOML file or the same as a dict. A ScenarioError lists everything that is wrong.

    Paths in it are relative to `directory`: by default the file's directory, for a dict the current one.
    `set` overrides keys: `{"system.parallel": 4, "run.agent.trials": 100}`; see `loopwright.scenario.overrides`.
    """
    if isinstance(source, Mapping):
        text, raw, path, start = _dump(source), dict(source), None, Path.cwd()
    else:
        path = Path(source).absolute()
        text, raw = _read(Path(source))
        start = path.parent
    problems = []
    try:
        raw = override(raw, set or {}, os.environ)
    except ValueError as error:
        problems = [Problem("", f"{error}.")]
    directory = Path(directory).absolute() if directory is not None else start / str(raw.get("home", ""))
    look_for_types(raw, directory)
    checker = _Checker(directory, problems)
    scenario = checker.scenario(raw)
    if checker.problems or scenario is None:
        raise ScenarioError("scenario" if path is None else str(source), checker.problems)
    return LoadedScenario(scenario, raw, text, path, directory, dict(set or {}))


def _dump(source: Mapping[str, Any]) -> str:
    try:
        return tomli_w.dumps(source)
    except TypeError as error:
        raise ScenarioError("scenario", [Problem("", f"{error}. Use the values that TOML has.")]) from error


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # Some editors begin a file with a byte order mark.
        return text, tomllib.loads(text)
    except FileNotFoundError:
        problem = "there is no such file. Give the path of a scenario, one TOML file."
    except IsADirectoryError:
        problem = "is a directory. Give one of the scenarios in it, or check them all with `loopwright verify`."
    except UnicodeDecodeError as error:
        problem = f"is not text: byte {error.start} is not UTF-8. Give a scenario, one TOML file."
    except OSError as error:
        problem = f"cannot be read: {error.strerror}. Check its permissions."
    except tomllib.TOMLDecodeError as error:
        problem = f"is not valid TOML: {error}."
    raise ScenarioError(path, [Problem("", problem)])


class _Checker:
    """Collects problems while it turns tables into configurations; a broken part does not hide the next one."""

    def __init__(self, directory: Path, problems: list[Problem]) -> None:
        self.directory, self.problems = directory, problems
        self._suffix = ""
        self._parallel = 1

    def scenario(self, raw: Mapping[str, Any]) -> Scenario | None:
        self._unknown("", raw, Scenario)
        system = self._model("[system]", raw.get("system", {}), SystemConfig)
        self._parallel = system.parallel if system is not None else 1
        name = raw.get("name", "")
        if not isinstance(name, str) or not name:
            self.add("name", "is missing; give the scenario a name, in quotes.")
        if not self.directory.is_dir():
            self.add("home", f"there is no directory {self.directory}.")
        tables = raw.get("run")
        if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
            self.add("[[run]]", "is missing; a scenario has at least one [[run]].")
            return None
        runs = [self._run(table, several=len(tables) > 1) for table in tables]
        self._across(tables)
        if self.problems or system is None:
            return None
        return Scenario.model_construct(
            name=name, home=str(self.directory), system=system, run=tuple(run for run in runs if run)
        )

    def _across(self, tables: list[dict[str, Any]]) -> None:
        """What concerns several runs."""
        self._suffix = ""
        names = [table["name"] for table in tables if isinstance(table.get("name"), str)]
        for name in dict.fromkeys(n for n in names if names.count(n) > 1):
            self.add("[[run]] name", f"{name!r} is used {names.count(name)} times; each run needs a folder of its own.")
        plain = [str(table.get("name")) for table in tables if "agent" not in table]
        if plain and len(plain) < len(tables):
            self.add(
                "[[run]]", f"runs with and without an agent are mixed; {', '.join(plain)} has none. Split the file."
            )

    # -- one run ------------------------------------------------------------------------------------------------

    def _run(self, raw: dict[str, Any], *, several: bool) -> RunConfig | None:
        self._suffix = f" (run {raw.get('name')!r})" if several else ""
        before = len(self.problems)
        parts: dict[str, Any] = {}
        kind = self._agent_kind(raw) if "agent" in raw else None
        if "agent" in raw:
            parts["agent"] = self._model("[run.agent]", raw["agent"], kind.Config) if kind else None
        parts["reward"] = self._rewards(raw.get("reward", []))
        workload = None if "live" in raw or "rollout" in raw else self._workload(raw)
        live = self._model("[run.live]", raw["live"], LiveConfig) if "live" in raw else None
        rollout = self._model("[run.rollout]", raw["rollout"], RolloutConfig) if "rollout" in raw else None
        parts["workload"], parts["live"], parts["rollout"] = workload, live, rollout
        parts["engine"] = self._engine(raw["engine"]) if "engine" in raw else None
        parts["gateway"] = self._gateway(raw["gateway"]) if "gateway" in raw else None
        if isinstance(parts["gateway"], ExternalGatewayConfig | TrialServerGatewayConfig):
            parts["engine"] = EXTERNAL_ENGINE
        parts["eval"] = self._model("[run.eval]", raw["eval"], EvalConfig) if "eval" in raw else None
        parts["env_params"] = self._env_params(raw.get("env_params", {}))
        parts["rewards"] = self._model("[run.rewards]", raw.get("rewards", {}), PenaltiesConfig)
        basics = {key: value for key, value in raw.items() if key in RunBasics.model_fields}
        # A wrong name must not hide what else is wrong.
        run = self._model("[[run]]", basics, RunBasics) or RunBasics.model_construct(name="")
        self._unknown("[[run]]", raw, RunConfig)
        known = workload is not None or live is not None or rollout is not None
        if known and parts["reward"] is not None and parts["env_params"] is not None:
            config = RunConfig.model_construct(**dict(run), **parts)
            if rollout is not None:
                self._rollout(config, rollout, raw)
            else:
                self._together(config, raw) if live is None else self._live(config, live, raw)
                self._not_a_rollout(raw)
            return config if len(self.problems) == before else None
        return None

    def _agent_kind(self, raw: dict[str, Any]) -> Any:
        """The agent's class. The run's kind picks the registry: `ppo` is another agent in a run with rollouts."""
        registry, other = (rollout_agents, agents) if "rollout" in raw else (agents, rollout_agents)
        name = _agent_name(raw)
        if name in registry.names() or name not in other.names():
            return self._kind("[run.agent]", raw["agent"], registry)
        if registry is rollout_agents:
            self._needs_rollout_agent()
        else:
            self.add("[run.rollout]", f"is missing; agent {name!r} works on rollouts.")
        return None

    def _needs_rollout_agent(self) -> None:
        able = ", ".join(rollout_agents.names())
        self.add("[run.agent] type", f"a run with [run.rollout] needs an agent that works on rollouts: {able}.")

    def _kind(self, where: str, raw: Any, registry: Registry[Any]) -> Any:
        if not isinstance(raw, dict) or "type" not in raw:
            self.add(f"{where} type", f"is missing. {did_you_mean('', registry.names())}")
            return None
        try:
            return registry.get(str(raw["type"]))
        except KeyError as error:
            self.add(f"{where} type", error.args[0])
        except ImportError as error:
            self.add(f"{where} type", f"{raw['type']!r} cannot be imported: {error}.")
        return None

    def _rewards(self, raw: Any) -> tuple[RewardFunction, ...] | None:
        tables = raw if isinstance(raw, list) else [raw]
        functions = []
        for table in tables:
            kind = self._kind("[[run]] reward", table, rewards)
            functions.append(self._model("[[run]] reward", table, kind) if kind else None)
        good = tuple(function for function in functions if function is not None)
        return good if len(good) == len(tables) else None

    def _workload(self, raw: dict[str, Any]) -> WorkloadConfig | None:
        if "workload" not in raw:
            if _agent_name(raw) not in rollout_agents.names():
                self.add("[run.workload]", "is missing; it says what a trial runs.")
            return None
        kind = self._kind("[run.workload]", raw["workload"], workloads)
        config = self._model("[run.workload]", raw["workload"], kind.Config) if kind else None
        if config is not None:
            for problem in config.problems(self.directory):
                self.add(f"[run.workload] {problem.key}", problem.message)
        return config

    def _engine(self, raw: Any) -> EngineConfig | None:
        kind = self._kind("[run.engine]", raw, engines)
        config: EngineConfig | None = self._model("[run.engine]", raw, kind.Config) if kind else None
        if config is not None:
            for problem in config.problems(self.directory):
                self.add(f"[run.engine] {problem.key}", problem.message)
        return config

    def _gateway(self, raw: Any) -> GatewayHostConfig | None:
        kind = str(raw.get("type", "embedded")) if isinstance(raw, dict) else "embedded"
        if kind not in GATEWAY_HOSTS:
            self.add("[run.gateway] type", f"unknown gateway {kind!r}. {did_you_mean(kind, list(GATEWAY_HOSTS))}")
            return None
        config: GatewayHostConfig | None = self._model("[run.gateway]", raw, GATEWAY_HOSTS[kind])
        for problem in config.problems(self.directory) if config is not None else ():
            self.add(f"[run.gateway] {problem.key}", problem.message)
        return config

    def _env_params(self, raw: Any) -> dict[str, EnvParamConfig] | None:
        if not isinstance(raw, dict):
            self.add("[run.env_params]", "must be a table of tables, such as [run.env_params.size].")
            return None
        parsed = {name: self._model(f"[run.env_params.{name}]", table, EnvParamConfig) for name, table in raw.items()}
        return None if None in parsed.values() else {name: config for name, config in parsed.items() if config}

    # -- what only the parts together can tell ------------------------------------------------------------------

    def _live(self, run: RunConfig, live: LiveConfig, raw: dict[str, Any]) -> None:
        """A live run: the spaces come from the server, the reward too, and the agent must know how to step it."""
        for problem in live.problems(self.directory, run.env_params.keys()):
            self.add(f"[run.live] {problem.key}", problem.message)
        if "workload" in raw:
            self.add("[run.workload]", "a run has a workload or a live environment, not both.")
        if [function.type for function in run.reward] not in ([], ["server"]):
            self.add("[[run]] reward", 'a live environment gives its own reward: reward = { type = "server" }.')
        for key in ("repeats", "cache"):
            if key in raw:
                self.add(f"[[run]] {key}", "has no meaning in a live run: its steps are never repeated or cached.")
        agent = run.agent_class
        if agent is None and "agent" not in raw:
            self.add("[run.agent]", "is missing; a live environment needs an agent that acts in it.")
        elif agent is not None and not agent.steps_live:
            able = ", ".join(name for name in agents.names() if agents.get(name).steps_live)
            self.add("[run.agent] type", f"{raw['agent']['type']!r} cannot act in a live environment; {able} can.")
        elif agent is not None:
            found = agent.problems(run.agent, live.spaces(self.directory).action_space, self.directory)
            for problem in [*found, *agent.too_little(run.agent, None)]:
                self.add(f"[run.agent] {problem.key}", problem.message)
            self._draws(run, agent, raw, live.args)
        self._observers(run)

    def _rollout(self, run: RunConfig, rollout: RolloutConfig, raw: dict[str, Any]) -> None:
        """Rollouts: the judger gives the reward, and the agent must know what to do with episodes."""
        held_out = run.eval.tasks if run.eval is not None else ()
        unfit = run.eval.problems(self.directory) if run.eval is not None else []
        for problem in unfit:
            self.add(f"[run.eval] {problem.key}", problem.message)
        found = rollout.problems(self.directory, () if unfit else held_out)
        for problem in found:
            self.add(f"[run.rollout] {problem.key}", problem.message)
        if held_out and not unfit and not found and (both := shared_tasks(rollout.tasks, held_out, self.directory)):
            more = f", and {len(both) - 1} more" if len(both) > 1 else ""
            self.add("[run.eval] tasks", f"{both[0].id}{more} would be trained on, too; hold out others.")
        for key, instead in _NOT_WITH_ROLLOUTS.items():
            if key in raw:
                self.add(f"[[run]] {key}", f"has no meaning in a run with [run.rollout]: {instead}.")
        if "gateway" in raw and not is_remote(raw):
            self.add("[run.gateway]", 'has no meaning without loop = { type = "remote" }.')
        if isinstance(run.gateway, TrialServerGatewayConfig) and getattr(rollout.loop, "server", None) is None:
            self.add("[run.gateway] type", '"server" is for loops with `server`, a trial server.')
        if isinstance(run.gateway, ExternalGatewayConfig | TrialServerGatewayConfig):
            if "engine" in raw:
                whose = "a trial server's" if isinstance(run.gateway, TrialServerGatewayConfig) else "an external"
                self.add("[run.engine]", f"has no meaning with {whose} gateway, which has engines of its own.")
        elif "engine" not in raw:
            self.add("[run.engine]", 'is missing; it says what the policy runs on, such as type = "scripted".')
        agent = run.agent_class
        if agent is None and "agent" not in raw:
            self._needs_rollout_agent()
        elif agent is not None:
            for problem in agent.problems(run.agent, rollout, self.directory):
                # What is wrong for the agent may stand in another table.
                where = problem.key if problem.key.startswith("[") else f"[run.agent] {problem.key}"
                self.add(where, problem.message)
            if agent.gives_weights:
                self._trained(run)
        self._observers(run)

    def _trained(self, run: RunConfig) -> None:
        """Whether what is sampled from can be trained."""
        if isinstance(run.gateway, TrialServerGatewayConfig):
            self.add("[run.gateway] type", '"server" takes no weights, so nothing can be trained; leave it out.')
        elif run.engine is not None and not run.engine.takes_weights:
            said = f"{run.engine.type!r} takes no weights, so nothing can be trained"
            self.add("[run.engine] type", f"{said}; transformers, vllm and sglang do.")
        elif run.engine is not None and run.engine.policy is None and getattr(run.agent, "model", None) is None:
            self.add("[run.agent] model", f"is missing: engine {run.engine.type!r} does not say which model it has.")

    def _not_a_rollout(self, raw: dict[str, Any]) -> None:
        for key in ("engine", "gateway", "eval"):
            if key in raw:
                self.add(f"[run.{key}]", "has no meaning without [run.rollout].")

    def _together(self, run: RunConfig, raw: dict[str, Any]) -> None:
        assert run.workload is not None  # noqa: S101  the other kind of run is _live
        agent = run.agent_class
        known_agent = agent is not None or "agent" not in raw
        try:
            space = run.workload.space(frozenset(run.env_params))
        except ValueError as error:
            self.add("[run.workload] args", f"{error}.")
            return
        if known_agent:
            self._draws(run, agent, raw, {**run.workload.args, **run.workload.env})
        self._metrics(run)
        self._conditions(run, space)
        self._observers(run)
        if agent is None and "agent" not in raw:
            for name in space.tunable:
                self.add(f"[run.workload] args.{name}", "has several values, but the run has no agent to choose one.")
        elif agent is not None and run.agent is not None:
            self._agent(run, agent, run.agent, space)

    def _agent(self, run: RunConfig, agent: type[Agent], config: AgentConfig, space: Space) -> None:
        if not space.tunable:
            self.add("[run.workload] args", "there is nothing to search: make an argument a list or a range.")
        if not run.reward:
            metrics = (run.workload.metric_names() if run.workload else None) or ("seconds",)
            example = f'reward = {{ type = "identity", metrics = ["{metrics[0]}"] }}'
            self.add("[[run]] reward", f"is missing; for example {example}.")
        if len(run.reward) > 1 and not agent.several_objectives:
            able = [name for name in ("nsga2", "tpe", "gp", "random", "grid") if name in agents.names()]
            self.add("[[run]] reward", f"agent {config.type!r} takes one objective; for several: {', '.join(able)}.")
        if config.trials is not None and config.trials % run.repeats:
            self.add("[run.agent] trials", f"{config.trials} is not a multiple of repeats = {run.repeats}.")
        found = agent.problems(config, space, self.directory)
        for problem in [*found, *agent.too_little(config, space, run.repeats, self._parallel)]:
            self.add(f"[run.agent] {problem.key}", problem.message)

    def _draws(
        self, run: RunConfig, agent: type[Agent] | None, raw: dict[str, Any], parameters: Mapping[str, Any]
    ) -> None:
        for name, config in run.env_params.items():
            where = f"[run.env_params.{name}]"
            if name not in parameters:
                self.add(where, f"there is no argument {name!r}. {did_you_mean(name, list(parameters))}")
            elif problem := problem_with(parameters[name], config):
                self.add(where, f"argument {name!r} {problem}.")
        if run.env_params and agent is None:
            self.add("[run.env_params]", "needs an agent; a run without one has nothing to learn from draws.")
        elif run.env_params and agent is not None and not agent.samples_env_params:
            able = [name for name, other in agents.working().items() if other.samples_env_params]
            kind = raw["agent"]["type"]
            self.add("[run.env_params]", f"agent {kind!r} does not sample them; agents that do: {', '.join(able)}.")

    def _metrics(self, run: RunConfig) -> None:
        known = run.workload.metric_names() if run.workload else None
        for function in run.reward:
            for name in sorted(function.needs() - set(known)) if known is not None else ():
                hint = did_you_mean(name, list(known or ()))
                self.add("[[run]] reward", f"reads the metric {name!r}, which the workload does not give. {hint}")

    def _conditions(self, run: RunConfig, space: Space) -> None:
        for name, parameter in space.tunable.items():
            if parameter.when is None:
                continue
            condition = Expression(parameter.when)
            if condition.names & run.env_params.keys():
                self.add(f"[run.workload] args.{name}", "`when` names a drawn argument; it can name chosen ones only.")
            values = {**space.fixed, **space.first()}
            try:
                condition(values) if condition.names <= values.keys() else None
            except (ValueError, TypeError) as error:
                self.add(f"[run.workload] args.{name}", f"`when` has no value for {values}: {error}.")
            except ArithmeticError:
                pass  # such as a division by one of several candidates; it does not hold there
        regime = {name: p.decode(0) for name, p in space.parameters.items() if name in run.env_params}
        problem = space.violated(space.first(), regime)
        if problem is not None and "has no value" in problem and "division" not in problem:
            self.add("[run.workload] constraints", f"{problem}.")

    def _observers(self, run: RunConfig) -> None:
        for path in run.observers:
            try:
                import_observer(path, self.directory)
            except (ImportError, AttributeError, TypeError, ValueError) as error:
                self.add("[[run]] observers", f"{path!r}: {error}.")

    # -- machinery ----------------------------------------------------------------------------------------------

    def _model(self, where: str, raw: Any, model: type[M]) -> M | None:
        try:
            return model.model_validate(raw)
        except ValidationError as error:
            for key, message in explain(error, model):
                self.add(f"{where} {key}".strip(), message if message.endswith((".", "?")) else f"{message}.")
        return None

    def _unknown(self, where: str, raw: Mapping[str, Any], model: type[BaseModel]) -> None:
        known = list(model.model_fields)
        for key in raw:
            if key not in known:
                self.add(where, f"unknown key {key!r}. {did_you_mean(key, known)}")

    def add(self, where: str, message: str) -> None:
        self.problems.append(Problem(f"{where.strip()}{self._suffix}", message))


def _agent_name(raw: dict[str, Any]) -> Any:
    return raw["agent"].get("type") if isinstance(raw.get("agent"), dict) else None


def import_observer(path: str, home: Path) -> Observer:
    """Make an observer from `module:Class`, looked for in the scenario's directory first."""
    made = import_function(path, home)()
    if not isinstance(made, Observer):
        raise TypeError(f"{path.partition(':')[2]} is no loopwright.Observer")
    return made
