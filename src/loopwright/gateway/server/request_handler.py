"""Handles requests: finds the session, parses the request, runs a call, and writes its response or stream."""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import orjson
from aiohttp import HttpVersion11, web
from aiohttp.helpers import rfc822_formatted_time

from loopwright.core.errors import StorageError
from loopwright.engines.base import Sampling
from loopwright.gateway.dialects.base import Dialect, StreamWriter, TurnRequest, parse_object
from loopwright.gateway.dialects.chat import ChatCompletions
from loopwright.gateway.dialects.completions import Completions
from loopwright.gateway.dialects.fields import text
from loopwright.gateway.dialects.messages import Messages, models_response
from loopwright.gateway.dialects.responses import Responses
from loopwright.gateway.refusal import Refusal, refusal_of
from loopwright.gateway.server.body_worker import LARGE_BYTES, BodyWorker
from loopwright.gateway.server.connections import ConnectionGuard
from loopwright.gateway.server.observer import CALL, RequestObserver
from loopwright.gateway.sessions.call import SessionCall
from loopwright.gateway.sessions.served_session import ServedSession

if TYPE_CHECKING:
    from loopwright.gateway.gateway import Gateway

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
AnyHandler = Callable[[Any], Awaitable[web.StreamResponse]]
ROUTES: dict[str, type[Dialect]] = {
    "v1/chat/completions": ChatCompletions,
    "v1/completions": Completions,
    "v1/responses": Responses,
    "v1/messages": Messages,
    "v1/v1/messages": Messages,
    "messages": Messages,
}
"""The path below `/{session}` and its dialect; the same dialect serves `count_tokens` below that path."""
_CLIENT_LEFT = 499
"""The status of a request whose client left before the response."""
_MAX_NAMES, _MAX_NAME = 32, 80
"""How many ignored fields a header names, and how many characters of each."""
_MAX_VALUES = 8192
"""Tokens and alternatives of a response that the event loop renders itself: that takes a few milliseconds."""
_SMALL_BYTES = 2**16
"""A response of so many bytes need not wait until the client has read some of it."""
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class RequestHandler:
    """Handles the requests of agents, and turns errors of any request into responses of its dialect."""

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway, self._config = gateway, gateway.config
        self.observer = RequestObserver(gateway)
        self._worker = BodyWorker(gateway)
        self.guard = ConnectionGuard(gateway.config.unauthenticated_connections, gateway.config.header_s)
        # For errors outside of sessions, which need no tokenizer. A relay has none before its first worker connects.
        tokenizer: Any = getattr(gateway.engine, "tokenizer", None)
        self._sessionless = {path: dialect(tokenizer, Sampling()) for path, dialect in ROUTES.items()}

    async def close(self) -> None:
        """Close the access log, and end the body worker."""
        self.observer.close()
        await self._worker.close()

    def mount(self, app: web.Application) -> None:
        """Add the routes of the dialects."""

        async def handle_turn(request: web.Request) -> web.StreamResponse:
            path = request.match_info.route.resource.canonical.removeprefix("/{id}/")  # type: ignore[union-attr]
            session = self._gateway.find(request.match_info["id"], _key(request), for_call=True)
            return await self._turn(request, path, session)

        for path in ROUTES:
            app.router.add_route("POST", f"/{{id}}/{path}", handle_turn)
            app.router.add_route("POST", f"/{{id}}/{path}/count_tokens", self._count_handler(path))
        app.router.add_route("POST", "/{id}/v1/responses/input_tokens", self._count_handler("v1/responses"))
        for path in ("/{id}/tokenize", "/{id}/v1/tokenize"):
            app.router.add_route("POST", path, self._tokenize)

    def dispatcher(self, route: AnyHandler) -> AnyHandler:
        """Handles turns of sessions in memory, and routes all other requests: the router takes its time."""

        async def dispatch(request: web.Request) -> web.StreamResponse:
            id, _, path = request.raw_path[1:].partition("/")
            if (session := self._gateway.sessions.get(id)) is None or path not in ROUTES:
                return await route(request)
            if request.method != "POST" or "expect" in request.headers:
                return await route(request)
            return await self._respond(request, f"/{{id}}/{path}", id, self._turn(request, path, session))

        return dispatch

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn errors into responses, and observe how each request ends."""
        resource, id = request.match_info.route.resource, request.match_info.get("id")
        return await self._respond(request, "other" if resource is None else resource.canonical, id, handler(request))

    async def _respond(
        self, request: web.Request, route: str, id: str | None, handling: Awaitable[web.StreamResponse]
    ) -> web.StreamResponse:
        start, status = time.perf_counter(), _CLIENT_LEFT
        self.guard.last_calls.pop(request.protocol, None)  # a client that asks again has read the response before
        try:
            try:
                response = await handling
            except ConnectionResetError:
                raise
            except Exception as error:  # noqa: BLE001  each becomes a response
                response = self._error_response(request, route, error)
            status = response.status
            return response
        finally:
            self.observer.observe(request, route, id, status, time.perf_counter() - start)

    def _error_response(self, request: web.Request, route: str, error: Exception) -> web.StreamResponse:
        if isinstance(error, web.HTTPRequestEntityTooLarge):
            refusal = Refusal.too_large(self._config.body_bytes)
        elif isinstance(error, web.HTTPException):
            message = f"{request.method} {request.path[:200]}: {error.reason.lower()}"
            refusal = Refusal(error.status, "not_found" if error.status == 404 else "invalid", message, retry=False)
        else:
            refusal = refusal_of(error)
            if refusal.status == 500:
                trace = None if isinstance(error, StorageError) else error
                log.error("%s %s failed: %s", request.method, route, error, exc_info=trace)
        path = request.path.lstrip("/").partition("/")[2].removesuffix("/count_tokens")
        if "anthropic-version" in request.headers:
            path = "v1/messages"
        dialect = self._sessionless.get(path) or self._sessionless["v1/chat/completions"]
        body = dialect.error(str(refusal), kind=refusal.kind, param=refusal.param)
        headers = {} if refusal.retry else {"x-should-retry": "false"}
        if refusal.status == 405 and (not_allowed := request.match_info.http_exception) is not None:
            headers["allow"] = not_allowed.headers.get("allow", "")
        return json_response(body, refusal.status, headers)

    def is_admin(self, request: web.Request) -> bool:
        """Whether a request has the gateway's token."""
        token = self._gateway.token
        if token is None or not hmac.compare_digest(_key(request).encode("utf-8", "replace"), token.encode()):
            return False
        self.guard.unauthenticated.pop(request.protocol, None)
        return True

    def session(self, request: web.Request) -> ServedSession:
        """The session of a request that has its key, to call models."""
        session = self._gateway.find(request.match_info["id"], _key(request))
        self._check_key(request, session)
        return session

    def _check_key(self, request: web.Request, session: ServedSession) -> None:
        if not session.admits(_key(request)):
            raise Refusal.wrong_key()
        if request.protocol in self.guard.unauthenticated:
            self.guard.admit(request.protocol, session.id)

    def owned_session(self, request: web.Request) -> ServedSession:
        """The session of a request of its owner, or with the gateway's token, to read or end it."""
        is_admin = self.is_admin(request)
        session = self._gateway.find(request.match_info["id"], None if is_admin else _key(request))
        if is_admin or session.is_owned_by(_key(request)):
            return session
        self.session(request)
        message = (
            f"session {session.id!r} belongs to the run that opened it: this key may only call models. "
            "To read, end or delete the session, use the run's key or the gateway's token"
        )
        raise Refusal(403, "permission", message, retry=False)

    def _dialect(self, session: ServedSession, path: str) -> Dialect:
        inner = session.session
        dialect = ROUTES[path](inner.engine.tokenizer, inner.sampling, inner.template.grammar, session.history)
        session.dialects[path] = dialect
        return dialect

    async def _read(self, request: web.Request, limit: int) -> bytes:
        """The body of a request, which has at most `limit` bytes, and `read_s` seconds to arrive."""
        content, size = request.content, request.content_length
        if request.headers.get("content-encoding", "identity") != "identity":  # a small one could become a huge one
            raise Refusal(415, "invalid", "content-encoding: send the body uncompressed", retry=False)
        if size is not None and size > limit:  # before it is sent
            raise Refusal.too_large(limit)
        if size is not None and content.is_eof():  # most bodies have arrived with their headers
            return content.read_nowait()
        try:
            async with asyncio.timeout(self._config.read_s):
                if size is not None:
                    return await content.read()
                data = bytearray()
                while part := await content.readany():
                    data += part
                    if len(data) > limit:
                        raise Refusal.too_large(limit)
                return bytes(data)
        except TimeoutError as error:
            message = f"the request's body did not arrive within {self._config.read_s:g} s"
            raise Refusal(408, "invalid", message) from error

    async def read_small_object(self, request: web.Request, *, allow_empty: bool = False) -> dict[str, Any]:
        """The JSON object in the body of a request that is parsed and used on the event loop."""
        data = await self._read(request, min(LARGE_BYTES, self._config.body_bytes))
        return parse_object(data, allow_empty=allow_empty)

    @asynccontextmanager
    async def _large_body(
        self, request: web.Request, session: ServedSession, dialect: Dialect
    ) -> AsyncIterator[tuple[dict[str, Any], bytes]]:
        """The content and the digest of a body that may be large: the worker prepares it, unless little of it is new.

        A session has one such body in memory at a time.
        """
        async with session.large_body_lock:
            data = await self._read(request, self._config.body_bytes)
            if dialect.bodies.count_new(data) <= LARGE_BYTES:
                yield dialect.bodies.read(data)
                return
            prepared = await self._worker.prepare(session, dialect, data)
            dialect.bodies.adopt(data, prepared.content, prepared.start)
            with prepared.used_by(dialect.tokenizer):
                yield prepared.content, prepared.digest

    async def _turn(self, request: web.Request, path: str, session: ServedSession) -> web.StreamResponse:
        self._check_key(request, session)
        if session.status != "open":
            raise session.refusal()
        dialect = session.dialects.get(path) or self._dialect(session, path)
        if (size := request.content_length) is not None and size <= LARGE_BYTES:
            content = dialect.bodies.read(await self._read(request, self._config.body_bytes))
            turn_request, call = _join(request, session, dialect, *content)
        else:
            async with self._large_body(request, session, dialect) as content:
                turn_request, call = _join(request, session, dialect, *content)
        is_delivered = False
        try:
            if turn_request.stream:
                response = await self._stream(request, dialect, turn_request, call)
            else:
                turns = await call.result()
                if turn_request.return_token_ids:
                    prompts = call.prompts()
                    turns = [turn._replace(prompt_ids=ids) for turn, ids in zip(turns, prompts, strict=True)]
                values = sum(len(turn.ids) * (1 + turn_request.top_logprobs) + len(turn.prompt_ids) for turn in turns)
                arguments = turn_request, call.id, turns
                is_small = values <= _MAX_VALUES
                data = dialect.render(*arguments) if is_small else await asyncio.to_thread(dialect.render, *arguments)
                response = await _send_json(request, data, _notice(call) if call.record.ignored else {})
            if (transport := request.transport) is not None and not transport.is_closing():
                self.guard.last_calls[request.protocol], is_delivered = call, True
            return response
        finally:
            call.leave(is_delivered=is_delivered)

    def _count_handler(self, path: str) -> Handler:
        async def handle_count(request: web.Request) -> web.StreamResponse:
            session = self.session(request)
            dialect = session.dialects.get(path) or self._dialect(session, path)
            async with self._large_body(request, session, dialect) as (body, _):
                turn_request = dialect.parse(body)
                tools, options = turn_request.tools, turn_request.options
                prompts = session.session.prompts
                tokens = sum(len(prompts.ids(each, tools, options)) for each in turn_request.conversations)
            kind = {"object": "response.input_tokens"} if dialect.name == Responses.name else {}
            return json_response({**kind, "input_tokens": tokens})

        return handle_count

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        """The ids of a text, or of the prompt for some messages, as vLLM's route of that name returns them."""
        session = self.session(request)
        body = await self.read_small_object(request)
        tokenizer = session.session.engine.tokenizer
        if "messages" in body:
            path = "v1/chat/completions"
            turn_request = (session.dialects.get(path) or self._dialect(session, path)).parse(body)
            ids = session.session.prompts.ids(turn_request.messages, turn_request.tools, turn_request.options)
        else:
            ids = session.session.template.plain(text(body.get("prompt"), "prompt"))
        pieces = {"token_strs": tokenizer.pieces(ids)} if body.get("return_token_strs") else {}
        return json_response({"count": len(ids), "tokens": ids, **pieces})

    async def _stream(
        self, request: web.Request, dialect: Dialect, turn_request: TurnRequest, call: SessionCall
    ) -> web.StreamResponse:
        """Send deltas as they are sampled. A failure before the first one becomes an error response."""
        writer = dialect.stream(turn_request, call.id)
        if turn_request.return_token_ids:
            writer.prompts = call.prompts()
        notice = _notice(call) if call.record.ignored else {}
        stream, data = _EventStream(request, writer, self._config.write_s, notice), b""
        try:
            async with aclosing(call.follow(self._config.keepalive_s)) as follow:
                async for deltas in follow:
                    start = await stream.open(call)
                    events = [writer.delta(choice, delta) for choice, delta in deltas] or [writer.keepalive()]
                    data += start + b"".join(events)
                    if call.turns is None:  # or the end follows at once
                        await stream.write(data)
                        data = b""
            start = await stream.open(call)
            await stream.write(data + start + writer.end(await call.result()), is_last=True)
        except ConnectionResetError:  # the client has left, or no longer reads
            if request.transport is not None:
                request.transport.abort()
        except Exception as error:
            if not stream.response.prepared:
                raise
            refusal = refusal_of(error)
            if refusal.status == 500:
                log.exception("a stream of session %s failed", call.owner.id)
            await stream.write(writer.fail(str(refusal), kind=refusal.kind))
        finally:
            stream.close()
        return stream.response

    async def models(self, request: web.Request) -> web.StreamResponse:
        """The models; requests may name any of them, or another one."""
        self.session(request)
        name = self._config.model
        if "anthropic-version" in request.headers:
            data = models_response([name])
            return json_response(data if "model" not in request.match_info else data["data"][0])
        model = {"id": name, "object": "model", "created": 0, "owned_by": "loopwright"}
        if "model" in request.match_info:
            return json_response({**model, "id": request.match_info["model"]})
        return json_response({"object": "list", "data": [model]})


