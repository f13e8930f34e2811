"""The scripted engine: follows a script, but samples for real, with a seed and true logprobs.

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
    """`module:function`: gets the prompt as text and a seeded `random.Random`, returns the reply."""
    replies: tuple[str, ...] = ("yes", "no")
    """The replies without a script: the seed picks one."""
    slip: float = Field(default=0.02, ge=0, le=0.9)
    """The probability that a token is not the script's, which stays the likeliest."""
    delay_s: float = Field(default=0.0, ge=0)
    """The median time before a turn's first token, in seconds."""
    delay_sigma: float = Field(default=0.0, ge=0)
    """How much that time varies: the standard deviation of its logarithm."""
    token_s: float = Field(default=0.0, ge=0)
    """Seconds per token."""
    fault_rate: float = Field(default=0.0, ge=0, le=1)
    """The probability that a turn fails as if the engine had died."""

    def problems(self, scenario_dir: Path) -> list[Problem]:
        try:
            if self.script is not None:
                import_function(self.script, scenario_dir)
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

    def __init__(self, config: ScriptedConfig, scenario_dir: Path) -> None:
        super().__init__(config, scenario_dir)
        self.tokenizer = ByteTokenizer()
        self._script: Callable[[str, Random], Any] | None = (
            None if config.script is None else import_function(config.script, scenario_dir)
        )
        self._end = self.tokenizer.specials["<|im_end|>"]

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, seed: str) -> AsyncGenerator[Chunk, None]:
        pauses, config = await self.wait_until_running(), self.config
        random = Random(f"{seed}:{len(ids)}")
        if config.delay_s:
            await asyncio.sleep(config.delay_s * math.exp(random.gauss(0.0, config.delay_sigma)))
        if random.random() < config.fault_rate:
            raise EngineError("the scripted engine failed: fault_rate is above 0")
        script = iter(self._reply(ids, seed))
        remaining, finish = sampling.max_tokens, None
        while finish is None:
            if self.pauses != pauses:
                yield Chunk((), (), self.version, "abort")
                return
            block = min(remaining, _BLOCK) if config.token_s else remaining
            version = self.version  # it may change while we sleep
            tokens, logprobs, tops, finish = self._sample(script, block, sampling, random)
            remaining -= len(tokens)
            if config.token_s:
                await asyncio.sleep(config.token_s * len(tokens))
            if finish is None and not remaining:
                finish = "length"
            yield Chunk(tokens, logprobs, version, finish, tops)

    def _reply(self, ids: Sequence[int], seed: str) -> list[int]:
        """The rest of the script's reply. A turn that was interrupted by a pause continues the same reply."""
        start = self.tokenizer.specials["<|im_start|>"]
        message = ids[max((i for i, token in enumerate(ids) if token == start), default=-1) + 1 :]
        opening = self.tokenizer.encode("assistant\n")
        done = len(message) - len(opening) if list(message[: len(opening)]) == opening else 0
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
        self, script: Iterator[int], count: int, sampling: Sampling, random: Random
    ) -> tuple[tuple[int, ...], tuple[float, ...], Tops | None, Finish | None]:
        tokens, logprobs, tops, slip = [], [], [], self.config.slip
        finish: Finish | None = None
        for _ in range(count):
            scripted = next(script, self._end)
            token, logprob = sample(scripted, slip, sampling, random)
            tokens.append(token)
            logprobs.append(logprob)
            if sampling.top_logprobs:
                tops.append(likeliest(scripted, slip, sampling))
            if token == self._end:
                finish = "stop"
                break
        return tuple(tokens), tuple(logprobs), tuple(tops) if sampling.top_logprobs else None, finish


def sample(scripted: int, slip: float, sampling: Sampling, random: Random) -> tuple[int, float]:
    """A token and its logprob: `scripted` with probability 1 − slip, printable characters share the rest.

    Temperature, top-k, top-p and min-p reshape that distribution first: the logprob is that of the result.
    """
    count, share = _alternatives(scripted, slip, sampling)
    if not count or not share:
        return scripted, 0.0
    total = 1.0 + count * share
    point = random.random() * total - 1.0
    if point < 0:
        return scripted, -math.log(total)
    return _alternative(scripted, min(count - 1, int(point / share))), math.log(share) - math.log(total)


def likeliest(scripted: int, slip: float, sampling: Sampling) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens and their logprobs, as many as `top_logprobs`."""
    count, share = _alternatives(scripted, slip, sampling)
    if not count or not share:
        return ((scripted, 0.0),)
    total = math.log(1.0 + count * share)
    others = range(min(count, sampling.top_logprobs - 1))
    return (scripted, -total), *((_alternative(scripted, index), math.log(share) - total) for index in others)


def _alternatives(scripted: int, slip: float, sampling: Sampling) -> tuple[int, float]:
    """How many other tokens may be sampled, and how likely each of them is relative to the script's."""
    if slip == 0 or sampling.greedy:
        return 0, 0.0
    others = len(_PRINTABLE) - (scripted in _PRINTABLE)
    # Relative, so that both do not vanish at any temperature.
    share = (slip / others / (1.0 - slip)) ** (1.0 / sampling.temperature)
    if share < sampling.min_p:
        return 0, 0.0
    count = others if not sampling.top_k else min(others, sampling.top_k - 1)
    if sampling.top_p < 1.0 and share:
        mass = sampling.top_p * (1.0 + count * share) - 1.0
        count = min(count, math.ceil(mass / share)) if mass > 0 else 0
    return count, share


def _alternative(scripted: int, index: int) -> int:
    token = _PRINTABLE[index]
    return token + (scripted in _PRINTABLE and token >= scripted)
