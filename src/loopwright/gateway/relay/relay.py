"""The relay: engines that connect to the gateway by WebSocket, and serve as one fleet while they are connected."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal

import orjson
from aiohttp import web
from pydantic import Field

from loopwright.engines.base import Chunk, ContextFull, Engine, EngineConfig, EngineError, Sampling, Tops
from loopwright.engines.chat_template import ChatTemplateSource
from loopwright.engines.fleet import Fleet, FleetSettings
from loopwright.engines.tokenizer import ByteTokenizer, HubTokenizer, Tokenizer, fingerprint
from loopwright.gateway.relay.link import MAX_MESSAGE_BYTES, PROTOCOL, Link

log = logging.getLogger(__name__)
_ANNOUNCE_TIMEOUT_S = 60.0
_POLL_S = 0.02
_FINISHES = ("stop", "length", "abort", None)


class RelayConfig(FleetSettings):
    """How a gateway manages the engines that connect to it."""

    type: Literal["relay"] = "relay"
    wait_s: float = Field(default=300.0, ge=0)
    """Seconds for which a request waits while no worker is connected."""
    heartbeat_s: float = Field(default=5.0, gt=0)
    """Seconds between heartbeats; a worker that does not respond within half of that is lost."""


class RelayedEngine(Engine):
    """The engine of a worker, at the other end of a link."""

    def __init__(self, link: Link, tokenizer: Tokenizer, version: int, steering: Sequence[str] = ()) -> None:
        super().__init__(EngineConfig(type="relayed"), Path())
        self.tokenizer, self.version, self._steering = tokenizer, version, frozenset(map(str, steering))
        self._link, self._numbers = link, count(1)
        self._streams: dict[int, asyncio.Queue[Chunk | Exception]] = {}
        self._commands: dict[int, asyncio.Future[int]] = {}
        self._lost: EngineError | None = None

    @property
    def steering(self) -> frozenset[str]:
        return self._steering

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, seed: str) -> AsyncGenerator[Chunk, None]:
        if self._lost is not None:
            raise self._lost
        number = next(self._numbers)
        chunks = self._streams[number] = asyncio.Queue()
        sampling_json = orjson.Fragment(sampling.model_dump_json(exclude_defaults=True))
        self._link.send("generate", id=number, ids=list(ids), sampling=sampling_json, seed=seed)
        done = False
        try:
            while not done:
                chunk = await chunks.get()
                done = isinstance(chunk, Exception) or chunk.finish is not None
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
        finally:
            del self._streams[number]
            if not done:
                self._link.send("cancel", id=number)

    async def pause(self) -> None:
        await self._command("pause")

    async def resume(self) -> None:
        await self._command("resume")

    async def load_weights(self, source: Any, version: int) -> None:
        """Load them from a path, as the worker's engine sees it."""
        if not isinstance(source, str | None):
            raise EngineError("a worker loads weights from a path, not from memory")
        self.version = await self._command("load", source=source, version=version)

    async def check(self) -> None:
        await self._command("check")

    async def _command(self, kind: str, **fields: Any) -> int:
        """Run a command on the worker's engine; returns its version afterwards."""
        if self._lost is not None:
            raise self._lost
        number = next(self._numbers)
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._commands[number] = done
        self._link.send(kind, id=number, **fields)
        try:
            return await done
        finally:
            del self._commands[number]

    # -- messages of the worker ---------------------------------------------------------------------------------

    def handle(self, message: dict[str, Any]) -> None:
        """Pass a message to the call that waits for it. EngineError if it is invalid."""
        try:
            if type(number := message["id"]) is not int:
                raise ValueError("its id is not a number")
            match message["t"]:
                case "chunk":
                    answer: Chunk | Exception = _chunk(message)
                case "failed":
                    answer = _failure(message)
                case "done":
                    version = int(message["version"])
                    if number in self._commands and not self._commands[number].done():
                        self._commands[number].set_result(version)
                    return
                case other:
                    raise EngineError(f"unknown message type {other!r}")
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"invalid message: {type(error).__name__}: {error}") from error
        if number in self._streams:
            self._streams[number].put_nowait(answer)
        elif isinstance(answer, Exception) and number in self._commands and not self._commands[number].done():
            self._commands[number].set_exception(answer)

    def dismiss(self, reason: str) -> None:
        """Stop using the worker, and tell it why."""
        self._link.send("refused", reason=reason)
        self.lose(reason)

    def lose(self, reason: str) -> None:
        """The link has ended: raise that to all calls that wait."""
        self._lost = EngineError(reason)
        for chunks in self._streams.values():
            chunks.put_nowait(self._lost)
        for command in self._commands.values():
            if not command.done():
                command.set_exception(self._lost)


