"""What engines behind HTTP share: streams that can be paused and cancelled, and checks of the server's numbers."""

import asyncio
import logging
import math
import os
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from loopwright.core.errors import LoopwrightError, Problem
from loopwright.engines.base import (
    BadSampling,
    Chunk,
    ContextFull,
    Engine,
    EngineConfig,
    EngineError,
    Finish,
    Sampling,
    Tops,
)
from loopwright.engines.http.client import EngineGone, HttpClient, url_problems
from loopwright.engines.inprocess.smollm2 import package_problem
from loopwright.engines.named_tokenizer import end_ids_in, model_location, stop_ids, tokenizer_of
from loopwright.engines.tokenizer import ends_with_stop

log = logging.getLogger(__name__)
_DRAIN_S = 1.0
_POLL_S = 0.5
_TRUST_S = 2.0
"""Seconds after a check during which a server is not checked again; a restart takes longer."""


class HttpConfig(EngineConfig):
    """A server that turns ids into ids."""

    extra: ClassVar[str] = "gateway"
    packages: ClassVar[tuple[str, ...]] = ("aiohttp", "tokenizers")
    url: str = Field(examples=['"http://localhost:8000"'])
    """Where the server listens, without a path."""
    tokenizer: str = Field(examples=['"Qwen/Qwen3-8B"'])
    """The tokenizer of the served model: a name on the hub, a directory, `smollm2` or `tiny`."""
    api_key_env: str | None = None
    """The environment variable that holds the server's API key."""
    api_key_file: Path | None = None
    """The file that holds the server's API key."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Seconds without a byte after which the server counts as gone."""
    wait_s: float = Field(default=600.0, ge=0)
    """Seconds to wait for a server that is gone after it was given weights: it may be restarting. In a fleet, other
    engines serve meanwhile, and nothing waits."""
    stop_ids: tuple[int, ...] | None = None
    """Tokens that end a turn; by default those in the tokenizer's directory, and the usual ends of messages."""

    def problems(self, scenario_dir: Path) -> list[Problem]:
        problems = url_problems(self.url, "url")
        if "@" in self.url:
            problems.append(
                Problem("url", "a URL is recorded and shown: put the key into api_key_env or api_key_file instead.")
            )
        if (missing := self.missing_extra(self.type)) is not None:
            problems.append(Problem("type", str(missing)))
        if self.tokenizer == "smollm2" and (problem := package_problem()):
            problems.append(Problem("tokenizer", problem))
        try:
            self.key(scenario_dir)
        except EngineError as error:
            problems.append(Problem("api_key_env" if self.api_key_env else "api_key_file", str(error)))
        return problems

    @property
    def policy(self) -> str | None:
        return self.tokenizer

    def key(self, scenario_dir: Path) -> str | None:
        """The API key, if any. It is read where it is needed, and never recorded."""
        if self.api_key_env is not None:
            if not (key := os.environ.get(self.api_key_env, "").strip()):
                raise EngineError(f"the environment variable {self.api_key_env} holds no API key.")
            return key
        if self.api_key_file is not None:
            try:
                return (scenario_dir / self.api_key_file).read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise EngineError(f"the API key cannot be read: {error}") from error
        return None


class RawChunk(NamedTuple):
    """The next tokens as the server sent them, not yet checked."""

    ids: Sequence[Any]
    logprobs: Sequence[Any]
    finish: Finish | None = None
    tops: Tops | None = None


