"""The base of all engines: ids in, a stream of (id, logprob) out, each with the policy version that sampled it."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, overload

from pydantic import BeforeValidator, Field

from loopwright.core.config import Config
from loopwright.core.errors import LoopwrightError, MissingExtra, Problem
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
    """Sampling parameters that this engine cannot apply, or report true logprobs for: the request is at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


_NEUTRAL_PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
PENALTIES = frozenset({*_NEUTRAL_PENALTIES, "logit_bias"})
"""The parameters of `Sampling.steering` that add to or scale logits."""
GUIDES = frozenset({"guide.json", "guide.regex", "guide.choice", "guide.grammar"})
"""The kinds of guided decoding."""


class Guide(Config):
    """What constrains a turn: only tokens that continue a match can be sampled."""

    kind: Literal["json", "regex", "choice", "grammar"]
    value: str
    """A JSON schema, a regular expression, a JSON list of texts, or a grammar in the server's own notation."""
    source: str = "guide"
    """The field that a client requested it with."""


def _bias_pairs(value: Any) -> Any:
    """A mapping from tokens to biases as sorted pairs, which can be hashed."""
    return sorted((int(token), bias) for token, bias in value.items()) if isinstance(value, Mapping) else value


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
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from a token's logit for each time that the turn contains it already."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from the logit of each token that the turn contains already."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Divides positive logits, and multiplies negative ones, of tokens that the prompt or the turn contains."""
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(_bias_pairs)] = ()
    """Added to the logits of tokens, by token id."""
    guide: Guide | None = None
    """What the turn has to match, for servers with guided decoding."""
    sampled_before: int = Field(default=0, ge=0, repr=False)
    """How many of the given ids an interrupted stream of the same turn has sampled: penalties count them, too."""

    @property
    def reshapes(self) -> dict[str, Any]:
        """The parameters that change the model's own distribution; empty if none does."""
        plain = self.temperature == 1.0 and self.top_p == 1.0 and self.top_k == 0 and self.min_p == 0.0
        if plain and not self.steering:
            return {}
        truncation = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        return {**truncation, **self.steering}

    @property
    def steering(self) -> dict[str, Any]:
        """The parameters that prefer or exclude certain tokens, by name; engines apply them only if they can.

        They make a turn that cannot be trained on: a trainer computes the policy's logprobs without them.
        """
        values: dict[str, Any] = {
            name: getattr(self, name) for name, neutral in _NEUTRAL_PENALTIES.items() if getattr(self, name) != neutral
        }
        if self.logit_bias:
            values["logit_bias"] = {str(token): bias for token, bias in self.logit_bias}
        if self.guide is not None:
            values["guide"] = self.guide.model_dump()
        return values

    def after(self, sampled: int) -> "Sampling":
        """The sampling for the rest of a turn, after this many sampled tokens."""
        changes: dict[str, Any] = {"max_tokens": self.max_tokens - sampled}
        if self.guide is not None:
            raise BadSampling("a turn with guided decoding cannot be continued after an interruption: send it again")
        if self.frequency_penalty or self.presence_penalty:
            changes["sampled_before"] = self.sampled_before + sampled
        return self.model_copy(update=changes)

    @property
    def greedy(self) -> bool:
        """Whether only the likeliest token is possible."""
        return self.temperature == 0 or self.top_k == 1


Tops = tuple[tuple[tuple[int, float], ...], ...]
"""The likeliest tokens at each position and their logprobs, the likeliest first."""


class PromptIds(Sequence[int]):
    """The ids that an engine is given: parts of a conversation, which are joined only when they are read."""

    __slots__ = ("_length", "_parts")

    def __init__(self, parts: Sequence[Sequence[int]], length: int) -> None:
        self._parts, self._length = parts, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._parts)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if len(self._parts) > 1:
            self._parts = (tuple(self),)
        (ids,) = self._parts
        return tuple(ids[index]) if isinstance(index, slice) else ids[index]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of a stream; the last chunk has a `finish`."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    finish: Finish | None = None
    tops: Tops | None = None
    """One entry per token, if `top_logprobs` were requested and the engine reports them."""
    cached_tokens: int = 0
    """In the first chunk of a stream: tokens of the prompt that came from a prefix cache, if the engine reports it."""


