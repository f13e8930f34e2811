"""The relay: engines that connect out to the gateway by WebSocket, and serve as one fleet while they are there."""

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
from loopwright.engines.fleet import Fleet, FleetSettings
from loopwright.engines.tokenizer import ByteTokenizer, HubTokenizer, Tokenizer, fingerprint
from loopwright.gateway.relay.link import LARGEST_BYTES, PROTOCOL, Link

log = logging.getLogger(__name__)
_ANNOUNCE_S = 60.0
_LOOK_S = 0.02
_FINISHES = ("stop", "length", "abort", None)


class RelayConfig(FleetSettings):
    """How a gateway keeps the engines that connect to it."""

    type: Literal["relay"] = "relay"
    wait_s: float = Field(default=300.0, ge=0)
    """Seconds that a request waits while no worker is connected."""
    heartbeat_s: float = Field(default=5.0, gt=0)
    """Seconds between heartbeats; a worker that does not answer one for half of that is lost."""


class RelayedEngine(Engine):
    """The engine of a worker, at the other end of a link."""

    def __init__(self, link: Link, tokenizer: Tokenizer, version: int) -> None:
        super().__init__(EngineConfig(type="relayed"), Path())
        self.tokenizer, self.version = tokenizer, version
        self._link, self._numbers = link, count(1)
        self._streams: dict[int, asyncio.Queue[Chunk | Exception]] = {}
        self._asked: dict[int, asyncio.Future[int]] = {}
        self._lost: EngineError | None = None

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, seed: str) -> AsyncGenerator[Chunk, None]:
        if self._lost is not None:
            raise self._lost
        number = next(self._numbers)
        chunks = self._streams[number] = asyncio.Queue()
        asked = orjson.Fragment(sampling.model_dump_json(exclude_defaults=True))
        self._link.send("generate", id=number, ids=list(ids), sampling=asked, seed=seed)
        ended = False
        try:
            while not ended:
                chunk = await chunks.get()
                ended = isinstance(chunk, Exception) or chunk.finish is not None
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
        finally:
            del self._streams[number]
            if not ended:
                self._link.send("cancel", id=number)

    async def pause(self) -> None:
        await self._ask("pause")

    async def resume(self) -> None:
        await self._ask("resume")

    async def load_weights(self, source: Any, version: int) -> None:
        """From a path, as the worker's engine sees it."""
        if not isinstance(source, str | None):
            raise EngineError("a worker takes weights by a path, not as they are in memory")
        self.version = await self._ask("load", source=source, version=version)

    async def check(self) -> None:
        await self._ask("check")

    async def _ask(self, what: str, **parts: Any) -> int:
        """Have the worker's engine do something; its version afterwards."""
        if self._lost is not None:
            raise self._lost
        number = next(self._numbers)
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._asked[number] = done
        self._link.send(what, id=number, **parts)
        try:
            return await done
        finally:
            del self._asked[number]

    # -- what the worker says -----------------------------------------------------------------------------------

    def heard(self, message: dict[str, Any]) -> None:
        """Hand a message to whoever waits for it. EngineError if nobody could have meant it."""
        try:
            number = message["id"]
            match message["t"]:
                case "chunk":
                    answer: Chunk | Exception = _chunk(message)
                case "failed":
                    answer = _failure(message)
                case "done":
                    version = int(message["version"])
                    if number in self._asked and not self._asked[number].done():
                        self._asked[number].set_result(version)
                    return
                case other:
                    raise EngineError(f"{other!r} is nothing that a worker says")
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"a message of it cannot be read: {type(error).__name__}: {error}") from error
        if number in self._streams:
            self._streams[number].put_nowait(answer)
        elif isinstance(answer, Exception) and number in self._asked and not self._asked[number].done():
            self._asked[number].set_exception(answer)

    def dismiss(self, reason: str) -> None:
        """Do without the worker from now on, and tell it so."""
        self._link.send("refused", reason=reason)
        self.lose(reason)

    def lose(self, reason: str) -> None:
        """The link has ended: whoever waits is told."""
        self._lost = EngineError(reason)
        for chunks in self._streams.values():
            chunks.put_nowait(self._lost)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(self._lost)


def _chunk(message: dict[str, Any]) -> Chunk:
    ids, logprobs, version, finish = (message[key] for key in ("ids", "logprobs", "version", "finish"))
    if finish not in _FINISHES or type(version) is not int or not all(type(token) is int for token in ids):
        raise ValueError("no chunk of tokens")
    return Chunk(tuple(ids), tuple(logprobs), version, finish, _tops(message.get("tops")))