def _chunk(message: dict[str, Any]) -> Chunk:
    ids, logprobs, version, finish = (message[key] for key in ("ids", "logprobs", "version", "finish"))
    if finish not in _FINISHES or type(version) is not int or not all(type(token) is int for token in ids):
        raise ValueError("not a chunk of tokens")
    cached = int(message.get("cached_tokens", 0))
    return Chunk(tuple(ids), tuple(logprobs), version, finish, _tops(message.get("tops")), cached)


def _tops(data: Any) -> Tops | None:
    if data is None:
        return None
    # JSON cannot write minus infinity.
    tops = tuple(tuple((token, -math.inf if value is None else value) for token, value in place) for place in data)
    if not all(type(token) is int and isinstance(value, float | int) for place in tops for token, value in place):
        raise ValueError("not a list of alternatives")
    return tops


def _failure(message: dict[str, Any]) -> Exception:
    match message["kind"]:
        case "context":
            return ContextFull(int(message["limit"]), int(message["length"]))
        case "invalid":
            return ValueError(str(message["reason"]))
        case _:
            return EngineError(str(message["reason"]))


class Relay(Fleet):
    """A fleet of engines that connect and disconnect. Unless it has a tokenizer, it uses the first worker's."""

    config: RelayConfig

    def __init__(
        self,
        config: RelayConfig = RelayConfig(),  # noqa: B008  frozen
        tokenizer: Tokenizer | None = None,
        *,
        say: Callable[[str], None] = log.info,
    ) -> None:
        super().__init__(config, Path())
        self._say = say
        self._fingerprint: str | None = None
        self._has_tokenizer = asyncio.Event()
        self._tokenizer_lock = asyncio.Lock()
        self._links: dict[web.WebSocketResponse, web.RequestHandler] = {}
        if tokenizer is not None:
            self._set_tokenizer(tokenizer, fingerprint(tokenizer))

    def _set_tokenizer(self, tokenizer: Tokenizer, fingerprint: str) -> None:
        self.tokenizer, self._fingerprint = tokenizer, fingerprint
        self._has_tokenizer.set()

    def _unavailable(self) -> str:
        return super()._unavailable() if self._members else "no worker is connected"

    def mount(self, app: web.Application, admits: Callable[[web.Request], bool]) -> None:
        """Accept workers at `/ws/worker`, and delay requests to sessions until there is a tokenizer."""

        async def worker(request: web.Request) -> web.StreamResponse:
            if not admits(request):
                raise web.HTTPUnauthorized(reason="A worker needs the gateway's token")
            return await self._serve_worker(request)

        @web.middleware
        async def wait_for_tokenizer(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            if not self._has_tokenizer.is_set() and ("id" in request.match_info or request.path == "/sessions"):
                try:
                    await asyncio.wait_for(self._has_tokenizer.wait(), self.config.wait_s)
                except TimeoutError as error:
                    raise EngineError("no worker has connected yet") from error
            return await handler(request)

        app.router.add_route("GET", "/ws/worker", worker)
        app.middlewares.append(wait_for_tokenizer)

    async def drain(self, server: web.Server, calls: Callable[[], int], within_s: float) -> None:
        """Let calls end, cut off those that do not, and disconnect the workers.

        This must precede aiohttp's own shutdown, after which it reads from no connection, including the workers'.
        """
        await asyncio.sleep(0)  # requests that have arrived are started
        agents = set(server.connections) - set(self._links.values())
        for each in agents:
            each.close()  # after its response
        clock = asyncio.get_running_loop().time
        deadline = clock() + within_s
        while clock() < deadline:
            await asyncio.sleep(_POLL_S)
            if not calls():
                break
        else:
            for each in agents:
                each.force_close()
        await asyncio.gather(*(socket.close(code=1001, message=b"shutdown") for socket in self._links))

    # -- workers ------------------------------------------------------------------------------------------------

    async def _serve_worker(self, request: web.Request) -> web.StreamResponse:
        """Handle a worker's connection, from its announcement to its end."""
        socket = web.WebSocketResponse(
            heartbeat=self.config.heartbeat_s, max_msg_size=MAX_MESSAGE_BYTES, timeout=2.0, compress=False
        )
        await socket.prepare(request)
        self._links[socket] = request.protocol
        link = Link(socket)
        try:
            async with link.running():
                link.send("hello", protocol=PROTOCOL, tokenizer=self._fingerprint)
                try:
                    async with asyncio.timeout(_ANNOUNCE_TIMEOUT_S):
                        announcement = await link.receive()
                    await self._check_announcement(announcement)
                except (EngineError, TimeoutError) as error:
                    self._say(f"a worker at {request.remote} was refused: {error}")
                    link.send("refused", reason=str(error) or "it did not announce itself in time")
                    return socket
                await self._run_worker(link, announcement)
        finally:
            del self._links[socket]
            if request.transport is not None:
                request.transport.abort()  # or a frozen peer would keep unread data in memory
        return socket

    async def _check_announcement(self, announcement: dict[str, Any]) -> None:
        """EngineError unless a worker has our protocol and tokenizer; the first one may define the tokenizer."""
        if announcement["t"] != "announce" or announcement.get("protocol") != PROTOCOL:
            raise EngineError(f"it uses protocol {announcement.get('protocol')!r}, the gateway {PROTOCOL}")
        if not isinstance(announcement.get("name"), str) or type(announcement.get("version")) is not int:
            raise EngineError("it announced no name and version")
        if not isinstance(announcement.get("steering"), list | None):
            raise EngineError("it announced what steers its sampling as something else than a list")
        theirs = announcement.get("fingerprint")
        async with self._tokenizer_lock:
            if self._fingerprint is None:
                tokenizer = _tokenizer(announcement)
                if await asyncio.to_thread(fingerprint, tokenizer) != theirs:
                    raise EngineError(
                        "the tokenizer that it sent differs from its own: start the gateway with --tokenizer"
                    )
                self._set_tokenizer(tokenizer, str(theirs))
        if theirs != self._fingerprint:
            raise EngineError(
                f"its tokenizer ({announcement.get('tokenizer')}, {theirs}) is not the gateway's, {self._fingerprint}: "
                "all workers must serve the same model"
            )

    async def _run_worker(self, link: Link, announcement: dict[str, Any]) -> None:
        name = announcement["name"]
        if (old := self._members.get(name)) is not None:
            # It reconnected before we noticed that it was gone; or two have that name, and the first is dismissed.
            if isinstance(old.engine, RelayedEngine):
                old.engine.dismiss(f"another worker has connected as {name!r}; give each its own --name")
            self._leave(old, "it has reconnected")
        engine = RelayedEngine(link, self.tokenizer, announcement["version"], announcement.get("steering") or ())
        link.send("welcome")
        # Its previous gateway may have paused it.
        link.send("resume", id=0)
        member = self._join(name, engine)
        note = "" if engine.version == self.version or self._update else f" (not served: others have {self.version})"
        offer = f"{announcement.get('model')} at version {announcement['version']}"
        self._say(f"worker {name} connected, with {offer}{note}")
        joining = asyncio.create_task(self._catch_up(member))
        reason = "it left"
        try:
            while True:
                message = await link.receive()
                if message["t"] == "drain":
                    member.leaving = True
                else:
                    engine.handle(message)
        except EngineError as error:
            reason = str(error)
        finally:
            joining.cancel()
            engine.lose(f"worker {name} is lost: {reason}")
            self._leave(member, reason)
            self._say(f"worker {name} disconnected: {reason}")


def _tokenizer(announcement: dict[str, Any]) -> Tokenizer:
    if announcement.get("tokenizer") == "bytes":
        return ByteTokenizer()
    if not isinstance(text := announcement.get("tokenizer_json"), str):
        raise EngineError("it cannot send its tokenizer: start the gateway with --tokenizer")
    try:
        return HubTokenizer.from_text(text, ChatTemplateSource.from_json(announcement.get("chat_template")))
    except Exception as error:  # the library defines no error types
        raise EngineError(f"its tokenizer cannot be loaded: {error}") from error
