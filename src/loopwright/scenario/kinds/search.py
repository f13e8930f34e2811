"""Search runs: an agent proposes parameters, a workload measures them. Without an agent, the one point is run once."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError

from loopwright.agents import agents, rollout_agents
from loopwright.agents.search.base import SearchAgent, SpaceAgent
from loopwright.agents.search.grid_random import Grid
from loopwright.core.agent import Agent, AgentConfig
from loopwright.core.errors import Problem, did_you_mean
from loopwright.core.expression import Expression
from loopwright.core.imports import import_function
from loopwright.core.trial import Identity, Objectives
from loopwright.envs.search import SearchEnv, TrialRules
from loopwright.envs.stopping import FidelityConfig, StopConfig
from loopwright.execution.system import SystemConfig
from loopwright.ledger.shared_cache import SharedCache
from loopwright.reports.search.trajectory import TrajectoryFile
from loopwright.scenario.checker import Checker
from loopwright.scenario.kinds.base import BuildContext, RunKind
from loopwright.scenario.schema import EpisodeConfig
from loopwright.selection.plan import LEAST_TRIALS, ConfirmConfig, ConfirmPlan, plan
from loopwright.spaces.parameter import Fixed
from loopwright.spaces.space import Draws, Noise, Space
from loopwright.workloads.base import Site, Workload, WorkloadConfig, fingerprint_of, workloads
from loopwright.workloads.command_config import CommandConfig
from loopwright.workloads.steps import SteppedWorkload, missing_programs, problems_of

_COSTS = frozenset(("loss", "latency", "error", "errors", "duration", "seconds", "time", "cost", "s", "ms", "us"))
"""Words in the names of metrics that are usually minimised."""
_POINTS_TRIED = 10_000
"""Of larger spaces, as many random points are tried for one that satisfies the constraints."""


class SearchRun(RunKind):
    """A run with a workload."""

    kind: ClassVar[Literal["search"]] = "search"
    needs: ClassVar[tuple[str, ...]] = ("workload",)
    workload: WorkloadConfig
    workload_class: type[Workload] = Field(exclude=True)

    @classmethod
    def read_parts(cls, raw: dict[str, Any], checker: Checker) -> dict[str, Any]:
        parts: dict[str, Any] = {"episode": checker.model("[run.episode]", raw.get("episode", {}), EpisodeConfig)}
        if "stop" in raw:
            parts["stop"] = checker.model("[[run]] stop", raw["stop"], StopConfig)
        if "workload" in raw:
            fidelity, table = _read_fidelity(raw, checker)
            table = _with_noise(table, raw, checker)
            kind, config = checker.configured("[run.workload]", table, workloads)
            if kind is not None and config is None:
                checker.add_all("[run.workload]", _problems_beside_wrong_keys(table, kind.Config, checker.directory))
            # A run without an episode could not be checked any further.
            workload = None if parts["episode"] is None else config
            return {**parts, "fidelity": fidelity, "workload": workload, "workload_class": kind}
        agent = raw["agent"].get("type") if isinstance(raw.get("agent"), dict) else None
        if agent not in rollout_agents.names():  # otherwise [run.rollout] is what is missing
            checker.add("[run.workload]", "is missing; it says what a trial runs.")
        return {"workload": None}

    @cached_property
    def space(self) -> Space:
        """What the agent chooses from."""
        return self.workload.space(frozenset({*self.env_params, *self.noise}))

    @cached_property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics of a trial: the workload's, or else those that the rewards read."""
        names = self.workload.metric_names()
        return tuple(sorted(self._metrics_of_rewards())) if names is None else names

    def _metrics_of_rewards(self) -> set[str]:
        return {name for function in self.reward for name in function.needs()}

    # -- checking -----------------------------------------------------------------------------------------------

    def check(self, raw: dict[str, Any], checker: Checker) -> None:
        self.check_not_rollout(raw, checker)
        try:
            space = self.space
        except ValueError as error:
            checker.add("[run.workload] args", f"{error}.")
            return
        agent = self.agent_class
        if agent is not None or "agent" not in raw:
            self.check_draws(raw, self.workload.parameters, checker)
        for name in self.workload.unused_arguments():
            if name not in self.noise:
                checker.add(f"[run.workload] args.{name}", f"is searched, but no command contains {{{name}}}.")
        for name in sorted(self._metrics_of_rewards() - set(self.metric_names)):
            hint = did_you_mean(name, list(self.metric_names))
            checker.add("[[run]] reward", f"reads the metric {name!r}, which the workload does not give. {hint}")
        self._check_place(checker)
        self._check_steps(raw, checker)
        self._check_stopping(checker)
        self._check_conditions(space, checker)
        if agent is not None and self.agent is not None:
            self._check_agent(agent, self.agent, space, checker)
        elif "agent" not in raw:
            for name, parameter in space.tunable.items():
                if not isinstance(parameter, Fixed):
                    problem = "has several values, but the run has no agent to choose one."
                    checker.add(f"[run.workload] args.{name}", problem)

    def _check_place(self, checker: Checker) -> None:
        """Report what the system cannot offer."""
        workload, system = self.workload, checker.system
        nodes = workload.nodes.grid() if workload.nodes is not None else ()
        checker.add_all("[run.workload]", system.problems(self.kind, nodes, workload.gpus))
        if system.type == "local":
            checker.add_all("[run.workload]", workload.missing_programs(checker.directory))
        else:
            keys = [f"[run.workload] {key}" for key in workload.local_only()]
            keys += ["[run.fidelity]"] if self.fidelity else []
            # A command's progress is read from its output; a function has to be asked where it runs.
            keys += ["[[run]] stop"] if self.stop is not None and not isinstance(workload, CommandConfig) else []
            for key in keys:
                checker.add(key, f'needs [system] type = "local", not {system.type!r}.')

    def unreachable(self, system: SystemConfig) -> list[Problem]:
        return system.unreachable(self.workload.gpus)

    def _check_steps(self, raw: dict[str, Any], checker: Checker) -> None:
        for key, steps in (("pre", self.pre), ("post", self.post)):
            checker.add_all("[[run]]", problems_of(key, steps, self.workload))
            if checker.system.type == "local":
                checker.add_all("[[run]]", missing_programs(key, steps, self.workload, checker.directory))
        if "iterations" in raw and ("agent" in raw or "repeats" in raw):
            problem = "is for runs without an agent; use" if "agent" in raw else "means the same; remove"
            checker.add("[[run]] iterations", f"{problem} `repeats`.")

    def _check_stopping(self, checker: Checker) -> None:
        stop, workload = self.stop, self.workload
        if self.fidelity and stop is None:
            checker.add("[run.fidelity]", 'needs a rule, such as stop = { rule = "asha", metric = "loss" }.')
        if stop is None:
            return
        if not self.fidelity and stop.needs_max_resource():
            checker.add("[[run]] stop", "hyperband needs options = { max_resource = … }, the last step of a trial.")
        progress = getattr(workload, "progress", None)
        if self.fidelity:
            names: Iterable[str] | None = workload.metric_names()
        elif isinstance(workload, CommandConfig) and progress is None:
            example = "progress = { regex = 'step (?P<step>\\d+) loss (?P<loss>[0-9.]+)' }"
            checker.add("[run.workload] progress", f"is missing; `stop` needs it, for example {example}.")
            return
        else:
            names = None if progress is None or progress.regex is None else progress.metric_names()
        if names is not None and stop.metric not in names:
            hint = did_you_mean(stop.metric, list(names))
            checker.add("[[run]] stop.metric", f"{stop.metric!r} is not reported. {hint}")

    def _check_conditions(self, space: Space, checker: Checker) -> None:
        for name, parameter in space.tunable.items():
            if parameter.when is None:
                continue
            condition = Expression(parameter.when)
            if condition.names & (self.env_params.keys() | self.noise.keys()):
                checker.add(
                    f"[run.workload] args.{name}", "`when` names a drawn argument; it can name chosen ones only."
                )
            values = {**space.fixed, **space.first()}
            try:
                condition(values) if condition.names <= values.keys() else None
            except (ValueError, TypeError) as error:
                checker.add(f"[run.workload] args.{name}", f"`when` has no value for {values}: {error}.")
            except ArithmeticError:
                pass  # such as a division by one of several candidates; it does not hold there
        regime = {name: p.decode(0) for name, p in space.parameters.items() if name in self.env_params}
        problem = space.violated(space.first(), regime)
        if problem is not None and "has no value" in problem and "division" not in problem:
            checker.add("[run.workload] constraints", f"{problem}.")
        draws = Draws(0, space.parameters, self.env_params)
        is_small = space.constraints and space.enumerable and space.grid_size * draws.count <= _POINTS_TRIED
        # A grid tries these points only; other agents may find one between the `points` of a range.
        if is_small and (self.agent_class is Grid or space.size == space.grid_size):
            drawn = product(*(choice.values for choice in draws.values.values()))
            regimes = [dict(zip(draws.values, values, strict=True)) for values in drawn]
            if all(space.violated(*point) is not None for point in product(space.points(), regimes)):
                checker.add("[run.workload] constraints", "no combination of the arguments satisfies them; relax one.")

    def _check_agent(self, agent: type[Agent], config: AgentConfig, space: Space, checker: Checker) -> None:
        if not space.tunable and not issubclass(agent, Grid):
            checker.add("[run.workload] args", "there is nothing to search: make an argument a list or a range.")
        if not self.reward:
            metrics = self.metric_names or ("seconds",)
            example = f'reward = {{ type = "identity", metrics = ["{metrics[0]}"] }}'
            checker.add("[[run]] reward", f"is missing; for example {example}.")
        if len(self.reward) > 1 and not agent.several_objectives:
            able = [name for name in ("nsga2", "tpe", "gp", "random", "grid") if name in agents.names()]
            checker.add("[[run]] reward", f"agent {config.type!r} takes one objective; for several: {', '.join(able)}.")
        if config.trials is not None and config.trials % self.repeats:
            checker.add("[run.agent] trials", f"{config.trials} is not a multiple of repeats = {self.repeats}.")
        confirmation = self.confirmation
        if self.confirm and not issubclass(agent, SpaceAgent):
            checker.add("[[run]] confirm", f"agent {config.type!r} drives its own trials; remove `confirm`.")
        elif self.confirm and confirmation is None:
            checker.add("[[run]] confirm", "its share of the trials is less than two; give more `trials` or `share`.")
        for name in sorted(self.noise.keys() & self.env_params.keys()):
            checker.add(f"[run.env_params.{name}]", f"{name!r} is also in `noise`; remove one of the two.")
        if self.episode.steps > 1 and issubclass(agent, SearchAgent):
            policies = (name for name, other in agents.working().items() if not issubclass(other, SearchAgent))
            reason = f"agent {config.type!r} learns no policy that acts step by step; {', '.join(policies)} do."
            checker.add("[run.episode] steps", reason)
        checker.add_all("[run.agent]", agent.problems(config, space, checker.directory))
        # An evaluation is made of whole episodes.
        episode_trials, parallel = self.repeats * self.episode.steps, checker.system.parallel
        checker.add_all("[run.agent]", agent.too_little(config, space, self.repeats, parallel, episode_trials))

    def hints(self) -> list[Problem]:
        hints = []
        for name in (name for function in self.reward if isinstance(function, Identity) for name in function.metrics):
            if _COSTS.intersection(words := name.lower().split("_")) and "per" not in words:
                fix = 'to minimise it, write type = "negative".'
                hints.append(Problem("[[run]] reward", f'type "identity" maximises {name}; {fix}'))
        for name in self.workload.unused_arguments():  # only noise, or the scenario is refused
            fix = f"add {{{name}}}, or leave it out and set `repeats`."
            hints.append(
                Problem(f"[[run]] noise.{name}", f"no command contains it, so it only tells repeats apart; {fix}")
            )
        space, draws = self.space, Draws(0, self.space.parameters, self.env_params)
        points = ((space.sample(0, n), draws.sample(n)) for n in range(_POINTS_TRIED))
        if space.constraints and all(space.violated(*point) is not None for point in points):
            problem = f"none of {_POINTS_TRIED:,} random points satisfies them; check them against the ranges."
            hints.append(Problem("[run.workload] constraints", problem))
        if self.agent_class is not None and self.agent is not None:
            hints += self.agent_class.hints(self.agent, space, draws.count)
        return hints

    @cached_property
    def confirmation(self) -> ConfirmPlan | None:
        """How the best configurations are confirmed; None if they are not. A copy of the run keeps this value."""
        agent, space = self.agent_class, self.space
        if agent is None or self.agent is None:
            return None
        config = self.confirm if isinstance(self.confirm, ConfirmConfig) else ConfirmConfig()
        trials = self.agent.trials
        if trials is None and self.confirm and space.enumerable:
            trials = int(space.grid_size * self.repeats / (1 - config.share))
        is_default = self.confirm is None and agent.confirms
        # From the default share of a small budget no plan can be made.
        if trials is None or not (self.confirm or (is_default and trials >= LEAST_TRIALS)):
            return None
        return plan(
            config,
            trials=trials,
            repeats=self.repeats,
            regimes=Draws(0, space.parameters, self.env_params).count,
            objectives=len(self.reward),
            seed=self.agent.seed,
            per_regime=agent.conditions_on_regime and bool(self.env_params),
            required=bool(self.confirm),
        )

    # -- building and describing --------------------------------------------------------------------------------

    def build_env(self, context: BuildContext) -> SearchEnv:
        system, config = context.loaded.scenario.system, self.workload
        site = Site(
            scenario_dir=context.loaded.directory,
            directory=(context.output / self.name).absolute(),
            system=system,
        )
        workload: Workload = self.workload_class(config, site)
        if self.agent is None or self.pre or self.post:
            workload = SteppedWorkload(workload, self.pre, self.post, context.on_start)
        fingerprint = workload.fingerprint()
        module = context.loaded.directory / f"{config.type.partition(':')[0].replace('.', '/')}.py"
        if ":" in config.type and module.is_file():  # the user's own class
            fingerprint = fingerprint_of(fingerprint, module)
        space, budget = self.space, context.agent.budget
        # A caller of `make` proposes all trials itself.
        confirmation = self.confirmation if context.agent is self.agent else None
        reserve = confirmation.reserve if confirmation else 0
        if budget is None and space.enumerable:
            budget = space.grid_size * self.repeats + reserve
        book = self.open_book(
            context,
            fingerprint,
            objectives=tuple(function.label() for function in self.reward),
            metrics=self.metric_names,
            budget=budget,
            confirm=confirmation.described() if confirmation else None,
            stop=None if self.stop is None else self.stop.model_dump(mode="json"),
        )
        trajectory = TrajectoryFile(book.ledger, book.directory)
        context.resources.callback(trajectory.close)
        book.observers.append(trajectory)
        make: Callable[..., SearchEnv] = context.env or SearchEnv
        if self.env is not None and context.env is None:
            make = import_function(self.env, context.loaded.directory)
        return make(
            book,
            space=space,
            workload=workload,
            draws=Draws(context.agent.seed, space.parameters, self.env_params),
            noise=Noise(context.agent.seed, self.noise),
            objectives=Objectives(self.reward),
            metric_names=self.metric_names,
            rules=TrialRules(
                self.rewards,
                self.repeats,
                self.cache,
                exhaustible=not (self.agent_class or Grid).measures_again,
                stop=self.stop,
                fidelity=next(iter(self.fidelity.values()), None),
                fidelity_name=next(iter(self.fidelity), ""),
                fingerprint=fingerprint,
                retries=system.retries,
                reserve=reserve,
                same=self.fail.same,
                keep=config.keep,
                episode_steps=self.episode.steps,
            ),
            shared=self._open_shared_cache(context) if self.cache == "shared" else None,
        )

    def _open_shared_cache(self, context: BuildContext) -> SharedCache:
        name = context.loaded.scenario.system.shared_cache
        path = context.loaded.directory / Path(name).expanduser() if name else context.output / "cache.db"
        shared = SharedCache(path)
        context.resources.callback(shared.close)
        return shared


