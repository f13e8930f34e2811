"""Between a learner's numbers and native values: both ways, in every view, and strict about what does not fit."""

import math

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from loopwright.core.errors import InvalidAction
from loopwright.core.trial import Observation
from loopwright.envs.gym.codec import ActionCodec, ObservationCodec
from loopwright.envs.gym.observation import ObsLeafDescriptor, RegimeEncoder
from loopwright.spaces.parameter import Range, parameter
from loopwright.spaces.space import Draws, EnvParamConfig, Space

VALUES = st.lists(
    st.one_of(st.integers(-1000, 1000), st.text(max_size=3), st.booleans(), st.floats(-1e6, 1e6)),
    min_size=2,
    max_size=5,
    unique_by=lambda value: repr(value if not isinstance(value, float) or not value.is_integer() else int(value)),
)


@st.composite
def ranges(draw):
    log = draw(st.booleans())
    if draw(st.booleans()):
        low = draw(st.integers(1 if log else -(10**6), 10**6))
        return {"low": low, "high": low + draw(st.integers(1, 10**6)), "dtype": "int", "log": log}
    low = draw(st.floats(1e-3, 1e3) if log else st.floats(-1e3, 1e3))
    return {"low": low, "high": low + draw(st.floats(1e-2, 1e3)), "log": log}


@st.composite
def made_spaces(draw, *, finite: bool = False):
    """Lists, ranges and a parameter that depends on another."""
    choices = {f"list{n}": parameter(draw(VALUES)) for n in range(draw(st.integers(1, 3)))}
    ranged = {} if finite else {f"range{n}": parameter(draw(ranges())) for n in range(draw(st.integers(0, 2)))}
    depends = {}
    if draw(st.booleans()):
        inner = {"values": [1, 2, 3]} if finite or draw(st.booleans()) else draw(ranges())
        depends = {
            "gate": parameter([0, 1]),
            "behind": parameter({**inner, "when": "gate == 1"}),
            "constant": parameter({"value": 7, "when": "gate == 1"}),
        }
    return Space({**choices, **ranged, **depends, "fixed": parameter("f")})


def same(one, other, space: Space) -> bool:
    """Equal; floats to the precision of float32, over the range where it is that which is spread."""
    if one.keys() != other.keys():
        return False
    for name, value in one.items():
        p = space.parameters[name]
        if isinstance(p, Range) and p.dtype == "float":
            width = max(abs(p.low), abs(p.high))
            if not math.isclose(value, other[name], rel_tol=3e-6, abs_tol=3e-7 * width):
                return False
        elif type(value) is not type(other[name]) or value != other[name]:
            return False
    return True


@given(space=made_spaces(), view=st.sampled_from(["dict", "flat"]), n=st.integers(0, 1000))
def test_g03_decoding_inverts_encoding(space, view, n):
    codec = ActionCodec(space, view)
    action = space.sample(seed=1, n=n)
    encoded = codec.encode(action)
    assert codec.gym_space.contains(encoded)
    assert same(codec.decode(encoded), action, space)


@given(space=made_spaces(finite=True), n=st.integers(0, 1000))
def test_g03_the_index_of_a_point_decodes_to_that_point(space, n):
    codec = ActionCodec(space, "discrete")
    action = space.sample(seed=1, n=n)
    encoded = codec.encode(action)
    assert codec.gym_space.contains(encoded)
    assert codec.decode(encoded) == action
    assert codec.gym_space.n == len(list(space.points()))


@given(space=made_spaces(), view=st.sampled_from(["dict", "flat"]), seed=st.integers(0, 1000))
def test_g02_every_sample_of_the_space_is_an_action(space, view, seed):
    codec = ActionCodec(space, view)
    codec.gym_space.seed(seed)
    action = codec.decode(codec.gym_space.sample())
    assert space.validate(action) == action


@given(jitter=st.floats(-0.49, 0.49), value=st.integers(10, 20))
def test_g03_whole_numbers_are_rounded_and_clamped_at_decode(jitter, value):
    codec = ActionCodec(Space({"n": Range(low=10, high=20, dtype="int")}), "dict")
    decoded = codec.decode({"n": np.array([value + jitter], np.float32)})["n"]
    assert decoded == value
    assert type(decoded) is int
    assert codec.decode({"n": [1e9]})["n"] == 20


