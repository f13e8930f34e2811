"""Configuration: strict, frozen, and with explained errors."""

import pytest
from pydantic import ValidationError

from loopwright.core.config import Config, explain


class Inner(Config):
    seconds: float = 1.0


class Outer(Config):
    inner: Inner = Inner()
    name: str


def problems_of(**values):
    with pytest.raises(ValidationError) as raised:
        Outer(**values)
    return list(explain(raised.value, Outer))


def test_a_typo_names_the_known_keys_and_the_nearest():
    ((key, message),) = problems_of(name="x", nmae="y")
    assert (key, message) == ("", "unknown key 'nmae'. Known: inner, name. Did you mean 'name'?")


def test_a_nested_typo_names_the_keys_of_its_table():
    assert problems_of(name="x", inner={"second": 1}) == [
        ("inner", "unknown key 'second'. Known: seconds. Did you mean 'seconds'?")
    ]


def test_every_problem_is_listed():
    assert problems_of(inner={"seconds": "soon"}, extra=1) == [
        ("inner.seconds", "must be a number, not 'soon'"),
        ("name", "is missing"),
        ("", "unknown key 'extra'. Known: inner, name."),
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(value):
    assert problems_of(name="x", inner={"seconds": value})


def test_a_config_is_immutable():
    config = Outer(name="x")
    with pytest.raises(ValidationError):
        config.name = "y"


class Timed(Config):
    timeout_s: float = 1.0
    """How long it may take,
    in seconds."""
    retries: int = 0


class Served(Timed):
    port: int = 80
    """Where it listens."""


def test_the_docstring_under_a_field_is_its_documentation():
    """Given a config that inherits fields, field_docs and the JSON schema have the docstrings of all of them."""
    assert Served.field_docs() == {"timeout_s": "How long it may take,\nin seconds.", "port": "Where it listens."}
    properties = Served.model_json_schema()["properties"]
    assert properties["port"]["description"] == "Where it listens."
    assert "description" not in properties["retries"]
