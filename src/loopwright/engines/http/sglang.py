"""SGLang's server: prompts as ids to `/generate`. Experimental: tested against its documented wire format only.

It tells logprobs after the temperature, but before top-p, top-k and min-p: requests with those are refused. Seeds count
if the server was started with `--enable-deterministic-inference`.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar, Literal

from loopwright.engines.base import BadSampling, ContextFull, EngineConfig, EngineError, Sampling
from loopwright.engines.http.base import HttpConfig, HttpEngine, RawChunk, greedy, truncates

_FINISHES = ("stop", "length", "abort")


class SglangConfig(HttpConfig):
    """A server of SGLang; experimental."""

    type: Literal["sglang"] = "sglang"


class SglangEngine(HttpEngine):
    """Speaks ids to SGLang's server; experimental."""

    Config: ClassVar[type[EngineConfig]] = SglangConfig
    config: SglangConfig

    async def sample(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[RawChunk, None]:
        if truncates(sampling):
            raise BadSampling(
                f"{self.client.url}: SGLang tells logprobs from before top-p, top-k and min-p. Sample without them"
            )
        most = sampling.max_tokens
        try:
            async with aclosing(self._asked(ids, sampling, seed, most)) as pieces:
                async for piece in pieces:
                    yield piece
        except ContextFull as error:
            if (room := error.limit - len(ids)) <= 0 or room >= most:
                raise
            # It refuses to begin what it could not finish; we want as much as there is room for.
            async with aclosing(self._asked(ids, sampling, seed, room)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _asked(
        self, ids: Sequence[int], sampling: Sampling, seed: int, most: int
    ) -> AsyncGenerator[RawChunk, None]:
        body = {
            "input_ids": ids,
            "sampling_params": {
                "max_new_tokens": most,
                "temperature": 0.0 if greedy(sampling) else sampling.temperature,
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
        seen = 0
        async with aclosing(self.client.events("/generate", body, prompt_tokens=len(ids))) as events:
            async for event in events:
                facts = event["meta_info"]
                piece = self._piece(facts, seen, sampling.top_logprobs, len(ids))
                seen += len(piece.ids)
                yield piece

    def _piece(self, facts: dict[str, Any], seen: int, most: int, prompt: int) -> RawChunk:
        """What is new in an event, which tells of all tokens so far, or of the new ones, as the server was started."""
        reason = facts.get("finish_reason") or {}
        finish = reason.get("type")
        if finish is not None and (finish not in _FINISHES or reason.get("status_code")):
            raise self.client.refusal(f"{self.client.url} ended a stream", str(reason).encode(), prompt)
        listed, count = facts.get("output_token_logprobs") or [], facts["completion_tokens"]
        if len(listed) not in (count, count - seen):
            raise EngineError(f"{self.client.url} gave {count} ids but {len(listed)} logprobs")
        new = listed[len(listed) - (count - seen) :]
        tops = None
        if most:
            told = (facts.get("output_top_logprobs") or [])[-len(new) :] if new else []
            tops = tuple(tuple((each[1], each[0]) for each in place) for place in told)
        return RawChunk([entry[1] for entry in new], [entry[0] for entry in new], finish, tops)

    async def put_weights(self, directory: Path) -> None:
        await self.client.post("/pause_generation", {"mode": "abort"})
        try:
            told = await self.client.post("/update_weights_from_disk", {"model_path": str(directory)})
            if not told.get("success"):
                raise EngineError(f"{self.client.url} did not take the weights: {told.get('message')}")
            await self.client.post("/continue_generation", {})
        except EngineError as error:
            raise self.broken(error) from error
