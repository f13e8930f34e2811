"""Codecs between native values and the arrays of Gymnasium spaces. Requires gymnasium (extra `rl`): import it late."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from loopwright.core.errors import InvalidAction
from loopwright.core.trial import Action, Observation, key_of
from loopwright.envs.gym.observation import ObsLeafDescriptor, StructuredObservation
from loopwright.spaces.parameter import Parameter, Range
from loopwright.spaces.space import Space

_MAX_FLOAT32_INTEGER = 2**20
"""Up to this value float32 keeps neighbouring integers apart, even after scaling to -1..1."""

_MAX_CACHED_REGIMES = 1024

View = Literal["dict", "flat", "discrete"]
"""`dict`: named leaves. `flat`: one MultiDiscrete or Box, no nesting. `discrete`: the index of a grid point."""


class ActionCodec:
    """Converts actions between native values and a Gymnasium action space."""

    def __init__(self, space: Space, view: View) -> None:
        self.space, self.view = space, view
        self._parameters = dict(space.tunable)
        self._points: list[dict[str, Any]] = []
        if view == "discrete":
            if not_listed := [name for name, p in self._parameters.items() if not p.grid()]:
                raise ValueError(f"{', '.join(not_listed)}: view 'discrete' needs a list of values or `points`")
            self._points = list(space.points())
        self._indices = {key_of(point): index for index, point in enumerate(self._points)}
        self.gym_space = self._gym_space()

    def _gym_space(self) -> spaces.Space[Any]:
        match self.view:
            case "dict":
                return spaces.Dict({name: _leaf_space(p) for name, p in self._parameters.items()})
            case "discrete":
                return spaces.Discrete(len(self._points))
        parameters = self._parameters.values()
        if not any(isinstance(p, Range) for p in parameters):
            return spaces.MultiDiscrete([p.size or 1 for p in parameters])
        dtype = max((_float_type(p) for p in parameters), key=lambda kind: kind().itemsize)
        return spaces.Box(-1.0, 1.0, (len(parameters),), dtype)

    def encode(self, action: Action) -> Any:
        """Native values as an element of the space. An inactive conditional parameter gets its first value."""
        action = self.space.validate(action)
        if self.view == "discrete":
            if (index := self._indices.get(key_of(action))) is None:
                raise InvalidAction(f"{action} is not one of the {len(self._points)} points of the grid")
            return np.int64(index)
        values = {name: action.get(name, p.decode(0)) for name, p in self._parameters.items()}
        if self.view == "dict":
            return {name: _encode_leaf(p, values[name]) for name, p in self._parameters.items()}
        numbers = [p.encode(values[name]) for name, p in self._parameters.items()]
        if isinstance(self.gym_space, spaces.MultiDiscrete):
            return np.array(numbers, self.gym_space.dtype)
        # In a Box, each candidate of a list owns an equal share of the line; encode to the middle of its share.
        units = [
            number if isinstance(p, Range) else (number + 0.5) / (p.size or 1)
            for p, number in zip(self._parameters.values(), numbers, strict=True)
        ]
        return np.array([2.0 * unit - 1.0 for unit in units], self.gym_space.dtype)

    def decode(self, action: Any) -> dict[str, Any]:
        """An element of the space as native values. Raises InvalidAction, which names the parameter."""
        if self.view == "discrete":
            index = _index(action)
            if not 0 <= index < len(self._points):
                raise InvalidAction(f"point {index} is outside 0..{len(self._points) - 1}")
            return dict(self._points[index])
        values = self._decode_dict(action) if self.view == "dict" else self._decode_flat(action)
        active: dict[str, Any] = {}
        for name, value in values.items():
            if self.space.active(name, active):
                active[name] = value
        return self.space.validate(active)

    def _decode_dict(self, action: Any) -> dict[str, Any]:
        if not isinstance(action, Mapping):
            raise InvalidAction(f"an action is a dict with the keys {', '.join(self._parameters)}, not {action!r}")
        wrong = [f"unknown key {name!r}" for name in action if name not in self._parameters]
        wrong += [f"missing key {name!r}" for name in self._parameters if name not in action]
        if wrong:
            raise InvalidAction("; ".join(wrong))
        values = {}
        for name, parameter in self._parameters.items():
            with _errors_name(name):
                values[name] = _decode_leaf(parameter, action[name])
        return values

    def _decode_flat(self, action: Any) -> dict[str, Any]:
        numbers = _numbers(action)
        if len(numbers) != len(self._parameters):
            raise InvalidAction(f"an action has {len(self._parameters)} numbers, not {len(numbers)}")
        if not np.isfinite(numbers).all():
            raise InvalidAction(f"{numbers.tolist()} has a number that is not finite")
        discrete = isinstance(self.gym_space, spaces.MultiDiscrete)
        values: dict[str, Any] = {}
        for (name, p), number in zip(self._parameters.items(), numbers.tolist(), strict=True):
            with _errors_name(name):
                values[name] = p.decode(_index(number) if discrete else _from_symmetric(p, number))
        return values

    def native(self, values: Action) -> dict[str, Any]:
        """The action in a dict of native values, which must hold the active tunable and all fixed parameters."""
        fixed = self.space.fixed
        wrong = [f"missing fixed parameter {name!r}" for name in fixed if name not in values]
        action: dict[str, Any] = {}
        try:
            for name in fixed.keys() & values.keys():
                with _errors_name(name):
                    self.space.parameters[name].validate_value(values[name])
            action = self.space.validate({name: value for name, value in values.items() if name not in fixed})
        except InvalidAction as error:
            wrong.append(str(error))
        if wrong:
            raise InvalidAction("; ".join(wrong))
        return action


@contextmanager
def _errors_name(name: str) -> Iterator[None]:
    try:
        yield
    except InvalidAction as error:
        raise InvalidAction(f"{name}: {error}") from None


def _numbers(value: Any) -> "np.ndarray[Any, np.dtype[np.float64]]":
    try:
        return np.asarray(value, np.float64).ravel()
    except (TypeError, ValueError):
        raise InvalidAction(f"{value!r} is not a number or a list of numbers") from None


def _index(value: Any) -> int:
    numbers = _numbers(value)
    if len(numbers) != 1 or not float(numbers[0]).is_integer():
        raise InvalidAction(f"{value!r} is not an index")
    return int(numbers[0])


def _float_type(parameter: Parameter) -> type[np.floating[Any]]:
    """float32, or float64 for a range of integers that float32 cannot tell apart."""
    if not isinstance(parameter, Range) or parameter.dtype != "int":
        return np.float32
    return np.float64 if max(abs(parameter.low), abs(parameter.high)) > _MAX_FLOAT32_INTEGER else np.float32


def _leaf_space(parameter: Parameter) -> spaces.Space[Any]:
    if isinstance(parameter, Range):
        return spaces.Box(parameter.low, parameter.high, (1,), _float_type(parameter))
    return spaces.Discrete(parameter.size or 1)


def _encode_leaf(parameter: Parameter, value: Any) -> Any:
    if isinstance(parameter, Range):
        # low and high were rounded to float32; rounding the value must not step over them.
        box = _leaf_space(parameter)
        assert isinstance(box, spaces.Box)  # noqa: S101
        return np.clip(np.array([parameter.validate_value(value)], box.dtype), box.low, box.high)
    return np.int64(parameter.encode(value))


def _decode_leaf(parameter: Parameter, number: Any) -> Any:
    if not isinstance(parameter, Range):
        return parameter.decode(_index(number))
    numbers = _numbers(number)
    if len(numbers) != 1 or not np.isfinite(numbers[0]):
        raise InvalidAction(f"{number!r} is not a finite number")
    value = min(parameter.high, max(parameter.low, float(numbers[0])))
    return round(value) if parameter.dtype == "int" else value


def _from_symmetric(parameter: Parameter, number: float) -> float:
    """A number in -1..1 as the argument of `Parameter.decode`: 0..1 for a range, else an index."""
    unit = min(1.0, max(0.0, (number + 1.0) / 2.0))
    if isinstance(parameter, Range):
        return unit
    size = parameter.size or 1
    return min(int(unit * size), size - 1)


class ObservationCodec:
    """Encodes observations of a batch run: the metrics of the last trial and, with env_params, the regime."""

    def __init__(self, metrics: Sequence[str], structure: StructuredObservation | None, *, flat: bool) -> None:
        self._metrics, self._context = list(metrics), _context_codec(structure, flat=flat)
        box = spaces.Box(-np.inf, np.inf, (max(1, len(self._metrics)),), np.float32)
        self.gym_space = box if self._context is None else _with_context(box, self._context.gym_space)

    def encode(self, observation: Observation) -> Any:
        """The observation in its space. A metric that the last trial did not report is 0."""
        box = _as_float32([observation.metrics.get(name) or 0.0 for name in self._metrics] or [0.0])
        if self._context is None:
            return box
        return {"observation": box, "context": self._context.encode(observation.metrics, observation.context)}


class LiveObservationCodec:
    """Adds the regime of the episode to a live server's observations, if anything is drawn."""

    def __init__(
        self, server_space: "spaces.Space[Any]", structure: StructuredObservation | None, *, flat: bool = True
    ) -> None:
        self._context, self._flat = _context_codec(structure, flat=flat), flat
        self._server_space_is_dict = isinstance(server_space, spaces.Dict)
        self.adds_context = self._context is not None
        self.gym_space = server_space if self._context is None else _with_context(server_space, self._context.gym_space)
        self._encoded: dict[str, Any] = {}
        self._current: Any = None

    def set_regime(self, regime: Mapping[str, Any]) -> None:
        """Set the regime of the episode that begins. Each regime is encoded once and cached."""
        if self._context is None:
            return
        key = repr(regime)
        if key not in self._encoded:
            if len(self._encoded) >= _MAX_CACHED_REGIMES:
                self._encoded.clear()
            self._encoded[key] = self._context.encode({}, regime)
        self._current = self._encoded[key]

    def encode(self, observation: Any) -> Any:
        """The server's observation in the learner's space."""
        if self._context is None:
            return observation
        # Copied, since the receiver may write into it.
        current = self._current
        context = current.copy() if self._flat else {name: value.copy() for name, value in current.items()}
        if self._server_space_is_dict:
            return {**observation, "context": context}
        return {"observation": observation, "context": context}


