"""One parameter: a fixed value, a list of candidates or a range, as a scenario writes it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from random import Random
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator

from loopwright.core.config import Config, explain
from loopwright.core.errors import InvalidAction
from loopwright.core.expression import Expression
from loopwright.core.trial import canonical, key_of


class Parameter(Config, ABC):
    """The base of all parameters. `when` makes it conditional; while inactive, it is `otherwise` or absent."""

    when: str | None = None
    """An expression over other parameters; while it is false, this one is not part of the action."""
    otherwise: Any = None
    """The value while `when` is false; without it the parameter is then absent."""

    @field_validator("when")
    @classmethod
    def _parses(cls, text: str | None) -> str | None:
        if text is not None:
            Expression(text)
        return text

    @property
    @abstractmethod
    def size(self) -> int | None:
        """How many values there are, None for a continuum."""

    @abstractmethod
    def validate_value(self, value: Any) -> Any:
        """The value as the workload will get it, or InvalidAction."""

    @abstractmethod
    def grid(self) -> list[Any]:
        """The values that a grid visits; empty if the parameter does not define any."""

    @abstractmethod
    def sample(self, random: Random) -> Any:
        """A value drawn evenly (on a log scale where the parameter asks for one)."""

    @abstractmethod
    def encode(self, value: Any) -> float:
        """A number for a learner: the index of a candidate, or a position in 0..1 of a range."""

    @abstractmethod
    def decode(self, number: float) -> Any:
        """The value that a number stands for."""


class Choice(Parameter):
    """A list of candidates. A list in TOML is short for this."""

    values: tuple[Any, ...] = Field(min_length=1)
    """The candidates."""

    _indices: dict[str, int] = PrivateAttr(default_factory=dict)
    # By key: a list may be long, and True == 1 in Python, but a flag that is on is not the number one.

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        for index, value in enumerate(self.values):
            if self._indices.setdefault(key_of(value), index) != index:
                raise ValueError(f"{value!r} is listed twice")
        return self

    @property
    def size(self) -> int:
        return len(self.values)

    @property
    def ordered(self) -> bool:
        """Whether the candidates are numbers in order, so that neighbours are alike."""
        numbers = [v for v in self.values if isinstance(v, (int, float)) and not isinstance(v, bool)]
        return len(numbers) == len(self.values) > 2 and numbers in (sorted(numbers), sorted(numbers, reverse=True))

    def validate_value(self, value: Any) -> Any:
        index = self._indices.get(key_of(value))
        if index is None:
            raise InvalidAction(f"{value!r} is not one of {', '.join(map(repr, self.values))}")
        return self.values[index]

    def grid(self) -> list[Any]:
        return list(self.values)

    def sample(self, random: Random) -> Any:
        return self.values[random.randrange(len(self.values))]

    def encode(self, value: Any) -> int:
        return self._indices[key_of(self.validate_value(value))]

    def decode(self, number: float) -> Any:
        index = round(float(number)) if math.isfinite(number) else -1
        if not 0 <= index < len(self.values):
            raise InvalidAction(f"index {number} is outside 0..{len(self.values) - 1}")
        return self.values[index]


class Range(Parameter):
    """All numbers from `low` to `high`, both included."""

    low: float
    """The smallest value."""
    high: float
    """The largest value."""
    dtype: Literal["float", "int"] = "float"
    """`int` for whole numbers."""
    log: bool = False
    """Whether ratios matter, not differences: 1 to 10 gets as much room as 10 to 100."""
    points: int | None = Field(default=None, ge=2)
    """How many values a grid takes from the range, ends included."""

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"low must be below high, not {self.low:g} and {self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError(f"log = true needs low above 0, not {self.low:g}")
        if self.dtype == "int" and not (self.low.is_integer() and self.high.is_integer()):
            raise ValueError(f"dtype = 'int' needs whole bounds, not {self.low:g} and {self.high:g}")
        return self

    @property
    def size(self) -> int | None:
        return int(self.high) - int(self.low) + 1 if self.dtype == "int" else None

    def validate_value(self, value: Any) -> Any:
        if type(value) is float and self.dtype == "float" and self.low <= value <= self.high:
            return value or 0.0  # never -0.0
        plain = canonical(value)
        if isinstance(plain, bool) or not isinstance(plain, (int, float)):
            raise InvalidAction(f"{value!r} is not a number")
        if not self.low <= plain <= self.high:
            raise InvalidAction(f"{value!r} is outside {self.low:g}..{self.high:g}")
        if self.dtype == "int" and not isinstance(plain, int):
            raise InvalidAction(f"{value!r} is not a whole number")
        return plain if self.dtype == "int" else float(plain)

    def grid(self) -> list[Any]:
        if self.points is None:
            return []
        return list(dict.fromkeys(self.decode(step / (self.points - 1)) for step in range(self.points)))

    def sample(self, random: Random) -> Any:
        if self.dtype == "int" and not self.log:
            return random.randint(int(self.low), int(self.high))
        return self.decode(random.random())

    def encode(self, value: Any) -> float:
        number = float(self.validate_value(value))
        if self.log:
            return math.log(number / self.low) / math.log(self.high / self.low)
        return (number - self.low) / (self.high - self.low)

    def decode(self, number: float) -> Any:
        unit = float(number)
        if 0.0 < unit < 1.0:
            value = self.low * (self.high / self.low) ** unit if self.log else self.low + unit * (self.high - self.low)
            value = min(self.high, max(self.low, value))
        elif math.isnan(unit):
            raise InvalidAction(f"{number} is not a position in 0..1")
        else:  # exactly the ends, without rounding errors
            value = self.high if unit >= 1.0 else self.low
        return round(value) if self.dtype == "int" else value


ContinuousSpace = Range
"""A range, under the name that fits gymnasium's spaces."""


