"""Optuna's samplers as agents: `tpe`, `gp`, `cmaes` and `nsga2`.

Each proposal gets a new sampler, seeded by (seed, n), over a study that is rebuilt from the ledger: proposal n depends
on the seed, n and the record, so that a resumed run continues exactly where it stopped.
"""

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from loopwright.agents.search.base import BudgetedConfig, SpaceAgent
from loopwright.agents.search.failure_map import FailureMap
from loopwright.agents.search.warm_start import warm_start_problem, warm_trials
from loopwright.core.agent import AgentConfig
from loopwright.core.errors import MissingExtra, Problem
from loopwright.core.imports import lazy_module
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Action, Feedback, Observation, Proposal, key_of
from loopwright.envs.failures import FAILED
from loopwright.envs.search import SearchEnv
from loopwright.spaces.parameter import Choice, Parameter, Range
from loopwright.spaces.space import Space

_RETRIES_FOR_FAILURES = 6
"""How often a point among failures is given up for another one."""

if TYPE_CHECKING:
    import optuna
else:
    optuna = lazy_module("optuna")


class SamplerConfig(BudgetedConfig):
    """The settings of all of Optuna's samplers."""

    warm_start: str | None = None
    """Whose trials the sampler learns from first: the folder of an earlier run, or an Optuna study as
    `sqlite:///optuna.db#name`; relative to the scenario."""


class ModelConfig(SamplerConfig):
    """The settings of samplers that fit a model to the trials so far."""

    startup: int = Field(default=10, ge=1)
    """How many random trials come first."""


class TpeConfig(ModelConfig):
    """Tree-structured Parzen estimator: a good first choice for mixed spaces."""

    type: Literal["tpe"] = "tpe"


class GpConfig(ModelConfig):
    """Gaussian process: the most careful with expensive trials; needs the extra `gp`."""

    type: Literal["gp"] = "gp"


class CmaesConfig(ModelConfig):
    """CMA-ES: for ranges that interact; candidates of lists that are not numbers are drawn at random.
    A warm start only replaces the random trials at the beginning.
    """

    type: Literal["cmaes"] = "cmaes"


class Nsga2Config(SamplerConfig):
    """NSGA-II: evolution towards the front of several objectives."""

    type: Literal["nsga2"] = "nsga2"
    population: int = Field(default=20, ge=2)
    """How many trials make a generation; those of the first are random."""


