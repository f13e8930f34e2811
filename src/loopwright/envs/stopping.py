"""Stopping early: rules that compare a trial's intermediate metrics with those of earlier trials, and its curve.

The rules are pruners over an Optuna study in memory, which is rebuilt from the curves in the ledger: a resumed run
decides as an undisturbed one would. All but `asha` are Optuna's own. A step that does not increase is ignored.
"""

import inspect
import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Self

import orjson
from pydantic import Field, model_validator

from loopwright.core.config import Config
from loopwright.core.errors import did_you_mean
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Result
from loopwright.ledger.ledger import Ledger
from loopwright.workloads.base import Job, Workload, fresh_directory

if TYPE_CHECKING:
    import optuna

_RULES = {
    "hyperband": "HyperbandPruner",
    "median": "MedianPruner",
    "threshold": "ThresholdPruner",
}
_PRUNERS = (
    *("HyperbandPruner", "MedianPruner", "NopPruner", "PatientPruner", "PercentilePruner"),
    *("SuccessiveHalvingPruner", "ThresholdPruner", "WilcoxonPruner"),
)
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # Optuna's "auto" looks at the trials so far, which would differ in a resumed run. `StopRule` has its own.
    "asha": {"min_resource": 1, "reduction_factor": 4},
    "SuccessiveHalvingPruner": {"min_resource": 1, "reduction_factor": 4},
    "PatientPruner": {"wrapped_pruner": None},
}
_EVERY = 1000
"""From here on only each tenth, then each hundredth step is kept, and so on: a curve stays small."""
_FIRST_RUNG = 9
"""Without `min_resource`, asha first compares trials after this part of the first complete one."""
_NAMES = 64
"""How many metrics a curve may have, at most."""


class FidelityConfig(Config):
    """An argument that makes a trial cheaper and less exact, such as the number of epochs."""

    low: int = Field(ge=1)
    """The first value."""
    high: int = Field(ge=1)
    """The last value, at which a trial is complete."""
    eta: int = Field(default=3, ge=2)
    """Each value is this many times the one before."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}")
        return self

    def levels(self) -> list[int]:
        """The values from low to high."""
        levels = [self.low]
        while levels[-1] * self.eta < self.high:
            levels.append(levels[-1] * self.eta)
        return [*levels, self.high]


class StopConfig(Config):
    """When a trial is stopped early, judged by a metric that it reports while it runs."""

    rule: str
    """`asha`, `hyperband`, `median`, `threshold`, or the class of one of Optuna's pruners, such as
    `PercentilePruner`."""
    metric: str
    """The metric of the trial's progress; with `[run.fidelity]` a metric of the workload."""
    mode: Literal["min", "max"] = "min"
    """Whether a good trial has a low or a high metric."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The settings of the rule, such as `{ min_resource = 5, reduction_factor = 4 }` for `asha`,
    `{ upper = 10.0 }` for `threshold`."""

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        name = _RULES.get(self.rule, self.rule)
        if name not in (*_PRUNERS, "asha"):
            names = ["asha", *_RULES, *_PRUNERS]
            raise ValueError(f"unknown rule {self.rule!r}. {did_you_mean(self.rule, names)}")
        options = list(inspect.signature(_pruner_class(name)).parameters)
        for option in self.options:
            if option not in options:
                raise ValueError(f"{self.rule} has no option {option!r}. {did_you_mean(option, options)}")
        if name == "HyperbandPruner" and not isinstance(self.options.get("max_resource", 1), int):
            raise ValueError("max_resource must be a number: the last step of a complete trial")
        if name != "HyperbandPruner" or "max_resource" in self.options:
            self.pruner()
        return self

    def pruner(self, fidelity: FidelityConfig | None = None) -> "optuna.pruners.BasePruner":
        """Optuna's pruner for this rule."""
        import optuna  # Late, since it takes a second: it is needed only where there is a rule.

        name = _RULES.get(self.rule, self.rule)
        options = dict(_DEFAULTS.get(name, {}))
        if fidelity is not None and name in ("asha", "SuccessiveHalvingPruner", "HyperbandPruner"):
            options |= {"min_resource": fidelity.low, "reduction_factor": fidelity.eta}
            options |= {"max_resource": fidelity.high} if name == "HyperbandPruner" else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            try:
                return _pruner_class(name)(**options | self.options)
            except TypeError as error:
                raise ValueError(f"{self.rule}: {error}") from error

    def learns_resource(self, fidelity: FidelityConfig | None) -> bool:
        """Whether the first rung is set by the first complete trial."""
        is_asha = self.rule in ("asha", "SuccessiveHalvingPruner")
        return is_asha and fidelity is None and "min_resource" not in self.options

    def needs_max_resource(self) -> bool:
        """Whether the rule lacks the last step of a complete trial."""
        return _RULES.get(self.rule, self.rule) == "HyperbandPruner" and "max_resource" not in self.options


