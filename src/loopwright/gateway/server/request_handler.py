"""One request of an agent: parsed, answered by a call, and written as a whole or as a stream."""

import asyncio
import json
import logging
from collections.abc import Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from loopwright.gateway.dialects.base import Dialect, StreamWriter, TurnRequest
from loopwright.gateway.refusal import refusal_of
from loopwright.gateway.sessions.call import SessionCall
from loopwright.gateway.sessions.served_session import ServedSession

if TYPE_CHECKING:
    from loopwright.gateway.gateway import GatewayConfig

log = logging.getLogger(__name__)
_STREAM = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}

ASKED = web.RequestKey("asked", tuple[TurnRequest, SessionCall])
"""What a request came to, for whoever watches."""


class Answer:
    """An answer on its way."""

    def __init__(self, request: web.Request, dialect: Dialect, served: ServedSession, config: "GatewayConfig") -> None:
        self._request, self._dialect, self._served, self._config = request, dialect, served, config

    async def give(self) -> web.StreamResponse:
        """Answer, and end the call with the connection."""
        request, dialect = self._request, self._dialect
        body, digest = self._served.read(dialect.name, await request.read())
        ask = dialect.parse(body, request.headers)
        call = self._served.call(dialect.name, ask, digest, retried=_is_retry(request))
        request[ASKED] = ask, call
        call.join()
        try:
            if ask.stream:
                return await self._streamed(ask, call)
            return json_response(dialect.render(ask, call.id, await call.result()))
        finally:
            call.leave()

    async def _streamed(self, ask: TurnRequest, call: SessionCall) -> web.StreamResponse:
        """Pieces as they are sampled. What fails before the first of them is refused with a status of its own."""
        writer, watch = self._dialect.stream(ask, call.id), _Watch(self._request, self._config.write_s)
        response: web.StreamResponse | None = None
        try:
            async with aclosing(call.follow(self._config.keepalive_s)) as follow:
                async for news in follow:
                    data = b"".join(writer.piece(choice, piece) for choice, piece in news)
                    if response is None:
                        response = await self._opened(call, writer)
                    await watch.write(response, data if news else writer.keepalive())
            response = response or await self._opened(call, writer)
            await watch.write(response, writer.end(await call.result()))
        except ConnectionResetError:  # the client has left, or reads no more
            if self._request.transport is not None:
                self._request.transport.abort()
            return response or web.Response()
        except Exception as error:
            if response is None:
                raise
            refused = refusal_of(error)
            if refused.status == 500:
                log.exception("a stream of session %s failed", self._served.id)
            await watch.write(response, writer.fail(str(refused), kind=refused.kind))
        finally:
            watch.end()
        return response

    async def _opened(self, call: SessionCall, writer: StreamWriter) -> web.StreamResponse:
        response = web.StreamResponse(headers=_STREAM)
        await response.prepare(self._request)
        await response.write(writer.begin(call.drafts[0].prompt_tokens))
        return response


class _Watch:
    """Hangs up on a client that takes too long to read what it was sent. One timer for a stream: it has many pieces."""

    def __init__(self, request: web.Request, limit_s: float) -> None:
        self._request, self._limit_s = request, limit_s
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._timer = self._loop.call_later(limit_s, self._look)

    async def write(self, response: web.StreamResponse, data: bytes) -> None:
        """Send a part of an answer, if there is anything to send."""
        if data:
            self._since = self._loop.time()
            try:
                await response.write(data)
            finally:
                self._since = None

    def _look(self) -> None:
        left_s = self._limit_s if self._since is None else self._since + self._limit_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        elif self._request.transport is not None:
            self._request.transport.abort()

    def end(self) -> None:
        """The stream has come to its end."""
        self._timer.cancel()


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Data as JSON."""
    try:
        body = orjson.dumps(data)
    except TypeError:  # an integer of more than 64 bits, in the arguments of a call
        body = json.dumps(data).encode()
    return web.Response(body=body, status=status, headers={"content-type": "application/json", **(headers or {})})


def _is_retry(request: web.Request) -> bool:
    count = request.headers.get("x-stainless-retry-count", "0")
    return count.isdecimal() and int(count[:9]) > 0
