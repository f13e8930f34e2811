"""Configuration: strict, frozen, and explained in words when it is wrong."""

import pytest
from pydantic import ValidationError

from loopwright.core.config import Config, explain


class Inner(Config):
    seconds: float = 1.0


class Outer(Config):
    inner: Inner = Inner()
    name: str


def wrong(**values):
    with pytest.raises(ValidationError) as raised:
        Outer(**values)
    return list(explain(raised.value, Outer))


def test_a_typo_names_the_known_keys_and_the_nearest():
    ((key, message),) = wrong(name="x", nmae="y")
    assert (key, message) == ("", "unknown key 'nmae'. Known: inner, name. Did you mean 'name'?")


def test_a_typo_inside_gets_the_keys_of_its_own_place():
    assert wrong(name="x", inner={"second": 1}) == [
        ("inner", "unknown key 'second'. Known: seconds. Did you mean 'seconds'?")
    ]


def test_every_problem_is_listed():
    assert wrong(inner={"seconds": "soon"}, extra=1) == [
        ("inner.seconds", "input should be a valid number, unable to parse string as a number, not 'soon'"),
        ("name", "is missing"),
        ("", "unknown key 'extra'. Known: inner, name."),
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(value):
    assert wrong(name="x", inner={"seconds": value})


def test_a_value_never_changes():
    config = Outer(name="x")
    with pytest.raises(ValidationError):
        config.name = "y"