@cache
def _pruner_class(name: str) -> "type[optuna.pruners.BasePruner]":
    """One of Optuna's pruners, or our own for `asha`."""
    import optuna

    if name != "asha":
        return getattr(optuna.pruners, name)  # type: ignore[no-any-return]

    class Asha(optuna.pruners.BasePruner):
        """Stops a trial that is not in the best part of those that reached the same rung so far.

        That part is rounded up: of seven trials, two stay. Optuna rounds it down, so that only the very best stays.
        """

        def __init__(self, min_resource: int = 1, reduction_factor: int = 4) -> None:
            if min_resource < 1 or reduction_factor < 2:
                raise ValueError("min_resource must be at least 1 and reduction_factor at least 2")
            self._first, self._factor = min_resource, reduction_factor
            self._rungs: dict[int, dict[int, float]] = {}
            """The value of each trial, by its number, at the first step that reached a rung."""

        def prune(self, study: Any, trial: Any) -> bool:
            *earlier, step = sorted(trial.intermediate_values)
            rung, sign = self._first, 1 if study.direction == optuna.study.StudyDirection.MINIMIZE else -1
            while rung <= step:
                if not earlier or earlier[-1] < rung:
                    values = self._reached(study, rung, sign)
                    value = values[trial.number] = sign * trial.intermediate_values[step]
                    better = sum(other < value for other in values.values())
                    if math.isnan(value) or better >= math.ceil(len(values) / self._factor):
                        return True
                rung *= self._factor
            return False

        def _reached(self, study: Any, rung: int, sign: int) -> dict[int, float]:
            if rung not in self._rungs:
                self._rungs[rung] = {}
                for trial in study.get_trials(deepcopy=False):
                    values = trial.intermediate_values
                    if (first := min((step for step in values if step >= rung), default=None)) is not None:
                        self._rungs[rung][trial.number] = sign * values[first]
            return self._rungs[rung]

    return Asha


