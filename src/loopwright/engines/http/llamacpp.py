"""llama.cpp's server: prompts as ids to `/completion`.

Its stream omits tokens that end within a character, so we request a block of tokens at a time, which has all ids. Even
there, the logprobs of such tokens are missing; a second request asks for all logprobs at their position.
"""

import math
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import orjson

from loopwright.engines.base import (
    PENALTIES,
    BadSampling,
    ContextFull,
    EngineConfig,
    EngineError,
    Finish,
    Guide,
    Sampling,
)
from loopwright.engines.http.base import HttpConfig, HttpEngine, RawChunk

_BLOCK = 16
_ALL = 2**20
"""More tokens than any vocabulary has."""
_FINISHES: dict[str, Finish | None] = {"eos": "stop", "word": "stop", "limit": None}
_TokenLogprobs = tuple[float, tuple[tuple[int, float], ...]]
"""The logprob of a token, and the likeliest tokens at its position."""


class LlamaCppConfig(HttpConfig):
    """A llama.cpp server."""

    type: Literal["llamacpp"] = "llamacpp"

    @property
    def takes_weights(self) -> bool:
        return False


class LlamaCppEngine(HttpEngine):
    """Samples from a llama.cpp server."""

    Config: ClassVar[type[EngineConfig]] = LlamaCppConfig
    config: LlamaCppConfig

    @property
    def steering(self) -> frozenset[str]:
        return PENALTIES | {"guide.json", "guide.choice", "guide.grammar"}

    async def sample(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[RawChunk, None]:
        sampled: list[int] = []
        finish: Finish | None = None
        while finish is None:
            # A grammar starts over with each request, so a guided turn is a single request.
            count = sampling.max_tokens if sampling.guide else min(_BLOCK, sampling.max_tokens - len(sampled))
            prompt = [*ids, *sampled]
            try:
                answer = await self.client.post(
                    "/completion", _body(prompt, count, sampling, seed + len(sampled)), prompt_tokens=len(prompt)
                )
            except ContextFull:
                if not sampled:
                    raise
                yield RawChunk((), (), "length")
                return
            tokens, stop_type = answer["tokens"], answer["stop_type"]
            if stop_type not in _FINISHES:
                raise EngineError(f"{self.client.url} ended a stream with {stop_type!r}")
            sampled += tokens
            finish = _FINISHES[stop_type]
            if finish is None and (len(tokens) < count or len(sampled) >= sampling.max_tokens):
                finish = "length"
            logprobs = [each async for each in self._logprobs(prompt, answer, sampling)]
            tops = tuple(likeliest for _, likeliest in logprobs) if sampling.top_logprobs else None
            yield RawChunk(tokens, [logprob for logprob, _ in logprobs], finish, tops)

    async def _logprobs(
        self, prompt: Sequence[int], answer: Any, sampling: Sampling
    ) -> AsyncGenerator[_TokenLogprobs, None]:
        """The logprobs of each token of a block."""
        tokens, entries = answer["tokens"], iter(answer["completion_probabilities"])
        for index, (token, reported) in enumerate(zip(tokens, self._are_reported(tokens), strict=True)):
            if not reported:
                before = [*prompt, *tokens[:index]]
                yield (0.0, ()) if sampling.greedy else await self._missing(before, token, sampling)
                continue
            entry = next(entries, None)
            if entry is None or entry["id"] != token:
                raise EngineError(f"{self.client.url} sent no logprob for token {index + 1} of {len(tokens)}")
            likeliest = tuple((each["id"], _log(each["prob"])) for each in entry["top_probs"])
            yield _log(entry["prob"]), likeliest[: sampling.top_logprobs]
        if next(entries, None) is not None:
            raise EngineError(f"{self.client.url} sent more logprobs than {len(tokens)} tokens")

    def _are_reported(self, tokens: Sequence[int]) -> Iterator[bool]:
        """Whether the server reports each token's logprob: unless the text so far ends within a character."""
        text, specials = b"", set(self.tokenizer.specials.values())
        for token in tokens:
            text = (text + (b"" if token in specials else self.tokenizer.bytes_of(token)))[-4:]
            yield not _is_cut(text)

    async def _missing(self, before: Sequence[int], token: int, sampling: Sampling) -> _TokenLogprobs:
        """Logprobs that the server left out: request all of them at this position, forcing an `a` as the token."""
        if sampling.repetition_penalty != 1.0 or sampling.guide is not None:
            name = "repetition_penalty" if sampling.guide is None else sampling.guide.source
            raise BadSampling(
                f"{name}: {self.client.url} reports no logprob for a token that ends within a character; leave it out",
                name,
            )
        plain = self.tokenizer.encode("a")[0]
        body = _body(before, 1, Sampling(temperature=0), 0) | {
            "logit_bias": [[plain, 1e6]],
            "n_probs": _ALL,
            "post_sampling_probs": False,
        }
        answer = await self.client.post("/completion", body, prompt_tokens=len(before))
        entries = answer["completion_probabilities"][0]["top_logprobs"]
        logprobs = _steer({entry["id"]: entry["logprob"] for entry in entries}, before, sampling)
        return _reshaped(list(logprobs), list(logprobs.values()), token, sampling)


def _body(prompt: Sequence[int], count: int, sampling: Sampling, seed: int) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "n_predict": count,
        "seed": seed,
        # In our order, without the server's defaults (temperature 0.8, top-k 40, min-p 0.05).
        "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "mirostat": 0,
        "n_probs": max(1, sampling.top_logprobs),
        "post_sampling_probs": True,
        "return_tokens": True,
        "cache_prompt": True,
        "n_cache_reuse": 0,  # shifting cached keys to another position is not exact
        "stream": False,
        "response_fields": ["tokens", "completion_probabilities", "stop_type"],
        "repeat_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repeat_last_n": len(prompt) + count,
        "logit_bias": sampling.logit_bias,
        **_guide_fields(sampling.guide),
    }


