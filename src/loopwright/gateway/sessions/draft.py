"""A turn that has its place in the graph, and is or will be sampled."""

import math
from dataclasses import dataclass, field
from itertools import filterfalse

from loopwright.core.episode import Node, Span
from loopwright.core.task import Message
from loopwright.engines.base import Chunk, EngineError, Sampling
from loopwright.gateway.sessions.exactness import Verdict
from loopwright.gateway.sessions.graph import Ids
from loopwright.gateway.sessions.manner import PLAIN, Manner


@dataclass(slots=True, eq=False)
class Draft:
    """What a turn was asked and has said so far; if it is given up, it can go on from here."""

    node: int
    parent: int
    prompt: Ids
    """Let go of once the turn has come to its end."""
    prompt_tokens: int
    opening: tuple[int, ...]
    """The end of the prompt: it belongs to this turn's node."""
    sampling: Sampling
    seed: str
    verdict: Verdict = Verdict()  # noqa: RUF009  frozen
    """What its prompt is worth, if the turn comes to its end."""
    manner: Manner = PLAIN
    reserved: int = 0
    """Tokens of the session's budget that it holds."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[tuple[tuple[int, float], ...]] | None = None
    """What else was likely at each token; a restart forgets it."""
    spans: list[Span] = field(default_factory=list)

    @property
    def left(self) -> int:
        """How many tokens it may still have."""
        return self.sampling.max_tokens - len(self.ids)

    def add(self, chunk: Chunk, kept: int) -> None:
        """Take in the first tokens of a chunk; a span grows as long as the version stays."""
        start = len(self.opening) + len(self.ids)
        stop = start + kept
        if self.spans and self.spans[-1].version == chunk.version:
            start = self.spans.pop().start
        if start < stop:
            self.spans.append(Span(start, stop, chunk.version))
        if chunk.tops is not None or self.tops is not None:
            self.tops = [*(self.tops or [()] * len(self.ids)), *(chunk.tops or [()] * kept)[:kept]]
        self.ids += chunk.ids[:kept]
        self.logprobs += chunk.logprobs[:kept]

    def as_node(self, message: Message, finish: str) -> Node:
        """What is recorded of it."""
        logprobs = (*[0.0] * len(self.opening), *self.logprobs)
        ids = (*self.opening, *self.ids)
        return Node(self.parent, message, ids, logprobs, tuple(self.spans), finish, self.sampling.reshapes)


def check(chunk: Chunk) -> None:
    """EngineError unless there is a number for every token: short by one, a row would train on the wrong tokens."""
    if len(chunk.ids) != len(chunk.logprobs):
        raise EngineError(f"the engine gave {len(chunk.ids)} ids but {len(chunk.logprobs)} logprobs")
    if chunk.tops is not None and len(chunk.tops) != len(chunk.ids):
        raise EngineError(f"the engine gave {len(chunk.ids)} ids but {len(chunk.tops)} lists of alternatives")
    try:
        sound = math.isfinite(sum(chunk.logprobs)) or all(map(math.isfinite, chunk.logprobs))
    except TypeError:
        sound = False
    if not sound:
        raise EngineError(f"the engine gave {next(filterfalse(_is_number, chunk.logprobs))} as a logprob")


def _is_number(logprob: object) -> bool:
    return isinstance(logprob, float | int) and math.isfinite(logprob)
