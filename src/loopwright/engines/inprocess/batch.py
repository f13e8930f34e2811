"""Continuous batching: requests join and leave between two steps of the model.

A step first processes prompts, a bounded number of tokens at a time, so that a long prompt delays the others only
briefly; then it samples one token for every running request. Prompts reuse the cached prefixes of other requests, and
requests with the same prompt share its computation.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from loopwright.engines.base import Chunk, Finish, Sampling
from loopwright.engines.inprocess.kv_cache import Rows, Shape
from loopwright.engines.inprocess.prefixes import Ids, Prefixes, common
from loopwright.engines.inprocess.sampler import Draw, likeliest, sample, steer
from loopwright.engines.tokenizer import Tokenizer, ends_with_stop

_PROMPT_TOKENS = 512
"""Prompt tokens that one step processes."""


class ChunkReader(Protocol):
    """Receives the chunks of a request."""

    def put_nowait(self, item: Chunk | Exception, /) -> None:
        """Receive a chunk, on the event loop."""
        ...


@dataclass(eq=False, slots=True)
class StreamRequest:
    """One stream: its prompt, and the tokens sampled so far."""

    prompt: Ids
    sampling: Sampling
    seed: str
    reader: ChunkReader
    sampled: list[int] = field(default_factory=list)
    is_steered: bool = False
    """Whether the sampling has a bias or a penalty."""
    cached_tokens: int = 0
    """Tokens of its prompt that were cached."""
    is_over: bool = False
    """It has finished, or its reader is gone."""

    def draw(self) -> Draw:
        """How its next token is sampled."""
        sampling, position = self.sampling, len(self.prompt) + len(self.sampled)
        if not self.is_steered:
            return Draw(sampling, self.seed, position)
        context = np.concatenate((self.prompt, np.asarray(self.sampled, dtype=np.int64)))
        return Draw(sampling, self.seed, position, context, sampling.sampled_before + len(self.sampled))


@dataclass(slots=True)
class _Prefill:
    """Prompts that are processed together, each for one or more requests."""

    rows: Rows
    requests: list[list[StreamRequest]]

    def next_ids(self) -> list[list[int]]:
        """The next prompt tokens of each row; there is more than one row only if all of them fit into a step."""
        chunks = []
        for row, (request, *_) in enumerate(self.requests):
            start = self.rows.lengths[row]
            chunks.append(request.prompt[start : start + _PROMPT_TOKENS].tolist())
        return chunks

    @property
    def done(self) -> bool:
        """Whether all prompts have been processed."""
        pairs = zip(self.rows.lengths, self.requests, strict=True)
        return all(length == len(requests[0].prompt) for length, requests in pairs)


class Batch:
    """All requests of an engine. Only one thread may use it at a time."""

    def __init__(
        self,
        model: Any,
        shape: Shape,
        tokenizer: Tokenizer,
        *,
        stop_ids: frozenset[int],
        max_batch: int,
        max_tokens: int,
        max_context: int,
        prefix_bytes: int,
    ) -> None:
        self.model, self._shape, self._tokenizer = model, shape, tokenizer
        self.stop_ids, self._max_context = stop_ids, max_context
        self._max_batch, self._max_tokens = max_batch, max_tokens
        self.prefixes = Prefixes(prefix_bytes)
        self._rows = Rows(model, shape)
        self._running: list[StreamRequest] = []
        self._prefill: _Prefill | None = None
        self.waiting: deque[StreamRequest] = deque()
        self.computed_tokens = 0
        """Tokens that the model has processed so far, without those from the prefix cache."""

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.waiting or self._prefill or self._running)

    def submit(self, prompt: Sequence[int], sampling: Sampling, seed: str, reader: ChunkReader) -> StreamRequest:
        """Queue a request; it joins the batch with the next step."""
        ids = np.asarray(prompt, dtype=np.int64)
        request = StreamRequest(ids, sampling, seed, reader, is_steered=bool(sampling.steering))
        self.waiting.append(request)
        return request

    @torch.inference_mode()
    def step(self, version: int) -> list[tuple[StreamRequest, Chunk]]:
        """Sample one token for each running request; returns the chunks by request."""
        results = []
        self._remove_finished()
        if self._prefill is None:
            self._prefill = self._next_prefill()
        if self._prefill is not None:
            results += self._process_prompts(self._prefill, version)
        if self._running:
            self.computed_tokens += len(self._running)
            logits = self._rows.forward([request.sampled[-1:] for request in self._running])
            results += self._sample(list(self._running), logits, version)
        return results

    def drain(self) -> Iterator[StreamRequest]:
        """Remove all requests; yields those that are not over."""
        waiting = [request for group in self._prefill.requests for request in group] if self._prefill else []
        yield from (request for request in (*self._running, *waiting, *self.waiting) if not request.is_over)
        self._running, self._prefill, self._rows = [], None, Rows(self.model, self._shape)
        self.waiting.clear()

    # -- joining ----------------------------------------------------------------------------------------------------

    def _next_prefill(self) -> _Prefill | None:
        """The oldest waiting prompts that fit into one step; a longer prompt is processed alone."""
        rows = Rows(self.model, self._shape)
        groups: dict[bytes, list[StreamRequest]] = {}
        longest = admitted = 0
        widest = max(map(self._most_tokens, self._running), default=0)
        while self.waiting and (busy := len(self._running) + admitted) < self._max_batch:
            request = self.waiting[0]
            widest = max(widest, self._most_tokens(request))
            if busy and (busy + 1) * widest > self._max_tokens:
                break
            key = request.prompt.tobytes()
            if request.is_over or key in groups:
                self.waiting.popleft()
                if not request.is_over:
                    request.cached_tokens = len(request.prompt)
                    groups[key].append(request)
                    admitted += 1
                continue
            length, memory = self._cached_prefix(request.prompt)
            request.cached_tokens = length
            longest = max(longest, len(request.prompt) - length)
            if groups and longest * (len(groups) + 1) > _PROMPT_TOKENS:
                break
            self.waiting.popleft()
            rows.add(memory)
            groups[key] = [request]
            admitted += 1
        return _Prefill(rows, list(groups.values())) if groups else None

    def _most_tokens(self, request: StreamRequest) -> int:
        """Its maximum length."""
        return min(self._max_context, len(request.prompt) + request.sampling.max_tokens)

    def _cached_prefix(self, prompt: Ids) -> tuple[int, Tensor | None]:
        """The longest cached prefix of a prompt, in finished and running requests; its last token is computed."""
        before = prompt[:-1]
        best, memory = self.prefixes.find(before)
        for row, request in enumerate(self._running):
            if (length := common(request.prompt, before)) > best:
                best, memory = length, self._rows.memory(row, length)
        return best, memory

    def _process_prompts(self, prefill: _Prefill, version: int) -> list[tuple[StreamRequest, Chunk]]:
        ids = prefill.next_ids()
        self.computed_tokens += sum(map(len, ids))
        logits = prefill.rows.forward(ids)
        if not prefill.done:
            return []
        self._prefill = None
        requests: list[StreamRequest] = []
        origins: list[int] = []
        self._rows.reserve(len(self._rows) + sum(map(len, prefill.requests)), max(prefill.rows.lengths))
        for row, group in enumerate(prefill.requests):
            for request in group:
                self._rows.add(prefill.rows.memory(row))
                requests.append(request)
                origins.append(row)
        self._running += requests
        return self._sample(requests, logits[origins], version)

    # -- sampling and leaving ---------------------------------------------------------------------------------------

    def _sample(
        self, requests: Sequence[StreamRequest], logits: Tensor, version: int
    ) -> list[tuple[StreamRequest, Chunk]]:
        """Sample the next token of each request."""
        results, draws = [], [request.draw() for request in requests]
        logits = steer(logits, draws)
        tokens = zip(requests, sample(logits, draws), likeliest(logits, draws), strict=True)
        for request, (token, logprob), tops in tokens:
            request.sampled.append(token)
            finish = self._finish(request)
            cached = request.cached_tokens if len(request.sampled) == 1 else 0
            results.append((request, Chunk((token,), (logprob,), version, finish, tops, cached)))
            request.is_over = request.is_over or finish is not None
        self._remove_finished()
        return results

    def _finish(self, request: StreamRequest) -> Finish | None:
        """Why it ends after its last token, if it does."""
        sampled, sampling = request.sampled, request.sampling
        if sampled[-1] in self.stop_ids or ends_with_stop(self._tokenizer, sampled, sampling.stop):
            return "stop"
        full = len(request.prompt) + len(sampled) >= self._max_context
        return "length" if full or len(sampled) >= sampling.max_tokens else None

    def _remove_finished(self) -> None:
        """Remove requests that are over, and add their tokens to the prefix cache."""
        for row in reversed(range(len(self._running))):
            request = self._running[row]
            if request.is_over:
                ids = np.concatenate((request.prompt, request.sampled))[: self._rows.lengths[row]]
                self.prefixes.add(ids, self._rows.memory(row))
                self._rows.remove(row)
                last = self._running.pop()
                if row < len(self._running):
                    self._running[row] = last
        if self._prefill and all(request.is_over for group in self._prefill.requests for request in group):
            self._prefill = None
