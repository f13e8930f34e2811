"""verl's servers as an engine."""

import copy
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from loopwright.engines.base import Chunk, Engine, EngineConfig, EngineError, Finish, Sampling
from loopwright.engines.chat_template import ChatTemplateSource
from loopwright.engines.named_tokenizer import stop_ids
from loopwright.engines.tokenizer import HubTokenizer


class VerlEngine(Engine):
    """verl's servers as an engine: a turn is one call. verl itself pauses them and updates their weights."""

    def __init__(self, servers: Any, tokenizer: Any, config: EngineConfig) -> None:
        super().__init__(config, Path())
        self._servers, self._session = servers, ""
        template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
        source = None if template is None else ChatTemplateSource(template, tokens=tokenizer.special_tokens_map)
        self.tokenizer = HubTokenizer.from_text(tokenizer.backend_tokenizer.to_str(), source)
        self._stops = stop_ids(self.tokenizer, tokenizer.eos_token_id)

    def for_session(self, key: str) -> Self:
        """A copy with its own request id, by which verl routes all turns of a session to one server."""
        view = copy.copy(self)
        view._session = f"{key}-{uuid4().hex}"
        return view

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, seed: str) -> AsyncGenerator[Chunk, None]:
        params = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "max_tokens": sampling.max_tokens,
            "stop_token_ids": sorted(self._stops),
            "logprobs": True,
        }
        # Behind a relay there are no views; the seed of a turn starts with that of its session.
        request_id = self._session or seed.rpartition(":")[0] or uuid4().hex
        try:
            answer = await self._servers.generate(request_id, prompt_ids=list(ids), sampling_params=params)
        except Exception as error:  # whatever Ray or a server raises
            raise EngineError(f"verl's servers failed: {type(error).__name__}: {error}") from error
        tokens, logprobs = tuple(answer.token_ids), tuple(answer.log_probs or ())
        if len(tokens) != len(logprobs):
            raise EngineError(f"verl's servers sent {len(logprobs)} logprobs for {len(tokens)} tokens")
        version = int(answer.extra_fields.get("global_steps") or 0)
        finish: Finish = "stop" if tokens and tokens[-1] in self._stops else "length"
        if answer.stop_reason in ("aborted", "abort"):
            finish = "abort"
        yield Chunk(tokens, logprobs, version, finish)
