"""How an engine applies a weight update."""

import asyncio

import pytest

from loopwright.engines.base import EngineError
from loopwright.engines.weight_update import WeightUpdate, apply_update
from tests.engines.test_fleet import Counting


class Recording(Counting):
    """Records its calls."""

    def __init__(self):
        super().__init__()
        self.calls = []

    async def pause(self):
        self.calls.append("pause")

    async def resume(self):
        self.calls.append("resume")

    async def load_weights(self, source, version):
        self.calls.append((source, version))
        await super().load_weights(source, version)


def calls_after(engine, *updates):
    for one in updates:
        asyncio.run(apply_update(engine, one))
    return engine.calls


def test_t06_weights_sent_with_a_pause_are_loaded_whatever_the_engines_version():
    """A server that another run has trained also looks like version 0 to a new client."""
    updates = WeightUpdate(0, paused=True, weights="first"), WeightUpdate(0, weights="first")
    assert calls_after(Recording(), *updates) == ["pause", ("first", 0), "resume"]


def test_a_pause_alone_changes_no_weights():
    assert calls_after(Recording(), WeightUpdate(0, paused=True), WeightUpdate(0)) == ["pause", "resume"]


def test_an_engine_that_cannot_load_weights_continues_with_its_own():
    engine = Recording()
    engine.stubborn = True
    with pytest.raises(EngineError):
        calls_after(engine, WeightUpdate(1, weights="w"))
    assert engine.calls == ["pause", ("w", 1), "resume"]
    assert engine.version == 0
