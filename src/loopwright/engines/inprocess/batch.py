"""The batch: requests that join and leave between two steps of the model, and what each of them gets.

A step first takes in prompts, a bounded number of tokens at a time, so that a long one holds up the others for a moment
only; then every running request gets its next token. Prompts begin with what is remembered of others, and requests with
the same prompt share its computation.
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
from loopwright.engines.inprocess.sampler import Draw, likeliest, sample
from loopwright.engines.stops import stopped
from loopwright.engines.tokenizer import Tokenizer

_PROMPT_TOKENS = 512
"""Tokens of prompts that one step takes in."""


class ChunkReader(Protocol):
    """Whoever gets the tokens of a request."""

    def put_nowait(self, item: Chunk | Exception, /) -> None:
        """Take them, on the event loop."""
        ...


@dataclass(eq=False, slots=True)
class StreamRequest:
    """One stream: what it was asked, and what it has said."""

    prompt: Ids
    sampling: Sampling
    seed: str
    reader: ChunkReader
    said: list[int] = field(default_factory=list)
    gone: bool = False
    """Nobody reads it any more."""

    def draw(self) -> Draw:
        """How its next token is sampled."""
        return Draw(self.sampling, self.seed, len(self.prompt) + len(self.said))


@dataclass(slots=True)
class _Intake:
    """Prompts that are being taken in together, each for one or more requests."""

    rows: Rows
    requests: list[list[StreamRequest]]

    def next_ids(self) -> list[list[int]]:
        """What each row takes in next; more than one row only if all of it fits into a step."""
        found = []
        for row, (request, *_) in enumerate(self.requests):
            start = self.rows.lengths[row]
            found.append(request.prompt[start : start + _PROMPT_TOKENS].tolist())
        return found

    @property
    def done(self) -> bool:
        """Whether all prompts have been taken in."""
        pairs = zip(self.rows.lengths, self.requests, strict=True)
        return all(length == len(requests[0].prompt) for length, requests in pairs)


class Batch:
    """All requests of an engine. Only one thread at a time may use it."""

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
        self._intake: _Intake | None = None
        self.waiting: deque[StreamRequest] = deque()
        self.computed_tokens = 0
        """Tokens that went through the model so far; those that were remembered did not."""

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.waiting or self._intake or self._running)

    @torch.inference_mode()
    def step(self, version: int) -> list[tuple[StreamRequest, Chunk]]:
        """Go on by one token; what each request got."""
        found = []
        self._part()
        if self._intake is None:
            self._intake = self._next_intake()
        if self._intake is not None:
            found += self._take_in(self._intake, version)
        if self._running:
            self.computed_tokens += len(self._running)
            logits = self._rows.forward([request.said[-1:] for request in self._running])
            found += self._sampled(list(self._running), logits, version)
        return found

    def drain(self) -> Iterator[StreamRequest]:
        """All requests, which leave; those that nobody reads any more are left out."""
        asked = [request for group in self._intake.requests for request in group] if self._intake else []
        yield from (request for request in (*self._running, *asked, *self.waiting) if not request.gone)
        self._running, self._intake, self._rows = [], None, Rows(self.model, self._shape)
        self.waiting.clear()

    # -- joining ----------------------------------------------------------------------------------------------------

    def _next_intake(self) -> _Intake | None:
        """The prompts that wait longest and fit into one step; a longer one goes alone."""
        rows = Rows(self.model, self._shape)
        groups: dict[bytes, list[StreamRequest]] = {}
        longest = taken = 0
        widest = max(map(self._most_tokens, self._running), default=0)
        while self.waiting and (busy := len(self._running) + taken) < self._max_batch:
            request = self.waiting[0]
            widest = max(widest, self._most_tokens(request))
            if busy and (busy + 1) * widest > self._max_tokens:
                break
            key = request.prompt.tobytes()
            if request.gone or key in groups:
                self.waiting.popleft()
                if not request.gone:
                    groups[key].append(request)
                    taken += 1
                continue
            length, memory = self._remembered(request.prompt)
            longest = max(longest, len(request.prompt) - length)
            if groups and longest * (len(groups) + 1) > _PROMPT_TOKENS:
                break
            self.waiting.popleft()
            rows.add(memory)
            groups[key] = [request]
            taken += 1
        return _Intake(rows, list(groups.values())) if groups else None

    def _most_tokens(self, request: StreamRequest) -> int:
        """How long it can become."""
        return min(self._max_context, len(request.prompt) + request.sampling.max_tokens)

    def _remembered(self, prompt: Ids) -> tuple[int, Tensor | None]:
        """What is known of the beginning of a prompt, of ended and running requests; its last token is always new."""
        before = prompt[:-1]
        best, memory = self.prefixes.find(before)
        for row, request in enumerate(self._running):
            if (length := common(request.prompt, before)) > best:
                best, memory = length, self._rows.memory(row, length)
        return best, memory

    def _take_in(self, intake: _Intake, version: int) -> list[tuple[StreamRequest, Chunk]]:
        ids = intake.next_ids()
        self.computed_tokens += sum(map(len, ids))
        logits = intake.rows.forward(ids)
        if not intake.done:
            return []
        self._intake = None
        joined: list[StreamRequest] = []
        origins: list[int] = []
        self._rows.reserve(len(self._rows) + sum(map(len, intake.requests)), max(intake.rows.lengths))
        for row, requests in enumerate(intake.requests):
            for request in requests:
                self._rows.add(intake.rows.memory(row))
                joined.append(request)
                origins.append(row)
        self._running += joined
        return self._sampled(joined, logits[origins], version)

    # -- going on and leaving ---------------------------------------------------------------------------------------

    def _sampled(
        self, requests: Sequence[StreamRequest], logits: Tensor, version: int
    ) -> list[tuple[StreamRequest, Chunk]]:
        """Give each request its next token."""
        found, draws = [], [request.draw() for request in requests]
        sampled = zip(requests, sample(logits, draws), likeliest(logits, draws), strict=True)
        for request, (token, logprob), tops in sampled:
            request.said.append(token)
            finish = self._finish(request)
            found.append((request, Chunk((token,), (logprob,), version, finish, tops)))
            request.gone = request.gone or finish is not None
        self._part()
        return found

    def _finish(self, request: StreamRequest) -> Finish | None:
        """Why it ends here, if it does."""
        said, sampling = request.said, request.sampling
        if said[-1] in self.stop_ids or stopped(self._tokenizer, said, sampling.stop):
            return "stop"
        full = len(request.prompt) + len(said) >= self._max_context
        return "length" if full or len(said) >= sampling.max_tokens else None

    def _part(self) -> None:
        """Let those go that have ended, or that nobody reads, and remember what they were about."""
        for row in reversed(range(len(self._running))):
            request = self._running[row]
            if request.gone:
                ids = np.concatenate((request.prompt, request.said))[: self._rows.lengths[row]]
                self.prefixes.add(ids, self._rows.memory(row))
                self._rows.remove(row)
                last = self._running.pop()
                if row < len(self._running):
                    self._running[row] = last
        if self._intake and all(request.gone for group in self._intake.requests for request in group):
            self._intake = None
