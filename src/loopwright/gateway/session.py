"""A session: one agent's conversation with an engine. It alone renders messages, splices sampled ids and records."""

import asyncio
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from loopwright.core.episode import ROOT, Attempt, Episode, Node, Span
from loopwright.core.errors import LoopwrightError
from loopwright.core.outcome import FAULT_OF, Fault, Outcome
from loopwright.core.task import Message, Task
from loopwright.engines.base import Chunk, Engine, EngineError, Sampling
from loopwright.gateway.template import ChatML, Parsed, Template, Tool, calls_of, text_of


class BudgetSpent(LoopwrightError, RuntimeError):
    """The session may sample no more: its turns or tokens are used up, which is the policy's own doing."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a session may use; None for no limit."""

    turns: int | None = None
    tokens: int | None = None
    """Sampled tokens, over all turns."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One call and what came of it."""

    message: Message
    finish: str
    node: int
    prompt_tokens: int
    sampled_tokens: int
    malformed: tuple[str, ...] = ()
    """Tool calls in it that nobody can read."""

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """The tool calls of the message."""
        return self.message.get("tool_calls") or ()

    @property
    def text(self) -> str:
        """The text of the message."""
        return str(self.message["content"] or "")


@dataclass(slots=True)
class _Speech:
    """A turn as it is being sampled."""

    parent: int
    opening: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        """Take in sampled tokens; a span grows as long as the version stays."""
        start = len(self.opening) + len(self.ids)
        stop = start + len(chunk.ids)
        if self.spans and self.spans[-1].version == chunk.version:
            start = self.spans.pop().start
        if start < stop:
            self.spans.append(Span(start, stop, chunk.version))
        self.ids += chunk.ids
        self.logprobs += chunk.logprobs

    def node(self, message: Message, finish: str) -> Node:
        """What is recorded of it."""
        logprobs = (*[0.0] * len(self.opening), *self.logprobs)
        return Node(self.parent, message, (*self.opening, *self.ids), logprobs, tuple(self.spans), finish)