def _problems_beside_wrong_keys(
    table: Mapping[str, Any], model: type[WorkloadConfig], directory: Path
) -> list[Problem]:
    """What else is wrong with a workload that has wrong keys; nothing if its arguments are: the rest refers to them."""
    try:
        model.model_validate(table)
    except ValidationError as error:
        wrong = {str(detail["loc"][0]) for detail in error.errors() if detail["loc"]}
        if wrong.isdisjoint(("args", "env")):
            with suppress(ValidationError):
                return model.model_validate({k: v for k, v in table.items() if k not in wrong}).problems(directory)
    return []


def _read_fidelity(raw: Mapping[str, Any], checker: Checker) -> tuple[dict[str, FidelityConfig], Any]:
    """The fidelity, and the workload's table with the complete value as an argument: that is what is compared."""
    tables, workload = raw.get("fidelity", {}), raw["workload"]
    if not isinstance(tables, dict) or len(tables) > 1:
        checker.add("[run.fidelity]", "must name one argument, such as epochs = { low = 1, high = 81 }.")
        return {}, workload
    fidelity = {}
    for name, table in tables.items():
        if (config := checker.model(f"[run.fidelity] {name}", table, FidelityConfig)) is None:
            continue
        fidelity[name] = config
        if isinstance(workload, dict) and isinstance(args := workload.get("args", {}), dict):
            if name in args:
                checker.add("[run.fidelity]", f"{name!r} is also in [run.workload.args]; remove it there.")
            workload = {**workload, "args": {**args, name: config.high}}
    return fidelity, workload


def _with_noise(table: Any, raw: Mapping[str, Any], checker: Checker) -> Any:
    """The workload's table with the noise among its arguments, so that it is checked and passed like any other."""
    noise = raw.get("noise")
    if not isinstance(noise, dict) or not isinstance(table, dict):
        return table
    for part in ("args", "env"):
        for name in sorted(noise.keys() & (table.get(part) or {})):
            checker.add(f"[[run]] noise.{name}", f"{name!r} is also in [run.workload] {part}; remove one of the two.")
    # A list of one value would be a fixed one; it is reported with the other keys of the run.
    draws = {name: values for name, values in noise.items() if isinstance(values, list) and len(values) > 1}
    args = table.get("args", {})
    return {**table, "args": {**args, **draws}} if isinstance(args, dict) else table
