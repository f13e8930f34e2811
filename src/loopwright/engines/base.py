"""The base of all engines: ids in, a stream of (id, logprob) out, each with the policy version that sampled it."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from loopwright.core.config import Config
from loopwright.core.errors import LoopwrightError, Problem
from loopwright.core.registry import Registry
from loopwright.engines.tokenizer import Tokenizer

Reasoning = Literal["preserve", "fork"]
Finish = Literal["stop", "length", "abort"]
"""Why a stream ended: a stop token or text, the token limit, or a pause, after which it can be continued."""


class EngineError(LoopwrightError, ConnectionError):
    """An engine failed or is gone; the policy did not cause it."""


class EngineAway(EngineError):
    """No engine is connected at the moment; the request did not cause it."""


class ContextFull(EngineError, ValueError):
    """The prompt leaves no space for another token; `limit` is the model's context length."""

    def __init__(self, limit: int, length: int) -> None:
        super().__init__(f"This model's maximum context length is {limit} tokens, but the prompt has {length}.")
        self.limit, self.length = limit, length


class BadSampling(EngineError, ValueError):
    """Sampling parameters for which this engine cannot report true logprobs: the request is at fault."""


class Sampling(Config):
    """How tokens are sampled."""

    temperature: float = Field(default=1.0, ge=0)
    """0 always takes the likeliest token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample among the likeliest tokens that together reach this probability."""
    top_k: int = Field(default=0, ge=0)
    """Sample among this many of the likeliest tokens; 0 for all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Sample among the tokens that are at least this likely, relative to the likeliest."""
    stop: tuple[str, ...] = ()
    """Texts that end a turn. They are cut from the text that is shown; the ids stay complete."""
    max_tokens: int = Field(default=256, ge=1)
    """Tokens of one turn."""
    top_logprobs: int = Field(default=0, ge=0, le=20)
    """How many of the likeliest tokens are reported at each position, where the engine can."""

    @property
    def reshapes(self) -> dict[str, float]:
        """The parameters that change the model's own distribution; empty if none does."""
        plain = self.temperature == 1.0 and self.top_p == 1.0 and self.top_k == 0 and self.min_p == 0.0
        if plain:
            return {}
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}

    @property
    def greedy(self) -> bool:
        """Whether only the likeliest token is possible."""
        return self.temperature == 0 or self.top_k == 1


Tops = tuple[tuple[tuple[int, float], ...], ...]
"""The likeliest tokens at each position and their logprobs, the likeliest first."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of a stream; the last chunk has a `finish`."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    finish: Finish | None = None
    tops: Tops | None = None
    """One entry per token, if `top_logprobs` were requested and the engine reports them."""


class EngineConfig(Config):
    """Settings of every engine."""

    type: str
    template: Literal["auto", "chatml", "llama3", "json"] = "auto"
    """How conversations and tool calls are written; `auto` decides by the tokenizer's special tokens."""
    reasoning: Reasoning = "preserve"
    """The policy's reasoning before the last user message: `preserve` keeps it in the context as it was sampled, `fork`
    leaves it out, as many chat templates do, on a separate branch."""
    thinks: bool = False
    """Whether turns start with `<think>`, for models whose chat template does that."""

    def problems(self, scenario_dir: Path) -> list[Problem]:
        """Everything that is wrong with it and can be checked before the run starts."""
        return []

    @property
    def takes_weights(self) -> bool:
        """Whether the weights it samples from can be updated."""
        return True

    @property
    def policy(self) -> str | None:
        """The model that it serves, as the `transformers` engine would name it; None if unknown."""
        return getattr(self, "model", None)


class Engine(ABC):
    """Turns token ids into token ids.

        class Echo(Engine):
            tokenizer = ByteTokenizer()

            async def generate(self, ids, sampling, *, seed):
                pauses = await self.wait_until_running()
                for token in ids[-sampling.max_tokens :]:
                    if self.pauses > pauses:
                        yield Chunk((), (), self.version, "abort")
                        return
                    yield Chunk((token,), (0.0,), self.version)
                yield Chunk((), (), self.version, "stop")

    The last chunk of a stream has a `finish`, and a stream has at most `max_tokens` tokens. Closing a stream aborts it.
    During a pause, running streams end with `abort` and new ones wait. A reader can then continue an aborted stream
    with the next version of the weights. Subclass `loopwright.testing.EngineContract` to test an engine.
    """

    Config: ClassVar[type[EngineConfig]] = EngineConfig
    tokenizer: Tokenizer

    def __init__(self, config: Any, scenario_dir: Path) -> None:
        self.config, self.scenario_dir = config, scenario_dir
        self.version = 0
        self.pauses = 0
        """How often the engine was paused; a stream that sees this change ends with `abort`."""
        self._running = asyncio.Event()
        self._running.set()

    @abstractmethod
    def generate(self, ids: Sequence[int], sampling: Sampling, *, seed: str) -> AsyncGenerator[Chunk, None]:
        """The policy's tokens after these ids. The same seed gives the same tokens. Raises EngineError on failure."""

    async def wait_until_running(self) -> int:
        """Wait while the engine is paused; returns the number of pauses so far."""
        while not self._running.is_set():  # it may be paused again before we wake
            await self._running.wait()
        return self.pauses

    async def pause(self) -> None:
        """End running streams with `abort`, and hold new ones."""
        self.pauses += 1
        self._running.clear()

    async def resume(self) -> None:
        """Let streams run again."""
        self._running.set()

    async def load_weights(self, source: Any, version: int) -> None:
        """Load new weights while paused; tokens carry this version from now on."""
        self.version = version

    async def check(self) -> None:
        """Raise EngineError if it could not serve a stream now."""

    def for_session(self, key: str) -> "Engine":
        """The engine that one session uses: a fleet routes a session to the member that served it before."""
        return self

    async def close(self) -> None:
        """Release all resources."""


engines: Registry[type[Engine]] = Registry("engine", "loopwright.engines", Engine)
engines.add_lazily("scripted", "loopwright.engines.scripted:ScriptedEngine")
engines.add_lazily("transformers", "loopwright.engines.inprocess.engine:TransformersEngine")
engines.add_lazily("vllm", "loopwright.engines.http.vllm:VllmEngine")
engines.add_lazily("llamacpp", "loopwright.engines.http.llamacpp:LlamaCppEngine")
engines.add_lazily("sglang", "loopwright.engines.http.sglang:SglangEngine")
engines.add_lazily("fleet", "loopwright.engines.fleet:Fleet")
