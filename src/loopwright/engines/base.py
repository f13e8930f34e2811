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

Reasoning = Literal["preserve", "fork"]
Finish = Literal["stop", "length", "abort"]
"""Why a stream ended: a stop token, the budget of tokens, or a pause, after which it can be continued."""


class EngineError(LoopwrightError, ConnectionError):
    """An engine failed or is gone; nothing that the policy did."""


class EngineAway(EngineError):
    """Nobody is there to be asked, for now: nothing that a request could have caused."""


class ContextFull(EngineError, ValueError):
    """What the engine was asked to go on from leaves no room for a token; `limit` is what it can hold."""

    def __init__(self, limit: int, length: int) -> None:
        super().__init__(f"This model's maximum context length is {limit} tokens, but the prompt has {length}.")
        self.limit, self.length = limit, length


class BadSampling(EngineError, ValueError):
    """A way to sample of which this engine cannot tell true logprobs: the request is at fault, not the engine."""


_RESHAPING = "temperature", "top_p", "top_k", "min_p"
_PLAIN = 1.0, 1.0, 0, 0.0


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
    top_logprobs: int = Field(default=0, ge=0, le=20)
    """How many of the likeliest tokens are told at each position, where the engine can."""

    @property
    def reshapes(self) -> dict[str, float]:
        """What makes the distribution sampled from another than the model's own."""
        asked = self.temperature, self.top_p, self.top_k, self.min_p
        return {} if asked == _PLAIN else dict(zip(_RESHAPING, asked, strict=True))


Tops = tuple[tuple[tuple[int, float], ...], ...]
"""The likeliest tokens at each position and their logprobs, the likeliest first."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of a stream; the last chunk says why it ended."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    finish: Finish | None = None
    tops: Tops | None = None
    """A list for every token, where `top_logprobs` were asked for and the engine knows them."""


class EngineConfig(Config):
    """What every engine can be told."""

    type: str
    template: Literal["auto", "chatml", "llama3", "json"] = "auto"
    """How conversations and tool calls are written; `auto` asks the tokenizer's special tokens."""
    reasoning: Reasoning = "preserve"
    """What the policy thought before the user last spoke: `preserve` keeps it in the context as it was sampled, `fork`
    leaves it out, as many chat templates do, on a branch of its own."""
    thinks: bool = False
    """Whether turns are begun with `<think>`, for models that were trained with chat templates which do that."""

    def problems(self, home: Path) -> list[Problem]:
        """What is wrong with it; found before anything starts."""
        return []

    @property
    def takes_weights(self) -> bool:
        """Whether what it samples from can be trained."""
        return True

    @property
    def policy(self) -> str | None:
        """The model that it has, in the words of the `transformers` engine; None if it does not say."""
        return getattr(self, "model", None)


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

    async def check(self) -> None:
        """EngineError if it could not serve a stream now."""

    def for_session(self, key: str) -> "Engine":
        """The engine as one session sees it: of several, one that has seen it before serves it again."""
        return self

    async def close(self) -> None:
        """Let go of everything."""


engines: Registry[type[Engine]] = Registry("engine", "loopwright.engines", Engine)
engines.add_lazily("scripted", "loopwright.engines.scripted:ScriptedEngine")
engines.add_lazily("transformers", "loopwright.engines.inprocess.engine:TransformersEngine")
engines.add_lazily("vllm", "loopwright.engines.http.vllm:VllmEngine")
engines.add_lazily("llamacpp", "loopwright.engines.http.llamacpp:LlamaCppEngine")
engines.add_lazily("sglang", "loopwright.engines.http.sglang:SglangEngine")
engines.add_lazily("fleet", "loopwright.engines.fleet:Fleet")
