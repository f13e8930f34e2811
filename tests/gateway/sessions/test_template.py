"""Families of models: each writes its own special tokens and tool calls, and all keep the same promises.

What the engine was given and gave is what is recorded (T02); text and ids agree; a stream, joined, is the whole answer.
"""

import asyncio
import json
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwright.core.task import Task
from loopwright.engines.base import Chunk, Engine, EngineConfig, Sampling
from loopwright.engines.tokenizer import ByteTokenizer
from loopwright.gateway.sessions.model_template import template_of
from loopwright.gateway.sessions.session import Session
from loopwright.gateway.sessions.template import ChatML, Llama3, PlainText, TemplateError
from loopwright.gateway.sessions.tool_calls import HERMES, JSON, LLAMA3, ObjectScanner, is_json_object
from loopwright.gateway.sessions.turn_options import TurnOptions
from loopwright.gateway.sessions.turn_parser import TurnParser

TASK = Task("t", ({"role": "user", "content": "hi"},))
TOOLS = [{"type": "function", "function": {"name": "add"}}]


class LlamaBytes(ByteTokenizer):
    """A token per byte, and Llama 3's special ones."""

    specials: ClassVar = {
        name: 256 + index
        for index, name in enumerate(
            ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
             "<|eom_id|>", "<|python_tag|>"]
        )
    }  # fmt: skip


class PlainBytes(ByteTokenizer):
    """A token per byte, and one for the end of everything."""

    specials: ClassVar = {"<|endoftext|>": 256}


FAMILIES = {
    "chatml": (ByteTokenizer, HERMES, "<|im_end|>"),
    "llama3": (LlamaBytes, LLAMA3, "<|eot_id|>"),
    "json": (PlainBytes, JSON, "<|endoftext|>"),
}


def encoded(tokenizer, text):
    """The ids of what a policy says, its special tokens included."""
    ids, specials = [], tokenizer.specials
    while text:
        name = next((name for name in specials if text.startswith(name)), None)
        ids += [specials[name]] if name else tokenizer.encode(text[0])
        text = text[len(name) if name else 1 :]
    return ids


class Player(Engine):
    """Says what it was told to say next, in chunks of these sizes."""

    def __init__(self, family, sizes=(1,), **config):
        super().__init__(EngineConfig(type="player", template=family, **config), Path())
        make, _, end = FAMILIES[family]
        self.tokenizer, self.sizes = make(), sizes
        self.end = self.tokenizer.specials[end]
        self.plans, self.calls = [], []

    async def generate(self, ids, sampling, *, seed):
        gave = []
        self.calls.append((tuple(ids), gave))
        left = [*encoded(self.tokenizer, self.plans.pop(0)), self.end]
        full = len(left) > sampling.max_tokens
        left, turn = left[: sampling.max_tokens], 0
        while left:
            size = self.sizes[turn % len(self.sizes)]
            now, left, turn = left[:size], left[size:], turn + 1
            gave += now
            tops = tuple(((token, -0.25), (0, -2.0)) for token in now)
            finish = None if left else "length" if full else "stop"
            yield Chunk(tuple(now), (-0.25,) * len(now), 0, finish, tops if sampling.top_logprobs else None)

    async def pause(self): ...

    async def resume(self): ...


# -- what a policy may say ----------------------------------------------------------------------------------------

PLAIN = st.text(alphabet='ab \n{}[]"<>/:;,€😀\u0301', max_size=8)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(-1e9, 1e9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.text(max_size=3), VALUE, max_size=3)
SPACE = st.sampled_from([None, 1])


@st.composite
def calls(draw, grammar):
    arguments = draw(ARGUMENTS)
    said = {
        "name": draw(st.sampled_from(["add", "f\n€"])),
        draw(st.sampled_from(["arguments", "parameters"])): arguments,
    }
    if draw(st.booleans()):
        said = dict(reversed(said.items()))
    body = json.dumps(said, ensure_ascii=draw(st.booleans()), indent=draw(SPACE))
    return f"{grammar.open}{draw(st.sampled_from(['', chr(10)])) if grammar.close else ''}{body}{grammar.close}"


