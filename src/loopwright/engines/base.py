"""The base of all engines: ids in, a stream of (id, logprob) out, each with the policy version that sampled it."""

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

Finish = Literal["stop", "length", "abort"]
"""Why a stream ended: a stop token, the budget of tokens, or a pause, after which it can be continued."""


class EngineError(LoopwrightError, ConnectionError):
    """An engine failed or is gone; nothing that the policy did."""


class ContextFull(EngineError, ValueError):
    """What the engine was asked to go on from leaves no room for a token; `limit` is what it can hold."""

    def __init__(self, limit: int, length: int) -> None:
        super().__init__(f"This model's maximum context length is {limit} tokens, but the prompt has {length}.")
        self.limit, self.length = limit, length


class Sampling(Config):
    """How tokens are sampled."""

    temperature: float = Field(default=1.0, ge=0)
    """0 takes the likeliest token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample among the likeliest tokens that together reach this probability."""
    top_k: int = Field(default=0, ge=0)
    """Sample among this many of the likeliest tokens; 0 for all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Sample among the tokens that are at least this likely, relative to the likeliest."""
    stop: tuple[str, ...] = ()
    """Texts that end a turn; whoever shows the text cuts it there, the ids stay complete."""
    max_tokens: int = Field(default=256, ge=1)
    """Tokens of one turn."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of a stream; the last chunk says why it ended."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    finish: Finish | None = None


class EngineConfig(Config):
    """What every engine can be told."""

    type: str

    def problems(self, home: Path) -> list[Problem]:
        """What is wrong with it; found before anything starts."""
        return []


class Engine(ABC):
    """Turns token ids into token ids.

        async with aclosing(engine.generate(ids, sampling, seed="7")) as stream:
            async for chunk in stream:
                said += chunk.ids

    The last chunk of a stream has a `finish`, and a stream has `max_tokens` tokens at most. Closing a stream aborts it.
    While the engine is paused, running streams end with `abort` and new ones wait, so that whoever reads can go on
    where it was, under the next version of the weights.
    """

    Config: ClassVar[type[EngineConfig]] = EngineConfig
    tokenizer: Tokenizer

    def __init__(self, config: Any, home: Path) -> None:
        self.config, self.home = config, home
        self.version = 0

    @abstractmethod
    def generate(self, ids: Sequence[int], sampling: Sampling, *, seed: str) -> AsyncGenerator[Chunk, None]:
        """What the policy says after these ids. The same seed gives the same tokens. EngineError if it cannot."""

    @abstractmethod
    async def pause(self) -> None:
        """End running streams with `abort` and hold new ones."""

    @abstractmethod
    async def resume(self) -> None:
        """Let streams run again."""

    async def load_weights(self, source: Any, version: int) -> None:
        """Take on new weights, while paused; tokens carry this version from now on."""
        self.version = version

    async def close(self) -> None:
        """Let go of everything."""


engines: Registry[type[Engine]] = Registry("engine", "loopwright.engines", Engine)
engines.add_lazily("scripted", "loopwright.engines.scripted:ScriptedEngine")
engines.add_lazily("transformers", "loopwright.engines.inprocess:TransformersEngine")
