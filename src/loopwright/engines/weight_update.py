"""News of the policy, and how an engine takes them in."""

from dataclasses import dataclass
from typing import Any

from loopwright.engines.base import Engine


@dataclass(frozen=True, slots=True)
class News:
    """How things are with the policy: its version, where its weights lie, and whether engines are to pause."""

    version: int
    paused: bool = False
    weights: Any = None


async def take_in(engine: Engine, news: News) -> int:
    """Have an engine be as the news say; the version that it is at then.

    Weights that come with a pause are taken whatever the version: a server may hold another run's under the same one.
    """
    new = news.version != engine.version or (news.paused and news.weights is not None)
    if news.paused or new:
        await engine.pause()
    try:
        if new:
            await engine.load_weights(news.weights, news.version)
    finally:  # with the weights that it has, if it could not have others
        if not news.paused:
            await engine.resume()
    return engine.version