class SamplerAgent(SpaceAgent):
    """Asks a sampler for points and tells it their reward. A failed point counts as bad, or as the penalty for it."""

    config: SamplerConfig
    several_objectives: ClassVar[bool] = True
    heeds_constraints: ClassVar[bool] = True
    confirms: ClassVar[bool] = True
    foreign_attrs: ClassVar[Mapping[str, Any]] = {}
    """The attributes with which the sampler learns from a trial that it did not ask for."""
    heeds_failures: ClassVar[bool] = False
    """Whether the sampler ranks a trial with a violated constraint last; others are told less than the worst value."""

    def __init__(self, env: SearchEnv, config: Any, *, parallel: int = 1) -> None:
        super().__init__(env, config, parallel=parallel)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(directions=["maximize"] * len(env.objectives.functions))
        self._numbers: dict[int, int] = {}
        self._note: dict[str, Any] = {}
        self._extremes: list[tuple[float, float]] = []
        """The worst and the best value of each objective so far."""
        self._failures: list[tuple[Action, Mapping[str, Any]]] = []
        """Failures from before the first success, when there was no worst value yet."""
        self._avoided: dict[int, Action] = {}
        """The tries of the current proposal that were avoided because they are among failures."""
        self._failure_map = FailureMap(self.space.tunable)
        if config.warm_start is not None:
            # The finalists of a confirmed run were measured many times: as many equal points would repel a sampler.
            measurements: dict[str, tuple[Action, list[tuple[float, ...]]]] = {}
            for action, _, objectives in warm_trials(env, config.warm_start):
                measurements.setdefault(key_of(action), (action, []))[1].append(objectives)
            for action, repeats in measurements.values():
                self._add(action, self.foreign_attrs, tuple(map(fmean, zip(*repeats, strict=True))))

    @classmethod
    def problems(cls, config: Any, space: Space, home: Path) -> list[Problem]:
        problems = super().problems(config, space, home)
        if config.warm_start is not None and (problem := warm_start_problem(config.warm_start, home)):
            problems.append(Problem("warm_start", problem))
        return problems

    @abstractmethod
    def sampler(self, seed: int) -> "optuna.samplers.BaseSampler":
        """A new sampler with this seed."""

    def propose(self, n: int, retry: int, observation: Observation) -> Action | None:
        if retry:
            self._reject(self._numbers[n], self._avoided.get(retry - 1))
        else:
            self._avoided = {}
        with warnings.catch_warnings():
            # Optuna has called these samplers experimental for years; a warning per trial does not help.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study.sampler = self.sampler(int(key_of(self.config.seed, n, retry)[:8], 16))
        trial = self._study.ask()
        action: dict[str, Any] = {}
        for name, parameter in self.space.tunable.items():
            if self.space.active(name, action):
                action[name] = _suggest(trial, name, parameter)
        self._numbers[n] = trial.number
        frozen = self._study.get_trials(deepcopy=False)[trial.number]
        self._set_note(dict(frozen.system_attrs), retry)
        return action

    def _reject(self, number: int, avoided: Action | None) -> None:
        """Give up a point for another one. One that was avoided counts as bad, or the sampler would insist on it."""
        self._study.tell(number, state=optuna.trial.TrialState.FAIL)
        if avoided is not None:
            self._failures.append((avoided, {}))
            self._add_failures()

    def _set_note(self, attrs: Mapping[str, Any], retries: int) -> None:
        self._note = {"attrs": attrs, "retries": retries}
        if self._avoided:
            self._note["avoided"] = {str(retry): action for retry, action in self._avoided.items()}

    def avoids(self, action: Action, observation: Observation, retry: int) -> bool:
        if retry < _RETRIES_FOR_FAILURES and self._failure_map.is_likely_to_fail(action):
            self._avoided[retry] = action
            return True
        return super().avoids(action, observation, retry)

    def other(self, n: int, observation: Observation) -> Action | None:
        # The sampler did not ask for this point: its result must not be told for the one it did ask for.
        self._reject(self._numbers.pop(n), self._avoided.get(self.retries - 1))
        action = super().other(n, observation)
        if action is not None:
            self._numbers[n] = self._add(action, {}, None)
            self._set_note({}, self.retries)
        return action

    def select_action(self, observation: Observation) -> Action | None:
        action = super().select_action(observation)
        self.note = self._note if self.proposed in self._numbers else None
        return action

    def learn(self, feedback: Feedback) -> None:
        number = self._numbers.pop(feedback.group, None)
        if number is None:
            # A pinned first trial: the sampler did not ask for it, but learns from it.
            if feedback.values is not None and feedback.outcome is not Outcome.INVALID:
                self._add(feedback.action, self.foreign_attrs, feedback.values)
        elif feedback.outcome is Outcome.STOPPED:
            if feedback.stopped_at is not None and len(self.env.objectives.functions) == 1:
                step, value = feedback.stopped_at
                trial = self._study.get_trials(deepcopy=False)[number]
                optuna.trial.Trial(self._study, trial._trial_id).report(value, step)
            self._study.tell(number, state=optuna.trial.TrialState.PRUNED)
        elif feedback.values is None:
            attrs = self._study.get_trials(deepcopy=False)[number].system_attrs
            self._study.tell(number, state=optuna.trial.TrialState.FAIL)
            # Optuna ignores failed trials, and would propose their neighbours.
            if feedback.outcome in (*FAILED, Outcome.INFEASIBLE):
                self._failures.append((feedback.action, attrs))
        else:
            self._study.tell(number, list(feedback.values))
        if feedback.outcome is Outcome.OK or feedback.outcome in FAILED:
            self._failure_map.add(feedback.action, failed=feedback.outcome is not Outcome.OK)
        if feedback.reward is not None:
            values = feedback.reward.objectives
            extremes = self._extremes or [(value, value) for value in values]
            self._extremes = [(min(e[0], v), max(e[1], v)) for e, v in zip(extremes, values, strict=True)]
        self._add_failures()

    def _add_failures(self) -> None:
        """Add failed trials as bad ones: by a violated constraint, or by a value below the worst so far."""
        if not (self.heeds_failures or self._extremes):
            return
        worst = tuple(low - 0.1 * (high - low) for low, high in self._extremes)
        for action, attrs in self._failures:
            self._add(action, attrs, worst or (0.0,) * len(self._study.directions), failed=True)
        self._failures.clear()

    def recall(self, proposal: Proposal) -> None:
        if proposal.note is None:
            return
        avoided = proposal.note.get("avoided", {})
        for retry in range(proposal.note["retries"]):
            self._study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING))
            self._reject(len(self._study.get_trials(deepcopy=False)) - 1, avoided.get(str(retry)))
        self._numbers[proposal.group] = self._add(proposal.action, proposal.note["attrs"], None)

    def _add(
        self,
        action: Action,
        attrs: Mapping[str, Any],
        objectives: tuple[float, ...] | None,
        *,
        failed: bool = False,
    ) -> int:
        """Add a trial to the study that its sampler did not ask for; without objectives it is still running."""
        state = optuna.trial.TrialState
        distributions = {name: _distribution(self.space.tunable[name]) for name in action}
        searched = {name: d for name, d in distributions.items() if d is not None}
        self._study.add_trial(
            optuna.trial.create_trial(
                state=state.RUNNING if objectives is None else state.COMPLETE,
                values=None if objectives is None else list(objectives),
                params={
                    name: parameter.encode(action[name]) if isinstance(parameter, Choice) else action[name]
                    for name, parameter in self.space.tunable.items()
                    if name in searched
                },
                distributions=searched,
                system_attrs=dict(attrs),
                constraints={"failed": 1.0} if failed and self.heeds_failures else None,
            )
        )
        return len(self._study.get_trials(deepcopy=False)) - 1


