"""vLLM's server: prompts as ids to `/v1/completions`, weights by its routes for reinforcement learning.

Start it with `--logprobs-mode processed_logprobs`, or its logprobs are those of another distribution than the one that
was sampled from as soon as a temperature, top-p, top-k or min-p is set; such requests are refused then. Weights can be
changed while it runs if it was started with `VLLM_SERVER_DEV_MODE=1`.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar, Literal

from loopwright.engines.base import BadSampling, ContextFull, EngineConfig, EngineError, Sampling
from loopwright.engines.http.base import HttpConfig, HttpEngine, RawChunk, greedy

_PROBED_TOKENS = 4
_FINISHES = ("stop", "length", "abort")


class VllmConfig(HttpConfig):
    """A vLLM server."""

    type: Literal["vllm"] = "vllm"
    model: str | None = None
    """The name that the server has for its model; its first one by default."""


class VllmEngine(HttpEngine):
    """Speaks ids to a vLLM server."""

    Config: ClassVar[type[EngineConfig]] = VllmConfig
    config: VllmConfig

    def __init__(self, config: VllmConfig, home: Path) -> None:
        super().__init__(config, home)
        self._served: tuple[str, int | None] | None = None
        self._processed: bool | None = None
        self._marks = False

    async def sample(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[RawChunk, None]:
        model, limit = await self._model()
        if limit is not None and len(ids) >= limit:
            raise ContextFull(limit, len(ids))
        if sampling.reshapes and not greedy(sampling):
            await self._refuse_raw(model, ids)
        body = {
            "model": model,
            "prompt": ids,
            "seed": seed,
            # It refuses to begin what it could not finish.
            "max_tokens": sampling.max_tokens if limit is None else min(sampling.max_tokens, limit - len(ids)),
            "temperature": 0.0 if greedy(sampling) else sampling.temperature,
            "top_p": 1.0 if greedy(sampling) else sampling.top_p,
            "top_k": 0 if greedy(sampling) else sampling.top_k,
            "min_p": 0.0 if greedy(sampling) else sampling.min_p,
            # The model's own generation config may set these.
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": sorted(self.stop_ids),
            "logprobs": sampling.top_logprobs,
            # Ids in the list of logprobs, which unlike `return_token_ids` does not send the prompt back.
            "return_tokens_as_token_ids": True,
            "stream": True,
        }
        async with aclosing(self.client.events("/v1/completions", body, prompt_tokens=len(ids))) as events:
            async for event in events:
                for choice in event.get("choices") or ():
                    yield self._piece(choice, sampling.top_logprobs)

    def _piece(self, choice: dict[str, Any], most: int) -> RawChunk:
        listed, finish = choice.get("logprobs") or {}, choice.get("finish_reason")
        if finish is not None and finish not in _FINISHES:
            raise EngineError(f"{self.client.url} ended a stream with {finish!r}")
        tokens, logprobs = listed.get("tokens") or (), listed.get("token_logprobs") or ()
        if choice.get("text") and not tokens:
            raise EngineError(f"{self.client.url} sent text without logprobs")
        tops = tuple(_likeliest(each, most) for each in listed.get("top_logprobs") or ()) if most else None
        return RawChunk([_id(token) for token in tokens], logprobs, finish, tops)

    async def _model(self) -> tuple[str, int | None]:
        """The name of the model, and how many tokens it can hold."""
        if self._served is None:
            models = (await self.client.get("/v1/models"))["data"]
            wanted = self.config.model or models[0]["id"]
            found = next((model for model in models if model["id"] == wanted), None)
            if found is None:
                raise EngineError(f"{self.client.url} serves no model {wanted!r}, but {[m['id'] for m in models]}")
            self._served = wanted, found.get("max_model_len")
        return self._served

    async def _refuse_raw(self, model: str, ids: Sequence[int]) -> None:
        """EngineError unless the server tells the logprobs of what it samples from: of one candidate, that is 0."""
        if self._processed is None:
            body = {"model": model, "prompt": ids[-_PROBED_TOKENS:], "max_tokens": _PROBED_TOKENS, "ignore_eos": True}
            told = await self.client.post("/v1/completions", {**body, "temperature": 1.0, "top_k": 1, "logprobs": 0})
            self._processed = all(each > -1e-6 for each in told["choices"][0]["logprobs"]["token_logprobs"])
        if not self._processed:
            raise BadSampling(
                f"{self.client.url} tells logprobs from before temperature, top-p, top-k and min-p. "
                "Start it with --logprobs-mode processed_logprobs, or sample with temperature 1 and nothing else"
            )

    async def put_weights(self, directory: Path) -> None:
        try:
            await self.client.post("/pause?mode=abort&clear_cache=true", {})
        except EngineError as error:
            raise EngineError(f"{error}. Is the server of vLLM started with VLLM_SERVER_DEV_MODE=1?") from error
        try:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
            await self.client.post("/collective_rpc", reload)
            await self.client.post("/resume", {})
        except EngineError as error:
            raise self.broken(error) from error
        try:
            await self.client.post("/update_weight_version", {"new_version": str(directory)})
            self._marks = True
        except EngineError:  # older ones cannot be marked
            self._marks = False

    async def held(self) -> Any:
        return await self.client.get("/weight_info") if self._marks else await super().held()


def _id(token: Any) -> Any:
    """The number in `token_id:7`; what is none stays what it is, and is refused as an id."""
    number = str(token).removeprefix("token_id:")
    return int(number) if number != token and number.isdecimal() else token


def _likeliest(told: dict[str, float], most: int) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens; what was sampled is told even if it is none of them."""
    return tuple(sorted(((_id(token), value) for token, value in told.items()), key=lambda each: -each[1])[:most])
