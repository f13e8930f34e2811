"""A JSON client for one HTTP server: one session, opened at the first request, reused and closed."""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import orjson

from loopwright.core.errors import LoopwrightError, MissingExtra, Problem, sentence
from loopwright.engines.base import ContextFull, EngineError

if TYPE_CHECKING:
    import aiohttp

_CONNECT_S = 10.0
_PAUSE_S = 0.2
_MAX_EXCERPT = 300
_CONTEXT_LIMIT = re.compile(r"context (?:length|size)\D{0,12}(\d+)")
"""How vLLM, llama.cpp and SGLang all report their context length."""


class EngineGone(EngineError):
    """No server listens at the engine's address."""


class HttpClient:
    """Sends JSON to one server and reads JSON, whole or as a stream of events; anything else raises `error`.

        client = HttpClient("http://localhost:8000", read_timeout_s=300)
        reply = await client.post("/generate", {"prompt": [1, 2, 3]})

    A server that cannot be reached within `attempts` raises `unreachable`, or `error` if that is None. Other errors are
    not retried, except on a pooled connection that went stale.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        read_timeout_s: float | None = None,
        connections: int = 0,
        attempts: int = 3,
        max_mib: int = 64,
        error: type[LoopwrightError] = EngineError,
        unreachable: type[LoopwrightError] | None = None,
        extra: str = "gateway",
    ) -> None:
        self.url, self._headers, self._read_timeout_s = url.rstrip("/"), dict(headers or {}), read_timeout_s
        self._connections, self._attempts, self._max_mib = connections, attempts, max_mib
        self._error, self._unreachable, self._extra = error, unreachable or error, extra
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self.failed_connections = 0

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON object that the server answers with; an empty answer is an empty object."""
        async with self._response("GET", path, None, 0) as response:
            return self._object(await self._json(response, path), path)

    async def post(self, path: str, body: Any, *, prompt_tokens: int = 0) -> dict[str, Any]:
        """The JSON object that the server answers with.

        Pass the number of `prompt_tokens` sent, if any: if the server refuses them as too many, ContextFull is raised.
        """
        async with self._response("POST", path, body, prompt_tokens) as response:
            return self._object(await self._json(response, path), path)

    async def post_any(self, path: str, body: Any) -> Any:
        """Like `post`, but the answer may be any JSON value."""
        async with self._response("POST", path, body, 0) as response:
            return await self._json(response, path)

    async def events(self, path: str, body: Any, *, prompt_tokens: int) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a stream. Closing it closes the connection, so that the server stops generating."""
        async with self._response("POST", path, body, prompt_tokens) as response:
            rest = b""
            async for part in response.content.iter_any():
                *lines, rest = (rest + part).split(b"\n")
                if len(rest) > self._max_mib << 20:
                    raise self._error(f"{self.url}{path} sent a line of more than {self._max_mib} MiB")
                for line in lines:
                    if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                        event = self._object(self._parse(data, path), path)
                        if event.get("error"):
                            raise self.refusal(f"{self.url}{path} failed in mid-stream", data, prompt_tokens)
                        yield event

    async def close(self) -> None:
        """Close all connections."""
        self._closed = True
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, body: Any, prompt_tokens: int
    ) -> "AsyncIterator[aiohttp.ClientResponse]":
        url = f"{self.url}{path}"
        try:
            data = None if body is None else orjson.dumps(body)
        except TypeError as error:
            raise self._error(f"the request to {url} is not JSON: {error}") from error
        session = self._open_session()
        from aiohttp import ClientError

        response = await self._connect(session, method, url, data)
        try:
            if response.status != 200:
                answer = await response.content.read(self._max_mib << 20)
                raise self.refusal(f"{url} answered {response.status}", answer, prompt_tokens, status=response.status)
            yield response
        except LoopwrightError:
            raise
        except TimeoutError as error:
            raise self._timeout(url) from error
        except (ClientError, OSError) as error:
            raise self._error(f"{url} closed the connection in mid-stream: {sentence(error)}") from error
        finally:
            response.close()  # back to the pool if all of it was read; otherwise the connection is closed

    async def _connect(
        self, session: "aiohttp.ClientSession", method: str, url: str, data: bytes | None
    ) -> "aiohttp.ClientResponse":
        """The beginning of an answer. No part of it has arrived by then, so the request can be sent again."""
        from aiohttp import ClientError, ConnectionTimeoutError

        attempts = 0
        while True:
            connection = SimpleNamespace(reused=False)
            try:
                return await session.request(
                    method, url, data=data, allow_redirects=False, trace_request_ctx=connection
                )
            except (ClientError, OSError) as error:
                if isinstance(error, TimeoutError) and not isinstance(error, ConnectionTimeoutError):
                    raise self._timeout(url) from error
                if isinstance(error, LoopwrightError):
                    raise
                if connection.reused:  # it went stale in the pool: that says nothing about the server
                    continue
                self.failed_connections += 1
                attempts += 1
                if attempts == self._attempts:
                    reason = f"{url} cannot be reached: {sentence(error)} Is the server running?"
                    raise self._unreachable(reason) from error
                await asyncio.sleep(_PAUSE_S * attempts)

    def _open_session(self) -> "aiohttp.ClientSession":
        if self._closed:
            raise self._error(f"the connection to {self.url} was closed")
        if self._session is None:
            try:
                from aiohttp import ClientSession, ClientTimeout, TCPConnector, TraceConfig
            except ModuleNotFoundError as error:
                raise MissingExtra("an HTTP connection", self._extra) from error

            async def mark_reused(_: Any, context: Any, __: Any) -> None:
                context.trace_request_ctx.reused = True

            trace = TraceConfig()
            trace.on_connection_reuseconn.append(mark_reused)
            self._session = ClientSession(
                connector=TCPConnector(limit=self._connections),
                headers={"Content-Type": "application/json", **self._headers},
                timeout=ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=self._read_timeout_s),
                trace_configs=[trace],
            )
        return self._session

    async def _json(self, response: "aiohttp.ClientResponse", path: str) -> Any:
        data = bytearray()
        async for part in response.content.iter_any():
            data += part
            if len(data) > self._max_mib << 20:
                raise self._error(f"{self.url}{path} answered more than {self._max_mib} MiB")
        return self._parse(bytes(data), path) if data.strip() else {}

    def _parse(self, data: bytes, path: str) -> Any:
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise self._error(f"{self.url}{path} did not answer JSON: {_excerpt(data)}") from error

    def _object(self, value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._error(f"{self.url}{path} did not answer a JSON object: {_excerpt(orjson.dumps(value))}")
        return value

    def refusal(self, what: str, answer: bytes, prompt_tokens: int, *, status: int = 400) -> LoopwrightError:
        """The exception for a request that the server refused."""
        if status == 400 and prompt_tokens:
            limit = _CONTEXT_LIMIT.search(answer[:10_000].decode(errors="replace"))
            if limit is not None:
                return ContextFull(int(limit[1]), prompt_tokens)
        return self._error(f"{what}: {_excerpt(answer)}".rstrip(": "))

    def _timeout(self, url: str) -> LoopwrightError:
        return self._error(f"{url} sent nothing for {self._read_timeout_s:g} s; raise timeout_s to wait longer")


def _excerpt(data: bytes) -> str:
    return data[:_MAX_EXCERPT].decode(errors="replace")


def url_problems(url: str, key: str, example: str = "http://localhost:8000") -> list[Problem]:
    """A problem if this is not the URL of an HTTP server."""
    if url.startswith(("http://", "https://")) and url.partition("://")[2].strip("/"):
        return []
    return [Problem(key, f"{url!r} is not a URL; write for example {example!r}.")]