def speech(grammar):
    odd = [
        grammar.open,
        grammar.close,
        f'{grammar.open}{{"name": "f", "arguments": {{"x": tru',
        '{"name": "g"}',
        "<thi",
        '{"name": "f", "arguments": {"x": "\\ud800"}}',
        '[{"name": "f"}, {"name": "g"}]',
        "</think>",
        grammar.open[:4],
        "```",
        "```json\n[1]",
    ]
    part = st.one_of(PLAIN, calls(grammar), calls(grammar).map("```json\n{}\n```".format), st.sampled_from(odd))
    thoughts = st.sampled_from(["", "<think>\nhm\n</think>\n\n"]) | PLAIN.map(lambda text: f"<think>{text}</think>")
    return st.tuples(thoughts, st.lists(part, max_size=4).map("".join)).map("".join)


def joined(pieces):
    made = {}
    for piece in pieces:
        if piece.index is not None:
            call = made.setdefault(piece.index, {"id": piece.id, "name": piece.name, "arguments": ""})
            call["arguments"] += piece.arguments
    return (
        "".join(p.text for p in pieces),
        "".join(p.reasoning for p in pieces),
        [made[index] for index in sorted(made)],
    )


def parts(message):
    found = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())]
    return message["content"], message.get("reasoning_content", ""), found


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_pieces_joined_are_the_message_however_they_come(family, data):
    make, grammar, end = FAMILIES[family]
    tokenizer = make()
    ids = encoded(tokenizer, data.draw(speech(grammar))) + [tokenizer.specials[end]] * data.draw(st.booleans())
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    options = TurnOptions(single_tool_call=data.draw(st.booleans()), parse_tool_calls=data.draw(st.integers(0, 4)) > 0)
    arguments = {"call_id": "c", "grammar": grammar, "options": options}
    reader, whole = (TurnParser(tokenizer, {tokenizer.specials[end]}, **arguments) for _ in range(2))
    pieces, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        pieces += reader.feed(ids[at : at + size], [0.0] * len(ids[at : at + size]))
        at, turn = at + size, turn + 1
    pieces += reader.finish()
    whole.parse(ids)
    assert joined(pieces) == parts(reader.message) == parts(whole.message)
    assert reader.malformed == whole.malformed
    assert [token for piece in pieces for token in piece.ids] == ids, "every token is told once, in order"
    names = [call["name"] for call in joined(pieces)[2]]
    assert not names or options.parse_tool_calls
    assert len(names) <= 1 or not options.single_tool_call


@settings(max_examples=200, deadline=None)
@given(ARGUMENTS, SPACE, st.booleans(), st.integers(1, 7))
def test_json_is_reported_as_it_arrives_and_never_before_it_is_certain(arguments, indent, ascii_only, size):
    text = json.dumps(arguments, indent=indent, ensure_ascii=ascii_only)
    scanned, told = ObjectScanner(), ""
    for at in range(0, len(text), size):
        told += scanned.scan(text[at : at + size])
        assert not scanned.invalid
    assert (told, scanned.complete, scanned.rest) == (text, True, "")


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='{}[]":,\\u0dn1-e. truefalsn', max_size=24))
def test_what_ends_as_an_object_is_one_and_only_that(text):
    scanned = ObjectScanner()
    told = scanned.scan("{" + text)
    try:
        read = json.loads(told) if scanned.complete else None
    except ValueError:
        pytest.fail(f"{told!r} is no JSON")
    assert isinstance(read, dict) == scanned.complete
    if scanned.invalid:
        with pytest.raises(ValueError):  # noqa: PT011  of whatever kind
            json.loads("{" + text)