class FlattenCodec:
    """Flattens observations of any space to one float32 vector, for networks that take nothing else."""

    def __init__(self, space: "spaces.Space[Any]") -> None:
        self._space = space
        self.gym_space = spaces.Box(-np.inf, np.inf, (spaces.flatdim(space),), np.float32)

    def encode(self, observation: Any) -> Any:
        """The numbers of an observation, in the order of `gymnasium.spaces.flatten`."""
        return _as_float32(spaces.flatten(self._space, observation))


class _ContextCodec:
    """Encodes metrics and regime as named leaves or, with `flat`, as one vector."""

    def __init__(self, structure: StructuredObservation, *, flat: bool) -> None:
        self._structure = structure
        self._leaves = dict(structure.structured_observation_descriptors() or {})
        leaves = spaces.Dict(
            {
                name: spaces.Discrete(leaf.size)
                if leaf.kind == "discrete"
                else spaces.Box(-np.inf, np.inf, (leaf.size,), np.float32)
                for name, leaf in self._leaves.items()
            }
        )
        self._flatten = FlattenCodec(leaves) if flat else None
        self.gym_space: spaces.Space[Any] = leaves if self._flatten is None else self._flatten.gym_space

    def encode(self, metrics: Mapping[str, Any], regime: Mapping[str, Any]) -> Any:
        values = dict(self._structure.encode_observation(metrics, regime))
        if values.keys() != self._leaves.keys():
            raise ValueError(
                f"encode_observation returned the keys {sorted(values)}; the descriptors have {sorted(self._leaves)}"
            )
        encoded = {name: _leaf_value(name, leaf, values[name]) for name, leaf in self._leaves.items()}
        return encoded if self._flatten is None else self._flatten.encode(encoded)


