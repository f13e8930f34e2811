"""The HTTP client of an engine: one session, opened at the first request, reused and closed."""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import orjson

from loopwright.core.errors import LoopwrightError, MissingExtra, sentence
from loopwright.engines.base import ContextFull, EngineError

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

_CONNECT_S = 10.0
_TRIES = 3
_PAUSE_S = 0.2
_MOST_BYTES = 64 * 2**20
_SHOWN_CHARACTERS = 300
_LIMIT = re.compile(r"context (?:length|size)\D{0,12}(\d+)")
"""How vLLM, llama.cpp and SGLang all tell what they can hold."""


class EngineGone(EngineError):
    """Nobody listens where an engine's server should be."""


class Client:
    """Sends JSON to one server and reads JSON, whole or as a stream of events; anything else is an EngineError."""

    def __init__(self, url: str, headers: Mapping[str, str], silence_s: float) -> None:
        self.url, self._headers, self._silence_s = url.rstrip("/"), dict(headers), silence_s
        self._session: ClientSession | None = None
        self._closed = False
        self.unreached = 0
        """How often nobody was there."""

    async def get(self, path: str) -> Any:
        """What the server answers."""
        async with self._asked("GET", path, None, 0) as response:
            return await self._json(response, path)

    async def post(self, path: str, body: Any, *, prompt: int = 0) -> Any:
        """What the server answers; `prompt` tokens are sent, for the error if they are too many."""
        async with self._asked("POST", path, body, prompt) as response:
            return await self._json(response, path)

    async def events(self, path: str, body: Any, *, prompt: int) -> AsyncGenerator[Any, None]:
        """The events of a stream. Closing it hangs up, by which the server knows that nobody reads any more."""
        async with self._asked("POST", path, body, prompt) as response:
            rest = b""
            async for part in response.content.iter_any():
                *lines, rest = (rest + part).split(b"\n")
                if len(rest) > _MOST_BYTES:
                    raise EngineError(f"{self.url}{path} sent a line of more than {_MOST_BYTES >> 20} MiB")
                for line in lines:
                    if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                        event = self._parsed(data, path)
                        if event.get("error"):
                            raise self.refusal(f"{self.url}{path} failed in mid-stream", data, prompt)
                        yield event

    async def close(self) -> None:
        """Let the connections go."""
        self._closed = True
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    @asynccontextmanager
    async def _asked(self, method: str, path: str, body: Any, prompt: int) -> "AsyncIterator[ClientResponse]":
        from aiohttp import ClientError

        where = f"{self.url}{path}"
        response: ClientResponse = await self._connected(method, where, None if body is None else orjson.dumps(body))
        try:
            if response.status != 200:
                said = await response.content.read(_MOST_BYTES)
                raise self.refusal(f"{where} answered {response.status}", said, prompt, status=response.status)
            yield response
        except LoopwrightError:
            raise
        except TimeoutError as error:
            raise self._silent(where) from error
        except (ClientError, OSError) as error:
            raise EngineError(f"{where} hung up in mid-stream: {sentence(error)}") from error
        finally:
            response.close()  # back to the pool if all of it was read; otherwise the server hears that we have gone

    async def _connected(self, method: str, where: str, data: bytes | None) -> "ClientResponse":
        """The beginning of an answer. Nothing has been said by then, so it can be asked for again."""
        from aiohttp import ClientError, ConnectionTimeoutError

        tries = 0
        while True:
            connection = SimpleNamespace(reused=False)
            try:
                return await self._opened().request(
                    method, where, data=data, allow_redirects=False, trace_request_ctx=connection
                )
            except (ClientError, OSError) as error:
                if isinstance(error, TimeoutError) and not isinstance(error, ConnectionTimeoutError):
                    raise self._silent(where) from error
                if isinstance(error, LoopwrightError):
                    raise
                if connection.reused:  # it went stale in the pool: that tells nothing about the server
                    continue
                self.unreached += 1
                tries += 1
                if tries == _TRIES:
                    raise EngineGone(f"{where} cannot be reached: {sentence(error)} Is the server running?") from error
                await asyncio.sleep(_PAUSE_S * tries)

    def _opened(self) -> "ClientSession":
        if self._closed:
            raise EngineError("the engine is closed")
        if self._session is None:
            try:
                from aiohttp import ClientSession, ClientTimeout, TCPConnector, TraceConfig
            except ModuleNotFoundError as error:
                raise MissingExtra("an engine behind HTTP", "gateway") from error

            async def reused(_: Any, context: Any, __: Any) -> None:
                context.trace_request_ctx.reused = True

            trace = TraceConfig()
            trace.on_connection_reuseconn.append(reused)
            self._session = ClientSession(
                connector=TCPConnector(limit=0),
                headers={"Content-Type": "application/json", **self._headers},
                timeout=ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=self._silence_s),
                trace_configs=[trace],
            )
        return self._session

    async def _json(self, response: "ClientResponse", path: str) -> Any:
        data = bytearray()
        async for part in response.content.iter_any():
            data += part
            if len(data) > _MOST_BYTES:
                raise EngineError(f"{self.url}{path} answered more than {_MOST_BYTES >> 20} MiB")
        return self._parsed(bytes(data), path) if data.strip() else {}

    def _parsed(self, data: bytes, path: str) -> Any:
        try:
            found = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise EngineError(f"{self.url}{path} sent no JSON: {_shown(data)}") from error
        if not isinstance(found, dict):
            raise EngineError(f"{self.url}{path} sent something else than an object: {_shown(data)}")
        return found

    def refusal(self, what: str, said: bytes, prompt: int, *, status: int = 400) -> EngineError:
        """What the server's refusal means."""
        text = _shown(said)
        limit = _LIMIT.search(said[:10_000].decode(errors="replace")) if status == 400 and prompt else None
        return ContextFull(int(limit[1]), prompt) if limit else EngineError(f"{what}: {text}")

    def _silent(self, where: str) -> EngineError:
        return EngineError(f"{where} said nothing for {self._silence_s:g} s; timeout_s allows for more")


def _shown(data: bytes) -> str:
    return data[:_SHOWN_CHARACTERS].decode(errors="replace")
