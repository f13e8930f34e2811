"""SGLang's server: prompts as ids to `/generate`. Experimental: tested against its documented wire format only.

Its logprobs include the temperature, but not top-p, top-k and min-p: requests with those are refused. Seeds take effect
if the server was started with `--enable-deterministic-inference`.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar, Literal

from loopwright.engines.base import BadSampling, ContextFull, EngineConfig, EngineError, Sampling
from loopwright.engines.http.base import HttpConfig, HttpEngine, RawChunk

_FINISHES = ("stop", "length", "abort")


class SglangConfig(HttpConfig):
    """An SGLang server; experimental."""

    type: Literal["sglang"] = "sglang"


class SglangEngine(HttpEngine):
    """Samples from an SGLang server; experimental."""

    Config: ClassVar[type[EngineConfig]] = SglangConfig
    config: SglangConfig

    async def sample(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[RawChunk, None]:
        if not sampling.greedy and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0):
            raise BadSampling(
                f"{self.client.url}: SGLang reports logprobs from before top-p, top-k and min-p. Sample without them"
            )
        limit = sampling.max_tokens
        while True:
            try:
                async with aclosing(self._generate(ids, sampling, seed, limit)) as raw_chunks:
                    async for raw in raw_chunks:
                        yield raw
                return
            except ContextFull as error:
                if (space := error.limit - len(ids)) <= 0 or space >= limit:
                    raise
                limit = space  # SGLang refuses a limit beyond its context length; ask for as many tokens as fit

    async def _generate(
        self, ids: Sequence[int], sampling: Sampling, seed: int, max_tokens: int
    ) -> AsyncGenerator[RawChunk, None]:
        body = {
            "input_ids": ids,
            "sampling_params": {
                "max_new_tokens": max_tokens,
                "temperature": 0.0 if sampling.greedy else sampling.temperature,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "sampling_seed": seed,
                "stop_token_ids": sorted(self.stop_ids),
                "no_stop_trim": True,
            },
            "return_logprob": True,
            "top_logprobs_num": sampling.top_logprobs,
            "stream": True,
        }
        count = 0
        async with aclosing(self.client.events("/generate", body, prompt_tokens=len(ids))) as events:
            async for event in events:
                raw = self._raw_chunk(event["meta_info"], count, sampling.top_logprobs, len(ids))
                count += len(raw.ids)
                yield raw

    def _raw_chunk(self, info: dict[str, Any], before: int, top_logprobs: int, prompt_tokens: int) -> RawChunk:
        """The new tokens of an event. Depending on the server's flags, events list all tokens so far, or new ones."""
        reason = info.get("finish_reason") or {}
        finish = reason.get("type")
        if finish is not None and (finish not in _FINISHES or reason.get("status_code")):
            raise self.client.refusal(f"{self.client.url} ended a stream", str(reason).encode(), prompt_tokens)
        entries, count = info.get("output_token_logprobs") or [], info["completion_tokens"]
        if len(entries) not in (count, count - before):
            raise EngineError(f"{self.client.url} sent {count} ids but {len(entries)} logprobs")
        new = entries[len(entries) - (count - before) :]
        tops = None
        if top_logprobs:
            positions = (info.get("output_top_logprobs") or [])[-len(new) :] if new else []
            tops = tuple(tuple((each[1], each[0]) for each in position) for position in positions)
        return RawChunk([entry[1] for entry in new], [entry[0] for entry in new], finish, tops)

    async def put_weights(self, directory: Path) -> None:
        await self.client.post("/pause_generation", {"mode": "abort"})
        try:
            answer = await self.client.post("/update_weights_from_disk", {"model_path": str(directory)})
            if not answer.get("success"):
                raise EngineError(f"{self.client.url} refused the weights: {answer.get('message')}")
            await self.client.post("/continue_generation", {})
        except EngineError as error:
            raise self.broken(error) from error
