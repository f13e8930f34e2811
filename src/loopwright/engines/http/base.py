"""What engines behind HTTP share: streams that can be held and cut, and numbers that are checked before they count."""

import asyncio
import logging
import math
import os
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from loopwright.core.errors import LoopwrightError, MissingExtra, Problem
from loopwright.engines.base import Chunk, Engine, EngineConfig, EngineError, Finish, Sampling, Tops
from loopwright.engines.http.client import EngineGone, HttpClient, url_problems
from loopwright.engines.inprocess.smollm2 import package_problem
from loopwright.engines.named_tokenizer import ends_in, place, stop_ids, tokenizer_of
from loopwright.engines.stops import stopped

log = logging.getLogger(__name__)
_FAREWELL_S = 1.0
_WAIT_S = 0.5
_SURE_S = 2.0
"""Seconds for which a server counts as the one that it was; to be started anew takes it longer."""


class HttpConfig(EngineConfig):
    """A server that turns ids into ids."""

    url: str = Field(examples=['"http://localhost:8000"'])
    """Where the server listens, without a path."""
    tokenizer: str = Field(examples=['"Qwen/Qwen3-8B"'])
    """The tokenizer of the model that is served: a name on the hub, a directory, `smollm2` or `tiny`."""
    api_key_env: str | None = None
    """The environment variable that holds the server's API key."""
    api_key_file: Path | None = None
    """The file that holds the server's API key."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Seconds of silence after which the server is taken to be gone."""
    wait_s: float = Field(default=600.0, ge=0)
    """Seconds that a server which has been given weights is waited for when it is gone: it may be started anew. In a
    fleet others serve meanwhile, and nobody waits for it."""
    stop_ids: tuple[int, ...] | None = None
    """Tokens that end a turn; by default what the tokenizer's directory says, and the usual ends of messages."""

    def problems(self, home: Path) -> list[Problem]:
        found = url_problems(self.url, "url")
        if "@" in self.url:
            found.append(
                Problem("url", "a URL is recorded and shown: the key belongs into api_key_env or api_key_file.")
            )
        if missing := [name for name in ("aiohttp", "tokenizers") if find_spec(name) is None]:
            found.append(Problem("type", str(MissingExtra(f"engine {self.type!r} ({missing[0]})", "gateway"))))
        if self.tokenizer == "smollm2" and (problem := package_problem()):
            found.append(Problem("tokenizer", problem))
        try:
            self.key(home)
        except EngineError as error:
            found.append(Problem("api_key_env" if self.api_key_env else "api_key_file", str(error)))
        return found

    @property
    def policy(self) -> str | None:
        return self.tokenizer

    def key(self, home: Path) -> str | None:
        """The API key, if there is one. It is read where it is needed, and never part of what is recorded."""
        if self.api_key_env is not None:
            if not (key := os.environ.get(self.api_key_env, "").strip()):
                raise EngineError(f"the environment variable {self.api_key_env} holds no API key.")
            return key
        if self.api_key_file is not None:
            try:
                return (home / self.api_key_file).read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise EngineError(f"the API key cannot be read: {error}") from error
        return None


class RawChunk(NamedTuple):
    """What a server said next, as it said it."""

    ids: Sequence[Any]
    logprobs: Sequence[Any]
    finish: Finish | None = None
    tops: Tops | None = None


