"""Spaces: parameters, their conditions and their constraints."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopwright.core.errors import InvalidAction
from loopwright.spaces.parameter import parameter
from loopwright.spaces.space import Space


def space(constraints: tuple[str, ...] = (), env_params: tuple[str, ...] = (), **parameters) -> Space:
    return Space({name: parameter(value) for name, value in parameters.items()}, constraints, frozenset(env_params))


TREE = space(
    depth={"values": [1, 2], "when": "kind == 'tree'"},
    kind=["tree", "line"],
    leaves={"values": [8, 9], "when": "depth == 2", "otherwise": 0},
    seed=5,
)


class TestConditions:
    def test_a_parameter_comes_after_those_that_it_depends_on(self):
        assert list(TREE.tunable) == ["kind", "depth", "leaves"]

    def test_the_grid_has_every_active_combination_once(self):
        assert list(TREE.points()) == [
            {"kind": "tree", "depth": 1},
            {"kind": "tree", "depth": 2, "leaves": 8},
            {"kind": "tree", "depth": 2, "leaves": 9},
            {"kind": "line"},
        ]
        assert TREE.size == TREE.grid_size == 4

    def test_an_inactive_parameter_is_absent_or_has_its_default(self):
        assert TREE.arguments({"kind": "line"}, {}) == {"kind": "line", "leaves": 0, "seed": 5}

    def test_an_inactive_parameter_need_not_be_given(self):
        assert TREE.validate({"kind": "line"}) == {"kind": "line"}

    def test_a_value_for_an_inactive_parameter_is_dropped(self):
        assert TREE.validate({"kind": "line", "depth": 2, "leaves": 9}) == {"kind": "line"}

    def test_a_fixed_value_can_be_conditional(self):
        switch = space(mode=["a", "b"], turbo={"value": 9, "when": "mode == 'b'"})
        assert list(switch.points()) == [{"mode": "a"}, {"mode": "b", "turbo": 9}]

    def test_a_cycle_is_named(self):
        with pytest.raises(ValueError, match="form a cycle: a, b"):
            space(a={"values": [1, 2], "when": "b == 1"}, b={"values": [1, 2], "when": "a == 1"}, c=[1, 2])

    def test_a_condition_without_a_value_does_not_hold(self):
        divided = space(n=[0, 1], m={"values": [1, 2], "when": "1 / n > 0"})
        assert list(divided.points()) == [{"n": 0}, {"n": 1, "m": 1}, {"n": 1, "m": 2}]

    def test_a_condition_may_name_a_fixed_value(self):
        assert list(space(on=True, x={"values": [1, 2], "when": "on"}).points()) == [{"x": 1}, {"x": 2}]

    @given(st.integers(), st.integers(0, 1000))
    def test_every_sample_is_valid(self, seed, n):
        sample = TREE.sample(seed, n)
        assert TREE.validate(sample) == sample

    @given(st.integers(0, 1000))
    def test_encoding_keeps_active_parameters(self, n):
        sample = TREE.sample(0, n)
        assert TREE.decode(TREE.encode(sample)) == sample


class TestValidation:
    @pytest.mark.parametrize(
        ("action", "message"),
        [
            ({"x": 1}, "missing parameter 'y'"),
            ({"x": 1, "y": 0.5, "z": 1}, "unknown parameter 'z'"),
            ({"x": 3, "y": 0.5}, "x: 3 is not one of 1, 2"),
            ({"x": 3, "z": 0}, "unknown parameter 'z'; x: 3 is not one of 1, 2; missing parameter 'y'"),
            ({"x": 1, "y": 0.5, "f": 7}, "unknown parameter 'f'"),
        ],
    )
    def test_every_problem_is_named(self, action, message):
        with pytest.raises(InvalidAction) as raised:
            space(x=[1, 2], y={"low": 0, "high": 1}, f=7).validate(action)
        assert str(raised.value) == message

    def test_unknown_numbers_are_named(self):
        with pytest.raises(InvalidAction, match="unknown parameter 'z'"):
            space(x=[1, 2]).decode({"x": 0, "z": 1})


class TestConstraints:
    def test_the_violated_constraint_is_named(self):
        limited = space(("tile <= size", "tile > 1"), tile=[1, 8, 16], size=8)
        assert limited.violated({"tile": 8}, {}) is None
        assert limited.violated({"tile": 16}, {}) == "constraint 'tile <= size' is not met"
        assert limited.violated({"tile": 1}, {}) == "constraint 'tile > 1' is not met"

    def test_drawn_values_count(self):
        limited = space(("tile <= size",), env_params=("size",), tile=[4, 8], size=[4, 8])
        assert limited.violated({"tile": 8}, {"size": 8}) is None
        assert limited.violated({"tile": 8}, {"size": 4}) is not None

    def test_a_constraint_on_an_absent_parameter_holds(self):
        assert space(("m > 5",), n=[0, 1], m={"values": [1, 2], "when": "n == 1"}).violated({"n": 0}, {}) is None

    def test_a_constraint_without_a_value_does_not_hold(self):
        assert "division by zero" in space(("1 / n > 0",), n=[0, 1]).violated({"n": 0}, {})


class TestChoosing:
    def test_drawn_and_fixed_parameters_are_not_the_agents(self):
        mixed = space(env_params=("size",), tile=[1, 2], size=[4, 8], mode="fast")
        assert list(mixed.tunable) == ["tile"]
        assert mixed.fixed == {"mode": "fast"}
        assert mixed.size == 2

    def test_arguments_come_in_the_order_of_the_scenario(self):
        mixed = space(env_params=("size",), tile=[1, 2], size=[4, 8], mode="fast")
        assert list(mixed.arguments({"tile": 1}, {"size": 8}).items()) == [("tile", 1), ("size", 8), ("mode", "fast")]

    def test_the_last_parameter_of_a_grid_changes_fastest(self):
        assert [tuple(point.values()) for point in space(a=[1, 2], b=["x", "y"]).points()] == [
            (1, "x"),
            (1, "y"),
            (2, "x"),
            (2, "y"),
        ]

    def test_the_first_point_is_the_first_of_each_list_and_the_low_end_of_each_range(self):
        assert space(a=[3, 1], b={"low": 2, "high": 5}).first() == {"a": 3, "b": 2.0}

    @given(st.integers(), st.integers(0, 10**6))
    def test_adding_a_parameter_changes_no_other(self, seed, n):
        small, large = space(a={"low": 0, "high": 1}), space(b=[1, 2, 3], a={"low": 0, "high": 1})
        assert small.sample(seed, n)["a"] == large.sample(seed, n)["a"]

    def test_a_sample_depends_on_seed_and_number(self):
        wide = space(a={"low": 0, "high": 1})
        assert len({wide.sample(seed, n)["a"] for seed in range(5) for n in range(5)}) == 25

    @pytest.mark.parametrize(
        ("parameters", "size", "enumerable"),
        [
            ({"a": [1, 2], "b": [1, 2, 3]}, 6, True),
            ({"a": {"low": 0, "high": 1}}, None, False),
            ({"a": {"low": 0, "high": 1, "points": 3}}, None, True),
            ({"a": {"low": 1, "high": 9, "dtype": "int"}}, 9, False),
            ({"a": 5}, 1, True),
        ],
    )
    def test_the_size_counts_the_points(self, parameters, size, enumerable):
        assert (space(**parameters).size, space(**parameters).enumerable) == (size, enumerable)
