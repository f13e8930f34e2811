"""The message graph of a session: finds messages that it has, renders and adds new ones, and says where they differ."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import orjson
from pydantic_core import from_json

from loopwright.core.episode import ROOT, Node
from loopwright.core.task import Message
from loopwright.engines.base import PromptIds
from loopwright.gateway.sessions.exactness import EXACT, Exactness, Verdict
from loopwright.gateway.sessions.template import ChatTemplate, Continuation, calls_of, common_prefix, text_of
from loopwright.gateway.sessions.tool_calls import Tool
from loopwright.gateway.sessions.turn_options import PLAIN, TurnOptions
from loopwright.gateway.sessions.turn_parser import END_THINK, THINK

Key = tuple[str, str, str, str]
"""What identifies a message: role, text, calls (and tools, for the first message of a conversation) and reasoning."""

_ANY = "\0"
"""The reasoning of a message that was sent without any: it matches every reasoning."""
_ROLE = itemgetter("role")
_MAX_EXACT_INT = 2**53
_INLINE = re.compile(rf"\s*{THINK}(.*?){END_THINK}(.*)", re.DOTALL)
"""Reasoning that an agent sends as part of the text."""
_MAX_RECENT = 4
"""Conversations of a session that are remembered exactly as they were sent."""
_MAX_NEW = 5000
"""Messages and tool calls that one request may add: each takes 10 µs of the event loop, however short it is."""
_MAX_VALUES, _MAX_CHARS = 50_000, 2**22
"""What the arguments of those calls may have together. Values are counted by commas; each takes a microsecond."""
RAW = "prompt"
"""The role of raw text to continue, to which no chat template is applied."""


_Context = tuple[list[Tool], dict[str, Any]]
"""What a conversation is rendered with: its tools, and the arguments for the chat template."""
_Recent = tuple[list[Message], list[Message], _Context, list[int]]
"""A conversation as it was sent, our own copies of its messages, its context and nodes."""


class Placement(NamedTuple):
    """The place of a turn: the node before it, the ids between that and what is sampled, and how to parse it."""

    node: int
    opening: tuple[int, ...]
    verdict: Verdict
    options: TurnOptions


class Graph:
    """Nodes, and which messages lead from one to another.

    A conversation that differs from what was recorded is a separate branch; what branches share is stored once. With
    `forks`, reasoning from before the last user message is removed from the prompt, as many families' templates do;
    that too starts a branch. Otherwise reasoning stays as it was sampled.
    """

    def __init__(self, template: ChatTemplate, *, forks: bool = False) -> None:
        self._forks = forks
        self.nodes: list[Node] = [ROOT]
        self.tokens = 0
        """Tokens of all nodes together."""
        self.keys: dict[int, Key] = {}
        """How the message of a node is found again; interrupted turns have no key."""
        self._template = template
        self._by_key: dict[tuple[int, str, str, str], list[int]] = {}
        """Nodes by their parent and their key, except for the reasoning in it."""
        self._context_json: tuple[_Context, str] = ([], {}), ""
        self._children: dict[int, list[int]] = {}
        self._notes: dict[int, Verdict] = {}
        """Where the template would have written a sampled turn differently, by the nodes that follow it."""
        self._latest: tuple[int, list[Sequence[int]], int] = 0, [], 0
        """A node, the ids of each node up to it, and how many they are."""
        self._latest_placement: tuple[TurnOptions, Placement] | None = None
        self._recent: list[_Recent] = []

    def place(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: TurnOptions = PLAIN, *, frozen: bool = False
    ) -> Placement:
        """The place of the policy's turn after these messages; those that are not in the graph yet are added.

        If they are `frozen`, nobody changes them later: those of an earlier turn are recognised without being read.
        """
        if messages[0].get("role") == RAW:
            node, verdict = self._place_raw(messages[0]["content"])
            return Placement(node, (), verdict, options)
        if self._forks:
            messages = _without_old_reasoning(messages)
        sent, context = list(messages), (list(tools), dict(options.chat_template_kwargs))
        recent = self._find_recent(sent, context)
        try:
            has_results = "tool" in map(_ROLE, sent[len(recent[0]) :])
        except KeyError as error:
            raise ValueError("a message needs a role") from error
        if has_results:
            sent = _arranged(messages)
            recent = self._find_recent(sent, context)
        _, prefix, _, nodes = recent
        new = sent[len(prefix) :]
        calls = [call for message in new for call in message.get("tool_calls") or ()]
        if len(new) + len(calls) > _MAX_NEW:
            with_calls = f", with {len(calls)} tool calls" if calls else ""
            raise ValueError(f"messages: {len(new)} of them are new{with_calls}; a request may add {_MAX_NEW}")
        if calls:
            _check_arguments(calls)
        more = [copy_message(message) for message in new]
        messages, keys = [*prefix, *more], [key_of(message) for message in more]
        latest = self._latest_placement
        if not more and latest is not None and (latest[0], latest[1].node) == (options, nodes[-1]):
            placement = latest[1]._replace(verdict=self._notes.get(nodes[-1], EXACT))
        else:
            if not prefix and any(context):
                keys[0] = self._first_key(keys[0], context)
            nodes, count = self._match(nodes, more, keys)
            known_keys = dict(enumerate(keys, len(prefix)))
            placement = self._extend(nodes[-1], len(prefix) + count, messages, known_keys, context, options)
            key = keys[count] if count < len(keys) else None
            if key is not None and key[0] == "assistant" and not key[3] and (nodes[-1], *key[:3]) in self._by_key:
                reason = f"message {len(prefix) + count + 1} lacks its reasoning"
                placement = placement._replace(verdict=replace(placement.verdict, reason=reason))
            nodes = [placement.node] if placement.node not in nodes else nodes
            self._latest_placement = options, placement
        # Python considers 1, 1.0 and true equal; as arguments of a call they differ, unless they are still JSON text.
        if all(isinstance(call["function"].get("arguments"), str) for m in more for call in m.get("tool_calls") or ()):
            others = [each for each in self._recent if each is not recent]
            self._recent = [(sent if frozen else messages, messages, context, nodes), *others[: _MAX_RECENT - 1]]
        return placement

    def _find_recent(self, sent: list[Message], context: _Context) -> _Recent:
        """The conversation that was sent in this form before, up to some message: a turn costs only what is new."""
        for recent in self._recent:
            former, _, former_context, _ = recent
            if len(former) <= len(sent) and sent[: len(former)] == former and context == former_context:
                return recent
        return [], [], context, [0]

    def _first_key(self, key: Key, context: _Context) -> Key:
        """The first message is rendered with the tools: with other tools it is another message."""
        if context != self._context_json[0]:
            self._context_json = context, "".join(map(sorted_json, filter(None, context)))
        role, text, calls, reasoning = key
        return role, text, calls + self._context_json[1], reasoning

    def _match(self, nodes: list[int], more: Sequence[Message], keys: Sequence[Key]) -> tuple[list[int], int]:
        """The nodes of as many of these messages as the graph has after `nodes`, and how many that are."""
        for count, (message, key) in enumerate(zip(more, keys, strict=True)):
            # A policy may sample the same message twice; all candidates are followed.
            candidates = [child for node in nodes for child in self._by_key.get((node, *key[:3]), ())]
            if key[3] != _ANY:
                candidates = [child for child in candidates if self.keys[child][3] == key[3]]
            if not candidates and key[0] == "assistant":
                # An agent may send a turn back as it was sampled, and not as it was shown.
                turns = [child for node in nodes for child in self._children.get(node, ())]
                finished = [turn for turn in turns if self.nodes[turn].finish in ("stop", "length")]
                candidates = [turn for turn in finished if self._is_echo(message, self.nodes[turn])]
            if not candidates:
                return nodes, count
            nodes = candidates
        return nodes, len(more)

    def _is_echo(self, message: Message, turn: Node) -> bool:
        """Whether an agent sends a turn back as it was sampled, with the stop string, or with text of its own added."""
        text, shown = text_of(message).strip(), str(turn.message["content"]).strip()
        if message.get("tool_calls") or not text:
            return False
        is_shown = bool(shown) and text.startswith(shown)
        # There may be thousands of turns: to decode all of each would hold the event loop.
        if not is_shown and not text.startswith(self._template.start_of(turn)):
            return False
        raw = self._template.raw_text(turn)
        if text == raw.strip() or self._template.text_added(message, turn):
            return True
        rest = text.removeprefix(shown).strip()
        is_end = is_shown and bool(rest) and raw.rstrip().endswith(rest)
        return is_end and raw.rstrip()[: -len(rest)].rstrip().endswith(shown)

    def _extend(
        self,
        last: int,
        count: int,
        messages: list[Message],
        known_keys: Mapping[int, Key],
        context: _Context,
        options: TurnOptions,
    ) -> Placement:
        """Add what follows the first `count` messages, which lead to the node `last`.

        What follows the latest sampled turn is rendered, and the nodes that it leads to are used again. If the template
        writes something before that differently by now, all is rendered, and branches off where it differs.
        """
        siblings = list(self._children.get(last, ()))
        turn, path = last, list[int]()
        while turn and self.nodes[turn].finish is None:
            path.insert(0, turn)
            turn = self.nodes[turn].parent or 0
        start, continuation = count - len(path), None
        if turn:
            continuation = self._template.extend(messages, start, context[0], options, self.nodes[turn])
        if continuation is None:
            start, path, turn = 0, self._path(last), 0
            continuation = self._template.begin(messages, context[0], options)
        node, used, ids, at = turn, 0, list(chain.from_iterable(continuation.messages)), 0
        for each in path:
            own = self.nodes[each].ids
            if tuple(ids[at : at + len(own)]) != own:
                break
            node, used, at = each, used + 1, at + len(own)
        is_rewritten = used < len(path)
        if is_rewritten:
            last, count, siblings = node, start + used, list(self._children.get(node, ()))
        end = 0
        for index, added in enumerate(continuation.messages, start):
            end += len(added)
            if index >= start + used:
                if (key := known_keys.get(index)) is None:
                    key = key_of(messages[index])
                    key = self._first_key(key, context) if index == 0 and any(context) else key
                own = tuple(ids[at : max(at, end)])
                node, at = self.add(Node(node, messages[index], own, (0.0,) * len(own)), key), max(at, end)
        if count < len(messages) and siblings:
            reason = f"message {count + 1} differs from what was recorded" if last else "another conversation starts"
            if is_rewritten:
                reason = f"the chat template writes message {count + 1} differently than before"
            verdict = self._fork(last, siblings, node, reason)
        else:
            verdict = self._judge(last, turn, node, continuation)
        return Placement(node, (*ids, *continuation.opening)[at:], verdict, continuation.options)

    def _judge(self, last: int, turn: int, node: int, continuation: Continuation) -> Verdict:
        """The verdict on messages that continue a turn: whether its end was added, or the template writes it so."""
        note = self._notes.get(self.nodes[turn].parent or 0) if turn else None
        if note is None and continuation.note:
            note = Verdict(reason=continuation.note, token=len(self.ids(turn)) - self.nodes[turn].sampled)
        if note is not None:  # what follows a deviation deviates, too
            self._notes[node] = note
        if continuation.ends_turn and last == turn:
            return Verdict(Exactness.BRIDGED, f"the end of node {turn} was added, not sampled", len(self.ids(turn)))
        return note or EXACT

    def _path(self, node: int) -> list[int]:
        """The nodes from below the root to this one."""
        path = []
        while node:
            path.append(node)
            node = self.nodes[node].parent or 0
        return path[::-1]

    def _place_raw(self, content: str | list[int]) -> tuple[int, Verdict]:
        """The node of raw text, which continues the graph as far as the ids are equal."""
        ids = self._template.plain(content)
        node = start = 0
        while (child := self._raw_child(node, ids, start)) is not None:
            node, start = child, start + len(self.nodes[child].ids)
        rest = tuple(ids[start:])
        if not rest and self.nodes[node].finish is None:
            return node, EXACT
        verdict = EXACT
        if siblings := self._children.get(node, ()):
            shared = self._shared_with(rest, siblings)
            verdict = Verdict(Exactness.FORKED, "the text differs from what was recorded", start + shared)
        message = {"role": RAW, "content": rest if start else content}
        return self.add(Node(node, copy_message(message), rest, (0.0,) * len(rest))), verdict

    def _raw_child(self, node: int, ids: list[int], start: int) -> int | None:
        """The longest child whose ids continue here; interrupted turns are skipped."""
        best = None
        for number in self._children.get(node, ()):
            child = self.nodes[number]
            is_raw = child.message.get("role") == RAW or (child.finish in ("stop", "length") and node)
            end = start + len(child.ids)
            # The last id first: most differ there, and there may be thousands.
            if is_raw and start < end <= len(ids) and child.ids[-1] == ids[end - 1]:
                is_longest = best is None or len(child.ids) >= len(self.nodes[best].ids)
                best = number if is_longest and child.ids == tuple(ids[start:end]) else best
        return best

    def add(self, node: Node, key: Key | None = None) -> int:
        """Add a node; its number."""
        number = len(self.nodes)
        self.nodes.append(node)
        self.tokens += len(node.ids)
        self._children.setdefault(node.parent or 0, []).append(number)
        if key is not None:
            self.index(number, key)
        return number

    def index(self, number: int, key: Key | None = None) -> None:
        """Make a node findable by its message."""
        node = self.nodes[number]
        role, text, calls, reasoning = key_of(node.message) if key is None else key
        self.keys[number] = role, text, calls, "" if reasoning == _ANY else reasoning
        self._by_key.setdefault((node.parent or 0, role, text, calls), []).append(number)

    def conversation(self, number: int) -> tuple[list[Message], list[Tool]]:
        """The messages up to a node, and the tools that they were sent with."""
        path = self._path(number)
        messages = [self.nodes[each].message for each in path]
        _, _, calls, _ = self.keys.get(path[0], ("", "", "", ""))  # raw text has no key
        context_json = calls.removeprefix(key_of(messages[0])[2])
        context, _ = json.JSONDecoder().raw_decode(context_json or "[]")
        return messages, context if isinstance(context, list) else []

    def truncate(self, count: int) -> None:
        """Keep so many nodes, and remove those that were added later: a refused request leaves nothing."""
        for number in range(len(self.nodes) - 1, count - 1, -1):
            node = self.nodes.pop()
            parent = node.parent or 0
            self.tokens -= len(node.ids)
            self._notes.pop(number, None)
            self._children[parent].remove(number)
            if (key := self.keys.pop(number, None)) is not None:
                known = self._by_key[parent, *key[:3]]
                known.remove(number)
                if not known:
                    del self._by_key[parent, *key[:3]]
            if not self._children[parent]:
                del self._children[parent]
        self._recent = [each for each in self._recent if max(each[3]) < count]
        if self._latest[0] >= count:
            self._latest = 0, [], 0
        if self._latest_placement is not None and self._latest_placement[1].node >= count:
            self._latest_placement = None

    def release(self) -> None:
        """Keep only the nodes, and free what is needed to find them and to add more."""
        self.keys, self._by_key, self._children, self._context_json = {}, {}, {}, (([], {}), "")
        self._latest, self._recent, self._latest_placement, self._notes = (0, [], 0), [], None, {}

    def ids(self, number: int, opening: Sequence[int] = ()) -> PromptIds:
        """All ids up to the end of this node, and the opening of a turn after it."""
        path, (latest, parts, count) = [], self._latest
        node = number
        while node and node != latest:
            path.append(node)
            node = self.nodes[node].parent or 0
        if node != latest:
            parts, count = [], 0
        new = [self.nodes[each].ids for each in path[::-1]]
        parts, count = [*parts, *new], count + sum(map(len, new))
        if self.nodes[number].finish != "cut":  # or it may still grow
            self._latest = number, parts, count
        return PromptIds([*parts, opening], count + len(opening))

    def _fork(self, last: int, siblings: Sequence[int], node: int, reason: str) -> Verdict:
        """The verdict on new messages up to `node`, which branch off after `last` beside these siblings."""
        while (parent := self.nodes[node].parent or 0) != last:
            node = parent
        shared = self._shared_with(self.nodes[node].ids, siblings)
        return Verdict(Exactness.FORKED, reason, len(self.ids(last)) + shared)

    def _shared_with(self, ids: Sequence[int], siblings: Sequence[int]) -> int:
        """With how many of these ids one of the siblings starts, at most."""
        shared = 0
        for sibling in siblings:
            others = self.nodes[sibling].ids
            # There may be thousands, with long prefixes: only one that may share more is compared.
            if len(others) > shared < len(ids) and others[shared] == ids[shared]:
                shared = max(shared, common_prefix(ids, others))
        return shared


# -- messages as agents send them ------------------------------------------------------------------------------------


def _check_arguments(calls: Sequence[Any]) -> None:
    """ValueError if the arguments of these calls would hold the event loop, although a prompt may be as long."""
    functions = [call.get("function") if isinstance(call, Mapping) else None for call in calls]
    arguments = [str(each.get("arguments")) for each in functions if isinstance(each, Mapping)]
    if sum(map(len, arguments)) > _MAX_CHARS or sum(text.count(",") for text in arguments) > _MAX_VALUES:
        limits = f"{_MAX_CHARS} characters or {_MAX_VALUES} values"
        raise ValueError(f"messages: the arguments of new tool calls have more than {limits}")


def copy_message(message: Message) -> dict[str, Any]:
    """A message as our own plain data, which its sender cannot change later."""
    is_plain = len(message) == 2 and type(message.get("role")) is str and type(message.get("content")) is str
    if is_plain and message["content"].isascii():
        return dict(message)  # as most are; a copy with the same text is compared in no time
    try:
        data = orjson.dumps(message)
    except orjson.JSONEncodeError as error:
        raise ValueError(f"a message cannot be written as JSON: {error}") from error
    copy: dict[str, Any] = dict(message) if is_plain else orjson.loads(data)
    return copy


def _without_old_reasoning(messages: Sequence[Message]) -> list[Message]:
    """The messages, with the reasoning from before the last user message marked as removed."""
    last = max((index for index, message in enumerate(messages) if message.get("role") == "user"), default=0)
    return [
        {**message, "content": _split_reasoning(text_of(message))[1], "reasoning_content": ""}
        if index < last and message.get("role") == "assistant"
        else message
        for index, message in enumerate(messages)
    ]


def _split_reasoning(text: str) -> tuple[str | None, str]:
    """Reasoning at the start of a text, and the rest; None if it starts with no reasoning."""
    match = _INLINE.fullmatch(text)
    return (None, text) if match is None else (match[1].strip(), match[2])


def _arranged(messages: Sequence[Message]) -> list[Message]:
    """The messages, with the results of each turn's tool calls in the order of the calls.

    ValueError for a result whose id belongs to no call before it. A result without an id stays where it is.
    """
    result = list(messages)
    positions: dict[str, int] = {}
    index = 0
    while index < len(result):
        if calls := result[index].get("tool_calls"):
            positions |= {str(call.get("id")): len(positions) + at for at, call in enumerate(calls)}
        end = index
        while end < len(result) and result[end].get("role") == "tool":
            id = result[end].get("tool_call_id")
            if id is not None and id not in positions:
                raise ValueError(
                    f"messages: a tool result is for the call {str(id)[:60]!r}, which no message before it contains; "
                    "send the assistant's message with this call, too"
                )
            end += 1
        if end - index > 1 and all(each.get("tool_call_id") is not None for each in result[index:end]):
            result[index:end] = sorted(result[index:end], key=lambda each: positions[each["tool_call_id"]])
        index = max(end, index + 1)
    return result


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
        calls = sorted_json(pairs)
    if role != "assistant":
        return role, text, calls, ""
    # Agents trim a message before they send it back; its tokens stay as they were sampled.
    reasoning = message.get("reasoning_content")
    if reasoning is None and THINK in text:
        reasoning, text = _split_reasoning(text)
    return role, text.strip(), calls, _ANY if reasoning is None else str(reasoning)


def sorted_json(value: Any) -> str:
    """A value as JSON with sorted keys."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except TypeError:  # an integer of more than 64 bits
        return json.dumps(value, sort_keys=True)


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
