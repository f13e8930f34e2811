"""The message graph of a session: finds messages that it has, renders and adds new ones, and says where they differ."""

import json
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import orjson
from pydantic_core import from_json

from loopwright.core.episode import ROOT, Node
from loopwright.core.task import Message
from loopwright.gateway.sessions.exactness import Exactness, Verdict
from loopwright.gateway.sessions.template import ChatTemplate, calls_of, text_of
from loopwright.gateway.sessions.tool_calls import Tool
from loopwright.gateway.sessions.turn import Ids
from loopwright.gateway.sessions.turn_options import PLAIN, TurnOptions

Key = tuple[str, str, str, str]
"""What identifies a message: role, text, calls (and tools, for the first message of a conversation) and reasoning."""

_MAX_RECENT = 4
"""Conversations of a session that are remembered exactly as they were sent."""
_MAX_EXACT_INT = 2**53
_ANY = "\0"
"""The reasoning of a message that was sent without any: it matches every reasoning."""
RAW = "prompt"
"""The role of raw text to continue, to which no chat template is applied."""


class Graph:
    """Nodes, and which messages lead from one to another.

    A conversation that differs from what was recorded is a separate branch; what branches share is stored once. With
    `forks`, reasoning from before the last user message is removed from the prompt, as many families' templates do;
    that too starts a branch. Otherwise reasoning stays as it was sampled.
    """

    def __init__(self, template: ChatTemplate, *, forks: bool = False) -> None:
        self._forks = forks
        self.nodes: list[Node] = [ROOT]
        self.keys: dict[int, Key] = {}
        """How the message of a node is found again; interrupted turns have no key."""
        self._template = template
        self._by_key: dict[tuple[int, Key], list[int]] = {}
        self._tools_json: tuple[Sequence[Tool], str] = ((), "")
        self._children: dict[int, list[int]] = {}
        self._latest: tuple[int, Ids] = (0, array("q"))
        self._recent: list[tuple[list[Message], list[Tool], list[int]]] = []

    def place(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[int, Verdict]:
        """The node of the last message; messages that are not in the graph yet are rendered and added."""
        if messages[0].get("role") == RAW:
            return self._place_raw(messages[0]["content"])
        if self._forks:
            messages = _without_old_reasoning(messages)
        messages, tools = list(messages), list(tools)
        prefix, nodes = self._take_recent(messages, tools)
        more = [copy_message(message) for message in messages[len(prefix) :]]
        keys = [key_of(message) for message in more]
        if tools and not prefix:
            # The first message is rendered with the tools: with other tools it is another message.
            role, text, calls, reasoning = keys[0]
            if tools != self._tools_json[0]:
                self._tools_json = tools, json.dumps(tools, sort_keys=True)
            keys[0] = role, text, calls + self._tools_json[1], reasoning
        count = 0
        for key in keys:
            # A policy may sample the same message twice; all candidates are followed.
            candidates = [child for node in nodes for child in self._by_key.get((node, key), ())]
            if not candidates:
                break
            nodes, count = candidates, count + 1
        node = last = nodes[-1]
        siblings = list(self._children.get(node, ()))
        lacks_reasoning = count < len(keys) and not keys[count][3] and (node, (*keys[count][:3], _ANY)) in self._by_key
        for message, key in zip(more[count:], keys[count:], strict=True):
            ids = self._template.render(message, first=node == 0, tools=() if node else tools)
            ids = [*self.closing(node), *ids]
            node = self.add(Node(node, message, tuple(ids), (0.0,) * len(ids)), key)
        count += len(prefix)
        # Python considers 1, 1.0 and true equal; as arguments of a call they differ, unless they are still JSON text.
        if all(isinstance(call["function"].get("arguments"), str) for m in more for call in m.get("tool_calls") or ()):
            self._recent.insert(0, ([*prefix, *more], tools, [node] if count < len(messages) else nodes))
            del self._recent[_MAX_RECENT:]
        verdict = self._compare(last, siblings, node, count if count < len(messages) else None)
        if lacks_reasoning:
            verdict = replace(verdict, reason=f"message {count + 1} lacks its reasoning")
        return node, verdict

    def _take_recent(self, messages: list[Message], tools: list[Tool]) -> tuple[list[Message], list[int]]:
        """The longest prefix that was sent in this form before, and its nodes: a turn costs only what is new in it."""
        for index, (sent, sent_tools, nodes) in enumerate(self._recent):
            if len(sent) <= len(messages) and messages[: len(sent)] == sent and tools == sent_tools:
                del self._recent[index]
                return sent, nodes
        return [], [0]

    def _place_raw(self, content: str | list[int]) -> tuple[int, Verdict]:
        """The node of raw text, which continues the graph as far as the ids are equal."""
        ids = self._template.plain(content)
        node = start = 0
        while (child := self._raw_child(node, ids, start)) is not None:
            node, start = child, start + len(self.nodes[child].ids)
        rest = tuple(ids[start:])
        if not rest and self.nodes[node].finish is None:
            return node, Verdict()
        verdict = Verdict()
        if siblings := self._children.get(node, ()):
            shared = max(_common_prefix(rest, self.nodes[sibling].ids) for sibling in siblings)
            verdict = Verdict(Exactness.FORKED, "the text differs from what was recorded", start + shared)
        message = {"role": RAW, "content": rest if start else content}
        return self.add(Node(node, copy_message(message), rest, (0.0,) * len(rest))), verdict

    def _raw_child(self, node: int, ids: list[int], start: int) -> int | None:
        """The longest child whose ids continue here; interrupted turns are skipped."""
        best = None
        for number in self._children.get(node, ()):
            child = self.nodes[number]
            is_raw = child.message.get("role") == RAW or (child.finish in ("stop", "length") and node)
            if is_raw and child.ids and list(child.ids) == ids[start : start + len(child.ids)]:
                best = number if best is None or len(child.ids) >= len(self.nodes[best].ids) else best
        return best

    def add(self, node: Node, key: Key | None = None) -> int:
        """Add a node; its number."""
        number = len(self.nodes)
        self.nodes.append(node)
        self._children.setdefault(node.parent or 0, []).append(number)
        if key is not None:
            self.index(number, key)
        return number

    def index(self, number: int, key: Key | None = None) -> None:
        """Make a node findable by its message."""
        node = self.nodes[number]
        role, text, calls, reasoning = key_of(node.message) if key is None else key
        self.keys[number] = key = role, text, calls, "" if reasoning == _ANY else reasoning
        parent = node.parent or 0
        self._by_key.setdefault((parent, key), []).append(number)
        if role == "assistant":
            self._by_key.setdefault((parent, (role, text, calls, _ANY)), []).append(number)

    def release(self) -> None:
        """Keep only the nodes, and free what is needed to find them and to add more."""
        self.keys, self._by_key, self._children, self._tools_json = {}, {}, {}, ((), "")
        self._latest, self._recent = (0, array("q")), []

    def closing(self, number: int) -> list[int]:
        """The ids between a node and the message after it."""
        node = self.nodes[number]
        return [] if node.finish is None else self._template.closing(node.ids[len(node.ids) - node.sampled :])

    def opening(self, number: int, options: TurnOptions = PLAIN) -> tuple[int, ...]:
        """The ids between a node and what the policy samples after it."""
        if self.nodes[number].message.get("role") == RAW:
            return ()
        return (*self.closing(number), *self._template.opening(options))

    def ids(self, number: int) -> Ids:
        """All ids up to the end of this node; copy them to keep them. Costs what is new since the latest call."""
        path, (latest, ids) = [], self._latest
        node = number
        while node and node != latest:
            path.append(node)
            node = self.nodes[node].parent or 0
        more = array("q")
        for each in path[::-1]:
            more.extend(self.nodes[each].ids)
        if self.nodes[number].finish is not None:  # a running turn may still grow; a given message never does
            return ids + more if node == latest else more
        if node == latest:
            ids += more
        else:
            ids = more
        self._latest = number, ids
        return ids

    def _compare(self, last: int, siblings: Sequence[int], node: int, new: int | None) -> Verdict:
        """The verdict on messages after the node `last`, whose children were `siblings`; `new` is the first new one."""
        if new is not None and siblings:
            while (parent := self.nodes[node].parent or 0) != last:
                node = parent
            shared = max(_common_prefix(self.nodes[node].ids, self.nodes[sibling].ids) for sibling in siblings)
            reason = f"message {new + 1} differs from what was recorded" if last else "another conversation starts"
            return Verdict(Exactness.FORKED, reason, len(self.ids(last)) + shared)
        closing = self.closing(last)
        if closing and closing[0] == self._template.end_id:
            return Verdict(Exactness.BRIDGED, f"the end of node {last} was added, not sampled", len(self.ids(last)))
        return Verdict()


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def copy_message(message: Message) -> dict[str, Any]:
    """A message as our own plain data, which its sender cannot change later."""
    try:
        copy: dict[str, Any] = orjson.loads(orjson.dumps(message))
    except orjson.JSONEncodeError as error:
        raise ValueError(f"a message cannot be written as JSON: {error}") from error
    return copy


def _without_old_reasoning(messages: Sequence[Message]) -> list[Message]:
    """The messages, with the reasoning from before the last user message marked as removed."""
    last = max((index for index, message in enumerate(messages) if message.get("role") == "user"), default=0)
    return [
        {**message, "reasoning_content": ""} if index < last and message.get("role") == "assistant" else message
        for index, message in enumerate(messages)
    ]


def key_of(message: Mapping[str, Any]) -> Key:
    """Equal for messages with the same meaning, whatever the white space and key order of their arguments."""
    role = message.get("role")
    if not isinstance(role, str):
        raise ValueError("a message needs a role")
    text = text_of(message)
    calls = ""
    if message.get("tool_calls"):
        pairs = []
        for name, arguments in calls_of(message):
            if isinstance(arguments, str):  # they break off: parsed as far as possible, as many clients do
                with suppress(ValueError):
                    arguments = from_json(arguments, allow_partial=True)
            pairs.append((name, _normalize(arguments)))
        calls = json.dumps(pairs, sort_keys=True)
    if role != "assistant":
        return role, text, calls, ""
    # Agents trim a message before they send it back; its tokens stay as they were sampled.
    reasoning = message.get("reasoning_content")
    return role, text.strip(), calls, _ANY if reasoning is None else str(reasoning)


def _normalize(value: Any) -> Any:
    """Numbers as every client sends them back: 1.0 is 1, and integers beyond a double's precision are rounded."""
    if isinstance(value, dict):
        return {key: _normalize(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_normalize(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):
            value = float(value)
            return int(value) if value.is_integer() and abs(value) <= _MAX_EXACT_INT else value
    return value
