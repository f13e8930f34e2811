"""A link between gateway and worker: a WebSocket that carries small JSON messages, written in order by one task."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import orjson
from aiohttp import ClientWebSocketResponse, WSMsgType, web

from loopwright.engines.base import EngineError

PROTOCOL = 1
"""What both sides must speak; another number is refused."""
LARGEST_BYTES = 128 * 2**20
"""A message: prompts are long, and a tokenizer may be sent once."""
_FLUSH_S = 5.0
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY


class Link:
    """What is sent never waits; a peer that takes nothing misses its heartbeats, and the link ends."""

    def __init__(self, socket: web.WebSocketResponse | ClientWebSocketResponse) -> None:
        self._socket = socket
        self._writer: asyncio.Task[None]
        self._out: asyncio.Queue[bytes | None] = asyncio.Queue()

    def send(self, what: str, /, **parts: Any) -> None:
        """Have a message sent, after those before it."""
        self._out.put_nowait(orjson.dumps({"t": what, **parts}, default=list, option=_OPTIONS))

    async def receive(self) -> dict[str, Any]:
        """The next message. EngineError if the link has ended, or if that is none."""
        got = await self._socket.receive()
        if got.type not in (WSMsgType.BINARY, WSMsgType.TEXT):
            error = self._socket.exception()
            raise EngineError("no heartbeat came" if isinstance(error, TimeoutError) else "the connection ended")
        try:
            message = orjson.loads(got.data)
        except orjson.JSONDecodeError as error:
            raise EngineError(f"a message was no JSON: {error}") from error
        if not isinstance(message, dict) or not isinstance(message.get("t"), str):
            raise EngineError("a message said not what it is")
        return message

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send what is to be sent; at the end the rest of it, and close."""
        self._writer = asyncio.create_task(self._write())
        try:
            yield
            await self.flushed()
        finally:
            self._writer.cancel()
            await asyncio.wait([self._writer])
            await self._socket.close()

    async def flushed(self) -> None:
        """Wait until all was sent, or can no longer be."""
        self._out.put_nowait(None)
        await asyncio.wait([self._writer], timeout=_FLUSH_S)

    async def _write(self) -> None:
        with suppress(ConnectionError):  # whoever receives hears of it
            while (data := await self._out.get()) is not None:
                await self._socket.send_bytes(data)