@settings(max_examples=300, deadline=None)
@given(
    st.text(alphabet='{}[]":,\\u0dn1-e. truefalsn\ud800é', max_size=24).map(lambda text: "{" + text)
    | ARGUMENTS.map(json.dumps)
    | st.integers(60, 70).map(lambda depth: '{"a":' * depth + "1" + "}" * depth)
    | st.integers(3999, 4002).map(lambda digits: '{"a": %s, "b": 1e999}' % ("1" * digits))
    | st.integers(3999, 4002).map(lambda digits: '{"a": %s}' % ("1" * digits))
)
def test_an_object_is_what_the_scanner_takes_for_one(text):
    scanned = ObjectScanner()
    scanned.scan(text.strip())
    assert is_json_object(text) == (scanned.complete and not scanned.rest)


# -- conversations -----------------------------------------------------------------------------------------------


def check(episode, engine):
    """T02 and T03."""
    paths = [tuple(token for i in path for token in episode.nodes[i].ids) for path in episode.branches()]
    for ids, gave in engine.calls:
        assert any(path[: len(ids) + len(gave)] == (*ids, *gave) for path in paths)
    assert sum(sum(row.response_mask) for row in episode.rows()) == sum(len(gave) for _, gave in engine.calls)
    if bos := engine.tokenizer.specials.get("<|begin_of_text|>"):
        assert all(ids.count(bos) == 1 and ids[0] == bos for ids, _ in engine.calls), "BOS once, and first"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["preserve", "fork"])
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_t02_any_conversation_of_any_family_is_exact(family, policy, data):
    grammar = FAMILIES[family][1]
    replies = data.draw(st.lists(speech(grammar), min_size=1, max_size=4))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    keeps = data.draw(st.booleans())

    async def story():
        engine = Player(family, sizes, reasoning=policy)
        session = Session(engine, Sampling(max_tokens=500), seed="0")
        history, before, fork = [{"role": "user", "content": "begin €"}], (), False
        for number, reply in enumerate(replies):
            engine.plans.append(f"{number} {reply}" if not reply.startswith("<think>") else reply)
            pieces = []
            most = data.draw(st.sampled_from([500, 500, 3]))
            draft = session.draft(history, TOOLS, sampling=Sampling(max_tokens=most))
            turn = await session.sample(draft, pieces.append)
            assert joined(pieces) == parts(turn.message), "a stream, joined, is the whole answer"
            assert [token for piece in pieces for token in piece.ids] == engine.calls[-1][1] == list(turn.ids)
            assert turn.message == session.result(draft).message
            ids, gave = engine.calls[-1]
            if not fork:
                assert ids[: len(before)] == before, "what was sampled is sent again as it was"
            before = (*ids, *gave)
            sent = {key: value for key, value in turn.message.items() if keeps or key != "reasoning_content"}
            history.append(sent)
            history += [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in turn.calls]
            fork = False
            if not turn.calls:
                history.append({"role": "user", "content": f"go on {number}"})
                fork = policy == "fork" and any("reasoning_content" in node.message for node in session.graph.nodes)
        check(session.episode(TASK), engine)

    asyncio.run(story())


def told(family, *replies, tools=TOOLS, **config):
    """A conversation in which the user says something after every reply: prompts as text, and the session."""

    async def story():
        engine = Player(family, **config)
        engine.plans += replies
        session, history = Session(engine, Sampling(max_tokens=500), seed="0"), [{"role": "user", "content": "hi"}]
        for _ in replies:
            turn = await session.turn(history, tools)
            history.append(turn.message)
            history += [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in turn.calls]
            if not turn.calls:
                history.append({"role": "user", "content": "more"})
        check(session.episode(TASK), engine)
        return [engine.tokenizer.decode(ids) for ids, _ in engine.calls], session, history

    return asyncio.run(story())