def _guide_fields(guide: Guide | None) -> dict[str, Any]:
    """The fields for guided decoding."""
    if guide is None:
        return {}
    if guide.kind == "json":
        return {"json_schema": orjson.loads(guide.value)}
    if guide.kind == "choice":
        return {"grammar": "root ::= " + " | ".join(orjson.dumps(text).decode() for text in orjson.loads(guide.value))}
    return {"grammar": guide.value}


def _is_cut(text: bytes) -> bool:
    """Whether llama.cpp considers a text to end within a character; its rule is not quite that of UTF-8."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        needed = 2 if byte & 0xE0 == 0xC0 else 3 if byte & 0xF0 == 0xE0 else 4 if byte & 0xF8 == 0xF0 else 0
        if back < needed:
            return True
    return False


def _log(probability: float) -> float:
    """A probability that was rounded to 0 is later refused as a logprob."""
    return math.log(probability) if probability > 0 else -math.inf


def _steer(logprobs: dict[int, float], before: Sequence[int], sampling: Sampling) -> dict[int, float]:
    """Apply bias, and the penalties as llama.cpp does: for all tokens so far, those of the prompt too."""
    changes = defaultdict[int, float](float, sampling.logit_bias)
    if sampling.frequency_penalty or sampling.presence_penalty:
        for token, count in Counter(before).items():
            changes[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    if not changes:
        return logprobs
    steered = {token: logprob + changes[token] for token, logprob in logprobs.items()}
    return dict(sorted(steered.items(), key=lambda each: -each[1]))


def _reshaped(ids: Sequence[int], logprobs: Sequence[float], token: int, sampling: Sampling) -> _TokenLogprobs:
    """Apply temperature, top-k, top-p and min-p to the model's own logprobs, sorted by likelihood."""
    scaled = (np.asarray(logprobs) - logprobs[0]) / sampling.temperature
    count = len(ids) if not sampling.top_k else min(sampling.top_k, len(ids))
    probabilities = np.exp(scaled[:count])
    probabilities /= probabilities.sum()
    if sampling.top_p < 1:
        count = min(count, 1 + int(np.searchsorted(probabilities.cumsum(), sampling.top_p)))
    count = min(count, int((probabilities >= sampling.min_p * probabilities[0]).sum()))
    result = np.log(probabilities[:count] / probabilities[:count].sum())
    rank = ids.index(token)
    if rank >= count:
        raise EngineError(f"the server sampled token {token}, which the sampling parameters exclude")
    return float(result[rank]), tuple(zip(ids, result[: sampling.top_logprobs].tolist(), strict=False))