class HttpEngine(Engine):
    """Asks a server, a request per stream. Subclasses know how that server wants to be asked."""

    config: HttpConfig

    def __init__(self, config: HttpConfig, home: Path) -> None:
        super().__init__(config, home)
        for problem in config.problems(home):
            raise EngineError(str(problem))
        self.tokenizer = tokenizer_of(config.tokenizer, home)
        ends = ends_in(Path(place(config.tokenizer, home)))
        self.stop_ids = stop_ids(self.tokenizer, ends) if config.stop_ids is None else frozenset(config.stop_ids)
        key = config.key(home)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = HttpClient(config.url, headers, read_timeout_s=config.timeout_s, unreachable=EngineGone)
        self._open = asyncio.Event()
        self._open.set()
        self._running: dict[asyncio.Task[None], asyncio.Queue[Chunk | Exception]] = {}
        self._closed = False
        self._broken: EngineError | None = None
        self._given: Path | None = None
        self._held: Any = None
        self._sure_until = 0.0
        self._looking: asyncio.Task[None] | None = None

    @abstractmethod
    def sample(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[RawChunk, None]:
        """What the server says after these ids; closing it makes the server stop."""

    @abstractmethod
    async def put_weights(self, directory: Path) -> None:
        """Make the server take on the weights in a directory, while nothing runs."""

    async def held(self) -> Any:
        """What is another after the server was started anew, by which it lost its weights."""
        await self.check()
        return self.client.failed_connections

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, seed: str) -> AsyncGenerator[Chunk, None]:
        if not len(ids):
            raise ValueError("an engine needs at least one token to go on from")
        while not self._open.is_set():  # it may close again before we wake
            await self._open.wait()
        if self._closed:
            raise EngineError("the engine is closed")
        if self._broken is not None:
            raise self._broken
        chunks: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        task = asyncio.ensure_future(self._read(list(ids), sampling, seed, chunks))
        self._running[task] = chunks
        try:
            while True:
                chunk = await chunks.get()
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            task.cancel()
            await asyncio.wait({task})  # until the server has been told
            del self._running[task]

    async def _read(
        self, ids: list[int], sampling: Sampling, seed: str, chunks: "asyncio.Queue[Chunk | Exception]"
    ) -> None:
        version, said = self.version, list[int]()
        digest = blake2b(f"{seed}:{len(ids)}".encode("utf-8", "replace"), digest_size=4).digest()
        try:
            async with aclosing(self._sampled(ids, sampling, int.from_bytes(digest) >> 1)) as pieces:
                async for piece in pieces:
                    chunk = self._chunk(piece, said, sampling, version)
                    if piece.finish is not None:
                        await _to_the_end(pieces)
                    chunks.put_nowait(chunk)
                    if chunk.finish is not None:
                        return
            raise EngineError(f"{self.client.url} ended a stream without saying why")
        except LoopwrightError as error:
            chunks.put_nowait(error)
        except Exception as error:  # noqa: BLE001  whatever a server sends, whoever waits must hear of it
            told = f"{self.client.url} answered something unforeseen: {type(error).__name__}: {error}"
            failure = EngineError(told)
            failure.__cause__ = error
            chunks.put_nowait(failure)

    async def _sampled(self, ids: list[int], sampling: Sampling, seed: int) -> AsyncGenerator[RawChunk, None]:
        """What the server says, under the weights that it was given."""
        begun = False
        while True:
            await self._ensure_weights()
            try:
                async with aclosing(self.sample(ids, sampling, seed)) as pieces:
                    async for piece in pieces:
                        begun = True
                        yield piece
                return
            except EngineGone:
                if begun or self._given is None:
                    raise
                self._sure_until = 0.0  # whoever answers next may hold other weights

    def _chunk(self, piece: RawChunk, said: list[int], sampling: Sampling, version: int) -> Chunk:
        """The tokens up to the end of the turn. What is not a logprob per token is no chunk."""
        ids, logprobs, finish, tops = piece
        if len(ids) != len(logprobs) or (tops is not None and len(tops) != len(ids)):
            raise EngineError(f"{self.client.url} gave {len(ids)} ids but {len(logprobs)} logprobs")
        for value in logprobs:
            if not isinstance(value, float | int) or not math.isfinite(value):
                raise EngineError(f"{self.client.url} gave {value!r} as a logprob")
        kept = len(ids)
        for index, token in enumerate(ids):
            if type(token) is not int:
                raise EngineError(f"{self.client.url} gave {token!r} as an id")
            said.append(token)
            if token in self.stop_ids or stopped(self.tokenizer, said, sampling.stop):
                kept, finish = index + 1, "stop"
                break
            if len(said) == sampling.max_tokens:
                kept, finish = index + 1, "stop" if finish == "stop" and index + 1 == len(ids) else "length"
                break
        certain = greedy(sampling)  # nothing else was possible then, whatever the server makes of it
        numbers = tuple(0.0 if certain else min(float(value), 0.0) for value in logprobs[:kept])
        return Chunk(tuple(ids[:kept]), numbers, version, finish, None if tops is None else tops[:kept])

    async def pause(self) -> None:
        self._open.clear()
        running = dict(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        for chunks in running.values():
            chunks.put_nowait(Chunk((), (), self.version, "abort"))

    async def resume(self) -> None:
        self._open.set()

    async def load_weights(self, source: Any, version: int) -> None:
        """A directory of safetensors that the server, too, can read; None keeps the weights."""
        if any(not task.done() for task in self._running):
            raise EngineError("streams are running: pause the engine before it gets new weights")
        if source is not None:
            if isinstance(source, Mapping):
                raise EngineError("a server takes its weights from a directory with *.safetensors, not from memory")
            directory = (self.home / Path(source)).absolute()
            if not any(directory.glob("*.safetensors")):
                raise EngineError(f"there are no weights in {directory}: a server needs a directory with *.safetensors")
            if self._looking is not None:
                await asyncio.wait({self._looking})
            await self._put(directory)
        self.version = version

    async def _put(self, directory: Path) -> None:
        await self._there()
        try:
            await self.put_weights(directory)
        except EngineError:
            try:
                await self.check()
            except EngineGone:  # killed meanwhile
                await self._there()
                await self.put_weights(directory)
            else:
                raise
        self._held, self._given, self._broken = await self.held(), directory, None
        self._sure_until = asyncio.get_running_loop().time() + _SURE_S

    async def _ensure_weights(self) -> None:
        """A server that was started anew has its first weights: it is given the last ones again before it serves."""
        if self._given is None or asyncio.get_running_loop().time() < self._sure_until:
            return
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look(self._given))
            self._looking.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._looking)  # whoever leaves does not end it for the others

    async def _there(self) -> None:
        """Wait for a server that is gone, if it has been given weights: it may be started anew."""
        clock = asyncio.get_running_loop().time
        until, said = clock() + (0.0 if self._given is None else self.config.wait_s), False
        while True:
            try:
                return await self.check()
            except EngineGone:
                if clock() >= until:
                    raise
            if not said:
                log.warning("%s is gone; it is waited for, %g s at most", self.client.url, self.config.wait_s)
                said = True
            await asyncio.sleep(_WAIT_S)

    async def _look(self, given: Path) -> None:
        await self._there()
        if await self.held() == self._held:
            self._sure_until = asyncio.get_running_loop().time() + _SURE_S
            return
        log.warning("%s was started anew; it gets version %d of the weights again", self.client.url, self.version)
        try:
            await self._put(given)
        except EngineError:
            self._broken = None  # whoever comes next tries again
            raise

    def broken(self, error: EngineError) -> EngineError:
        """Nobody knows any more which weights the server has: it serves nobody until it has been given others."""
        self._broken = EngineError(f"the server failed while it took on weights, and may hold half of them: {error}")
        return self._broken

    async def check(self) -> None:
        await self.client.get("/health")

    async def close(self) -> None:
        self._closed = True
        await self.pause()
        self._open.set()  # so that those who wait for it hear that it is over
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait({self._looking})
        await self.client.close()


async def _to_the_end(pieces: AsyncGenerator[RawChunk, None]) -> None:
    """Hear a server out that has said its last token, so that its connection can be used again."""
    with suppress(LoopwrightError, TimeoutError):
        async with asyncio.timeout(_FAREWELL_S):
            async for _ in pieces:
                pass


def greedy(sampling: Sampling) -> bool:
    """Whether only the likeliest token is possible."""
    return sampling.temperature == 0 or sampling.top_k == 1


def truncates(sampling: Sampling) -> bool:
    """Whether some tokens are ruled out, which gives the others larger shares."""
    return not greedy(sampling) and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0)