class EngineConfig(Config):
    """Settings of every engine."""

    extra: ClassVar[str] = ""
    """The extra that installs `packages`."""
    packages: ClassVar[tuple[str, ...]] = ()
    """The packages that the engine needs, by the names they are imported by."""
    type: str
    template: Literal["auto", "chatml", "llama3", "json"] = "auto"
    """How conversations and tool calls are written; `auto` uses the model's own chat template. Without one, it
    decides by the tokenizer's special tokens."""
    reasoning: Reasoning = "preserve"
    """The policy's reasoning before the last user message: `preserve` keeps it in the context as it was sampled, `fork`
    leaves it out, as many chat templates do, on a separate branch."""
    thinks: bool = False
    """Whether turns start with `<think>`, for models whose chat template does that."""

    def problems(self, scenario_dir: Path) -> list[Problem]:
        """Everything that is wrong with it and can be checked before the run starts."""
        return []

    @classmethod
    def missing_extra(cls, name: str) -> MissingExtra | None:
        """The error of the engine of this name without a package that it needs; None if all are installed."""
        missing = [package for package in cls.packages if find_spec(package) is None]
        return MissingExtra(f"engine {name!r} ({missing[0]})", cls.extra) if missing else None

    @property
    def takes_weights(self) -> bool:
        """Whether the weights it samples from can be updated."""
        return True

    @property
    def policy(self) -> str | None:
        """The model that it serves, as the `transformers` engine would name it; None if unknown."""
        return getattr(self, "model", None)


@dataclass(slots=True)
class EngineActivity:
    """What the sessions of an engine know of each other: views of an engine share it."""

    last_at: float = 0.0
    """When the engine last sampled a token, for any session, or was resumed; on the event loop's clock."""


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
    max_context: int | None = None
    """Tokens of a prompt and its turn together; None until the engine knows."""

    def __init__(self, config: Any, scenario_dir: Path) -> None:
        self.config, self.scenario_dir = config, scenario_dir
        self.version = 0
        self.pauses = 0
        """How often the engine was paused; a stream that sees this change ends with `abort`."""
        self.activity = EngineActivity()
        self._running = asyncio.Event()
        self._running.set()

    @abstractmethod
    def generate(self, ids: Sequence[int], sampling: Sampling, *, seed: str) -> AsyncGenerator[Chunk, None]:
        """The policy's tokens after these ids. The same seed gives the same tokens. Raises EngineError on failure."""

    @property
    def steering(self) -> frozenset[str]:
        """Which parameters of `Sampling.steering` it applies; the kinds of guided decoding as `guide.json`."""
        return frozenset()

    def check_sampling(self, sampling: Sampling) -> None:
        """Raise BadSampling for a parameter that this engine does not apply."""
        for name in sampling.steering:
            guide = sampling.guide if name == "guide" else None
            if (name if guide is None else f"guide.{guide.kind}") not in self.steering:
                source = name if guide is None else guide.source
                raise BadSampling(f"{source}: engine {self.config.type!r} cannot apply it; leave it out", source)

    @property
    def is_paused(self) -> bool:
        """Whether streams wait for `resume`."""
        return not self._running.is_set()

    async def wait_until_running(self) -> int:
        """Wait while the engine is paused; returns the number of pauses so far."""
        while self.is_paused:  # it may be paused again before we wake
            await self._running.wait()
        return self.pauses

    async def pause(self) -> None:
        """End running streams with `abort`, and hold new ones."""
        self.pauses += 1
        self._running.clear()

    async def resume(self) -> None:
        """Let streams run again."""
        self.activity.last_at = asyncio.get_running_loop().time()
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