def test_llama3_writes_headers_one_beginning_and_the_role_of_its_tools():
    prompts, session, history = told("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "eight")
    assert prompts[0].startswith("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n# Tools")
    assert prompts[0].endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
    assert '{"name": "…", "parameters": {…}}' in prompts[0]
    assert prompts[1].endswith(
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}<|eot_id|>'
        "<|start_header_id|>ipython<|end_header_id|>\n\n7<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert history[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert {str(verdict.kind) for verdict in session.verdicts.values()} == {"exact"}


@pytest.mark.parametrize(
    ("family", "text", "names", "content"),
    [
        ("llama3", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', ["f", "g"], ""),
        ("llama3", '{"type": "function", "name": "f", "parameters": {}}', ["f"], ""),
        ("llama3", "<|python_tag|>print(1)", [], "<|python_tag|>print(1)"),
        ("json", ' [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 1}}]', ["f", "g"], ""),
        ("json", '{"name": "f", "arguments": {}} and so on', ["f"], "and so on"),
        ("json", '{"answer": {"name": "f", "arguments": {}}}', [], '{"answer": {"name": "f", "arguments": {}}}'),
        ("json", 'it is {"name": "f", "arguments": {}}', [], 'it is {"name": "f", "arguments": {}}'),
        ("json", '{"name": "Bob", "age": 7}', [], '{"name": "Bob", "age": 7}'),
        ("json", '```json\n{"name": "f", "arguments": {}}\n```', ["f"], ""),
        ("json", '```\n[{"name": "f", "arguments": {}}, {"name": "g"}]\n```\n`so`', ["f", "g"], "`so`"),
        ("json", '```json\n{"answer": 7}\n```', [], '```json\n{"answer": 7}\n```'),
        ("json", "``json", [], "``json"),
        ("chatml", '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>', ["f"], ""),
        ("chatml", '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g"}</tool_call>', ["f", "g"], ""),
        ("chatml", "a <tool_cal of b", [], "a <tool_cal of b"),
        ("chatml", "<think>hm</think>\n\nyes", [], "yes"),
    ],
)
def test_how_families_write_calls(family, text, names, content):
    _, _, history = told(family, text)
    assert [call["function"]["name"] for call in history[1].get("tool_calls", ())] == names
    assert history[1]["content"] == content


def test_a_turn_can_be_begun_with_reasoning():
    """As the chat templates of some models do: the policy's first word is a thought, and no client sees the tag."""
    prompts, session, history = told("chatml", "hm</think>yes", "ok</think>no", thinks=True, tools=())
    assert [prompt.endswith("<|im_start|>assistant\n<think>\n") for prompt in prompts] == [True, True]
    assert [m.get("reasoning_content") for m in history if m["role"] == "assistant"] == ["hm", "ok"]
    assert [m["content"] for m in history if m["role"] == "assistant"] == ["yes", "no"]
    assert "<think>\nhm</think>yes" in prompts[1], "what was sampled stays as it was"
    assert {str(verdict.kind) for verdict in session.verdicts.values()} == {"exact"}
    assert session.prompts.ids([{"role": "user", "content": "hi"}]) == list(session.engine.calls[0][0])


def test_without_tools_json_is_an_answer():
    _, _, history = told("json", '{"name": "f", "arguments": {}}', tools=())
    assert history[1] == {"role": "assistant", "content": '{"name": "f", "arguments": {}}'}


def test_a_template_is_chosen_by_the_special_tokens():
    assert isinstance(template_of("auto", ByteTokenizer()), ChatML)
    assert isinstance(template_of("auto", LlamaBytes()), Llama3)
    assert isinstance(template_of("auto", PlainBytes()), PlainText)
    assert template_of("json", LlamaBytes()).grammar == JSON
    with pytest.raises(TemplateError, match=r"'llama3' needs the special tokens .*<.eot_id.>.* It has <.im_end.>"):
        template_of("llama3", ByteTokenizer())
    with pytest.raises(TemplateError, match="json"):
        template_of("auto", type("Bare", (ByteTokenizer,), {"specials": {}})())


def test_arguments_come_token_by_token():
    tokenizer = ByteTokenizer()
    reader = TurnParser(tokenizer, {257}, call_id="c")
    heard = [
        piece.arguments or f"<{piece.name}>"
        for token in tokenizer.encode('<tool_call>{"name": "f", "arguments": {"x": "ab", "n": 17}}</tool_call>')
        for piece in reader.feed([token], [0.0])
        if piece.index is not None
    ]
    assert heard == ["<f>", *'{"x": "ab", "n": ', "17}"], "a number once it is whole"