def _context_codec(structure: StructuredObservation | None, *, flat: bool) -> _ContextCodec | None:
    if structure is None or not structure.structured_observation_descriptors():
        return None
    return _ContextCodec(structure, flat=flat)


def _with_context(space: "spaces.Space[Any]", context: "spaces.Space[Any]") -> "spaces.Space[Any]":
    if not isinstance(space, spaces.Dict):
        return spaces.Dict({"observation": space, "context": context})
    # Pairs, since gymnasium sorts a plain dict and flattening depends on the order.
    return spaces.Dict([*space.spaces.items(), ("context", context)])


def _leaf_value(name: str, leaf: ObsLeafDescriptor, value: Any) -> Any:
    numbers = np.asarray(value, np.float64).ravel()
    if leaf.kind == "box":
        if len(numbers) != leaf.size:
            raise ValueError(f"{name}: expected {leaf.size} numbers (box({leaf.size})), got {len(numbers)}")
        return _as_float32(numbers)
    if len(numbers) != 1 or not float(numbers[0]).is_integer() or not 0 <= numbers[0] < leaf.size:
        raise ValueError(f"{name}: expected an index below {leaf.size} (discrete({leaf.size})), got {value!r}")
    return np.int64(numbers[0])


def _as_float32(numbers: Any) -> Any:
    """As float32, with the largest finite number instead of infinity: the ledger's float64 holds larger numbers."""
    return np.nan_to_num(np.asarray(numbers, np.float64)).clip(-3e38, 3e38).astype(np.float32)