class Tpe(SamplerAgent):
    """Optuna's TPE sampler."""

    Config: ClassVar[type[AgentConfig]] = TpeConfig
    config: TpeConfig
    heeds_failures: ClassVar[bool] = True

    def sampler(self, seed: int) -> "optuna.samplers.BaseSampler":
        return optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=self.config.startup, constant_liar=self.parallel > 1
        )


class Gp(SamplerAgent):
    """Optuna's Gaussian-process sampler."""

    Config: ClassVar[type[AgentConfig]] = GpConfig
    config: GpConfig
    retries: ClassVar[int] = 4  # each fits the model again

    @classmethod
    def problems(cls, config: Any, space: Space, home: Path) -> list[Problem]:
        problems = super().problems(config, space, home)
        if find_spec("torch") is None or find_spec("scipy") is None:
            problems.append(Problem("type", str(MissingExtra("agent 'gp'", "gp"))))
        return problems

    def sampler(self, seed: int) -> "optuna.samplers.BaseSampler":
        return optuna.samplers.GPSampler(
            seed=seed,
            n_startup_trials=self.config.startup,
            deterministic_objective=False,
            warn_independent_sampling=False,  # of a conditional parameter, at every trial
        )


class Cmaes(SamplerAgent):
    """Optuna's CMA-ES sampler."""

    Config: ClassVar[type[AgentConfig]] = CmaesConfig
    config: CmaesConfig
    several_objectives: ClassVar[bool] = False

    def sampler(self, seed: int) -> "optuna.samplers.BaseSampler":
        return optuna.samplers.CmaEsSampler(
            seed=seed, n_startup_trials=self.config.startup, warn_independent_sampling=False
        )


class Nsga2(SamplerAgent):
    """Optuna's NSGA-II sampler."""

    Config: ClassVar[type[AgentConfig]] = Nsga2Config
    config: Nsga2Config
    heeds_failures: ClassVar[bool] = True
    # Without a generation a trial belongs to no population.
    foreign_attrs: ClassVar[Mapping[str, Any]] = {"Ordered:generation": 0}

    def sampler(self, seed: int) -> "optuna.samplers.BaseSampler":
        return _ordered_nsga2()(seed=seed, population_size=self.config.population)


@cache
def _ordered_nsga2() -> "type[optuna.samplers.NSGAIISampler]":
    class Ordered(optuna.samplers.NSGAIISampler):
        # Optuna selects parents once per generation in order of rank, and later recalls them in order of number; a run
        # that is resumed in between selects again, and must see what an undisturbed one sees.
        def select_parent(self, study: Any, generation: int) -> Any:
            return sorted(super().select_parent(study, generation), key=lambda trial: trial.number)

    return Ordered


def _distribution(parameter: Parameter) -> "optuna.distributions.BaseDistribution | None":
    match parameter:
        case Range(dtype="int"):
            return optuna.distributions.IntDistribution(int(parameter.low), int(parameter.high), log=parameter.log)
        case Range():
            return optuna.distributions.FloatDistribution(parameter.low, parameter.high, log=parameter.log)
        case Choice(ordered=True):
            return optuna.distributions.IntDistribution(0, parameter.size - 1)
        case Choice():
            return optuna.distributions.CategoricalDistribution(range(parameter.size))
    return None


def _suggest(trial: "optuna.trial.Trial", name: str, parameter: Parameter) -> Any:
    distribution = _distribution(parameter)
    if distribution is None:
        return parameter.decode(0)
    inner: Any
    match distribution:
        case optuna.distributions.IntDistribution(low=low, high=high, log=log):
            inner = trial.suggest_int(name, low, high, log=log)
        case optuna.distributions.FloatDistribution(low=low, high=high, log=log):
            inner = trial.suggest_float(name, low, high, log=log)
        case optuna.distributions.CategoricalDistribution(choices=choices):
            inner = trial.suggest_categorical(name, choices)
    return parameter.decode(inner) if isinstance(parameter, Choice) else parameter.validate_value(inner)
