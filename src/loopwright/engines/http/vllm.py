"""vLLM's server: prompts as ids to `/v1/completions`, weights by its routes for reinforcement learning.

Start it with `--logprobs-mode processed_logprobs`. Otherwise, its logprobs ignore temperature, top-p, top-k and min-p,
and requests that set any of these are refused. Weight updates need `VLLM_SERVER_DEV_MODE=1`.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar, Literal

import orjson

from loopwright.engines.base import GUIDES, PENALTIES, BadSampling, ContextFull, EngineConfig, EngineError, Sampling
from loopwright.engines.http.base import HttpConfig, HttpEngine, RawChunk

_PROBED_TOKENS = 4
_FINISHES = ("stop", "length", "abort")


class VllmConfig(HttpConfig):
    """A vLLM server."""

    type: Literal["vllm"] = "vllm"
    model: str | None = None
    """The name of the model on the server; its first model by default."""


class VllmEngine(HttpEngine):
    """Samples from a vLLM server."""

    Config: ClassVar[type[EngineConfig]] = VllmConfig
    config: VllmConfig

    def __init__(self, config: VllmConfig, scenario_dir: Path) -> None:
        super().__init__(config, scenario_dir)
        self._model_info: tuple[str, int | None] | None = None
        self._processed_logprobs: bool | None = None
        self._can_mark_weights = False

    @property
    def steering(self) -> frozenset[str]:
        return PENALTIES | GUIDES

    async def sample(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[RawChunk, None]:
        model, limit = await self._model()
        if limit is not None and len(ids) >= limit:
            raise ContextFull(limit, len(ids))
        if sampling.reshapes and not sampling.greedy:
            await self._require_processed_logprobs(model, ids)
        body = {
            "model": model,
            "prompt": ids,
            "seed": seed,
            # vLLM refuses a limit beyond its context length.
            "max_tokens": sampling.max_tokens if limit is None else min(sampling.max_tokens, limit - len(ids)),
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": 1.0 if sampling.greedy else sampling.top_p,
            "top_k": 0 if sampling.greedy else sampling.top_k,
            "min_p": 0.0 if sampling.greedy else sampling.min_p,
            # Always, because the model's own generation config may set these.
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "stop_token_ids": sorted(self.stop_ids),
            "logprobs": sampling.top_logprobs,
            # Puts ids into the list of logprobs; `return_token_ids` would send the prompt back, too.
            "return_tokens_as_token_ids": True,
            "stream": True,
            **_steering(sampling),
        }
        async with aclosing(self.client.events("/v1/completions", body, prompt_tokens=len(ids))) as events:
            async for event in events:
                for choice in event.get("choices") or ():
                    yield self._raw_chunk(choice, sampling.top_logprobs)

    def _raw_chunk(self, choice: dict[str, Any], count: int) -> RawChunk:
        entries, finish = choice.get("logprobs") or {}, choice.get("finish_reason")
        if finish is not None and finish not in _FINISHES:
            raise EngineError(f"{self.client.url} ended a stream with {finish!r}")
        tokens, logprobs = entries.get("tokens") or (), entries.get("token_logprobs") or ()
        if choice.get("text") and not tokens:
            raise EngineError(f"{self.client.url} sent text without logprobs")
        tops = None
        if count:
            # vLLM adds the sampled token even if it is not among the likeliest.
            ranked = (sorted(each.items(), key=lambda top: -top[1]) for each in entries.get("top_logprobs") or ())
            tops = tuple(tuple((_id(token), value) for token, value in each[:count]) for each in ranked)
        return RawChunk([_id(token) for token in tokens], logprobs, finish, tops)

    async def _model(self) -> tuple[str, int | None]:
        """The name of the model, and its context length."""
        if self._model_info is None:
            models = (await self.client.get("/v1/models"))["data"]
            name = self.config.model or models[0]["id"]
            model = next((model for model in models if model["id"] == name), None)
            if model is None:
                raise EngineError(f"{self.client.url} does not serve {name!r}, but {[m['id'] for m in models]}")
            self.max_context = model.get("max_model_len")
            self._model_info = name, self.max_context
        return self._model_info

    async def _require_processed_logprobs(self, model: str, ids: Sequence[int]) -> None:
        """EngineError unless logprobs are of the distribution sampled from: with top-k 1, they are all 0."""
        if self._processed_logprobs is None:
            body = {"model": model, "prompt": ids[-_PROBED_TOKENS:], "max_tokens": _PROBED_TOKENS, "ignore_eos": True}
            answer = await self.client.post("/v1/completions", {**body, "temperature": 1.0, "top_k": 1, "logprobs": 0})
            logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
            self._processed_logprobs = all(logprob > -1e-6 for logprob in logprobs)
        if not self._processed_logprobs:
            raise BadSampling(
                f"{self.client.url} reports logprobs from before temperature, top-p, top-k and min-p. "
                "Start it with --logprobs-mode processed_logprobs, or sample with temperature 1 and none of the others"
            )

    async def put_weights(self, directory: Path) -> None:
        try:
            await self.client.post("/pause?mode=abort&clear_cache=true", {})
        except EngineError as error:
            raise EngineError(f"{error}. Was vLLM started with VLLM_SERVER_DEV_MODE=1?") from error
        try:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
            await self.client.post("/collective_rpc", reload)
            await self.client.post("/resume", {})
        except EngineError as error:
            raise self.broken(error) from error
        try:
            await self.client.post("/update_weight_version", {"new_version": str(directory)})
            self._can_mark_weights = True
        except EngineError:  # older versions have no such route
            self._can_mark_weights = False

    async def weights_id(self) -> Any:
        return await self.client.get("/weight_info") if self._can_mark_weights else await super().weights_id()


def _steering(sampling: Sampling) -> dict[str, Any]:
    """The fields for bias and guided decoding."""
    fields: dict[str, Any] = {}
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if (guide := sampling.guide) is not None:
        value = orjson.loads(guide.value) if guide.kind in ("json", "choice") else guide.value
        fields["structured_outputs"] = {guide.kind: value}
    return fields


def _id(token: Any) -> Any:
    """The number in `token_id:7`; anything else is returned as it is, and later refused as an id."""
    number = str(token).removeprefix("token_id:")
    return int(number) if number != token and number.isdecimal() else token
