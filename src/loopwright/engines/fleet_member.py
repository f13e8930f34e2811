"""One engine of a fleet: its load, its back-off after failures, and how its streams are released."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from hashlib import blake2b

from loopwright.engines.base import Chunk, Engine, EngineError, Sampling

_MAX_BACKOFF_S = 60.0


class FleetMember:
    """An engine and its name, which decides which sessions it serves."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine = name, engine
        self.running = 0
        """Streams that it serves now."""
        self.leaving = False
        """Whether it finishes its streams and accepts no new ones."""
        self.reason = ""
        """Why it last failed."""
        self.rests_until = 0.0
        self._failures = 0
        self._waits: set[asyncio.Timeout] = set()

    def weight(self, key: str) -> bytes:
        """Its rank for a session (rendezvous hashing): it does not depend on the other members."""
        return blake2b(f"{key}\0{self.name}".encode(), digest_size=8).digest()

    def back_off(self, reason: str, now: float, rest_s: float, *, away: bool = False) -> None:
        """Do not use it for a while, twice as long after each failure in a row; being `away` does not count as one."""
        self.reason = reason
        self.rests_until = now + min(_MAX_BACKOFF_S, rest_s * 2**self._failures)
        if not away:
            self._failures = min(self._failures + 1, 16)

    def mark_healthy(self) -> None:
        """It has served a stream or caught up: forget its failures."""
        self._failures, self.reason = 0, ""

    def release(self) -> None:
        """Raise EngineError in every stream that waits for it now."""
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)

    async def stream(self, ids: Sequence[int], sampling: Sampling, seed: str) -> AsyncGenerator[Chunk, None]:
        """Its engine's chunks, until the stream ends or `release` is called."""
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
