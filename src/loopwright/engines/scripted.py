"""The scripted engine: says what a script tells it to, but samples for real, with a seed and true logprobs.

At each position the script's token has probability 1 − `slip`, and printable characters share the rest. Sampling from
that distribution gives groups whose members differ, and logprobs that can be checked, without a model.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal

from pydantic import Field

from loopwright.core.errors import Problem
from loopwright.core.imports import import_function
from loopwright.engines.base import Chunk, Engine, EngineConfig, EngineError, Finish, Sampling, Tops
from loopwright.engines.tokenizer import ByteTokenizer

_PRINTABLE = range(32, 127)
_BLOCK = 16


class ScriptedConfig(EngineConfig):
    """An engine that follows a script; for tests, demonstrations and simulations."""

    type: Literal["scripted"] = "scripted"
    script: str | None = Field(default=None, pattern=r"^[\w.]+:[\w.]+$")
    """`module:function`: gets the prompt as text and a seeded `random.Random`, returns what to say."""
    replies: tuple[str, ...] = ("yes", "no")
    """What to say where there is no script: one of these, by the seed."""
    slip: float = Field(default=0.02, ge=0, le=0.9)
    """The probability that a token is not the script's, which stays the likeliest."""
    delay_s: float = Field(default=0.0, ge=0)
    """The median of the seconds before a turn's first token."""
    delay_sigma: float = Field(default=0.0, ge=0)
    """How much that varies: the standard deviation of its logarithm."""
    token_s: float = Field(default=0.0, ge=0)
    """Seconds per token."""
    fault_rate: float = Field(default=0.0, ge=0, le=1)
    """The probability that a turn fails as if the engine had died."""

    def problems(self, home: Path) -> list[Problem]:
        try:
            if self.script is not None:
                import_function(self.script, home)
        except (ImportError, ValueError) as error:
            return [Problem("script", f"{self.script!r}: {error}.")]
        return []

    @property
    def takes_weights(self) -> bool:
        return False


class ScriptedEngine(Engine):
    """Follows a script, in process."""

    Config: ClassVar[type[EngineConfig]] = ScriptedConfig
    config: ScriptedConfig

    def __init__(self, config: ScriptedConfig, home: Path) -> None:
        super().__init__(config, home)
        self.tokenizer = ByteTokenizer()
        self._script: Callable[[str, Random], Any] | None = (
            None if config.script is None else import_function(config.script, home)
        )
        self._end = self.tokenizer.specials["<|im_end|>"]
        self._pauses = 0
        self._open = asyncio.Event()
        self._open.set()

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, seed: str) -> AsyncGenerator[Chunk, None]:
        await self._open.wait()
        pauses, config = self._pauses, self.config
        random = Random(f"{seed}:{len(ids)}")
        if config.delay_s:
            await asyncio.sleep(config.delay_s * math.exp(random.gauss(0.0, config.delay_sigma)))
        if random.random() < config.fault_rate:
            raise EngineError("the scripted engine failed, as its fault_rate asks for")
        script = iter(self._reply(ids, seed))
        left, finish = sampling.max_tokens, None
        while finish is None:
            if self._pauses != pauses:
                yield Chunk((), (), self.version, "abort")
                return
            block = min(left, _BLOCK) if config.token_s else left
            version = self.version  # which may change while we sleep
            tokens, logprobs, tops, finish = self._sample(script, block, sampling, random)
            left -= len(tokens)
            if config.token_s:
                await asyncio.sleep(config.token_s * len(tokens))
            if finish is None and not left:
                finish = "length"
            yield Chunk(tokens, logprobs, version, finish, tops)

    def _reply(self, ids: Sequence[int], seed: str) -> list[int]:
        """What the script says here. A turn that goes on after a pause goes on in the same reply."""
        start = self.tokenizer.specials["<|im_start|>"]
        begun = max((i for i, token in enumerate(ids) if token == start), default=-1) + 1
        said = ids[begun:]
        opening = self.tokenizer.encode("assistant\n")
        done = len(said) - len(opening) if list(said[: len(opening)]) == opening else 0
        random = Random(f"{seed}:script")
        if self._script is None:
            text = random.choice(self.config.replies)
        else:
            prompt = self.tokenizer.decode(ids[: len(ids) - done])
            try:
                text = str(self._script(prompt, random))
            except Exception as error:
                raise EngineError(f"{self.config.script} failed: {type(error).__name__}: {error}") from error
        return [*self.tokenizer.encode(text), self._end][done:] or [self._end]

    def _sample(
        self, script: Iterator[int], most: int, sampling: Sampling, random: Random
    ) -> tuple[tuple[int, ...], tuple[float, ...], Tops | None, Finish | None]:
        tokens, logprobs, tops, slip = [], [], [], self.config.slip
        finish: Finish | None = None
        for _ in range(most):
            meant = next(script, self._end)
            token, logprob = sample(meant, slip, sampling, random)
            tokens.append(token)
            logprobs.append(logprob)
            if sampling.top_logprobs:
                tops.append(likeliest(meant, slip, sampling))
            if token == self._end:
                finish = "stop"
                break
        return tuple(tokens), tuple(logprobs), tuple(tops) if sampling.top_logprobs else None, finish

    async def pause(self) -> None:
        self._pauses += 1
        self._open.clear()

    async def resume(self) -> None:
        self._open.set()


def sample(meant: int, slip: float, sampling: Sampling, random: Random) -> tuple[int, float]:
    """A token and its logprob: `meant` with probability 1 − slip, printable characters share the rest.

    Temperature, top-k, top-p and min-p reshape that distribution first: the logprob is of what was sampled from.
    """
    kept, share = _spread(meant, slip, sampling)
    if not kept or not share:
        return meant, 0.0
    total = 1.0 + kept * share
    point = random.random() * total - 1.0
    if point < 0:
        return meant, -math.log(total)
    return _other(meant, min(kept - 1, int(point / share))), math.log(share) - math.log(total)


def likeliest(meant: int, slip: float, sampling: Sampling) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens and their logprobs, as many as were asked for."""
    kept, share = _spread(meant, slip, sampling)
    if not kept or not share:
        return ((meant, 0.0),)
    total = math.log(1.0 + kept * share)
    others = [(_other(meant, index), math.log(share) - total) for index in range(min(kept, sampling.top_logprobs - 1))]
    return (meant, -total), *others


def _spread(meant: int, slip: float, sampling: Sampling) -> tuple[int, float]:
    """How many other tokens may be sampled, and how likely each of them is relative to `meant`."""
    if slip == 0 or sampling.temperature == 0 or sampling.top_k == 1:
        return 0, 0.0
    others = len(_PRINTABLE) - (meant in _PRINTABLE)
    # Relative, so that no temperature makes both vanish.
    share = (slip / others / (1.0 - slip)) ** (1.0 / sampling.temperature)
    if share < sampling.min_p:
        return 0, 0.0
    kept = others if not sampling.top_k else min(others, sampling.top_k - 1)
    if sampling.top_p < 1.0 and share:
        wanted = sampling.top_p * (1.0 + kept * share) - 1.0
        kept = min(kept, math.ceil(wanted / share)) if wanted > 0 else 0
    return kept, share


def _other(meant: int, index: int) -> int:
    token = _PRINTABLE[index]
    return token + (meant in _PRINTABLE and token >= meant)