@pytest.mark.parametrize("view", ["dict", "flat"])
def test_g03_neighbouring_integers_of_a_wide_range_stay_distinct(view):
    codec = ActionCodec(Space({"n": Range(low=0, high=2**40, dtype="int")}), view)
    for value in (0, 2**24 + 1, 2**40 - 1, 2**40):
        assert codec.decode(codec.encode({"n": value})) == {"n": value}


def test_g02_spaces_by_view():
    lists = Space({"a": parameter([1, 2]), "b": parameter(["x", "y", "z"]), "one": parameter([5])})
    assert ActionCodec(lists, "dict").gym_space == spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Discrete(3)})
    assert ActionCodec(lists, "flat").gym_space == spaces.MultiDiscrete([2, 3])
    assert ActionCodec(lists, "discrete").gym_space == spaces.Discrete(6)
    mixed = Space({"a": parameter([1, 2]), "r": Range(low=0.5, high=2)})
    assert ActionCodec(mixed, "dict").gym_space["r"] == spaces.Box(0.5, 2, (1,), np.float32)
    assert ActionCodec(mixed, "flat").gym_space == spaces.Box(-1, 1, (2,), np.float32)


def test_g02_a_conditional_constant_leaves_lists_discrete():
    space = Space({"a": parameter([0, 1]), "c": parameter({"value": 7, "when": "a == 1"})})
    codec = ActionCodec(space, "flat")
    assert codec.gym_space == spaces.MultiDiscrete([2, 1])
    assert codec.decode([1, 0]) == {"a": 1, "c": 7}
    assert codec.decode([0, 0]) == {"a": 0}


def test_a_range_without_points_has_no_discrete_view():
    with pytest.raises(ValueError, match=r"r: view 'discrete' needs a list of values or `points`"):
        ActionCodec(Space({"a": parameter([1, 2]), "r": Range(low=0, high=1)}), "discrete")
    assert ActionCodec(Space({"r": Range(low=0, high=1, points=3)}), "discrete").decode(1) == {"r": 0.5}


SPACE = Space({"a": parameter([10, 20]), "r": Range(low=0, high=1)})


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ({"a": 0}, "missing key 'r'"),
        ({"a": 0, "r": [0.5], "q": 1}, "unknown key 'q'"),
        ({"a": 2, "r": [0.5]}, r"a: index 2 is outside 0\.\.1"),
        ({"a": -1, "r": [0.5]}, r"a: index -1"),
        ({"a": 0.5, "r": [0.5]}, r"a: 0\.5 is not an index"),
        ({"a": None, "r": [0.5]}, "a: None"),
        ({"a": 0, "r": [math.nan]}, "r: .*nan.* is not a finite number"),
        ({"a": 0, "r": []}, r"r: \[\] is not a finite number"),
        ({"a": 0, "r": [0.1, 0.2]}, "r: "),
        ({"a": 0, "r": "x"}, "r: 'x' is not a number"),
        ([0, 0.5], "an action is a dict with the keys a, r"),
    ],
)
def test_g04_an_invalid_action_names_the_parameter(action, words):
    with pytest.raises(ValueError, match=words):
        ActionCodec(SPACE, "dict").decode(action)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"a": 30, "r": 0.5}, "a: 30 is not one of 10, 20"),
        ({"a": 10}, "missing parameter 'r'"),
        ({"a": 10, "r": 2}, "r: 2"),
    ],
)
def test_g04_an_unknown_candidate_cannot_be_encoded(values, words):
    for view in ("dict", "flat"):
        with pytest.raises(ValueError, match=words):
            ActionCodec(SPACE, view).encode(values)


@pytest.mark.parametrize(
    ("arguments", "action", "words"),
    [
        ({"a": [1, 2], "b": [3, 4]}, [0], "an action has 2 numbers, not 1"),
        ({"a": [1, 2], "b": [3, 4]}, [0, 2], r"b: index 2 is outside 0\.\.1"),
        ({"a": [1, 2], "b": [3, 4]}, [0, 0.4], r"b: 0\.4 is not an index"),
        ({"a": [1, 2], "b": {"low": 0, "high": 1}}, [0, math.inf], "not finite"),
        ({"a": [1, 2], "b": {"low": 0, "high": 1}}, ["x", 0], "is not a number"),
    ],
)
def test_g04_a_flat_action_is_checked_too(arguments, action, words):
    space = Space({name: parameter(value) for name, value in arguments.items()})
    with pytest.raises(ValueError, match=words):
        ActionCodec(space, "flat").decode(action)


