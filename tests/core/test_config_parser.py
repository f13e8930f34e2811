"""Tables whose `type` chooses their config."""

import re
from abc import ABC, abstractmethod
from typing import Literal

import pytest

from loopwright.core.config import Config
from loopwright.core.registry import Registry, config_parser


class Half(Config, ABC):
    type: Literal["half"] = "half"

    @abstractmethod
    def rest(self): ...


class Whole(Config):
    """The config of the chosen type."""

    type: Literal["whole"] = "whole"
    size: int = 1


@pytest.fixture
def parse():
    things = Registry("thing", "loopwright.no_such_group")
    things.add("half", Half)
    things.add("whole", Whole)
    return config_parser(things)


def test_the_type_chooses(parse):
    assert parse({"type": "whole", "size": 3}) == Whole(size=3)
    assert parse(Whole()) == Whole()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "must be a table with a `type`. Known: half, whole."),
        ("whole", "must be a table with a `type`"),
        ({"type": "hole"}, "unknown thing 'hole'"),
        ({"type": "half"}, "thing 'half' is broken: TypeError: Can't instantiate abstract class Half"),
        ({"type": "whole", "sice": 3}, "Did you mean 'size'?"),
    ],
)
def test_problems_are_named(parse, table, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        parse(table)