def _join(
    request: web.Request, session: ServedSession, dialect: Dialect, body: dict[str, Any], digest: bytes
) -> tuple[TurnRequest, SessionCall]:
    """Parse a body, and follow its call: a new one, unless a retry finds the original one."""
    if session.status != "open":
        raise session.refusal()
    turn_request, headers = dialect.parse(body), request.headers
    if branch := headers.get("x-loopwright-branch") or headers.get("thread-id"):
        name = branch[:_MAX_NAME].encode("utf-8", "replace").decode()  # or the store could never write it
        turn_request = turn_request._replace(branch=name)
    retries = headers.get("x-stainless-retry-count", "0")
    is_retry = retries.isdecimal() and int(retries[:9]) > 0
    call = session.call(dialect.name, turn_request, digest, is_retry=is_retry)
    dialect.bodies.keep()
    request[CALL] = turn_request, call
    call.join()
    return turn_request, call


class _EventStream:
    """Server-sent events for one client; hangs up if it takes too long to read them.

    One timer serves the whole stream, because a stream has many deltas.
    """

    def __init__(self, request: web.Request, writer: StreamWriter, limit_s: float, notice: Mapping[str, str]) -> None:
        self._request, self._writer, self._limit_s = request, writer, limit_s
        self.response = web.StreamResponse(headers={**_STREAM_HEADERS, **notice})
        self._loop = asyncio.get_running_loop()
        self._writing_since: float | None = None
        self._timer = self._loop.call_later(limit_s, self._check)

    async def open(self, call: SessionCall) -> bytes:
        """Prepare the headers, unless that is done; the first event, to be sent with what follows it."""
        if self.response.prepared:
            return b""
        await self.response.prepare(self._request)
        return self._writer.begin(call.drafts[0].prompt_tokens)

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        """Send events, if there are any."""
        if data:
            self._writing_since = self._loop.time()
            try:
                await (self.response.write_eof(data) if is_last else self.response.write(data))
            finally:
                self._writing_since = None

    def _check(self) -> None:
        since = self._writing_since
        left_s = self._limit_s if since is None else since + self._limit_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check)
        elif self._request.transport is not None:
            self._request.transport.abort()

    def close(self) -> None:
        """Stop the timer."""
        self._timer.cancel()


