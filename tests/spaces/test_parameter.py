"""Parameters: their notation, valid values, and their encoding as numbers for learners."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopwright.core.errors import InvalidAction
from loopwright.spaces.parameter import Choice, Fixed, Range, nested, parameter, parameters

finite = st.floats(-1e12, 1e12, allow_nan=False)


@st.composite
def ranges(draw):
    whole = draw(st.booleans())
    log = draw(st.booleans())
    numbers = st.integers(1 if log else -(10**9), 10**9).map(float) if whole else finite
    if log and not whole:
        numbers = st.floats(1e-9, 1e9)
    low, high = sorted(draw(st.lists(numbers, min_size=2, max_size=2, unique=True)))
    points = draw(st.none() | st.integers(2, 9))
    return Range(low=low, high=high, dtype="int" if whole else "float", log=log, points=points)


choices = st.lists(
    st.integers() | st.text(max_size=5) | st.booleans(), min_size=1, unique_by=lambda v: (type(v), v)
).map(
    lambda values: Choice(values=tuple(v for v in values if not isinstance(v, int) or -(2**63) <= v < 2**63) or ("x",))
)
any_parameter = ranges() | choices | st.just(Fixed(value="one"))


class TestEncodeAndDecode:
    @given(any_parameter, st.integers())
    def test_a_value_round_trips(self, parameter, seed):
        value = parameter.sample(Random(seed))
        back = parameter.decode(parameter.encode(value))
        assert type(back) is type(value)
        if isinstance(value, float):
            scale = max(abs(parameter.low), abs(parameter.high))
            assert math.isclose(back, value, rel_tol=1e-6, abs_tol=1e-9 * scale)
        else:
            assert back == value

    @given(ranges(), st.floats(allow_nan=False))
    def test_every_number_decodes_to_a_value_of_the_range(self, parameter, number):
        value = parameter.decode(number)
        assert parameter.validate_value(value) == value

    @given(ranges(), st.integers())
    def test_a_range_is_encoded_into_0_to_1(self, parameter, seed):
        assert -1e-9 <= parameter.encode(parameter.sample(Random(seed))) <= 1 + 1e-9

    @pytest.mark.parametrize("number", [-1, 3, 2.6, -0.6, math.inf, -math.inf, math.nan])
    def test_an_index_outside_of_a_list_is_refused(self, number):
        with pytest.raises(InvalidAction, match=r"outside 0\.\.2"):
            Choice(values=("a", "b", "c")).decode(number)

    def test_nan_is_not_a_position(self):
        with pytest.raises(InvalidAction):
            Range(low=0, high=1).decode(math.nan)

    @given(st.floats(-0.2, 0.2))
    def test_jitter_does_not_change_a_whole_number(self, jitter):
        span = Range(low=0, high=10, dtype="int")
        assert span.decode(span.encode(4) + jitter / 10) == 4


class TestValidation:
    @pytest.mark.parametrize("value", [5, 5.0, np.int64(5), np.float64(5), np.float32(5)])
    def test_one_number_of_any_type_is_one_candidate(self, value):
        assert Choice(values=(1, 5)).validate_value(value) == 5
        assert type(Range(low=0, high=9, dtype="int").validate_value(value)) is int
        assert type(Range(low=0, high=9).validate_value(value)) is float

    def test_a_numpy_float_matches_a_candidate(self):
        assert Choice(values=(0.5, 1.5)).validate_value(np.float64(0.5)) == 0.5
        assert Choice(values=("a", "b")).validate_value(np.str_("b")) == "b"

    def test_the_workload_gets_the_value_as_it_was_written(self):
        assert repr(Choice(values=(1.0, 2)).validate_value(1)) == "1.0"

    @pytest.mark.parametrize("value", [True, "1", 2, None, [1]])
    def test_similar_values_are_not_candidates(self, value):
        with pytest.raises(InvalidAction):
            Choice(values=(1, 3)).validate_value(value)

    @pytest.mark.parametrize("value", [-0.1, 1.1, "0.5", True, None, math.nan, math.inf])
    def test_values_outside_a_range_are_refused(self, value):
        with pytest.raises(InvalidAction):
            Range(low=0, high=1).validate_value(value)

    def test_a_fraction_is_not_a_whole_number(self):
        with pytest.raises(InvalidAction, match="not a whole number"):
            Range(low=0, high=9, dtype="int").validate_value(0.5)

    def test_a_fixed_value_is_that_value(self):
        assert Fixed(value={"a": [1]}).validate_value({"a": [1.0]}) == {"a": [1]}
        with pytest.raises(InvalidAction):
            Fixed(value=1).validate_value(2)


class TestTheGrid:
    @given(ranges())
    def test_of_a_range_has_its_points_with_both_ends(self, parameter):
        grid = parameter.grid()
        if parameter.points is None:
            assert grid == []
        else:
            assert (grid[0], grid[-1]) == (parameter.low, pytest.approx(parameter.high))
            assert grid == sorted(set(grid))
            assert len(grid) <= parameter.points

    def test_of_a_list_is_the_list(self):
        assert Choice(values=(3, 1, 2)).grid() == [3, 1, 2]

    def test_on_a_log_scale_has_equal_ratios(self):
        assert Range(low=1, high=1000, log=True, points=4).grid() == pytest.approx([1, 10, 100, 1000])


class TestWriting:
    @pytest.mark.parametrize(
        ("text", "kind"),
        [
            (5, Fixed),
            ("x", Fixed),
            (True, Fixed),
            ([1], Fixed),
            ([1, 2], Choice),
            ({"values": [1]}, Choice),
            ({"low": 0, "high": 1}, Range),
            ({"value": [1, 2]}, Fixed),
        ],
    )
    def test_each_form_is_parsed(self, text, kind):
        assert type(parameter(text)) is kind

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ([], "an empty list has nothing to choose from"),
            ({}, "a table must have low and high"),
            ({"a": 1}, "a table must have low and high"),
            ([1, 1.0], "1.0 is listed twice"),
            ({"low": 0}, "high: is missing"),
            ({"high": 0}, "low: is missing"),
            ({"low": 1, "high": 1}, "low must be below high, not 1 and 1"),
            ({"low": 0, "high": 1, "log": True}, "log = true needs low above 0, not 0"),
            ({"low": 0.5, "high": 2, "dtype": "int"}, "dtype = 'int' needs whole bounds"),
            ({"low": 0, "high": math.inf}, "high: must be a finite number"),
            ({"low": 0, "high": 1, "points": 1}, "points: must be greater than or equal to 2"),
            ({"low": 0, "high": 1, "hihg": 1}, "unknown key 'hihg'. Known: when, otherwise, low, high"),
            ({"values": [1, 2], "when": "x +"}, "is not an expression"),
            ({"values": [1, 2], "when": "x[0]"}, "uses Subscript"),
            (math.nan, "not a finite number"),
            (2**70, "64 bits"),
        ],
    )
    def test_invalid_parameters_are_explained(self, text, message):
        with pytest.raises(ValueError, match=r".+") as raised:
            parameter(text)
        assert message in str(raised.value)

    def test_tables_inside_a_table_have_dotted_names(self):
        table = {"n": 1, "trainer": {"lr": {"low": 1, "high": 2}, "model": {"size": [1, 2]}}}
        found = parameters(table)
        assert {name: type(each) for name, each in found.items()} == {
            "n": Fixed,
            "trainer.lr": Range,
            "trainer.model.size": Choice,
        }
        assert nested({"n": 1, "trainer.lr": 2, "trainer.model.size": 3}) == {
            "n": 1,
            "trainer": {"lr": 2, "model": {"size": 3}},
        }
        with pytest.raises(ValueError, match=r"^a.b: an empty list.*; c: a table must have"):
            parameters({"a": {"b": []}, "c": {}})

    def test_true_and_one_are_two_candidates(self):
        assert parameter([True, 1, "1"]).size == 3


@pytest.mark.parametrize(
    ("values", "ordered"),
    [
        ((1, 2, 4), True),
        ((4, 2, 1), True),
        ((1, 4, 2), False),
        ((1, 2), False),
        ((1, "2", 3), False),
        ((0, True, 2), False),
    ],
)
def test_candidates_are_ordered_if_they_are_numbers_in_order(values, ordered):
    assert Choice(values=values).ordered is ordered