class StopRule:
    """Decides for each reported step whether its trial continues."""

    def __init__(self, config: StopConfig, fidelity: FidelityConfig | None, ledger: Ledger) -> None:
        import optuna

        self.config, self._trials, self._states = config, optuna.trial, optuna.trial.TrialState
        self._ledger, pruner = ledger, config.pruner(fidelity)
        self._waits = config.learns_resource(fidelity)
        """Whether no trial is stopped yet, because none is complete and the number of steps is unknown."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # A fixed name: Hyperband derives a trial's bracket from it and from the trial's number.
        self._study = optuna.create_study(
            study_name="loopwright",
            sampler=optuna.samplers.RandomSampler(seed=0),
            pruner=optuna.pruners.NopPruner() if self._waits else pruner,
            direction="minimize" if config.mode == "min" else "maximize",
        )
        if self._waits and (first := ledger.state("first_rung")) is not None:
            self._set_first_rung(first)
        self._restore(ledger)

    def _set_first_rung(self, step: int) -> None:
        options = {**self.config.options, "min_resource": step}
        self._study.pruner, self._waits = self.config.model_copy(update={"options": options}).pruner(), False

    def begin(self, number: int) -> "optuna.trial.Trial":
        """The trial with this number in the study; those before it are added as running."""
        while len(self._study.get_trials(deepcopy=False)) < number:
            self._study.ask()
        return self._trials.Trial(self._study, self._study.get_trials(deepcopy=False)[number - 1]._trial_id)

    def stops(self, trial: "optuna.trial.Trial", step: int, value: float) -> bool:
        """Add a step; return whether the trial should stop there."""
        if step not in self._study.get_trials(deepcopy=False)[trial.number].intermediate_values:  # in a lost attempt
            trial.report(value, step)
        if not math.isnan(value):
            return trial.should_prune()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of numpy and of Optuna, about the NaN
            return trial.should_prune() or self.config.rule != "NopPruner"

    def end(self, trial: "optuna.trial.Trial", outcome: Outcome, last: float | None) -> dict[str, Any]:
        """Add how a trial ended; return what the rule noted about it."""
        if outcome is Outcome.STOPPED:
            self._study.tell(trial.number, state=self._states.PRUNED)
        elif outcome is Outcome.OK and last is not None and not math.isnan(last):
            self._study.tell(trial.number, last)
            steps = self._study.get_trials(deepcopy=False)[trial.number].intermediate_values
            if self._waits and steps:
                self._ledger.set_state("first_rung", first := max(1, max(steps) // _FIRST_RUNG))
                self._set_first_rung(first)
        else:
            self._study.tell(trial.number, state=self._states.FAIL)
        return dict(self._study.get_trials(deepcopy=False)[trial.number].system_attrs)

    def _restore(self, ledger: Ledger) -> None:
        states = self._states
        curves = {number: orjson.loads(data) for number, data in ledger.payloads("curve")}
        for trial in ledger.trials() if curves else ():
            curve = curves.get(trial.number, {"steps": [], "metrics": {}, "attrs": {}})
            values = [math.nan if v is None else v for v in curve["metrics"].get(self.config.metric, ())]
            points = dict(zip(curve["steps"], values, strict=False))
            state, value = states.FAIL, None
            if trial.unfinished:
                state, points, curve["attrs"] = states.RUNNING, {}, {}
            elif trial.outcome is Outcome.STOPPED:
                state = states.PRUNED
            elif trial.outcome is Outcome.OK and values and not math.isnan(values[-1]):
                state, value = states.COMPLETE, values[-1]
            self._study.add_trial(
                self._trials.create_trial(
                    state=state, value=value, intermediate_values=points, system_attrs=curve["attrs"]
                )
            )


class Curve:
    """The intermediate metrics of a trial that runs, and the rule that watches them."""

    def __init__(self, number: int, rule: StopRule | None) -> None:
        self._rule = rule
        self._trial = rule.begin(number) if rule is not None else None
        self._steps: list[int] = []
        self._metrics: dict[str, list[float | None]] = {}
        self._count, self._last = 0, -1
        self._stop_reason = ""

    def add(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Add a step; return whether the trial should stop there."""
        if self._stop_reason or step <= self._last:
            return bool(self._stop_reason)
        self._last, self._count = step, self._count + 1
        if self._count >= _EVERY and self._count % 10 ** (len(str(self._count // _EVERY))):
            return False
        for name in sorted(metrics.keys() - self._metrics.keys())[: _NAMES - len(self._metrics)]:
            self._metrics[name] = [None] * len(self._steps)
        self._steps.append(step)
        for name, values in self._metrics.items():
            value = metrics.get(name)
            values.append(value if value is not None and math.isfinite(value) else None)
        if self._rule is not None and self._trial is not None:
            config, value = self._rule.config, metrics.get(self._rule.config.metric)
            if value is not None and self._rule.stops(self._trial, step, float(value)):
                self._stop_reason = f"{config.rule}: {config.metric} = {value:.6g} at step {step}"
        return bool(self._stop_reason)

    def finish(self, result: Result) -> Result:
        """The trial's result with the curve."""
        if result.outcome is Outcome.STOPPED:
            result = replace(result, reason=self._stop_reason)
        attrs: dict[str, Any] = {}
        if self._rule is not None and self._trial is not None:
            values = [value for value in self._metrics.get(self._rule.config.metric, ()) if value is not None]
            attrs = self._rule.end(self._trial, result.outcome, values[-1] if values else None)
        return replace(result, curve={"steps": self._steps, "metrics": self._metrics, "attrs": attrs})


async def run_levels(workload: Workload, job: Job, name: str, fidelity: FidelityConfig) -> Result:
    """Run a trial at one fidelity after another, until it is stopped or complete.

    Each level has its own directory; they share the trial's checkpoint directory.
    """
    fresh_directory(job.directory)
    checkpoint, usage = job.directory / "checkpoint", dict[str, float]()
    record = orjson.loads(job.parameters_json)
    for level in fidelity.levels():
        arguments = {**job.arguments, name: level}
        parameters = orjson.dumps({**record, "arguments": arguments}, option=orjson.OPT_INDENT_2)
        result = await workload.run(
            replace(
                job,
                directory=job.directory / f"{name}-{level}",
                arguments=arguments,
                parameters_json=parameters + b"\n",
                checkpoint=checkpoint,
                report=None,
            )
        )
        for key, value in result.usage.items():
            usage[key] = max(usage.get(key, 0.0), value) if key == "max_rss_bytes" else usage.get(key, 0.0) + value
        if result.outcome is not Outcome.OK:
            return replace(result, usage=usage)
        if job.report is not None and job.report(level, result.metrics) and level < fidelity.high:
            return Result(Outcome.STOPPED, usage=usage)
    return replace(result, usage=usage)
