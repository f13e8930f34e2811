"""Between a learner's numbers and native values, both ways. Import it late: gymnasium is an extra."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from loopwright.core.canonical import key_of
from loopwright.core.errors import InvalidAction
from loopwright.core.trial import Action, Observation
from loopwright.envs.gym.observation import ObsLeafDescriptor, StructuredObservation
from loopwright.spaces.parameter import Parameter, Range
from loopwright.spaces.space import Space

_EXACT = 2**20
"""Up to here float32 tells integers apart, also after they were spread over -1..1."""

_MOST_KNOWN = 1024
"""How many regimes stay encoded; more are rare, and each is encoded again when it comes."""

View = Literal["dict", "flat", "discrete"]
"""`dict`: named leaves. `flat`: MultiDiscrete or Box, and no nesting. `discrete`: one number per point."""


class ActionCodec:
    """Actions between a learner's numbers and native values."""

    def __init__(self, space: Space, view: View) -> None:
        self.space, self.view = space, view
        self._names = list(space.tunable)
        self._parameters = list(space.tunable.values())
        self._points: list[dict[str, Any]] = []
        if view == "discrete":
            if endless := [name for name, p in space.tunable.items() if not p.grid()]:
                raise ValueError(f"{', '.join(endless)} cannot be numbered: list values, or say how many `points`")
            self._points = list(space.points())
        self._indices = {key_of(point): index for index, point in enumerate(self._points)}
        self.gym_space = self._gym_space()

    def _gym_space(self) -> spaces.Space[Any]:
        match self.view:
            case "dict":
                return spaces.Dict({name: _leaf_space(p) for name, p in self.space.tunable.items()})
            case "discrete":
                return spaces.Discrete(len(self._points))
        if not any(isinstance(parameter, Range) for parameter in self._parameters):
            return spaces.MultiDiscrete([parameter.size or 1 for parameter in self._parameters])
        exact = max((_precision(parameter) for parameter in self._parameters), key=lambda kind: kind().itemsize)
        return spaces.Box(-1.0, 1.0, (len(self._parameters),), exact)

    def encode(self, action: Action) -> Any:
        """Native values as the learner's numbers; a parameter that does not take part gets its first value."""
        chosen = self.space.validate(action)
        if self.view == "discrete":
            if (index := self._indices.get(key_of(chosen))) is None:
                raise InvalidAction(f"{chosen} is none of the {len(self._points)} points of the grid")
            return np.int64(index)
        if self.view == "dict":
            return {name: _encode_leaf(p, chosen.get(name, p.decode(0))) for name, p in self.space.tunable.items()}
        numbers = [
            p.encode(chosen.get(name, p.decode(0))) for name, p in zip(self._names, self._parameters, strict=True)
        ]
        if isinstance(self.gym_space, spaces.MultiDiscrete):
            return np.array(numbers, self.gym_space.dtype)
        units = [_centre(p, n) for p, n in zip(self._parameters, numbers, strict=True)]
        return np.array([2.0 * unit - 1.0 for unit in units], self.gym_space.dtype)

    def decode(self, action: Any) -> dict[str, Any]:
        """The learner's numbers as native values; ValueError names what does not fit."""
        if self.view == "discrete":
            index = _whole(action)
            if not 0 <= index < len(self._points):
                raise InvalidAction(f"point {index} is outside 0..{len(self._points) - 1}")
            return dict(self._points[index])
        if self.view == "dict":
            return self._decode_dict(action)
        numbers = _numbers(action)
        if len(numbers) != len(self._names):
            raise InvalidAction(f"an action has {len(self._names)} numbers, not {len(numbers)}")
        if not np.isfinite(numbers).all():
            raise InvalidAction(f"{numbers.tolist()} has a number that is not finite")
        discrete = isinstance(self.gym_space, spaces.MultiDiscrete)
        values: dict[str, Any] = {}
        for name, p, number in zip(self._names, self._parameters, numbers.tolist(), strict=True):
            with _naming(name):
                values[name] = p.decode(_whole(number) if discrete else _spread(p, number))
        return self.space.validate(self._active(values))

    def native(self, values: Action) -> dict[str, Any]:
        """The action among native values of all parameters: exactly the tunable ones that take part, and the fixed."""
        fixed = self.space.fixed
        wrong = [f"missing fixed parameter {name!r}" for name in fixed if name not in values]
        chosen: dict[str, Any] = {}
        try:
            for name in fixed.keys() & values.keys():
                with _naming(name):
                    self.space.parameters[name].validate_value(values[name])
            chosen = self.space.validate({name: value for name, value in values.items() if name not in fixed})
        except InvalidAction as error:
            wrong.append(str(error))
        if wrong:
            raise InvalidAction("; ".join(wrong))
        return chosen

    def _decode_dict(self, action: Any) -> dict[str, Any]:
        if not isinstance(action, Mapping):
            raise InvalidAction(f"an action has the keys {', '.join(self._names)}; this is {action!r}")
        wrong = [f"unknown key {name!r}" for name in action if name not in self.space.tunable]
        wrong += [f"missing key {name!r}" for name in self._names if name not in action]
        if wrong:
            raise InvalidAction("; ".join(wrong))
        values = {}
        for name, parameter in self.space.tunable.items():
            with _naming(name):
                values[name] = _decode_leaf(parameter, action[name])
        return self.space.validate(self._active(values))

    def _active(self, values: dict[str, Any]) -> dict[str, Any]:
        chosen: dict[str, Any] = {}
        for name, value in values.items():
            if self.space.active(name, chosen):
                chosen[name] = value
        return chosen


@contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except InvalidAction as error:
        raise InvalidAction(f"{name}: {error}") from None


def _numbers(value: Any) -> "np.ndarray[Any, np.dtype[np.float64]]":
    try:
        return np.asarray(value, np.float64).ravel()
    except (TypeError, ValueError):
        raise InvalidAction(f"{value!r} is no number, nor a list of them") from None


def _whole(value: Any) -> int:
    """An index, which no learner gives in fractions."""
    numbers = _numbers(value)
    if len(numbers) != 1 or not float(numbers[0]).is_integer():
        raise InvalidAction(f"{value!r} is no index")
    return int(numbers[0])


def _precision(parameter: Parameter) -> type[np.floating[Any]]:
    """What is exact enough: neighbouring integers of a wide range are one number in float32."""
    wide = isinstance(parameter, Range) and parameter.dtype == "int" and max(map(abs, (parameter.low, parameter.high)))
    return np.float64 if wide and wide > _EXACT else np.float32


def _leaf_space(parameter: Parameter) -> spaces.Space[Any]:
    if isinstance(parameter, Range):
        return spaces.Box(parameter.low, parameter.high, (1,), _precision(parameter))
    return spaces.Discrete(parameter.size or 1)


def _encode_leaf(parameter: Parameter, value: Any) -> Any:
    if isinstance(parameter, Range):
        # Rounding to float32 must not step over the bounds that float32 has made of low and high.
        box = _leaf_space(parameter)
        assert isinstance(box, spaces.Box)  # noqa: S101
        return np.clip(np.array([parameter.validate_value(value)], box.dtype), box.low, box.high)
    return np.int64(parameter.encode(value))


def _decode_leaf(parameter: Parameter, number: Any) -> Any:
    if not isinstance(parameter, Range):
        return parameter.decode(_whole(number))
    numbers = _numbers(number)
    if len(numbers) != 1 or not np.isfinite(numbers[0]):
        raise InvalidAction(f"{number!r} is no finite number")
    value = float(numbers[0])
    value = min(parameter.high, max(parameter.low, value))
    return round(value) if parameter.dtype == "int" else value


def _spread(parameter: Parameter, number: float) -> float:
    """A number in -1..1 as what `decode` takes: equal shares of the line for each candidate."""
    unit = min(1.0, max(0.0, (number + 1.0) / 2.0))
    if isinstance(parameter, Range):
        return unit
    return min(int(unit * (parameter.size or 1)), (parameter.size or 1) - 1)


def _centre(parameter: Parameter, number: float) -> float:
    return number if isinstance(parameter, Range) else (number + 0.5) / (parameter.size or 1)


class ObservationCodec:
    """Observations as a learner sees them: metrics, and where something is drawn, the regime beside them."""

    def __init__(self, metrics: Sequence[str], structure: StructuredObservation | None, *, flat: bool) -> None:
        self._metrics, self._context = list(metrics), _context_of(structure, flat=flat)
        box = spaces.Box(-np.inf, np.inf, (max(1, len(self._metrics)),), np.float32)
        self.gym_space = box if self._context is None else _beside(box, self._context.gym_space)

    def encode(self, observation: Observation) -> Any:
        """An observation in its space; a metric that the last trial did not give is 0."""
        numbers = [observation.metrics.get(name) or 0.0 for name in self._metrics] or [0.0]
        box = _held(numbers)
        if self._context is None:
            return box
        return {"observation": box, "context": self._context.encode(observation.context)}


