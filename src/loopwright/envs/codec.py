"""Between a learner's numbers and native values, both ways. Import it late: gymnasium is an extra."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from loopwright.core.errors import InvalidAction
from loopwright.core.trial import Action, Observation
from loopwright.envs.observation import ObsLeafDescriptor, StructuredObservation
from loopwright.spaces.parameter import Choice, Parameter, Range
from loopwright.spaces.space import Space

View = Literal["dict", "flat", "discrete"]
"""`dict`: named leaves. `flat`: MultiDiscrete or Box, and no nesting. `discrete`: one number per point."""


class ActionCodec:
    """Actions between a learner's numbers and native values."""

    def __init__(self, space: Space, view: View) -> None:
        self.space, self.view = space, view
        self._names = list(space.tunable)
        self._parameters = list(space.tunable.values())
        self._points = list(space.points()) if view == "discrete" else []
        self.gym_space = self._gym_space()

    def _gym_space(self) -> spaces.Space[Any]:
        match self.view:
            case "dict":
                return spaces.Dict({name: _leaf_space(p) for name, p in self.space.tunable.items()})
            case "discrete":
                return spaces.Discrete(len(self._points))
        if all(isinstance(parameter, Choice) for parameter in self._parameters):
            return spaces.MultiDiscrete([parameter.size or 1 for parameter in self._parameters])
        return spaces.Box(-1.0, 1.0, (len(self._parameters),), np.float32)

    def encode(self, action: Action) -> Any:
        """Native values as the learner's numbers; a parameter that does not take part gets its first value."""
        chosen = self.space.validate(action)
        if self.view == "discrete":
            return self._points.index(chosen)
        if self.view == "dict":
            return {name: _encode_leaf(p, chosen.get(name, p.decode(0))) for name, p in self.space.tunable.items()}
        numbers = [
            p.encode(chosen.get(name, p.decode(0))) for name, p in zip(self._names, self._parameters, strict=True)
        ]
        if isinstance(self.gym_space, spaces.MultiDiscrete):
            return np.array(numbers, self.gym_space.dtype)
        units = [_centre(p, n) for p, n in zip(self._parameters, numbers, strict=True)]
        return np.array([2.0 * unit - 1.0 for unit in units], np.float32)

    def decode(self, action: Any) -> dict[str, Any]:
        """The learner's numbers as native values; ValueError names what does not fit."""
        if self.view == "discrete":
            index = int(action)
            if not 0 <= index < len(self._points):
                raise InvalidAction(f"point {index} is outside 0..{len(self._points) - 1}")
            return dict(self._points[index])
        if self.view == "dict":
            return self._decode_dict(action)
        numbers = np.asarray(action, np.float64).ravel()
        if len(numbers) != len(self._names):
            raise InvalidAction(f"an action has {len(self._names)} numbers, not {len(numbers)}")
        if not np.isfinite(numbers).all():
            raise InvalidAction(f"{numbers.tolist()} has a number that is not finite")
        discrete = isinstance(self.gym_space, spaces.MultiDiscrete)
        values = {
            name: p.decode(number if discrete else _spread(p, number))
            for name, p, number in zip(self._names, self._parameters, numbers, strict=True)
        }
        return self.space.validate(self._active(values))

    def _decode_dict(self, action: Mapping[str, Any]) -> dict[str, Any]:
        wrong = [f"unknown key {name!r}" for name in action if name not in self.space.tunable]
        wrong += [f"missing key {name!r}" for name in self._names if name not in action]
        if wrong:
            raise InvalidAction("; ".join(wrong))
        values = {}
        for name, parameter in self.space.tunable.items():
            try:
                values[name] = _decode_leaf(parameter, action[name])
            except InvalidAction as error:
                raise InvalidAction(f"{name}: {error}") from None
        return self.space.validate(self._active(values))

    def _active(self, values: dict[str, Any]) -> dict[str, Any]:
        chosen: dict[str, Any] = {}
        for name, value in values.items():
            if self.space.active(name, chosen):
                chosen[name] = value
        return chosen


def _leaf_space(parameter: Parameter) -> spaces.Space[Any]:
    if isinstance(parameter, Range):
        return spaces.Box(parameter.low, parameter.high, (1,), np.float32)
    return spaces.Discrete(parameter.size or 1)


def _encode_leaf(parameter: Parameter, value: Any) -> Any:
    if isinstance(parameter, Range):
        # Rounding to float32 must not step over the bounds that float32 has made of low and high.
        box = _leaf_space(parameter)
        assert isinstance(box, spaces.Box)  # noqa: S101
        return np.clip(np.array([parameter.validate_value(value)], np.float32), box.low, box.high)
    return np.int64(parameter.encode(value))


def _decode_leaf(parameter: Parameter, number: Any) -> Any:
    if not isinstance(parameter, Range):
        return parameter.decode(int(number))
    value = float(np.asarray(number).reshape(-1)[0])
    if not np.isfinite(value):
        raise InvalidAction(f"{value} is not finite")
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
        self._metrics, self._structure, self._flat = list(metrics), structure, flat
        self._leaves = dict(structure.structured_observation_descriptors()) if structure is not None else {}
        box = spaces.Box(-np.inf, np.inf, (max(1, len(self._metrics)),), np.float32)
        self.gym_space: spaces.Space[Any] = box
        if self._leaves:
            context: spaces.Space[Any] = spaces.Dict({name: _space_of(leaf) for name, leaf in self._leaves.items()})
            if flat:
                length = spaces.flatdim(context)
                self.gym_space = spaces.Dict(
                    {"observation": box, "context": spaces.Box(-np.inf, np.inf, (length,), np.float32)}
                )
            else:
                self.gym_space = spaces.Dict({"observation": box, "context": context})
            self._context = context

    def encode(self, observation: Observation) -> Any:
        """An observation in its space; a metric that the last trial did not give is 0."""
        numbers = [observation.metrics.get(name) or 0.0 for name in self._metrics] or [0.0]
        # A metric may be larger than float32 can hold; the ledger keeps it exactly.
        box = np.nan_to_num(np.array(numbers, np.float64)).clip(-3e38, 3e38).astype(np.float32)
        if not self._leaves or self._structure is None:
            return box
        encoded = dict(self._structure.encode_observation(observation.context))
        if encoded.keys() != self._leaves.keys():
            raise ValueError(
                f"encode_observation gave {sorted(encoded)}, but the descriptors are {sorted(self._leaves)}"
            )
        context = {name: _value_of(leaf, encoded[name]) for name, leaf in self._leaves.items()}
        flattened = np.asarray(spaces.flatten(self._context, context), np.float32) if self._flat else context
        return {"observation": box, "context": flattened}


def _space_of(leaf: ObsLeafDescriptor) -> spaces.Space[Any]:
    if leaf.kind == "discrete":
        return spaces.Discrete(leaf.size)
    return spaces.Box(-np.inf, np.inf, (leaf.size,), np.float32)


def _value_of(leaf: ObsLeafDescriptor, value: Any) -> Any:
    return np.int64(value) if leaf.kind == "discrete" else np.asarray(value, np.float32).reshape(leaf.size)