class Session:
    """Turns messages into a turn of the policy, and keeps the message graph.

    Messages that were seen before are found again, so that only new ones are rendered and what was sampled is never
    tokenised a second time. A conversation that begins or goes on otherwise is a branch of its own.
    """

    def __init__(
        self,
        engine: Engine,
        sampling: Sampling,
        *,
        seed: str,
        limits: Limits = Limits(),  # noqa: B008  frozen
        template: Template | None = None,
    ) -> None:
        self.engine, self.sampling, self.limits = engine, sampling, limits
        self._seed, self._template = seed, template or ChatML(engine.tokenizer)
        self._nodes: list[Node] = [ROOT]
        self._children: dict[tuple[int, str], list[int]] = {}
        self._speeches: dict[int, _Speech] = {}
        self._turns = self._spent = 0
        self.phases_s: dict[str, float] = {}
        """Seconds per phase so far: `generate`, and what a loop adds with `phase`."""
        self.last_token_at: float | None = None
        """When the engine last gave a token, on the event loop's clock."""
        self.cut: tuple[str, float, float] | None = None
        """The phase that was last cut short: its name, when it began, and when it ended."""

    async def turn(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, sampling: Sampling | None = None
    ) -> Turn:
        """What the policy says after these messages. BudgetSpent if it may not, EngineError if the engine fails."""
        if not messages:
            raise ValueError("a turn needs at least one message")
        sampling = self._within(sampling or self.sampling)
        parent = self._place(messages, tools)
        before = [token for index in self._path(parent) for token in self._nodes[index].ids]
        speech = _Speech(parent, (*self._closing(parent), *self._template.opening()))
        prompt = [*before, *speech.opening]
        node = len(self._nodes)
        self._nodes.append(speech.node(_SILENCE, "cut"))  # its place, whatever comes meanwhile
        self._speeches[node] = speech
        self._turns += 1
        self._spent += sampling.max_tokens
        finish, parsed = "cut", Parsed(_SILENCE)
        try:
            with self.phase("generate"):
                finish = await self._speak(speech, prompt, sampling, f"{self._seed}:{node}")
        finally:
            # Whatever was sampled is kept, also when this call ends here: it is a branch that leads no further.
            self._spent -= sampling.max_tokens - len(speech.ids)
            self._nodes[node] = speech.node(_SILENCE, finish)
            del self._speeches[node]
            parsed = self._template.parse(speech.ids, call_id=f"call_{node}")
            self._nodes[node] = replace(self._nodes[node], message=parsed.message)
        self._children.setdefault((parent, _key(parsed.message)), []).append(node)
        return Turn(_copied(parsed.message), finish, node, len(prompt), len(speech.ids), parsed.malformed)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds within as those of a phase, such as `tools`: what the policy had done on its behalf."""
        clock = asyncio.get_running_loop().time
        begun = clock()
        try:
            yield
        except asyncio.CancelledError:
            self.cut = name, begun, clock()
            raise
        finally:
            self.phases_s[name] = self.phases_s.get(name, 0.0) + clock() - begun

    def episode(
        self, task: Task, outcome: Outcome = Outcome.OK, *, fault: Fault | None = None, reason: str = ""
    ) -> Episode:
        """Everything that was recorded, as an episode that is yet to be judged."""
        nodes = list(self._nodes)
        for node, speech in self._speeches.items():  # turns that nobody waited for: what they have said by now
            nodes[node] = speech.node(self._template.parse(speech.ids, call_id=f"call_{node}").message, "cut")
        reason = reason.encode("utf-8", "replace").decode()
        attempt = Attempt(0.0, dict(self.phases_s), outcome, reason)
        return Episode(task, tuple(nodes), outcome, fault or FAULT_OF.get(outcome), reason, attempts=(attempt,))

    # -- the graph ----------------------------------------------------------------------------------------------

    def _place(self, messages: Sequence[Message], tools: Sequence[Tool]) -> int:
        """The node of the last message; those that are not known yet are rendered and added."""
        # The first message is rendered with the tools: with other tools it is another message.
        keys = [_key(message) for message in messages]
        keys[0] += json.dumps(tools, sort_keys=True) if tools else ""
        node, known = self._known(keys)
        copies = [_copied(message) for message in messages[known:]]
        for message, key in zip(copies, keys[known:], strict=True):
            first = node == 0
            ids = (*self._closing(node), *self._template.render(message, first=first, tools=tools if first else ()))
            self._children[node, key] = [len(self._nodes)]
            self._nodes.append(Node(node, message, ids, (0.0,) * len(ids)))
            node = len(self._nodes) - 1
        return node

    def _known(self, keys: Sequence[str]) -> tuple[int, int]:
        """The node that these messages lead to as far as they are known, and how many are.

        A policy may say the same twice: then the one of them from which the conversation went on, else the latest.
        """
        nodes = [0]
        for count, key in enumerate(keys):
            found = [child for node in nodes for child in self._children.get((node, key), ())]
            if not found:
                return nodes[-1], count
            nodes = found
        return nodes[-1], len(keys)

    def _closing(self, index: int) -> list[int]:
        """The ids between a node and the message after it."""
        node = self._nodes[index]
        return [] if node.finish is None else self._template.closing(node.ids[len(node.ids) - node.sampled :])

    def _path(self, node: int) -> list[int]:
        path = []
        while node:
            path.append(node)
            node = self._nodes[node].parent or 0
        return path[::-1]

    # -- the engine ---------------------------------------------------------------------------------------------

    def _within(self, sampling: Sampling) -> Sampling:
        """The sampling that the budget allows; what turns under way may still use counts as used."""
        if self.limits.turns is not None and self._turns >= self.limits.turns:
            raise BudgetSpent(f"all {self.limits.turns} turns are used up")
        if self.limits.tokens is None:
            return sampling
        left = self.limits.tokens - self._spent
        if left <= 0:
            raise BudgetSpent(f"all {self.limits.tokens} tokens are used up")
        return sampling.model_copy(update={"max_tokens": min(left, sampling.max_tokens)})

    async def _speak(self, speech: _Speech, prompt: list[int], sampling: Sampling, seed: str) -> str:
        """Sample until the turn ends, and say why it did; a pause in between only begins a new span."""
        clock = asyncio.get_running_loop().time
        while (left := sampling.max_tokens - len(speech.ids)) > 0:
            finish = None
            rest = sampling.model_copy(update={"max_tokens": left}) if speech.ids else sampling
            async with aclosing(self.engine.generate(prompt + speech.ids, rest, seed=seed)) as stream:
                async for chunk in stream:
                    _check(chunk)
                    speech.add(chunk)
                    if chunk.ids:
                        self.last_token_at = clock()
                    finish = chunk.finish
            if finish is None:
                raise EngineError("the engine ended a turn without saying why")
            if finish != "abort":
                return finish
        return "length"


_SILENCE: Message = {"role": "assistant", "content": ""}


def _check(chunk: Chunk) -> None:
    """EngineError unless there is a number for every token: short by one, a row would train on the wrong tokens."""
    if len(chunk.ids) != len(chunk.logprobs):
        raise EngineError(f"the engine gave {len(chunk.ids)} ids but {len(chunk.logprobs)} logprobs")
    for logprob in chunk.logprobs:
        if not isinstance(logprob, float | int) or not math.isfinite(logprob):
            raise EngineError(f"the engine gave {logprob} as a logprob")


def _copied(message: Message) -> dict[str, Any]:
    """A message as plain data of our own, whatever its sender does to it later."""
    try:
        copy: dict[str, Any] = orjson.loads(orjson.dumps(message))
    except orjson.JSONEncodeError as error:
        raise ValueError(f"a message cannot be written as JSON: {error}") from error
    return copy


def _key(message: Message) -> str:
    """Equal for messages that say the same, whatever the white space and key order of their arguments."""
    if not isinstance(message.get("role"), str):
        raise ValueError("a message needs a role")
    return json.dumps((message["role"], text_of(message), calls_of(message)), sort_keys=True)
