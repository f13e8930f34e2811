"""A space: the parameters of a workload, which of them an agent chooses and the environment draws, and constraints."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from random import Random
from typing import Any, Literal

from pydantic import Field

from loopwright.core.config import Config
from loopwright.core.errors import InvalidAction
from loopwright.core.expression import Expression
from loopwright.core.trial import Action, Regime
from loopwright.spaces.parameter import Choice, Fixed, Parameter


@dataclass(frozen=True)
class Space:
    """Named parameters and constraints. `drawn` names those that the environment draws, not the agent.

    >>> space = Space({"tile": Range(low=8, high=256, dtype="int"), "size": Choice(values=(256, 512))})
    >>> space.sample(seed=7, n=1)
    {'tile': 154, 'size': 512}
    """

    parameters: Mapping[str, Parameter]
    constraints: tuple[str, ...] = ()
    drawn: frozenset[str] = frozenset()
    tunable: dict[str, Parameter] = field(init=False, repr=False, default_factory=dict)
    """The parameters that an agent chooses, each after those that its `when` names."""
    fixed: dict[str, Any] = field(init=False, repr=False, default_factory=dict)
    """The values that never change."""
    _conditions: dict[str, Expression] = field(init=False, repr=False, compare=False, default_factory=dict)
    _constraints: tuple[Expression, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        free = {n: p for n, p in self.parameters.items() if n not in self.drawn and not isinstance(p, Fixed)}
        waiting = free | {n: p for n, p in self.parameters.items() if isinstance(p, Fixed) and p.when is not None}
        conditions = {name: Expression(p.when) for name, p in waiting.items() if p.when is not None}
        while waiting:
            ready = [n for n in waiting if n not in conditions or not conditions[n].names & waiting.keys()]
            if not ready:
                raise ValueError(f"the `when` conditions form a cycle: {', '.join(waiting)}")
            self.tunable.update({name: waiting.pop(name) for name in ready})
        self._conditions.update(conditions)
        self.fixed.update({n: p.value for n, p in self.parameters.items() if isinstance(p, Fixed) and p.when is None})
        object.__setattr__(self, "_constraints", tuple(map(Expression, self.constraints)))

    @cached_property
    def size(self) -> int | None:
        """How many different actions there are; None for a continuum, or if conditions make counting too slow."""
        size = 1
        for parameter in self.tunable.values():
            if parameter.size is None:
                return None
            size *= parameter.size
        if not self._conditions:
            return size
        countable = all(isinstance(parameter, (Choice, Fixed)) for parameter in self.tunable.values())
        return sum(1 for _ in self.points()) if countable and size <= 100_000 else None

    @cached_property
    def grid_size(self) -> int:
        """How many points a grid visits; counted one by one only if there are conditions."""
        if self._conditions:
            return sum(1 for _ in self.points())
        return prod(len(parameter.grid()) for parameter in self.tunable.values())

    @property
    def enumerable(self) -> bool:
        """Whether a grid can visit every parameter."""
        return all(parameter.grid() for parameter in self.tunable.values())

    def active(self, name: str, values: Mapping[str, Any]) -> bool:
        """Whether a parameter is part of the action, given the values of those before it."""
        condition = self._conditions.get(name)
        if condition is None:
            return True
        values = {**self.fixed, **values}
        try:
            # A condition on a parameter that is itself inactive does not hold, nor does one without a value.
            return condition.names <= values.keys() and bool(condition(values))
        except (ArithmeticError, ValueError, TypeError):
            return False

    def validate(self, action: Action) -> dict[str, Any]:
        """The action in the values that the workload will get; InvalidAction names everything that is wrong."""
        wrong = [f"unknown parameter {name!r}" for name in action if name not in self.tunable]
        values: dict[str, Any] = {}
        for name, parameter in self.tunable.items():
            if name in self._conditions and not self.active(name, values):
                continue
            if name not in action:
                wrong.append(f"missing parameter {name!r}")
                continue
            try:
                values[name] = parameter.validate_value(action[name])
            except InvalidAction as error:
                wrong.append(f"{name}: {error}")
        if wrong:
            raise InvalidAction("; ".join(wrong))
        return values

    def violated(self, action: Action, regime: Regime) -> str | None:
        """The constraint that this action breaks under this regime, if any; one on an absent parameter is met."""
        values = self.arguments(action, regime)
        for constraint in self._constraints:
            if not constraint.names <= values.keys():
                continue
            try:
                met = constraint(values)
            except (ArithmeticError, ValueError, TypeError) as error:
                return f"constraint {constraint.text!r} has no value: {error}"
            if not met:
                return f"constraint {constraint.text!r} is not met"
        return None

    def arguments(self, action: Action, regime: Regime) -> dict[str, Any]:
        """The workload's arguments in the order of the scenario: fixed, chosen, drawn and `otherwise` values."""
        values = {**self.fixed, **action, **regime}
        ordered = {}
        for name, parameter in self.parameters.items():
            if name in values:
                ordered[name] = values[name]
            elif parameter.otherwise is not None:
                ordered[name] = parameter.otherwise
        return ordered

    # -- points -------------------------------------------------------------------------------------------------

    def sample(self, seed: int, n: int | str) -> dict[str, Any]:
        """The n-th random action; each parameter has its own random source, so that adding one changes no other."""
        values: dict[str, Any] = {}
        for name, parameter in self.tunable.items():
            if name not in self._conditions or self.active(name, values):
                values[name] = parameter.sample(Random(f"{seed}:{name}:{n}"))
        return values

    def points(self) -> Iterator[dict[str, Any]]:
        """Every action of the grid, once, the last parameter changing fastest."""
        names = list(self.tunable)
        grids = [self.tunable[name].grid() for name in names]
        for candidate in itertools.product(*grids):
            values: dict[str, Any] = {}
            for name, value, grid in zip(names, candidate, grids, strict=True):
                if self.active(name, values):
                    values[name] = value
                elif value is not grid[0]:  # an inactive parameter is counted once
                    break
            else:
                yield values

    def first(self) -> dict[str, Any]:
        """The first candidate of each list and the low end of each range."""
        values: dict[str, Any] = {}
        for name, parameter in self.tunable.items():
            if self.active(name, values):
                values[name] = parameter.decode(0)
        return values

    def encode(self, action: Action) -> dict[str, float]:
        """An action as numbers, see Parameter.encode."""
        return {name: self.tunable[name].encode(value) for name, value in self.validate(action).items()}

    def decode(self, numbers: Mapping[str, float]) -> dict[str, Any]:
        """The action that numbers stand for."""
        unknown = [name for name in numbers if name not in self.tunable]
        if unknown:
            raise InvalidAction(f"unknown parameter {', '.join(map(repr, unknown))}")
        return self.validate({name: self.tunable[name].decode(number) for name, number in numbers.items()})