class Fixed(Parameter):
    """One value. A bare string, number or boolean in TOML is short for this."""

    value: Any
    """The value, of any type that the workload accepts."""

    @field_validator("value")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        canonical(value)
        return value

    @property
    def size(self) -> int:
        return 1

    def validate_value(self, value: Any) -> Any:
        same, fixed = canonical(value), canonical(self.value)
        # True == 1 in Python, but a flag that is on is not the number one.
        if type(same) is not type(fixed) or same != fixed:
            raise InvalidAction(f"{value!r} is not the fixed value {self.value!r}")
        return self.value

    def grid(self) -> list[Any]:
        return [self.value]

    def sample(self, random: Random) -> Any:
        return self.value

    def encode(self, value: Any) -> float:
        self.validate_value(value)
        return 0

    def decode(self, number: float) -> Any:
        return self.value


_FORMS: tuple[tuple[str, type[Parameter]], ...] = (
    ("low", Range),
    ("high", Range),
    ("values", Choice),
    ("value", Fixed),
)


_KEYS = {key for _, form in _FORMS for key in form.model_fields}


def parameters(table: Mapping[str, Any]) -> dict[str, Parameter]:
    """The parameters of a table; those of a table inside it have dotted names. A ValueError lists all problems.

    >>> list(parameters({"epochs": 3, "trainer": {"lr": [0.1, 0.2]}}))
    ['epochs', 'trainer.lr']
    """
    result, problems = {}, []
    for name, value in flat(table).items():
        try:
            result[name] = parameter(value)
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise ValueError("; ".join(problems))
    return result


def flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a table as they are written, by dotted name."""
    result: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict) and value and not value.keys() & _KEYS:
            result |= {f"{name}.{inner}": each for inner, each in flat(value).items()}
        else:
            result[name] = value
    return result


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values with dotted names as tables inside tables."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        table = result
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
    return result


def parameter(value: Any) -> Parameter:
    """A parameter from its form in TOML."""
    if isinstance(value, Parameter):
        return value
    if isinstance(value, (list, tuple)):
        if not value:
            raise ValueError("an empty list has nothing to choose from")
        value = {"value": value[0]} if len(value) == 1 else {"values": value}
    if not isinstance(value, dict):
        value = {"value": value}
    for key, form in _FORMS:
        if key in value:
            try:
                return form.model_validate(value)
            except ValidationError as error:
                wrong = [f"{key}: {message}" if key else message for key, message in explain(error, form)]
                raise ValueError("; ".join(wrong)) from error
    raise ValueError("a table must have low and high (a range), values (a list) or value (a fixed value)")