def test_g04_an_unknown_point_is_an_error():
    codec = ActionCodec(Space({"r": Range(low=0, high=1, points=3)}), "discrete")
    with pytest.raises(InvalidAction, match=r"point 3 is outside 0\.\.2"):
        codec.decode(3)
    with pytest.raises(InvalidAction, match=r"'r': 0\.3"):
        codec.encode({"r": 0.3})


# -- observations -------------------------------------------------------------------------------------------------


@given(
    metrics=st.dictionaries(st.sampled_from("abc"), st.one_of(st.none(), st.floats(allow_nan=True)), max_size=3),
    names=st.lists(st.sampled_from("abc"), unique=True),
)
def test_g05_metrics_are_a_box_with_at_least_one_number(metrics, names):
    codec = ObservationCodec(names, None, flat=True)
    observation = codec.encode(Observation(metrics, {}))
    assert codec.gym_space == spaces.Box(-np.inf, np.inf, (max(1, len(names)),), np.float32)
    assert codec.gym_space.contains(observation)
    assert np.isfinite(observation).all()


@pytest.mark.parametrize("flat", [True, False])
@given(values=st.lists(st.floats(1e-6, 1e300), min_size=2, max_size=5, unique=True), data=st.data())
def test_g05_each_drawn_parameter_is_encoded_by_its_leaf(flat, values, data):
    encodings = ("categorical", "scalar", "log")
    parameters = {name: parameter(values) for name in encodings}
    draws = Draws(0, parameters, {name: EnvParamConfig(encoding=name) for name in encodings})
    codec = ObservationCodec(("y",), RegimeEncoder(draws), flat=flat)
    value = data.draw(st.sampled_from(values))
    observation = codec.encode(Observation({"y": 1.0}, dict.fromkeys(encodings, value)))
    assert codec.gym_space.contains(observation)
    if flat:
        assert observation["context"].shape == (len(values) + 2,)
        assert np.isfinite(observation["context"]).all()
    else:
        assert observation["context"]["categorical"] == values.index(value)
        assert observation["context"]["log"] == pytest.approx(math.log(value), rel=1e-5, abs=1e-5)
        assert observation["context"]["scalar"] == pytest.approx(min(value, 3e38), rel=1e-6)


class Structured:
    def __init__(self, leaves, values):
        self.leaves, self.values = leaves, values

    def structured_observation_descriptors(self):
        return self.leaves

    def encode_observation(self, metrics, regime):
        return self.values


LEAVES = {"wind": ObsLeafDescriptor.box(2), "side": ObsLeafDescriptor.discrete(3)}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"wind": [1, 2]}, r"returned the keys \['wind'\]; the descriptors have \['side', 'wind'\]"),
        ({"wind": [1, 2], "side": 0, "more": 1}, r"returned the keys \['more', 'side', 'wind'\]"),
        ({"wind": [1], "side": 0}, r"wind: expected 2 numbers \(box\(2\)\), got 1"),
        ({"wind": [1, 2], "side": 3}, r"side: expected an index below 3 \(discrete\(3\)\), got 3"),
        ({"wind": [1, 2], "side": -1}, "side: .*got -1"),
        ({"wind": [1, 2], "side": 1.5}, r"side: .*got 1\.5"),
    ],
)
def test_g05_encoded_leaves_must_match_their_descriptors(values, words):
    with pytest.raises(ValueError, match=words):
        ObservationCodec((), Structured(LEAVES, values), flat=False).encode(Observation({}, {}))


def test_g05_custom_leaves_are_encoded():
    codec = ObservationCodec((), Structured(LEAVES, {"wind": [1, 2], "side": 2}), flat=False)
    observation = codec.encode(Observation({}, {}))
    assert codec.gym_space.contains(observation)
    assert observation["context"]["side"] == 2


@pytest.mark.parametrize(("kind", "size"), [("box", 0), ("box", 1.0), ("box", True), ("discrete", -1), ("circle", 1)])
def test_g05_a_leaf_descriptor_is_strict(kind, size):
    with pytest.raises(ValueError, match="leaf"):
        ObsLeafDescriptor(kind, size)
