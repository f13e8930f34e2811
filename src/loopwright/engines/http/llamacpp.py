"""llama.cpp's server: prompts as ids to `/completion`.

Its stream leaves out the tokens that end within a character, so we ask for a block of tokens at a time, whose ids are
complete. Their logprobs are left out even there: they are found by asking for all logprobs at their position.
"""

import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from loopwright.engines.base import ContextFull, EngineConfig, EngineError, Finish, Sampling
from loopwright.engines.http.base import HttpConfig, HttpEngine, RawChunk, greedy

_BLOCK = 16
_ALL = 2**20
"""More tokens than any vocabulary has."""
_FINISHES: dict[str, Finish | None] = {"eos": "stop", "word": "stop", "limit": None}
_Told = tuple[float, tuple[tuple[int, float], ...]]
"""The logprob of a token, and the likeliest tokens in its place."""


class LlamaCppConfig(HttpConfig):
    """A server of llama.cpp."""

    type: Literal["llamacpp"] = "llamacpp"

    @property
    def takes_weights(self) -> bool:
        return False


class LlamaCppEngine(HttpEngine):
    """Speaks ids to llama.cpp's server."""

    Config: ClassVar[type[EngineConfig]] = LlamaCppConfig
    config: LlamaCppConfig

    async def sample(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[RawChunk, None]:
        said: list[int] = []
        finish: Finish | None = None
        while finish is None:
            count = min(_BLOCK, sampling.max_tokens - len(said))
            prompt = [*ids, *said]
            try:
                found = await self.client.post(
                    "/completion", _body(prompt, count, sampling, seed + len(said)), prompt_tokens=len(prompt)
                )
            except ContextFull:
                if not said:
                    raise
                yield RawChunk((), (), "length")
                return
            tokens, ended = found["tokens"], found["stop_type"]
            if ended not in _FINISHES:
                raise EngineError(f"{self.client.url} ended a stream with {ended!r}")
            said += tokens
            finish = _FINISHES[ended]
            if finish is None and (len(tokens) < count or len(said) >= sampling.max_tokens):
                finish = "length"
            told = [each async for each in self._told(prompt, found, sampling)]
            tops = tuple(likeliest for _, likeliest in told) if sampling.top_logprobs else None
            yield RawChunk(tokens, [logprob for logprob, _ in told], finish, tops)

    async def _told(self, prompt: Sequence[int], found: Any, sampling: Sampling) -> AsyncGenerator[_Told, None]:
        """What is known of each token of a block."""
        tokens, listed = found["tokens"], iter(found["completion_probabilities"])
        for index, (token, told) in enumerate(zip(tokens, self._is_told(tokens), strict=True)):
            if not told:
                before = [*prompt, *tokens[:index]]
                yield (0.0, ()) if greedy(sampling) else await self._missing(before, token, sampling)
                continue
            entry = next(listed, None)
            if entry is None or entry["id"] != token:
                raise EngineError(f"{self.client.url} gave no logprob for token {index + 1} of {len(tokens)}")
            likeliest = tuple((each["id"], _log(each["prob"])) for each in entry["top_probs"])
            yield _log(entry["prob"]), likeliest[: sampling.top_logprobs]
        if next(listed, None) is not None:
            raise EngineError(f"{self.client.url} gave more logprobs than {len(tokens)} tokens")

    def _is_told(self, tokens: Sequence[int]) -> Iterator[bool]:
        """Whether each token's logprob is told: if the text so far, as the server sees it, does not end within a
        character."""
        text, specials = b"", set(self.tokenizer.specials.values())
        for token in tokens:
            text = (text + (b"" if token in specials else self.tokenizer.bytes_of(token)))[-4:]
            yield not _is_cut(text)

    async def _missing(self, before: Sequence[int], token: int, sampling: Sampling) -> _Told:
        """What the server does not tell: it is asked for all logprobs at this place, while it has to say an `a`."""
        plain = self.tokenizer.encode("a")[0]
        body = _body(before, 1, Sampling(temperature=0), 0) | {
            "logit_bias": [[plain, 1e6]],
            "n_probs": _ALL,
            "post_sampling_probs": False,
        }
        found = await self.client.post("/completion", body, prompt_tokens=len(before))
        entries = found["completion_probabilities"][0]["top_logprobs"]
        ids = [entry["id"] for entry in entries]
        return _reshaped(ids, [entry["logprob"] for entry in entries], token, sampling)

    async def put_weights(self, directory: Path) -> None:
        raise EngineError("llama.cpp cannot change its weights while it runs: convert them to GGUF and start it again")


def _body(prompt: Sequence[int], count: int, sampling: Sampling, seed: int) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "n_predict": count,
        "seed": seed,
        # In our order, and none of the server's own: by default it would sample with T = 0.8, top-k 40, min-p 0.05.
        "samplers": ["temperature", "top_k", "top_p", "min_p"],
        "temperature": 0.0 if greedy(sampling) else sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "mirostat": 0,
        "n_probs": max(1, sampling.top_logprobs),
        "post_sampling_probs": True,
        "return_tokens": True,
        "cache_prompt": True,
        "n_cache_reuse": 0,  # moving what is remembered to another position is not exact
        "stream": False,
        "response_fields": ["tokens", "completion_probabilities", "stop_type"],
    }


def _is_cut(text: bytes) -> bool:
    """Whether llama.cpp takes a text to end within a character: its own rule, which is not quite UTF-8's."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        needed = 2 if byte & 0xE0 == 0xC0 else 3 if byte & 0xF0 == 0xE0 else 4 if byte & 0xF8 == 0xF0 else 0
        if back < needed:
            return True
    return False


def _log(chance: float) -> float:
    """A probability that is too small to be told is refused as a logprob."""
    return math.log(chance) if chance > 0 else -math.inf


def _reshaped(ids: Sequence[int], logprobs: Sequence[float], token: int, sampling: Sampling) -> _Told:
    """What temperature, top-k, top-p and min-p make of the model's own logprobs, which come the likeliest first."""
    scaled = (np.asarray(logprobs) - logprobs[0]) / sampling.temperature
    kept = len(ids) if not sampling.top_k else min(sampling.top_k, len(ids))
    chances = np.exp(scaled[:kept])
    chances /= chances.sum()
    if sampling.top_p < 1:
        kept = min(kept, 1 + int(np.searchsorted(chances.cumsum(), sampling.top_p)))
    kept = min(kept, int((chances >= sampling.min_p * chances[0]).sum()))
    found = np.log(chances[:kept] / chances[:kept].sum())
    place = ids.index(token)
    if place >= kept:
        raise EngineError(f"the server sampled token {token}, which its own settings rule out")
    return float(found[place]), tuple(zip(ids, found[: sampling.top_logprobs].tolist(), strict=False))