class EnvParamConfig(Config):
    """How a list-valued argument is drawn. The values themselves stay where the argument is."""

    weights: tuple[float, ...] | None = None
    """How often each candidate is drawn; they add up to 1. Without them all are equally likely."""
    encoding: Literal["categorical", "scalar", "log"] = Field(default="categorical")
    """How a learner sees the drawn value."""


class Draws:
    """The regimes of a run. A draw depends on the seed, the parameter's name and the draw's index, on nothing else."""

    def __init__(self, seed: int, parameters: Mapping[str, Parameter], configs: Mapping[str, EnvParamConfig]) -> None:
        self.seed, self.configs = seed, dict(configs)
        self.values = {n: p for n, p in parameters.items() if n in configs and isinstance(p, Choice)}

    def sample(self, draw: int | str) -> Regime:
        """The regime of a draw; empty if nothing is drawn."""
        return {
            name: Random(f"{self.seed}:{name}:{draw}").choices(choice.values, self.configs[name].weights)[0]
            for name, choice in self.values.items()
        }

    @property
    def count(self) -> int:
        """How many regimes there are."""
        return prod(choice.size for choice in self.values.values())

    def weighted(self) -> Iterator[tuple[Regime, float]]:
        """Every regime with its probability."""
        for values in itertools.product(*(choice.values for choice in self.values.values())):
            regime = dict(zip(self.values, values, strict=True))
            weight = 1.0
            for name, value in regime.items():
                weights, choice = self.configs[name].weights, self.values[name]
                weight *= 1 / choice.size if weights is None else weights[choice.encode(value)]
            yield regime, weight


class Noise:
    """Arguments that are averaged over and never shown to the agent, such as a random seed.

    Draw n depends on the seed, the name and n alone, so that configurations are compared under the same draws. Each
    value is drawn once before any is drawn again.
    """

    def __init__(self, seed: int, values: Mapping[str, tuple[Any, ...]]) -> None:
        self.seed, self.values = seed, dict(values)

    def sample(self, n: int) -> dict[str, Any]:
        """The n-th draw, from 0; empty without noise."""
        draw = {}
        for name, values in self.values.items():
            turn, place = divmod(n, len(values))
            draw[name] = Random(f"{self.seed}:{name}:noise:{turn}").sample(values, len(values))[place]
        return draw


def problem_with(target: Parameter | None, config: EnvParamConfig) -> str | None:
    """Why this argument cannot be drawn in this way, and the fix; None if it can."""
    if isinstance(target, Fixed) and isinstance(target.value, dict):
        return "is a table; only a list of plain values can be drawn. Draw one of its parts as a separate argument"
    if isinstance(target, Fixed):
        return f"has one value, {target.value!r}; drawing needs a list of at least two"
    if not isinstance(target, Choice):
        return "is a range; drawing needs a list of candidates"
    if target.when is not None:
        return "has a `when`; a drawn argument cannot be conditional. Remove one of the two"
    if any(isinstance(value, (dict, list)) for value in target.values):
        return "has nested candidates; only plain values can be drawn"
    if problem := _unencodable(target, config.encoding):
        return problem
    weights = config.weights
    if weights is None:
        return None
    if len(weights) != len(target.values):
        return f"has {len(target.values)} candidates but {len(weights)} weights; give one weight for each"
    if any(weight < 0 for weight in weights):
        return f"has a negative weight in {list(weights)}"
    if abs(sum(weights) - 1.0) > 1e-6:
        return f"has weights that add up to {sum(weights):g}, not 1"
    return None


def _unencodable(target: Choice, encoding: str) -> str | None:
    numbers = [v for v in target.values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    if encoding != "categorical" and len(numbers) < len(target.values):
        return f"has candidates that are not numbers; encoding = {encoding!r} needs numbers, use 'categorical'"
    if encoding == "log" and min(numbers) <= 0:
        return f"has the candidate {min(numbers)}; encoding = 'log' needs numbers above 0, use 'scalar'"
    return None