class LiveCodec:
    """What a server shows, as a learner sees it: where something is drawn, the episode's regime beside it."""

    def __init__(
        self, shown: "spaces.Space[Any]", structure: StructuredObservation | None, *, flat: bool = True
    ) -> None:
        self._context, self._named = _context_of(structure, flat=flat), isinstance(shown, spaces.Dict)
        self.adds = self._context is not None
        """Whether a learner sees more than the server shows."""
        self.gym_space = shown if self._context is None else _beside(shown, self._context.gym_space)
        self._known: dict[str, Any] = {}
        self._now: Any = None
        self._flat = flat

    def begin(self, regime: Mapping[str, Any]) -> None:
        """An episode under this regime; each is encoded once, neither in each step nor in each episode."""
        if self._context is None:
            return
        written = repr(regime)
        if written not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[written] = self._context.encode(regime)
        self._now = self._known[written]

    def encode(self, seen: Any) -> Any:
        """An observation of the server's, in the learner's space."""
        if self._context is None:
            return seen
        # A copy, for whoever gets it may write into it.
        now = self._now
        context = now.copy() if self._flat else {name: value.copy() for name, value in now.items()}
        return {**seen, "context": context} if self._named else {"observation": seen, "context": context}


class RowCodec:
    """Observations of any kind as one row of numbers, for networks that take nothing else."""

    def __init__(self, space: "spaces.Space[Any]") -> None:
        self._space = space
        self.gym_space = spaces.Box(-np.inf, np.inf, (spaces.flatdim(space),), np.float32)

    def encode(self, seen: Any) -> Any:
        """The numbers of an observation, in gymnasium's own order."""
        return _held(spaces.flatten(self._space, seen))


class _ContextCodec:
    """The regime as named leaves, or, flat, as one row of numbers."""

    def __init__(self, structure: StructuredObservation, *, flat: bool) -> None:
        self._structure = structure
        self._leaves = dict(structure.structured_observation_descriptors())
        named = spaces.Dict({name: _space_of(leaf) for name, leaf in self._leaves.items()})
        self._row = RowCodec(named) if flat else None
        self.gym_space: spaces.Space[Any] = named if self._row is None else self._row.gym_space

    def encode(self, regime: Mapping[str, Any]) -> Any:
        encoded = dict(self._structure.encode_observation(regime))
        if encoded.keys() != self._leaves.keys():
            raise ValueError(
                f"encode_observation gave {sorted(encoded)}, but the descriptors are {sorted(self._leaves)}"
            )
        named = {name: _value_of(name, leaf, encoded[name]) for name, leaf in self._leaves.items()}
        return named if self._row is None else self._row.encode(named)


def _context_of(structure: StructuredObservation | None, *, flat: bool) -> _ContextCodec | None:
    has_leaves = structure is not None and structure.structured_observation_descriptors()
    return _ContextCodec(structure, flat=flat) if structure is not None and has_leaves else None


def _beside(shown: "spaces.Space[Any]", context: "spaces.Space[Any]") -> "spaces.Space[Any]":
    if not isinstance(shown, spaces.Dict):
        return spaces.Dict({"observation": shown, "context": context})
    # As pairs, for gymnasium sorts a plain dict, and flattening depends on the order.
    return spaces.Dict([*shown.spaces.items(), ("context", context)])


def _space_of(leaf: ObsLeafDescriptor) -> spaces.Space[Any]:
    if leaf.kind == "discrete":
        return spaces.Discrete(leaf.size)
    return spaces.Box(-np.inf, np.inf, (leaf.size,), np.float32)


def _value_of(name: str, leaf: ObsLeafDescriptor, value: Any) -> Any:
    numbers = np.asarray(value, np.float64).ravel()
    if leaf.kind == "box":
        if len(numbers) != leaf.size:
            raise ValueError(f"{name}: {len(numbers)} numbers where box({leaf.size}) is declared")
        return _held(numbers)
    if len(numbers) != 1 or not float(numbers[0]).is_integer() or not 0 <= numbers[0] < leaf.size:
        raise ValueError(f"{name}: {value!r} where discrete({leaf.size}) is declared")
    return np.int64(numbers[0])


def _held(numbers: Any) -> Any:
    """As float32, which holds less than the ledger does: the largest number instead of infinity."""
    return np.nan_to_num(np.asarray(numbers, np.float64)).clip(-3e38, 3e38).astype(np.float32)