class _SentResponse(web.Response):
    """Stands for a response that is on its way already: aiohttp has nothing to send."""

    _eof_sent = _keep_alive = True


_SENT = _SentResponse()


async def _send_json(request: web.Request, data: Any, headers: Mapping[str, str]) -> web.StreamResponse:
    """Send data as JSON at once. An unusual response is left to aiohttp, which takes several times as long."""
    transport, is_usual = request.transport, request.keep_alive and request.version == HttpVersion11
    if not is_usual or transport is None or transport.is_closing():
        return json_response(data, headers=headers)
    try:
        body = orjson.dumps(data)
    except TypeError:
        return json_response(data, headers=headers)
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nDate: {rfc822_formatted_time()}\r\n"
    for name, value in headers.items():
        head += f"{name}: {value}\r\n"
    response = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    if len(response) <= _SMALL_BYTES:
        transport.write(response)
    else:
        with suppress(ConnectionResetError):  # the client has left
            await request.writer.write(response)
    return _SENT


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Data as JSON."""
    try:
        body = orjson.dumps(data)
    except TypeError:  # an integer of more than 64 bits, in the arguments of a call
        body = json.dumps(data).encode()
    return web.Response(body=body, status=status, headers={"content-type": "application/json", **(headers or {})})


def _notice(call: SessionCall) -> dict[str, str]:
    """The header that names the ignored fields."""
    names = [quote(name[:_MAX_NAME], safe="._-[]") for name in call.record.ignored]
    rest = [f"and {len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else []
    return {"x-loopwright-ignored": ", ".join([*names[:_MAX_NAMES], *rest])}


def _key(request: web.Request) -> str:
    """The key of a request, as either SDK sends it."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    return bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