def _tops(told: Any) -> Tops | None:
    if told is None:
        return None
    # JSON has no word for minus infinity.
    tops = tuple(tuple((token, -math.inf if value is None else value) for token, value in place) for place in told)
    if not all(type(token) is int and isinstance(value, float | int) for place in tops for token, value in place):
        raise ValueError("no alternatives to a token")
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
    """A fleet of engines that come and go. Without a tokenizer of its own it takes that of the first to come."""

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
        self._known = asyncio.Event()
        self._learning = asyncio.Lock()
        self._links: dict[web.WebSocketResponse, web.RequestHandler] = {}
        if tokenizer is not None:
            self._know(tokenizer, fingerprint(tokenizer))

    def _know(self, tokenizer: Tokenizer, print_: str) -> None:
        self.tokenizer, self._fingerprint = tokenizer, print_
        self._known.set()

    def _unavailable(self) -> str:
        return super()._unavailable() if self._members else "no worker is connected"

    def mount(self, app: web.Application, admits: Callable[[web.Request], bool]) -> None:
        """Let workers in at `/ws/worker`, and hold whoever asks for a session until the tokenizer is known."""

        async def worker(request: web.Request) -> web.StreamResponse:
            if not admits(request):
                raise web.HTTPUnauthorized(reason="A worker needs the gateway's token")
            return await self._attend(request)

        @web.middleware
        async def held(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            if not self._known.is_set() and ("id" in request.match_info or request.path == "/sessions"):
                try:
                    await asyncio.wait_for(self._known.wait(), self.config.wait_s)
                except TimeoutError as error:
                    raise EngineError("no worker has connected yet") from error
            return await handler(request)

        app.router.add_route("GET", "/ws/worker", worker)
        app.middlewares.append(held)

    async def end(self, server: web.Server, calls: Callable[[], int], within_s: float) -> None:
        """Let calls come to their end, cut those that do not, and send the workers away.

        All that before aiohttp itself ends, for then it hears nothing more on any connection, a worker's included.
        """
        await asyncio.sleep(0)  # what has come by now is begun
        agents = set(server.connections) - set(self._links.values())
        for each in agents:
            each.close()  # once it has its answer
        clock = asyncio.get_running_loop().time
        until = clock() + within_s
        while clock() < until:
            await asyncio.sleep(_LOOK_S)
            if not calls():
                break
        else:
            for each in agents:
                each.force_close()
        await asyncio.gather(*(socket.close(code=1001, message=b"shutdown") for socket in self._links))

    # -- workers ------------------------------------------------------------------------------------------------

    async def _attend(self, request: web.Request) -> web.StreamResponse:
        """A worker, from its announcement until it is gone."""
        socket = web.WebSocketResponse(
            heartbeat=self.config.heartbeat_s, max_msg_size=LARGEST_BYTES, timeout=2.0, compress=False
        )
        await socket.prepare(request)
        self._links[socket] = request.protocol
        link = Link(socket)
        try:
            async with link.running():
                link.send("hello", protocol=PROTOCOL, tokenizer=self._fingerprint)
                try:
                    async with asyncio.timeout(_ANNOUNCE_S):
                        announced = await link.receive()
                    await self._learn(announced)
                except (EngineError, TimeoutError) as error:
                    self._say(f"a worker at {request.remote} was refused: {error}")
                    link.send("refused", reason=str(error) or "it did not say what it is")
                    return socket
                await self._served(link, announced)
        finally:
            del self._links[socket]
            if request.transport is not None:
                request.transport.abort()  # a frozen peer would keep what it has not read
        return socket

    async def _learn(self, announced: dict[str, Any]) -> None:
        """EngineError unless a worker speaks as we do, and in the same tokens; the first one says which those are."""
        if announced["t"] != "announce" or announced.get("protocol") != PROTOCOL:
            raise EngineError(f"it speaks protocol {announced.get('protocol')!r}, the gateway {PROTOCOL}")
        if not isinstance(announced.get("name"), str) or type(announced.get("version")) is not int:
            raise EngineError("it said no name and version")
        theirs = announced.get("fingerprint")
        async with self._learning:
            if self._fingerprint is None:
                tokenizer = _tokenizer(announced)
                if await asyncio.to_thread(fingerprint, tokenizer) != theirs:
                    raise EngineError(
                        "the tokenizer that it sent is not the one that it has: start the gateway with --tokenizer"
                    )
                self._know(tokenizer, str(theirs))
        if theirs != self._fingerprint:
            raise EngineError(
                f"its tokenizer ({announced.get('tokenizer')}, {theirs}) is not the gateway's ({self._fingerprint}): "
                "all workers must serve the same model"
            )

    async def _served(self, link: Link, announced: dict[str, Any]) -> None:
        name = announced["name"]
        if (old := self._members.get(name)) is not None:
            # It came back before we noticed that it was gone; or there are two of that name, and the first is told.
            if isinstance(old.engine, RelayedEngine):
                old.engine.dismiss(f"another worker has connected as {name!r}; each needs a --name of its own")
            self._leave(old, "it has connected anew")
        engine = RelayedEngine(link, self.tokenizer, announced["version"])
        link.send("welcome")
        # Whoever was its gateway before may have paused it and gone.
        link.send("resume", id=0)
        member = self._join(name, engine)
        serves = "" if engine.version == self.version or self._update else f", which is not served: {self.version} is"
        self._say(f"worker {name} is there, with {announced.get('model')} at version {announced['version']}{serves}")
        joining = asyncio.create_task(self._catch_up(member))
        reason = "it left"
        try:
            while True:
                message = await link.receive()
                if message["t"] == "drain":
                    member.leaving = True
                else:
                    engine.heard(message)
        except EngineError as error:
            reason = str(error)
        finally:
            joining.cancel()
            engine.lose(f"worker {name} is lost: {reason}")
            self._leave(member, reason)
            self._say(f"worker {name} is gone: {reason}")


def _tokenizer(announced: dict[str, Any]) -> Tokenizer:
    if announced.get("tokenizer") == "bytes":
        return ByteTokenizer()
    if not isinstance(text := announced.get("tokenizer_json"), str):
        raise EngineError("it cannot send its tokenizer: start the gateway with --tokenizer")
    try:
        return HubTokenizer.from_text(text)
    except Exception as error:  # the library has no errors of its own
        raise EngineError(f"its tokenizer cannot be read: {error}") from error
