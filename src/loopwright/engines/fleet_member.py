"""One engine of several: how much it does, whether it is to be left alone, and how those it serves get away from it."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from hashlib import blake2b

from loopwright.engines.base import Chunk, Engine, EngineError, Sampling

_LONGEST_REST_S = 60.0


class FleetMember:
    """An engine by a name of its own, which decides what sessions it gets."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine = name, engine
        self.running = 0
        """Streams that it serves now."""
        self.leaving = False
        """Whether it ends what it has begun and takes nothing new."""
        self.reason = ""
        """Why it was last left alone."""
        self.rests_until = 0.0
        self._failures = 0
        self._waits: set[asyncio.Timeout] = set()

    def weight(self, key: str) -> bytes:
        """How much it wants a session: it gets those that it wants most, whoever else comes or goes."""
        return blake2b(f"{key}\0{self.name}".encode(), digest_size=8).digest()

    def rest(self, reason: str, now: float, rest_s: float, *, away: bool = False) -> None:
        """Leave it alone for a while, twice as long each time in a row; one that is `away` may be back at any time."""
        self.reason = reason
        self.rests_until = now + min(_LONGEST_REST_S, rest_s * 2**self._failures)
        if not away:
            self._failures = min(self._failures + 1, 16)

    def served(self) -> None:
        """It has proved to work."""
        self._failures, self.reason = 0, ""

    def release(self) -> None:
        """Whoever waits for it now waits no more: EngineError is raised there."""
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)

    async def stream(self, ids: Sequence[int], sampling: Sampling, seed: str) -> AsyncGenerator[Chunk, None]:
        """What its engine gives, until it is done or `release` ends the wait for it."""
        self.running += 1
        try:
            async with aclosing(self.engine.generate(ids, sampling, seed=seed)) as stream:
                while (chunk := await self._next(stream)) is not None:
                    yield chunk
        finally:
            self.running -= 1

    async def _next(self, stream: AsyncGenerator[Chunk, None]) -> Chunk | None:
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                try:
                    return await anext(stream, None)
                finally:
                    self._waits.discard(wait)
        except TimeoutError as error:
            raise EngineError(f"{self.name} was given up: {self.reason}") from error
