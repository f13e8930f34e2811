"""How an engine takes in news of the policy."""

import asyncio

import pytest

from loopwright.engines.base import EngineError
from loopwright.engines.weight_update import WeightUpdate, apply_update
from tests.engines.test_fleet import Counting


class Remembering(Counting):
    """Writes down what it is told to do."""

    def __init__(self):
        super().__init__()
        self.told = []

    async def pause(self):
        self.told.append("pause")

    async def resume(self):
        self.told.append("resume")

    async def load_weights(self, source, version):
        self.told.append((source, version))
        await super().load_weights(source, version)


def told(engine, *news):
    for one in news:
        asyncio.run(apply_update(engine, one))
    return engine.told


def test_t06_weights_that_come_with_a_pause_are_taken_whatever_version_the_engine_says_that_it_has():
    """A server that another run has trained is at version 0, too, for whoever has just connected to it."""
    news = WeightUpdate(0, paused=True, weights="first"), WeightUpdate(0, weights="first")
    assert told(Remembering(), *news) == ["pause", ("first", 0), "resume"]


def test_a_pause_alone_changes_no_weights():
    assert told(Remembering(), WeightUpdate(0, paused=True), WeightUpdate(0)) == ["pause", "resume"]


def test_an_engine_that_cannot_take_weights_goes_on_with_those_that_it_has():
    engine = Remembering()
    engine.stubborn = True
    with pytest.raises(EngineError):
        told(engine, WeightUpdate(1, weights="w"))
    assert engine.told == ["pause", ("w", 1), "resume"]
    assert engine.version == 0
