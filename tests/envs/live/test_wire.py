"""Frames, arrays and spaces round-trip bit by bit, and errors name the field."""

import math
import re
import string
from collections import OrderedDict
from contextlib import suppress

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from loopwright.envs.live.samples import checker, reader
from loopwright.envs.live.wire import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    Unsendable,
    WireError,
    body_bytes,
    decode_arrays,
    decode_space,
    encode_space,
    frame,
    make_sendable,
    unpack,
)

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=3)
NAMES = st.text(min_size=1, max_size=5)


def travel(message):
    data = frame(message)
    assert body_bytes(data) == len(data) - HEADER_BYTES
    return unpack(data[HEADER_BYTES:])


@st.composite
def boxes(draw):
    dtype = np.dtype(draw(st.sampled_from((*INTEGERS, "float16", "float32", "float64"))))
    shape = draw(SHAPES)
    if dtype.kind == "f":
        numbers = st.floats(-100, 100, width=16) | st.sampled_from([math.inf, -math.inf])
    else:
        info = np.iinfo(dtype)
        numbers = st.integers(int(info.min), min(int(info.max), 2**63 - 2))
    first, second = (draw(hnp.arrays(dtype, shape, elements=numbers)) for _ in range(2))
    low, high = np.minimum(first, second), np.maximum(first, second)
    low, high = np.where(low == np.inf, 0, low), np.where(high == -np.inf, 0, high)
    return spaces.Box(low.astype(dtype), high.astype(dtype), shape, dtype.type)


@st.composite
def multi_discretes(draw):
    nvec = draw(hnp.arrays(np.int64, hnp.array_shapes(max_dims=2, max_side=3), elements=st.integers(1, 9)))
    return spaces.MultiDiscrete(nvec, start=np.full(nvec.shape, draw(st.integers(-5, 5))))


discretes = st.builds(
    spaces.Discrete, st.integers(1, 100), start=st.integers(-5, 20), dtype=st.sampled_from(INTEGERS[:4])
)
binaries = st.builds(spaces.MultiBinary, st.integers(1, 5) | st.lists(st.integers(1, 3), min_size=1, max_size=3))
texts = st.builds(
    lambda least, more, charset: spaces.Text(least + more, min_length=least, charset=charset),
    st.integers(0, 3),
    st.integers(0, 5),
    st.sampled_from([string.ascii_letters, "äöü€😀", "ba"]),
)
leaves = boxes() | multi_discretes() | discretes | binaries | texts
any_space = st.recursive(
    leaves,
    lambda inner: (
        st.dictionaries(NAMES, inner, min_size=1, max_size=3).map(lambda decoded: spaces.Dict(OrderedDict(decoded)))
        | st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple)
    ),
    max_leaves=5,
)


def same(one, other):
    if isinstance(one, dict):
        assert list(one) == list(other)
        return all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray) or (isinstance(other, np.ndarray) and other.shape == ()):
        # Of a Box without dimensions gymnasium itself samples arrays and numbers alike.
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return type(one) is type(other) and one == other


# Gymnasium's own sample() of the widest integers overflows in a cast.
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(any_space, st.integers(0, 2**31))
def test_spaces_and_samples_survive_a_round_trip(space, seed):
    decoded = decode_space(travel({"type": "x", "space": encode_space(space)})["space"], "space")
    assert decoded == space
    if isinstance(space, spaces.Dict):
        assert list(decoded.spaces) == list(space.spaces)
    space.seed(seed)
    sample = space.sample()
    arrived = reader(decoded)(travel({"type": "x", "obs": sample})["obs"], "obs")
    assert same(sample, arrived)
    assert checker(decoded)(arrived) is None


@settings(deadline=None)
@given(hnp.arrays(st.sampled_from((*INTEGERS, "float16", "float32", "float64", "bool")), SHAPES))
def test_arrays_survive_a_round_trip_bit_by_bit(array):
    assert same(array, decode_arrays(travel({"type": "x", "info": {"deep": [array]}})["info"], "info")["deep"][0])


def test_big_endian_and_strided_arrays_survive_a_round_trip():
    array = np.arange(12, dtype=">f4").reshape(3, 4)[:, ::2]
    arrived = decode_arrays(travel({"type": "x", "array": array})["array"], "info")
    assert arrived.dtype == np.float32
    assert arrived.tolist() == array.tolist()


def test_an_unbounded_integer_box_stays_unbounded():
    space = spaces.Box(-np.inf, np.inf, (2,), np.int32)
    decoded = decode_space(travel({"type": "x", "space": encode_space(space)})["space"], "space")
    assert decoded == space
    assert not decoded.bounded_below.any()


def test_lists_are_converted_to_the_declared_type():
    read = reader(spaces.Box(0, 1, (2, 2), np.float32))
    assert same(np.array([[0, 1], [0.5, 1]], np.float32), read([[0, 1], [0.5, 1]], "obs"))
    assert same(np.array(3.0, np.float32), reader(spaces.Box(0, 5, (), np.float32))(3, "obs"))


