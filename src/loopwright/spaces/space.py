"""A space: all parameters of a workload, what an agent may choose among them, and what is forbidden."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from random import Random
from typing import Any

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
                raise ValueError(f"`when` goes round in a circle: {', '.join(waiting)}")
            self.tunable.update({name: waiting.pop(name) for name in ready})
        self._conditions.update(conditions)
        self.fixed.update({n: p.value for n, p in self.parameters.items() if isinstance(p, Fixed) and p.when is None})
        object.__setattr__(self, "_constraints", tuple(map(Expression, self.constraints)))

    @cached_property
    def size(self) -> int | None:
        """How many different actions there are; None for a continuum or where conditions make counting too long."""
        size = 1
        for parameter in self.tunable.values():
            if parameter.size is None:
                return None
            size *= parameter.size
        if not self._conditions:
            return size
        listed = all(isinstance(parameter, (Choice, Fixed)) for parameter in self.tunable.values())
        return sum(1 for _ in self.points()) if listed and size <= 100_000 else None

    @cached_property
    def grid_size(self) -> int:
        """How many points a grid visits; counted one by one only where conditions leave no other way."""
        if self._conditions:
            return sum(1 for _ in self.points())
        return prod(len(parameter.grid()) for parameter in self.tunable.values())

    @property
    def enumerable(self) -> bool:
        """Whether a grid can visit every parameter."""
        return all(parameter.grid() for parameter in self.tunable.values())

    def active(self, name: str, chosen: Mapping[str, Any]) -> bool:
        """Whether a parameter takes part, given those chosen before it."""
        condition = self._conditions.get(name)
        if condition is None:
            return True
        values = {**self.fixed, **chosen}
        try:
            # A condition on a parameter that is itself inactive does not hold, nor does one that has no value.
            return condition.names <= values.keys() and bool(condition(values))
        except (ArithmeticError, ValueError, TypeError):
            return False

    def validate(self, action: Action) -> dict[str, Any]:
        """The action in the values that the workload will get; InvalidAction names everything that is wrong."""
        wrong = [f"unknown parameter {name!r}" for name in action if name not in self.tunable]
        chosen: dict[str, Any] = {}
        for name, parameter in self.tunable.items():
            if not self.active(name, chosen):
                continue
            if name not in action:
                wrong.append(f"missing parameter {name!r}")
                continue
            try:
                chosen[name] = parameter.validate_value(action[name])
            except InvalidAction as error:
                wrong.append(f"{name}: {error}")
        if wrong:
            raise InvalidAction("; ".join(wrong))
        return chosen

    def violated(self, action: Action, regime: Regime) -> str | None:
        """The constraint that this action breaks under this regime, if any; one on an absent parameter is met."""
        if not self._constraints:
            return None
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
        """All that the workload gets, in the order of the scenario: fixed, chosen, drawn and `otherwise`."""
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
        """The n-th random action; each parameter has randomness of its own, so that adding one disturbs no other."""
        chosen: dict[str, Any] = {}
        for name, parameter in self.tunable.items():
            if self.active(name, chosen):
                chosen[name] = parameter.sample(Random(f"{seed}:{name}:{n}"))
        return chosen

    def points(self) -> Iterator[dict[str, Any]]:
        """Every action of the grid, once, the last parameter changing fastest."""
        names = list(self.tunable)
        grids = [self.tunable[name].grid() for name in names]
        for values in itertools.product(*grids):
            chosen: dict[str, Any] = {}
            for name, value, grid in zip(names, values, grids, strict=True):
                if self.active(name, chosen):
                    chosen[name] = value
                elif value is not grid[0]:  # an inactive parameter is counted once
                    break
            else:
                yield chosen

    def first(self) -> dict[str, Any]:
        """The first candidate of each list and the low end of each range."""
        chosen: dict[str, Any] = {}
        for name, parameter in self.tunable.items():
            if self.active(name, chosen):
                chosen[name] = parameter.decode(0)
        return chosen

    def encode(self, action: Action) -> dict[str, float]:
        """An action as numbers, see Parameter.encode."""
        return {name: self.tunable[name].encode(value) for name, value in self.validate(action).items()}

    def decode(self, numbers: Mapping[str, float]) -> dict[str, Any]:
        """The action that numbers stand for."""
        unknown = [name for name in numbers if name not in self.tunable]
        if unknown:
            raise InvalidAction(f"unknown parameter {', '.join(map(repr, unknown))}")
        return self.validate({name: self.tunable[name].decode(number) for name, number in numbers.items()})
