"""The engine in this process: a model of transformers that serves many streams as one batch."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from loopwright.core.config import size_bytes
from loopwright.core.errors import MissingExtra, Problem
from loopwright.engines.base import Chunk, ContextFull, Engine, EngineConfig, EngineError, Sampling
from loopwright.engines.inprocess.smollm2 import package_problem

if TYPE_CHECKING:
    from loopwright.engines.inprocess.prefixes import Ids


class TransformersConfig(EngineConfig):
    """A model of transformers, in this process."""

    type: Literal["transformers"] = "transformers"
    model: str = "smollm2"
    """`smollm2` (SmolLM2-135M-Instruct), `tiny` (byte-level, random), a directory, or a name on the hub."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The precision of weights and computation."""
    device: str = "cpu"
    """Where it runs, as torch names it."""
    threads: int | None = Field(default=None, ge=1)
    """Threads that compute; as many as there are cores by default."""
    max_batch: int = Field(default=32, ge=1)
    """Streams that run at a time; more wait."""
    max_context: int | None = Field(default=None, ge=2)
    """Tokens of prompt and answer together; what the model can by default."""
    batch_bytes: Annotated[int, BeforeValidator(size_bytes)] = Field(default=2 * 2**30, ge=0)
    """Memory for what running streams have said and heard, such as "2GiB"; those that find no room wait."""
    prefix_bytes: Annotated[int, BeforeValidator(size_bytes)] = Field(default=2**30, ge=0)
    """Memory for what is remembered of ended streams, such as "1GiB"; 0 to remember nothing."""
    seed: int = 0
    """Which random weights `tiny` begins with."""

    def problems(self, home: Path) -> list[Problem]:
        if missing := [name for name in ("torch", "transformers") if find_spec(name) is None]:
            return [Problem("type", str(MissingExtra(f"engine 'transformers' ({missing[0]})", "train")))]
        problem = package_problem() if self.model == "smollm2" else None
        return [Problem("model", problem)] if problem else []


class TransformersEngine(Engine):
    """Runs a model in a thread of its own, a step at a time for all streams."""

    Config: ClassVar[type[EngineConfig]] = TransformersConfig
    config: TransformersConfig

    def __init__(self, config: TransformersConfig, home: Path) -> None:
        super().__init__(config, home)
        for problem in config.problems(home):
            raise EngineError(str(problem))
        from loopwright.engines.inprocess.models import load

        self._thread = ThreadPoolExecutor(1, "engine")
        loaded = self._thread.submit(load, config, home).result()
        self.model, self.tokenizer, self.batch = loaded.model, loaded.tokenizer, loaded.batch
        self.max_context = loaded.max_context
        self._open = asyncio.Event()
        self._open.set()
        self._driver: asyncio.Task[None] | None = None
        self._closed = False

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, seed: str) -> AsyncGenerator[Chunk, None]:
        import numpy as np

        from loopwright.engines.inprocess.batch import StreamRequest

        prompt = np.asarray(ids, dtype=np.int64)
        self._check(prompt)
        while not self._open.is_set():  # it may close again before we wake
            await self._open.wait()
        if self._closed:
            raise EngineError("the engine is closed")
        chunks: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        request = StreamRequest(prompt, sampling, seed, chunks)
        self.batch.waiting.append(request)
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
            request.gone = True

    def _check(self, ids: "Ids") -> None:
        if not len(ids):
            raise ValueError("an engine needs at least one token to go on from")
        size = self.model.config.vocab_size
        for token in (ids.min(), ids.max()):
            if not 0 <= token < size:
                raise ValueError(f"{token} is no token of this model, which has {size}")
        if len(ids) >= self.max_context:
            raise ContextFull(self.max_context, len(ids))

    async def _drive(self) -> None:
        """Step as long as anybody reads, and hand out what each step gave. Between steps the batch is ours."""
        try:
            while self.batch.busy and self._open.is_set():
                for request, chunk in await self._in_thread(self.batch.step, self.version):
                    request.reader.put_nowait(chunk)
        except Exception as error:  # noqa: BLE001  whatever a model raises, those who wait must hear of it
            self._end(error)
        finally:
            self._end(Chunk((), (), self.version, "abort"))

    def _end(self, last: Chunk | Exception) -> None:
        for request in self.batch.drain():
            request.reader.put_nowait(last)

    async def _in_thread(self, work: Any, *args: Any) -> Any:
        """Run it where the model runs. A cancelled caller, too, waits for its end: two must never run at once."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running})
            raise

    async def pause(self) -> None:
        self._open.clear()
        if self._driver is not None:
            await asyncio.wait({self._driver})

    async def resume(self) -> None:
        self._open.set()

    async def load_weights(self, source: Any, version: int) -> None:
        """Weights by name, a directory, or a file of them; None keeps the weights. EngineError if they do not fit."""
        if self.batch.busy:
            raise EngineError("streams are running: pause the engine before it gets new weights")
        if source is not None:
            from loopwright.engines.inprocess.models import put_weights

            if not isinstance(source, Mapping):
                source = self.home / Path(source)
            await self._in_thread(put_weights, self.model, source)
            self.batch.prefixes.clear()
        self.version = version

    async def close(self) -> None:
        self._closed = True
        await self.pause()
        self._open.set()  # so that those who wait for it hear that it is over
        self._thread.shutdown(wait=True)
