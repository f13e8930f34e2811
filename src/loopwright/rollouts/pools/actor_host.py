"""What lives in a Ray actor: one worker, the deadlines of its calls, and their cancellation."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from loopwright.rollouts.pools.base import Worker, WorkerFactory, answered, timeout_error
from loopwright.rollouts.pools.parcel import pack, pack_exception, unpack


class ActorHost:
    """A worker behind methods that take and return parcels; they raise nothing but a cancellation.

    An answer is a pair: what went wrong, and what came out.
    """

    def __init__(self, path: list[str]) -> None:
        sys.path[:0] = [place for place in path if place not in sys.path]
        self._worker: Worker | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._over = asyncio.Event()

    async def begin(self, build: bytes, update: bytes | None) -> bytes:
        """Make the worker and apply the latest update; answer with its description and the result of the update."""
        try:
            made: WorkerFactory = unpack(build)
            self._worker = made()
            told = None if update is None else await answered(self._worker.apply_update(unpack(update)))
            return pack((None, (self._worker.describe(), told)), "an answer")
        except Exception as error:  # noqa: BLE001  Everything is carried to the caller.
            return pack((pack_exception(error), None))

    async def handle(self, parcel: bytes) -> bytes:
        """Answer one request; the parcel holds what is left of its time, all of its time, and the request."""
        return await self._do("handle", parcel)

    async def stream(self, parcel: bytes) -> AsyncGenerator[bytes, None]:
        """Answer one request piece by piece; what goes wrong is the last piece. A parcel holds nothing but it."""
        try:
            if self._worker is None:
                raise RuntimeError("the host was asked before it began")
            async with aclosing(self._worker.stream(unpack(parcel))) as pieces:
                async for piece in pieces:
                    yield pack((None, piece), "an answer")
        except Exception as error:  # noqa: BLE001  Everything is carried to the caller.
            yield pack((pack_exception(error), None))

    async def apply_update(self, parcel: bytes) -> bytes:
        """Pass on an update, packed like a request."""
        return await self._do("apply_update", parcel)

    async def live(self) -> None:
        """Return never: whoever awaits this learns of the actor's death at once."""
        await self._over.wait()

    async def end(self) -> None:
        """Cancel what runs, and let go of the worker."""
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(set(self._calls))
        if self._worker is not None:
            await self._worker.close()
        self._over.set()

    async def _do(self, what: str, parcel: bytes) -> bytes:
        call = asyncio.current_task()
        if call is None or self._worker is None:
            raise RuntimeError("the host was asked before it began")
        self._calls.add(call)
        try:
            left_s, timeout_s, request = unpack(parcel)
            try:
                async with asyncio.timeout(left_s) as deadline:
                    answer = await answered(getattr(self._worker, what)(request))
            except TimeoutError:
                if deadline.expired():
                    raise timeout_error(timeout_s) from None
                raise
            return pack((None, answer), "an answer")
        except Exception as error:  # noqa: BLE001  Everything is carried to the caller.
            return pack((pack_exception(error), None))
        finally:
            self._calls.discard(call)
