"""The engine in this process: a transformers model that serves many streams as one batch."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field

from loopwright.core.config import Size
from loopwright.core.errors import Problem
from loopwright.engines.base import PENALTIES, Chunk, ContextFull, Engine, EngineConfig, EngineError, Sampling
from loopwright.engines.inprocess.smollm2 import package_problem

T = TypeVar("T")


class TransformersConfig(EngineConfig):
    """A transformers model, in this process."""

    extra: ClassVar[str] = "train"
    packages: ClassVar[tuple[str, ...]] = ("torch", "transformers")
    type: Literal["transformers"] = "transformers"
    model: str = "smollm2"
    """`smollm2` (SmolLM2-135M-Instruct), `tiny` (byte-level, random), a directory, or a name on the hub."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The precision of weights and computation."""
    device: str = "cpu"
    """Where it runs, as torch names it."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads; by default one per core."""
    max_batch: int = Field(default=32, ge=1)
    """Streams that run at a time; more wait."""
    max_context: int | None = Field(default=None, ge=2)
    """Tokens of prompt and answer together; by default the model's limit."""
    batch_bytes: Size = Field(default=2 * 2**30, ge=0)
    """Memory for the KV cache of running streams, such as "2GiB"; streams that do not fit wait."""
    prefix_bytes: Size = Field(default=2**30, ge=0)
    """Memory for the KV cache of finished streams (prefix cache), such as "1GiB"; 0 turns it off."""
    seed: int = 0
    """The seed of the random weights of `tiny`."""

    def problems(self, scenario_dir: Path) -> list[Problem]:
        if (error := self.missing_extra(self.type)) is not None:
            return [Problem("type", str(error))]
        problem = package_problem() if self.model == "smollm2" else None
        return [Problem("model", problem)] if problem else []


class TransformersEngine(Engine):
    """Runs a model in a separate thread, one step at a time for all streams."""

    Config: ClassVar[type[EngineConfig]] = TransformersConfig
    max_context: int
    config: TransformersConfig

    def __init__(self, config: TransformersConfig, scenario_dir: Path) -> None:
        super().__init__(config, scenario_dir)
        for problem in config.problems(scenario_dir):
            raise EngineError(str(problem))
        from loopwright.engines.inprocess.models import load

        self._thread = ThreadPoolExecutor(1, "engine")
        loaded = self._thread.submit(load, config, scenario_dir).result()
        self.model, self.tokenizer, self.batch, self.max_context = loaded
        self._driver: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def steering(self) -> frozenset[str]:
        return PENALTIES

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, seed: str) -> AsyncGenerator[Chunk, None]:
        if not len(ids):
            raise ValueError("an engine needs at least one token to continue from")
        size = self.model.config.vocab_size
        for token in (min(ids), max(ids), *(token for token, _ in sampling.logit_bias)):
            if not 0 <= token < size:
                raise ValueError(f"{token} is not a token of this model, whose vocabulary has {size}")
        if len(ids) >= self.max_context:
            raise ContextFull(self.max_context, len(ids))
        await self.wait_until_running()
        if self._closed:
            raise EngineError("the engine is closed")
        chunks: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        request = self.batch.submit(ids, sampling, seed, chunks)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.ensure_future(self._drive())
        try:
            while True:
                chunk = await chunks.get()
                if isinstance(chunk, Exception):
                    raise EngineError(f"the model failed: {type(chunk).__name__}: {chunk}") from chunk
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            request.is_over = True

    async def _drive(self) -> None:
        """Step while there are requests, and pass each step's chunks to the readers."""
        try:
            while self.batch.busy and self._running.is_set():
                for request, chunk in await finish_in_thread(self._thread, self.batch.step, self.version):
                    request.reader.put_nowait(chunk)
        except Exception as error:  # noqa: BLE001  whatever a model raises, readers must not wait forever
            self._end(error)
        finally:
            self._end(Chunk((), (), self.version, "abort"))

    def _end(self, last: Chunk | Exception) -> None:
        for request in self.batch.drain():
            request.reader.put_nowait(last)

    async def pause(self) -> None:
        await super().pause()
        if self._driver is not None:
            await asyncio.wait({self._driver})

    async def load_weights(self, source: Any, version: int) -> None:
        """A mapping, a directory, or a file of weights; None keeps them. EngineError if they do not fit the model."""
        if self.batch.busy:
            raise EngineError("streams are running: pause the engine before loading new weights")
        if source is not None:
            from loopwright.engines.inprocess.models import put_weights

            if not isinstance(source, Mapping):
                source = self.scenario_dir / Path(source)
            await finish_in_thread(self._thread, put_weights, self.model, source)
            self.batch.prefixes.clear()
        self.version = version

    async def close(self) -> None:
        self._closed = True
        await self.pause()
        await self.resume()  # streams that wait for the end of a pause raise an error
        self._thread.shutdown(wait=True)


async def finish_in_thread(thread: ThreadPoolExecutor, work: Callable[..., T], *args: Any) -> T:
    """Run it in this thread. Even a cancelled caller waits for the end: two calls must never overlap."""
    running = asyncio.get_running_loop().run_in_executor(thread, work, *args)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise
