"""A turn of the policy: the draft while it is sampled, the deltas that a stream shows, the result, and engine time."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from loopwright.core.episode import Node, Span
from loopwright.core.task import Message
from loopwright.engines.base import Chunk, EngineError, Sampling, Tops
from loopwright.gateway.sessions.exactness import EXACT, Verdict
from loopwright.gateway.sessions.turn_options import PLAIN, TurnOptions


@dataclass(frozen=True, slots=True)
class Delta:
    """What a stream adds: text, reasoning, or more of the tool call `index`. `id` and `name` come first, once.

    A delta may be empty except for its tokens, such as the end of a turn.
    """

    text: str = ""
    index: int | None = None
    """The tool call that this belongs to; None for text."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    reasoning: str = ""
    ids: tuple[int, ...] = ()
    """The tokens that it stands for. The deltas of a turn together contain all of its tokens, in order."""
    logprobs: tuple[float, ...] = ()
    tops: Tops | None = None
    """The most likely tokens at each position, if the engine was asked for them."""


class Turn(NamedTuple):  # created faster than a dataclass
    """What the policy sampled, as a message and as tokens."""

    message: Message
    finish: str
    node: int
    prompt_tokens: int
    sampled_tokens: int
    malformed: tuple[str, ...] = ()
    """Tool calls in it that cannot be parsed."""
    ids: tuple[int, ...] = ()
    """The tokens that were sampled, including the end of the turn, and their logprobs."""
    logprobs: tuple[float, ...] = ()
    stopped_by: str | None = None
    """The stop string that ended it."""
    tops: Tops | None = None
    """The most likely tokens at each position, if the engine was asked for them."""
    hidden: tuple[int, int] = (0, 0)
    """Characters of reasoning and of text that the client wrote itself."""
    cached_tokens: int = 0
    """Tokens of the prompt that the engine did not have to compute."""
    prompt_ids: tuple[int, ...] = ()
    """What the engine was given, for clients that ask for it."""

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """The tool calls of the message."""
        return self.message.get("tool_calls") or ()

    @property
    def text(self) -> str:
        """The text of the message, without what the client wrote itself."""
        return str(self.message["content"] or "")[self.hidden[1] :]

    @property
    def reasoning(self) -> str:
        """The reasoning of the message, without what the client wrote itself."""
        return str(self.message.get("reasoning_content") or "")[self.hidden[0] :]


@dataclass(slots=True, eq=False)
class Draft:
    """A turn with a place in the graph, and what was sampled of it so far. An interrupted draft can be continued."""

    node: int
    parent: int
    prompt: Sequence[int]
    prompt_tokens: int
    opening: tuple[int, ...]
    """The end of the prompt, which belongs to this turn's node."""
    sampling: Sampling
    seed: str
    verdict: Verdict = EXACT
    """The exactness of its prompt, which is the turn's if sampling succeeds."""
    options: TurnOptions = PLAIN
    reserved: int = 0
    """Tokens of the session's budget that are reserved for it."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[tuple[tuple[int, float], ...]] | None = None
    """The most likely tokens at each position; not stored."""
    cached_tokens: int = 0
    """Tokens of the prompt that the engine did not have to compute; not stored."""
    spans: list[Span] = field(default_factory=list)
    sampled: int = 0
    """How many tokens were sampled; those of a finished turn are in its node only."""
    first_node: int | None = None
    """The first node that it added to the graph; None if it was restored from a store."""
    reshapes: Mapping[str, Any] = field(default_factory=dict)
    """Those of its sampling, which take a while to collect."""

    @property
    def remaining(self) -> int:
        """How many more tokens it may have."""
        return self.sampling.max_tokens - len(self.ids)

    def add(self, chunk: Chunk, count: int) -> None:
        """Append the first tokens of a chunk; a span grows while the version stays the same."""
        start = len(self.opening) + len(self.ids)
        stop = start + count
        if self.spans and self.spans[-1].version == chunk.version:
            start = self.spans.pop().start
        if start < stop:
            self.spans.append(Span(start, stop, chunk.version))
        if chunk.tops is not None or self.tops is not None:
            self.tops = [*(self.tops or [()] * len(self.ids)), *(chunk.tops or [()] * count)[:count]]
        self.ids += chunk.ids[:count]
        self.logprobs += chunk.logprobs[:count]
        self.sampled += count

    def as_node(self, message: Message, finish: str) -> Node:
        """The node that records it."""
        logprobs = (0.0,) * len(self.opening) + tuple(self.logprobs)
        ids = self.opening + tuple(self.ids)
        return Node(self.parent, message, ids, logprobs, tuple(self.spans), finish, self.reshapes)


def check_chunk(chunk: Chunk) -> None:
    """EngineError unless each token has a finite logprob: one too few would shift all that follow."""
    if len(chunk.ids) != len(chunk.logprobs):
        raise EngineError(f"the engine returned {len(chunk.ids)} ids but {len(chunk.logprobs)} logprobs")
    if chunk.tops is not None and len(chunk.tops) != len(chunk.ids):
        raise EngineError(f"the engine returned {len(chunk.ids)} ids but {len(chunk.tops)} lists of alternatives")
    try:
        if math.isfinite(sum(chunk.logprobs)):  # faster than to check each of them
            return
    except TypeError:
        pass
    for logprob in chunk.logprobs:
        if not isinstance(logprob, float | int) or not math.isfinite(logprob):
            raise EngineError(f"the engine returned {logprob} as a logprob")


class EngineWait:
    """Engine time: how long a session could do nothing but wait for its engine, which is never the policy's fault.

    That is the time in which turns were sampled or queued, and no tool or command ran on the policy's behalf.
    Concurrent turns count once, so nobody gains time by asking twice.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        """When the current wait began, on the event loop's clock; None if the session does not wait."""
        self.on_change: Callable[[], None] | None = None
        """Called when a wait begins or ends."""
        self._turns = self._tasks = 0
        self._total_s = 0.0

    def total_s(self, now: float) -> float:
        """Seconds so far, including the current wait."""
        return self._total_s + (0.0 if self.since is None else now - self.since)

    def count(self, phase: str, change: int, now: float) -> None:
        """Start (1) or end (-1) a phase: `generate` waits for the engine, others are work of the policy's choice."""
        if phase == "generate":
            self._turns += change
        else:
            self._tasks += change
        is_waiting = self._turns > 0 and not self._tasks
        if is_waiting is (self.since is not None):
            return
        if self.since is not None:
            self._total_s += now - self.since
        self.since = now if is_waiting else None
        if self.on_change is not None:
            self.on_change()
