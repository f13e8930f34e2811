"""Draws: a regime depends on the seed, the name and the index of the draw, and on nothing else."""

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopwright.spaces.parameter import parameter
from loopwright.spaces.space import Draws, EnvParamConfig, problem_with


def draws(seed: int = 0, weights=None, **parameters) -> Draws:
    return Draws(
        seed,
        {n: parameter(v) for n, v in parameters.items()},
        dict.fromkeys(parameters, EnvParamConfig(weights=weights)),
    )


@given(st.integers(), st.integers(1, 10**9))
def test_a_draw_does_not_depend_on_the_other_parameters(seed, index):
    assert draws(seed, b=[1, 2], a=[1, 2, 3]).sample(index)["a"] == draws(seed, a=[1, 2, 3]).sample(index)["a"]


@given(st.integers(1, 100), st.integers(1, 100))
def test_a_draw_does_not_depend_on_those_before_it(one, other):
    source = draws(a=list(range(1000)))
    expected = draws(a=list(range(1000))).sample(other)
    source.sample(one)
    assert source.sample(other) == expected


def test_another_process_draws_the_same_values():
    script = (
        "from loopwright.spaces.space import *; from loopwright.spaces.parameter import parameter; "
        "print([Draws(7, {'a': parameter([1, 2, 3])}, {'a': EnvParamConfig()}).sample(i)['a'] for i in range(20)])"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output.strip() == str([draws(7, a=[1, 2, 3]).sample(index)["a"] for index in range(20)])


def test_weights_set_the_frequencies():
    source = draws(a=["rare", "often", "never"], weights=(0.1, 0.9, 0.0))
    counts = Counter(source.sample(index)["a"] for index in range(2000))
    assert counts["never"] == 0
    assert 100 < counts["rare"] < 300


def test_no_drawn_parameters_give_an_empty_regime():
    assert Draws(0, {"a": parameter([1, 2])}, {}).sample(1) == {}


@pytest.mark.parametrize(
    ("parameters", "weights", "words"),
    [
        (5, None, "has one value, 5; drawing needs a list of at least two"),
        ([5], None, "has one value, 5"),
        ({"value": {"a": 1}}, None, "is a table"),
        ({"low": 0, "high": 1}, None, "is a range"),
        ([[1], [2]], None, "has nested candidates"),
        ([{"a": 1}, {"a": 2}], None, "has nested candidates"),
        ({"values": [1, 2], "when": "x == 1"}, None, "cannot be conditional"),
        ([1, 2], (1.0,), "has 2 candidates but 1 weights"),
        ([1, 2], (1.5, -0.5), "has a negative weight"),
        ([1, 2], (0.5, 0.6), "add up to 1.1, not 1"),
    ],
)
def test_invalid_draws_are_explained(parameters, weights, words):
    assert words in problem_with(parameter(parameters), EnvParamConfig(weights=weights))


@pytest.mark.parametrize("weights", [None, (0.5, 0.5), (1.0, 0.0), (1 / 3, 2 / 3)])
def test_valid_draws(weights):
    assert problem_with(parameter([1, 2]), EnvParamConfig(weights=weights)) is None
