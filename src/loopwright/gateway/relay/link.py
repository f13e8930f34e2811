"""A link between gateway and worker: a WebSocket for small JSON messages, which one task writes in order."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import orjson
from aiohttp import ClientWebSocketResponse, WSMsgType, web

from loopwright.engines.base import EngineError

PROTOCOL = 1
"""The version of the protocol; both sides must have the same."""
MAX_MESSAGE_BYTES = 128 * 2**20
"""Prompts are long, and a tokenizer may be sent once."""
_FLUSH_S = 5.0
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY


class Link:
    """Sending never waits. A peer that does not read misses its heartbeats, which ends the link."""

    def __init__(self, socket: web.WebSocketResponse | ClientWebSocketResponse) -> None:
        self._socket = socket
        self._writer: asyncio.Task[None]
        self._out: asyncio.Queue[bytes | None] = asyncio.Queue()

    def send(self, kind: str, /, **fields: Any) -> None:
        """Queue a message."""
        self._out.put_nowait(orjson.dumps({"t": kind, **fields}, default=list, option=_OPTIONS))

    async def receive(self) -> dict[str, Any]:
        """The next message. EngineError if the link has ended, or the message is invalid."""
        frame = await self._socket.receive()
        if frame.type not in (WSMsgType.BINARY, WSMsgType.TEXT):
            error = self._socket.exception()
            raise EngineError("missed heartbeat" if isinstance(error, TimeoutError) else "the connection ended")
        try:
            message = orjson.loads(frame.data)
        except orjson.JSONDecodeError as error:
            raise EngineError(f"a message is not valid JSON: {error}") from error
        if not isinstance(message, dict) or not isinstance(message.get("t"), str):
            raise EngineError("a message has no type")
        return message

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send queued messages; at the end send the rest, and close."""
        self._writer = asyncio.create_task(self._write())
        try:
            yield
            await self.flush()
        finally:
            self._writer.cancel()
            await asyncio.wait([self._writer])
            await self._socket.close()

    async def flush(self) -> None:
        """Wait until everything was sent, or cannot be sent any more."""
        self._out.put_nowait(None)
        await asyncio.wait([self._writer], timeout=_FLUSH_S)

    async def _write(self) -> None:
        with suppress(ConnectionError):  # `receive` raises it, too
            while (data := await self._out.get()) is not None:
                await self._socket.send_bytes(data)
