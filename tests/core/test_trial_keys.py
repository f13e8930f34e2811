"""Canonical values: equal questions get equal keys, different ones different keys."""

import json
import math
from enum import StrEnum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopwright.core.errors import InvalidAction
from loopwright.core.trial import canonical, key_of

numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | numbers | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)


@given(st.integers(-(2**53), 2**53))
def test_an_integer_of_any_type_is_one_value(number):
    forms = [number, float(number), np.int64(number), np.float64(number), np.array(number)]
    assert {key_of(form) for form in forms} == {key_of(number)}
    assert {type(canonical(form)) for form in forms} == {int}


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_of_any_type_is_one_value(number):
    assert key_of(number) == key_of(np.float64(number))


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_small_float_of_numpy_is_the_float_that_equals_it(number):
    assert key_of(np.float32(number)) == key_of(float(np.float32(number)))


@given(values, values)
def test_keys_are_equal_exactly_when_canonical_values_are(one, other):
    # As JSON text, since True == 1 in Python.
    same = json.dumps(canonical(one)) == json.dumps(canonical(other))
    assert (key_of(one) == key_of(other)) == same


@given(values)
def test_canonical_values_are_their_own_canonical_values(value):
    assert json.dumps(canonical(canonical(value))) == json.dumps(canonical(value))


@given(st.dictionaries(st.text(), scalars, min_size=2))
def test_the_order_of_a_table_does_not_matter(table):
    assert key_of(table) == key_of(dict(reversed(table.items())))


@given(st.lists(scalars))
def test_a_tuple_is_a_list(items):
    assert key_of(items) == key_of(tuple(items))


@pytest.mark.parametrize(("one", "other"), [(True, 1), (1, "1"), (None, ""), (0, False), ([1], 1), ({}, [])])
def test_similar_values_have_different_keys(one, other):
    assert key_of(one) != key_of(other)


def test_the_order_of_key_parts_matters():
    assert key_of("a", "b") != key_of("b", "a")
    assert key_of("ab") != key_of("a", "b")


def test_minus_zero_is_zero():
    assert key_of(-0.0) == key_of(0)


def test_neighbouring_large_integers_have_different_keys():
    assert key_of(2**53 + 1) != key_of(2**53 + 2)


def test_strings_of_other_types_are_plain_strings():
    colour = StrEnum("Colour", "red")
    assert {type(canonical(text)) for text in (colour.red, np.str_("red"), "red")} == {str}
    assert key_of(colour.red) == key_of(np.str_("red")) == key_of("red")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2**63, -(2**63) - 1, "\ud800", object(), {1, 2}, b""])
def test_values_that_cannot_be_recorded_are_refused(value):
    with pytest.raises(InvalidAction):
        canonical([value])