class HttpEngine(Engine):
    """Sends one request per stream to a server. Subclasses implement the server's API."""

    config: HttpConfig

    def __init__(self, config: HttpConfig, scenario_dir: Path) -> None:
        super().__init__(config, scenario_dir)
        for problem in config.problems(scenario_dir):
            raise EngineError(str(problem))
        self.tokenizer = tokenizer_of(config.tokenizer, scenario_dir)
        end_ids = end_ids_in(Path(model_location(config.tokenizer, scenario_dir)))
        self.stop_ids = stop_ids(self.tokenizer, end_ids) if config.stop_ids is None else frozenset(config.stop_ids)
        key = config.key(scenario_dir)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = HttpClient(config.url, headers, read_timeout_s=config.timeout_s, unreachable=EngineGone)
        self._streams: dict[asyncio.Task[None], asyncio.Queue[Chunk | Exception]] = {}
        self._closed = False
        self._broken: EngineError | None = None
        self._weights: Path | None = None
        self._weights_id: Any = None
        self._trusted_until = 0.0
        self._restoring: asyncio.Task[None] | None = None

    @abstractmethod
    def sample(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[RawChunk, None]:
        """The server's tokens after these ids; closing the generator makes the server stop."""

    async def put_weights(self, directory: Path) -> None:
        """Make the server load the weights in a directory, while no stream runs."""
        raise EngineError(f"engine {self.config.type!r} cannot load weights while it runs: restart its server")

    async def weights_id(self) -> Any:
        """A value that changes when the server restarts, which loses its weights."""
        await self.check()
        return self.client.failed_connections

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, seed: str) -> AsyncGenerator[Chunk, None]:
        if not len(ids):
            raise ValueError("an engine needs at least one token to continue from")
        await self.wait_until_running()
        if self._closed:
            raise EngineError("the engine is closed")
        if self._broken is not None:
            raise self._broken
        chunks: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        task = asyncio.ensure_future(self._read(list(ids), sampling, seed, chunks))
        self._streams[task] = chunks
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
            await asyncio.wait({task})  # until the connection is closed, so that the server stops
            del self._streams[task]

    async def _read(
        self, ids: list[int], sampling: Sampling, seed: str, chunks: "asyncio.Queue[Chunk | Exception]"
    ) -> None:
        version, sampled = self.version, list[int]()
        digest = blake2b(f"{seed}:{len(ids)}".encode("utf-8", "replace"), digest_size=4).digest()
        try:
            async with aclosing(self._sample(ids, sampling, int.from_bytes(digest) >> 1)) as raw_chunks:
                async for raw in raw_chunks:
                    chunk = self._chunk(raw, sampled, sampling, version)
                    if raw.finish is not None:
                        with suppress(LoopwrightError, TimeoutError):
                            async with asyncio.timeout(_DRAIN_S):
                                async for _ in raw_chunks:  # read to the end, so that the connection can be reused
                                    pass
                    chunks.put_nowait(chunk)
                    if chunk.finish is not None:
                        return
            raise EngineError(f"{self.client.url} ended a stream without a finish reason")
        except LoopwrightError as error:
            chunks.put_nowait(error)
        except Exception as error:  # noqa: BLE001  whatever a server sends, the reader must not wait forever
            failure = EngineError(f"unexpected answer from {self.client.url}: {type(error).__name__}: {error}")
            failure.__cause__ = error
            chunks.put_nowait(failure)

    async def _sample(self, ids: list[int], sampling: Sampling, seed: int) -> AsyncGenerator[RawChunk, None]:
        """The server's chunks, sampled with the weights that it was last given."""
        started = False
        while True:
            await self._ensure_weights()
            try:
                async with aclosing(self.sample(ids, sampling, seed)) as raw_chunks:
                    async for raw in raw_chunks:
                        started = True
                        yield raw
                return
            except EngineGone:
                if started or self._weights is None:
                    raise
                self._trusted_until = 0.0  # it may come back with other weights
            except EngineError as error:
                guide = sampling.guide
                if started or guide is None or isinstance(error, BadSampling | ContextFull):
                    raise
                await self.check()  # a server that is healthy cannot apply the guide
                raise BadSampling(f"{guide.source}: refused by the engine: {error}", guide.source) from error

    def _chunk(self, raw: RawChunk, sampled: list[int], sampling: Sampling, version: int) -> Chunk:
        """The tokens up to the end of the turn. Raises EngineError unless each has an id and a finite logprob."""
        ids, logprobs, finish, tops = raw
        if len(ids) != len(logprobs) or (tops is not None and len(tops) != len(ids)):
            raise EngineError(f"{self.client.url} sent {len(ids)} ids but {len(logprobs)} logprobs")
        for value in logprobs:
            if not isinstance(value, float | int) or not math.isfinite(value):
                raise EngineError(f"{self.client.url} sent {value!r} as a logprob")
        count = len(ids)
        for index, token in enumerate(ids):
            if type(token) is not int:
                raise EngineError(f"{self.client.url} sent {token!r} as an id")
            sampled.append(token)
            if token in self.stop_ids or ends_with_stop(self.tokenizer, sampled, sampling.stop):
                count, finish = index + 1, "stop"
                break
            if len(sampled) == sampling.max_tokens:
                count, finish = index + 1, "stop" if finish == "stop" and index + 1 == len(ids) else "length"
                break
        # With greedy sampling no other token was possible, whatever logprob the server reports.
        numbers = tuple(0.0 if sampling.greedy else min(float(value), 0.0) for value in logprobs[:count])
        return Chunk(tuple(ids[:count]), numbers, version, finish, None if tops is None else tops[:count])

    async def pause(self) -> None:
        await super().pause()
        streams = dict(self._streams)
        for task in streams:
            task.cancel()
        if streams:
            await asyncio.wait(streams)
        for chunks in streams.values():
            chunks.put_nowait(Chunk((), (), self.version, "abort"))

    async def load_weights(self, source: Any, version: int) -> None:
        """A directory of safetensors that the server can read, too; None keeps the weights."""
        if any(not task.done() for task in self._streams):
            raise EngineError("streams are running: pause the engine before loading new weights")
        if source is not None:
            if isinstance(source, Mapping):
                raise EngineError("a server loads its weights from a directory with *.safetensors, not from memory")
            directory = (self.scenario_dir / Path(source)).absolute()
            if not any(directory.glob("*.safetensors")):
                raise EngineError(f"there are no weights in {directory}: a server needs a directory with *.safetensors")
            if self._restoring is not None:
                await asyncio.wait({self._restoring})
            await self._put(directory)
        self.version = version

    async def _put(self, directory: Path) -> None:
        await self._wait_for_server()
        try:
            await self.put_weights(directory)
        except EngineError:
            try:
                await self.check()
            except EngineGone:  # killed meanwhile
                await self._wait_for_server()
                await self.put_weights(directory)
            else:
                raise
        self._weights_id, self._weights, self._broken = await self.weights_id(), directory, None
        self._trusted_until = asyncio.get_running_loop().time() + _TRUST_S

    async def _ensure_weights(self) -> None:
        """A restarted server has its original weights: give it the last update again before it serves."""
        if self._weights is None or asyncio.get_running_loop().time() < self._trusted_until:
            return
        if self._restoring is None or self._restoring.done():
            self._restoring = asyncio.ensure_future(self._restore(self._weights))
            self._restoring.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._restoring)  # a cancelled stream does not cancel it for the others

    async def _wait_for_server(self) -> None:
        """Raise EngineGone if the server is gone; but once it was given weights, wait for it to restart."""
        clock = asyncio.get_running_loop().time
        until, warned = clock() + (0.0 if self._weights is None else self.config.wait_s), False
        while True:
            try:
                return await self.check()
            except EngineGone:
                if clock() >= until:
                    raise
            if not warned:
                log.warning("%s is gone; waiting up to %g s for it to return", self.client.url, self.config.wait_s)
                warned = True
            await asyncio.sleep(_POLL_S)

    async def _restore(self, weights: Path) -> None:
        await self._wait_for_server()
        if await self.weights_id() == self._weights_id:
            self._trusted_until = asyncio.get_running_loop().time() + _TRUST_S
            return
        log.warning("%s was restarted; loading version %d of the weights again", self.client.url, self.version)
        try:
            await self._put(weights)
        except EngineError:
            self._broken = None  # the next stream tries again
            raise

    def broken(self, error: EngineError) -> EngineError:
        """Mark the server's weights as unknown: it serves no stream until it has loaded others."""
        self._broken = EngineError(f"the server failed while loading weights, and may hold only half of them: {error}")
        return self._broken

    async def check(self) -> None:
        await self.client.get("/health")

    async def close(self) -> None:
        self._closed = True
        await self.pause()
        await self.resume()  # streams that wait for the end of a pause raise an error
        if self._restoring is not None:
            self._restoring.cancel()
            await asyncio.wait({self._restoring})
        await self.client.close()
