"""The message graph of a session: finds messages that are known, renders those that are not, and tells what parts."""

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

import orjson
from pydantic_core import from_json

from loopwright.core.episode import ROOT, Node
from loopwright.core.task import Message
from loopwright.gateway.sessions.exactness import Exactness, Verdict
from loopwright.gateway.sessions.manner import PLAIN, Manner
from loopwright.gateway.sessions.template import ChatTemplate, Tool, calls_of, text_of

Ids: TypeAlias = "array[int]"
"""All ids of a conversation, which are copied in every turn: as plain numbers, whose copy costs next to nothing."""
Key = tuple[str, str, str, str]
"""What a message is known by: role, text, calls (and tools, for the first one of a conversation) and reasoning."""

_SENT = 4
"""Conversations of a session that are recalled as they were sent."""
_EXACT = 2**53
_ANY = "\0"
"""The reasoning of a message that was sent without: it may have had any."""
RAW = "prompt"
"""The role of raw text to go on from, which no chat template touches."""


class Graph:
    """Nodes, and which messages lead from one to another.

    A conversation that begins or goes on otherwise is a branch of its own; what branches share is kept once. With
    `forks`, what the policy thought before the user last spoke is left out, as many families' templates do: from there
    on that is a branch, too. Otherwise it stays as it was sampled.
    """

    def __init__(self, template: ChatTemplate, *, forks: bool = False) -> None:
        self._forks = forks
        self.nodes: list[Node] = [ROOT]
        self.keys: dict[int, Key] = {}
        """How the message of a node is found again; turns that were given up are not."""
        self._template = template
        self._children: dict[tuple[int, Key], list[int]] = {}
        self._tools: tuple[Sequence[Tool], str] = ((), "")
        self._first: dict[int, list[int]] = {}
        self._latest: tuple[int, Ids] = (0, ids_of())
        self._sent: list[tuple[list[Message], list[Tool], list[int]]] = []

    def place(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[int, Verdict]:
        """The node of the last message; those that are not known yet are rendered and added."""
        if messages[0].get("role") == RAW:
            return self._placed(messages[0]["content"])
        if self._forks:
            messages = _forgotten(messages)
        sent, nodes = self._recalled(messages, tools)
        # Plain data of our own, whatever their sender does to them later.
        more = [copied(message) for message in messages[len(sent) :]]
        keys = [key_of(message) for message in more]
        if tools and not sent:
            # The first message is rendered with the tools: with other tools it is another message.
            role, text, calls, thought = keys[0]
            keys[0] = role, text, calls + self._written(tools), thought
        nodes, known = self._known(nodes, keys)
        node = found = nodes[-1]
        others = list(self._first.get(node, ()))
        thoughtless = known < len(keys) and keys[known][3] == "" and (node, (*keys[known][:3], _ANY)) in self._children
        for message, key in zip(more[known:], keys[known:], strict=True):
            first = node == 0
            written = self._template.render(message, first=first, tools=tools if first else ())
            ids = (*self.closing(node), *written)
            node = self.add(Node(node, message, ids, (0.0,) * len(ids)), key)
        known += len(sent)
        # Python takes 1, 1.0 and true for equal, which as arguments of a call they are not.
        if all(isinstance(call["function"].get("arguments"), str) for m in more for call in m.get("tool_calls") or ()):
            self._sent.insert(0, ([*sent, *more], list(tools), [node] if known < len(messages) else nodes))
            del self._sent[_SENT:]
        verdict = self._verdict(found, others, node, known, len(messages))
        if thoughtless:
            verdict = replace(verdict, reason=f"the reasoning of message {known + 1} is left out")
        return node, verdict

    def _placed(self, content: str | list[int]) -> tuple[int, Verdict]:
        """The node of raw text, which goes on from what is known as far as the ids are the same."""
        ids = self._template.plain(content)
        node = begun = 0
        while (child := self._raw_child(node, ids, begun)) is not None:
            node, begun = child, begun + len(self.nodes[child].ids)
        rest = tuple(ids[begun:])
        if not rest and self.nodes[node].finish is None:
            return node, Verdict()
        others = list(self._first.get(node, ()))
        shared = max((_shared(rest, self.nodes[other].ids) for other in others), default=0)
        forked = Verdict(Exactness.FORKED, "the text goes on otherwise than before", begun + shared)
        message = {"role": RAW, "content": rest if begun else content}
        return self.add(Node(node, copied(message), rest, (0.0,) * len(rest))), forked if others else Verdict()

    def _raw_child(self, node: int, ids: list[int], begun: int) -> int | None:
        """The longest node after this one with which the ids go on; turns that were given up are passed over."""
        best = None
        for child in self._first.get(node, ()):
            found = self.nodes[child]
            raw = found.message.get("role") == RAW or (found.finish in ("stop", "length") and node)
            if raw and found.ids and list(found.ids) == ids[begun : begun + len(found.ids)]:
                best = child if best is None or len(found.ids) >= len(self.nodes[best].ids) else best
        return best

    def _recalled(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[list[Message], list[int]]:
        """The messages that were sent just like these before, and where they lead: a turn costs what is new."""
        messages = list(messages)
        for index, (sent, with_tools, nodes) in enumerate(self._sent):
            if len(sent) <= len(messages) and messages[: len(sent)] == sent and list(tools) == with_tools:
                del self._sent[index]
                return sent, nodes
        return [], [0]

    def _written(self, tools: Sequence[Tool]) -> str:
        if tools != self._tools[0]:
            self._tools = tools, json.dumps(tools, sort_keys=True)
        return self._tools[1]

    def add(self, node: Node, key: Key | None = None) -> int:
        """A new node's number."""
        number = len(self.nodes)
        self.nodes.append(node)
        self._first.setdefault(node.parent or 0, []).append(number)
        if key is not None:
            self.know(number, key)
        return number

    def know(self, number: int, key: Key | None = None) -> None:
        """Let a node be found by its message from now on."""
        node = self.nodes[number]
        role, text, calls, thought = key_of(node.message) if key is None else key
        self.keys[number] = key = role, text, calls, "" if thought == _ANY else thought
        parent = node.parent or 0
        self._children.setdefault((parent, key), []).append(number)
        if role == "assistant":
            self._children.setdefault((parent, (role, text, calls, _ANY)), []).append(number)

    def let_go(self) -> None:
        """Keep the nodes alone, and nothing that helps to find them and to add more."""
        self.keys, self._children, self._first, self._tools = {}, {}, {}, ((), "")
        self._latest, self._sent = (0, ids_of()), []

    def closing(self, number: int) -> list[int]:
        """The ids between a node and the message after it."""
        node = self.nodes[number]
        return [] if node.finish is None else self._template.closing(node.ids[len(node.ids) - node.sampled :])

    def opening(self, number: int, manner: Manner = PLAIN) -> tuple[int, ...]:
        """The ids between a node and what the policy says after it."""
        if self.nodes[number].message.get("role") == RAW:
            return ()
        return (*self.closing(number), *self._template.opening(manner))

    def ids(self, number: int) -> Ids:
        """All ids up to the end of this node; to be copied, not kept. Costs what is new since the latest call."""
        path, (latest, known) = [], self._latest
        node = number
        while node and node != latest:
            path.append(node)
            node = self.nodes[node].parent or 0
        more = ids_of()
        for each in path[::-1]:
            more.extend(self.nodes[each].ids)
        if self.nodes[number].finish is not None:  # a turn under way may yet grow; a given message never does
            return known + more if node == latest else more
        if node == latest:
            known += more
        else:
            known = more
        self._latest = number, known
        return known

    def _known(self, nodes: list[int], keys: Sequence[Key]) -> tuple[list[int], int]:
        """The nodes that these messages lead to, from those before them, as far as they are known, and how many are.

        A policy may say the same twice: then the one of them from which the conversation went on, else the latest.
        """
        for count, key in enumerate(keys):
            found = [child for node in nodes for child in self._children.get((node, key), ())]
            if not found:
                return nodes, count
            nodes = found
        return nodes, len(keys)

    def _verdict(self, found: int, others: Sequence[int], node: int, known: int, count: int) -> Verdict:
        """How messages go on after the last known one, `found`, from which `others` went on before."""
        if known < count and others:
            new = self._child(found, node)
            shared = max(_shared(self.nodes[new].ids, self.nodes[other].ids) for other in others)
            said = f"message {known + 1} goes on otherwise than before" if found else "it begins another conversation"
            return Verdict(Exactness.FORKED, said, len(self.ids(found)) + shared)
        closing = self.closing(found)
        if closing and closing[0] == self._template.end_id:
            return Verdict(
                Exactness.BRIDGED, f"the end of node {found} was not sampled, but added", len(self.ids(found))
            )
        return Verdict()

    def _child(self, above: int, node: int) -> int:
        while (parent := self.nodes[node].parent or 0) != above:
            node = parent
        return node


def ids_of(ids: Iterable[int] = ()) -> Ids:
    """Ids, to be added to."""
    return array("q", ids)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two messages begin with in common."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def copied(message: Message) -> dict[str, Any]:
    """A message as plain data of our own, whatever its sender does to it later."""
    try:
        copy: dict[str, Any] = orjson.loads(orjson.dumps(message))
    except orjson.JSONEncodeError as error:
        raise ValueError(f"a message cannot be written as JSON: {error}") from error
    return copy


def _forgotten(messages: Sequence[Message]) -> list[Message]:
    """The messages, with what the policy thought before the user last spoke marked as left out."""
    last = max((index for index, message in enumerate(messages) if message.get("role") == "user"), default=0)
    return [
        {**message, "reasoning_content": ""} if index < last and message.get("role") == "assistant" else message
        for index, message in enumerate(messages)
    ]


def key_of(message: Mapping[str, Any]) -> Key:
    """Equal for messages that say the same, whatever the white space and key order of their arguments.

    Every message of a conversation comes by here in every turn: what is plain text is not written anew.
    """
    role = message.get("role")
    if not isinstance(role, str):
        raise ValueError("a message needs a role")
    text = text_of(message)
    calls = ""
    if message.get("tool_calls"):
        calls = json.dumps([(name, _same(_read(found))) for name, found in calls_of(message)], sort_keys=True)
    if role != "assistant":
        return role, text, calls, ""
    # Agents trim what the policy said before they send it back; its tokens are kept as they were.
    thought = message.get("reasoning_content")
    return role, text.strip(), calls, _ANY if thought is None else str(thought)


def _read(arguments: Any) -> Any:
    """Arguments that break off as far as they go: so clients read them that want an object at any price."""
    if isinstance(arguments, str):
        with suppress(ValueError):
            return from_json(arguments, allow_partial=True)
    return arguments


def _same(value: Any) -> Any:
    """Numbers as every client writes them back: 1.0 is 1, and integers that no double can hold are rounded to one."""
    if isinstance(value, dict):
        return {key: _same(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_same(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):
            value = float(value)
            return int(value) if value.is_integer() and abs(value) <= _EXACT else value
    return value