@pytest.mark.parametrize(
    ("space", "value", "words"),
    [
        (spaces.Box(0, 1, (2,)), ["a", "b"], "obs: expected numbers of float32"),
        (spaces.Box(0, 1, (2,)), [[1], [1, 2]], "obs: expected numbers of float32"),
        (spaces.Box(0, 1, (2,)), None, "obs: expected numbers of float32, got None"),
        (spaces.Box(0, 9, (2,), np.uint8), [1.5, 2], "obs: expected numbers of uint8"),
        (spaces.Box(0, 9, (2,), np.uint8), [1, 300], "obs: expected numbers of uint8"),
        (spaces.Box(0, 1, (2,)), {"x": 1}, "obs: expected an array"),
        (spaces.Box(0, 1, (2,)), {"nd": "object", "shape": [2], "data": b""}, "obs: unknown dtype 'object'"),
        (spaces.Box(0, 1, (2,)), {"nd": "float32", "shape": [-1], "data": b""}, "obs: shape "),
        (spaces.Box(0, 1, (2,)), {"nd": "float32", "shape": [2], "data": b"1234"}, "obs: .* needs 8 bytes"),
        (spaces.Discrete(3), 1.0, "obs: expected an integer, got 1.0"),
        (spaces.Discrete(3), True, "obs: expected an integer, got True"),
        (spaces.Discrete(3, dtype=np.int8), 1000, "obs: "),
        (spaces.Text(3), 5, "obs: expected text, got 5"),
        (spaces.Tuple([spaces.Discrete(2)]), [1, 2], "obs: expected a list of 1"),
        (spaces.Tuple([spaces.Discrete(2), spaces.Text(2)]), [1, 2], r"obs\[1\]: expected text, got 2"),
        (spaces.Dict(a=spaces.Discrete(2)), {"b": 1}, r"obs: expected the keys \['a'\], got the keys \['b'\]"),
        (spaces.Dict(a=spaces.Discrete(2)), {"a": "x"}, r"obs\['a'\]: expected an integer, got 'x'"),
    ],
)
def test_an_unreadable_sample_is_an_error_that_names_the_field(space, value, words):
    with pytest.raises(WireError, match=words):
        reader(space)(value, "obs")


@pytest.mark.parametrize(
    ("space", "value", "words"),
    [
        (spaces.Box(0, 1, (2,)), np.array([0, np.nan], np.float32), r"obs: element \[1\] is nan"),
        (spaces.Box(0, 1, (100,)), np.full(100, np.inf, np.float32), r"obs: element \[0\] is inf"),
        (spaces.Box(0, 1, (2,)), np.zeros(3, np.float32), r"obs: expected shape \(2,\), got \(3,\)"),
        (spaces.Box(0, 1, (2,)), np.zeros(2), "obs: expected numbers of float32, got float64"),
        (spaces.Box(0, 1, (2,)), [0, 0], "obs: expected an array"),
        (spaces.Discrete(3), np.int64(3), "obs: .* is not in Discrete"),
        (spaces.MultiBinary(2), np.array([0, 2], np.int8), "obs: .* is not in MultiBinary"),
        (spaces.Dict(eye=spaces.Box(0, 1, (1,))), {"eye": np.zeros(2, np.float32)}, r"obs\['eye'\]: expected shape"),
        (spaces.Dict(eye=spaces.Discrete(1)), {}, r"obs: expected the keys \['eye'\], got {}"),
        (spaces.Tuple([spaces.Box(0, 1, (1,))]), (np.zeros(2, np.float32),), r"obs\[0\]: expected shape"),
        (spaces.Tuple([spaces.Discrete(1)]), (), "obs: expected a tuple of 1"),
    ],
)
def test_a_sample_outside_its_space_is_reported_with_the_field(space, value, words):
    reason = checker(space)(value)
    assert reason is not None
    assert re.match(words, reason), reason


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"type": "Graph"},
        {"type": []},
        {"type": "Box", "shape": [2], "low": 0, "high": 1},
        {"type": "Box", "shape": [2], "dtype": "object", "low": 0, "high": 1},
        {"type": "Box", "shape": [10**6, 10**6], "dtype": "int8", "low": 0, "high": 1},
        {"type": "Box", "shape": "ab", "dtype": "int8", "low": 0, "high": 1},
        {"type": "Box", "shape": [2], "dtype": "float32", "low": 2, "high": 1},
        {"type": "Box", "shape": [2], "dtype": "float32", "low": [1, 2, 3], "high": 1},
        {"type": "Discrete", "n": 0},
        {"type": "Discrete", "n": "many"},
        {"type": "MultiDiscrete", "nvec": [0, 2]},
        {"type": "MultiBinary", "n": 10**12},
        {"type": "MultiBinary", "n": "x"},
        {"type": "Dict", "spaces": [1]},
        {"type": "Dict", "spaces": {"a": {"type": "?"}}},
        {"type": "Tuple", "spaces": 5},
        {"type": "Text", "max_length": -1, "charset": "ab"},
    ],
)
def test_an_invalid_space_is_an_error_that_names_the_field(value):
    with pytest.raises(WireError, match=r"^observation_space"):
        decode_space(value, "observation_space")


@pytest.mark.parametrize("space", [spaces.Sequence(spaces.Discrete(2)), spaces.Dict({1: spaces.Discrete(2)})])
def test_an_unsupported_space_is_an_error(space):
    with pytest.raises(WireError):
        encode_space(space)


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_wire_errors(data):
    with suppress(WireError):
        assert "type" in unpack(data)


def test_a_frame_has_a_maximum_size():
    with pytest.raises(WireError, match="a frame of 67,108,865 bytes"):
        body_bytes((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(Unsendable, match="67,108,864 are allowed"):
        frame({"type": "x", "data": bytes(MAX_FRAME_BYTES)})


@pytest.mark.parametrize("value", [object(), 2**70, np.zeros(2, complex), {1, 2}])
def test_unsendable_values_are_an_error_and_in_info_replaced_by_their_repr(value):
    with pytest.raises(Unsendable):
        frame({"type": "x", "value": value})
    assert isinstance(travel({"type": "x", "info": make_sendable({"deep": [value]})})["info"]["deep"][0], str)
