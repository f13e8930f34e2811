"""A weight update of the policy, and how an engine applies it."""

from dataclasses import dataclass
from typing import Any

from loopwright.engines.base import Engine


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """The policy's state: its version, where its weights are, and whether engines should pause."""

    version: int
    paused: bool = False
    weights: Any = None


async def apply_update(engine: Engine, update: WeightUpdate) -> int:
    """Bring an engine to the state of an update; returns the version that it is at then.

    Weights that come with a pause are loaded whatever the version: a server may hold another run's under the same one.
    """
    new = update.version != engine.version or (update.paused and update.weights is not None)
    if update.paused or new:
        await engine.pause()
    try:
        if new:
            await engine.load_weights(update.weights, update.version)
    finally:  # with the old weights if loading failed
        if not update.paused:
            await engine.resume()
    return engine.version
