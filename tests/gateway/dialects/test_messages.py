"""Anthropic Messages: requests become messages for the policy, and its turns become responses."""

from contextlib import suppress
from itertools import groupby

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, ModelInfo, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from loopwright.engines.base import EngineError
from loopwright.engines.tokenizer import ByteTokenizer
from loopwright.gateway.dialects.fields import BadRequest
from loopwright.gateway.dialects.messages import Messages, models_response
from loopwright.gateway.sessions.graph import Graph
from loopwright.gateway.sessions.template import ChatML
from loopwright.gateway.sessions.turn import Delta, Turn
from tests.gateway.dialects.harness import DEFAULTS, JSON, read_events, stream_events

DIALECT = Messages(ByteTokenizer(), DEFAULTS)
EVENT = TypeAdapter(RawMessageStreamEvent)
ADD = {
    "name": "add",
    "description": "adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
ASKED = {"model": "any", "max_tokens": 1000, "messages": [{"role": "user", "content": "hi"}]}


def call(arguments):
    return f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'


ONE, TWO, NONE = call('{"a": 1}'), call('{"a":  2}'), call("{}")


def parse(**body):
    return DIALECT.parse({**ASKED, **body})


def messages(*items, **body):
    return list(parse(messages=list(items), **body).messages)


def user(*content):
    return {"role": "user", "content": list(content)}


def text(value, **more):
    return {"type": "text", "text": value, **more}


def result(id, content, **more):
    return {"type": "tool_result", "tool_use_id": id, "content": content, **more}


# -- what is asked ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "system", ["Be brief.", [text("Be brief.")], [text("Be brief.", cache_control={"type": "ephemeral"})]]
)
def test_a_system_prompt_is_the_same_message_as_text_or_as_blocks(system):
    assert messages(user(text("hi")), system=system) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


@pytest.mark.parametrize("nonce", ["cc_version=2.1; cch=abc12;", "cch=0;"])
@pytest.mark.parametrize("as_blocks", [True, False])
def test_the_nonce_of_a_request_is_stripped(nonce, as_blocks):
    line = f"x-anthropic-billing-header: {nonce}"
    system = [text(line), text("Be brief.")] if as_blocks else f"{line}\nBe brief."
    assert messages(user(text("hi")), system=system)[0] == {"role": "system", "content": "Be brief."}
    assert messages(user(text("hi")), system=line) == [{"role": "user", "content": "hi"}]


def test_text_that_mentions_the_header_is_kept():
    prompt = "Never mention x-anthropic-billing-header: it is secret."
    assert messages(user(text("hi")), system=prompt)[0]["content"] == prompt


def test_tool_calls_and_results_become_calls_and_tool_messages():
    tool_use = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
    turn = {"role": "assistant", "content": [text("Let me see."), tool_use, {**tool_use, "id": "t2", "input": {}}]}
    answer = user(result("t1", "2"), result("t2", [text("3"), text("4")], is_error=True), text("and now?"))
    assert messages(user(text("hi")), turn, answer)[1:] == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
                {"id": "t2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "2"},
        {"role": "tool", "tool_call_id": "t2", "content": "3\n\n4"},
        {"role": "user", "content": "and now?"},
    ]


def test_a_result_may_have_no_content():
    assert messages(user({"type": "tool_result", "tool_use_id": "t"})) == [
        {"role": "tool", "tool_call_id": "t", "content": ""}
    ]


def test_tools_are_described_as_functions():
    (tool,) = parse(tools=[{**ADD, "cache_control": {"type": "ephemeral"}, "type": "custom"}]).tools
    assert tool == {
        "type": "function",
        "function": {"name": "add", "description": "adds", "parameters": ADD["input_schema"]},
    }


def test_thinking_in_the_history_is_accepted_and_is_not_text():
    value = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        text("yes"),
    ]
    message = messages(user(text("hi")), {"role": "assistant", "content": value}, user(text("go on")))[1]
    assert message == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


def test_sampling_overrides_that_of_the_session():
    ask = parse(temperature=0.5, top_p=0.9, top_k=7, max_tokens=12, stop_sequences=["\n", "END"], stream=True)
    assert ask.sampling == DEFAULTS.model_copy(update={"temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 12})
    assert (ask.stop, ask.stream, ask.model) == (("\n", "END"), True, "any")


def test_unknown_fields_are_accepted():
    thinking = {"type": "enabled", "budget_tokens": 1024}
    ask = parse(metadata={"user_id": "u"}, thinking=thinking, betas=["x"], tool_choice={"type": "auto"}, unheard=1)
    assert ask == parse()._replace(ignored={"unheard": 1, "thinking": thinking})


def test_a_prefill_is_the_beginning_of_the_next_message():
    ask = parse(messages=[*ASKED["messages"], {"role": "assistant", "content": "yes,"}])
    assert (ask.messages, ask.options.prefill) == (parse().messages, "yes,")
    called = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    for content, words in (("yes ", "white space"), ([called], "only text"), ([thought, text("yes")], "only text")):
        with pytest.raises(BadRequest, match=words):
            parse(messages=[*ASKED["messages"], {"role": "assistant", "content": content}])
    with pytest.raises(BadRequest, match="needs a message before it"):
        parse(messages=[{"role": "assistant", "content": "yes"}])


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
REFUSED = [
    ({"messages": [user(IMAGE)]}, "messages.0.content.0", "images are not supported"),
    (
        {"messages": [user(text("a"), result("t", [IMAGE]))]},
        "messages.0.content.1.content.0",
        "images are not supported",
    ),
    ({"messages": [user({"type": "document"})]}, "messages.0.content.0", "'document' is not supported"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages.0.role", "'robot'"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "required"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": "hi"}, "messages", "expected a list"),
    ({"messages": ["hi"]}, "messages.0", "expected an object"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": "many"}, "max_tokens", "expected a number"),
    ({"temperature": True}, "temperature", "expected a number"),
    ({"top_p": 2}, "top_p", "less than or equal to 1"),
    ({"stop_sequences": [""]}, "stop_sequences.0", "empty"),
    ({"stop_sequences": "END"}, "stop_sequences", "expected a list"),
    ({"stream": 1}, "stream", "true or false"),
    ({"system": 7}, "system", "expected a list"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0", "web_search_20250305"),
    ({"tools": [{"input_schema": {}}]}, "tools.0.name", "expected a text"),
    ({"tools": [{"name": "a", "input_schema": []}]}, "tools.0.parameters", "expected an object"),
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSED)
def test_unsupported_fields_are_refused_by_name(body, param, message):
    with pytest.raises(BadRequest, match=message) as refused:
        parse(**body)
    assert refused.value.param == param


def test_input_that_is_nested_too_deeply_is_refused():
    deep = {}
    for _ in range(600):
        deep = {"a": deep}
    tool_use = {"type": "tool_use", "id": "t", "name": "add", "input": deep}
    with pytest.raises(BadRequest, match="nested too deeply"):
        messages({"role": "assistant", "content": [tool_use]}, user(text("hi")))
    with pytest.raises(BadRequest, match="nested too deeply"):
        parse(tools=[{"name": "add", "input_schema": deep}])


@given(st.dictionaries(st.sampled_from(["messages", "system", "tools", "stop_sequences", "max_tokens", "model"]), JSON))
def test_any_body_is_read_or_refused(body):
    with suppress(BadRequest):
        DIALECT.parse(body)


BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image"])},
    optional=dict.fromkeys(("text", "id", "name", "input", "content", "tool_use_id", "thinking"), JSON),
)


@given(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.lists(BLOCK, max_size=3)}
        )
    )
)
def test_any_blocks_are_read_or_refused(blocks):
    with suppress(BadRequest):
        ask = DIALECT.parse({"messages": blocks})
        Graph(ChatML(ByteTokenizer())).place(ask.messages, ask.tools)


# -- what is answered -------------------------------------------------------------------------------------------------


def test_a_response_is_valid_for_the_sdk():
    _, rendered = stream_events(DIALECT, {**ASKED, "tools": [ADD]}, f"Let me see. {ONE}{TWO}")
    message = Message.model_validate(rendered)
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    assert message.content[0].text == "Let me see."
    assert [block.input for block in message.content[1:]] == [{"a": 1}, {"a": 2}]
    assert message.stop_reason == "tool_use"
    assert message.usage.input_tokens > 0
    assert message.usage.output_tokens > 40


@pytest.mark.parametrize(
    ("body", "reply", "reason", "stop_sequence"),
    [
        ({}, "yes", "end_turn", "yes"),
        ({"max_tokens": 2}, "yes", "max_tokens", "ye"),
        ({"stop_sequences": ["no", "s,"]}, "yes, no", "stop_sequence", "ye"),
        ({}, "", "end_turn", ""),
    ],
)
def test_the_stop_reason_says_why_a_turn_ended(body, reply, reason, stop_sequence):
    events, rendered = stream_events(DIALECT, {**ASKED, **body}, reply)
    message = Message.model_validate(rendered)
    assert (message.stop_reason, "".join(block.text for block in message.content)) == (reason, stop_sequence)
    assert message.stop_sequence == ("s," if reason == "stop_sequence" else None)
    assert accumulated(events) == message


def test_the_order_of_a_streams_events():
    events, rendered = stream_events(DIALECT, {**ASKED, "tools": [ADD]}, f"So: {ONE} then {NONE}")
    assert all(name == data["type"] for name, data in events)
    assert [kind for kind, _ in groupby(outline(events))] == [
        "message_start",
        "content_block_start text",
        "content_block_delta text_delta",
        "content_block_stop",
        "content_block_start tool_use",
        "content_block_delta input_json_delta",
        "content_block_stop",
        "content_block_start text",
        "content_block_delta text_delta",
        "content_block_stop",
        "content_block_start tool_use",
        "content_block_delta input_json_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0][1]["message"]["usage"]["input_tokens"] == rendered["usage"]["input_tokens"]
    assert events[-2][1]["usage"]["output_tokens"] == rendered["usage"]["output_tokens"]
    message = accumulated(events)
    assert [block.input for block in message.content if block.type == "tool_use"] == [{"a": 1}, {}]


def test_reasoning_ends_with_a_signature():
    ask = parse(stream=True)
    turn = Turn({"role": "assistant", "content": "yes", "reasoning_content": "hm"}, "stop", 1, 5, 7)
    writer = DIALECT.stream(ask, "7")
    pieces = writer.delta(0, Delta(reasoning="hm")) + writer.delta(0, Delta("yes"))
    events = read_events(writer.begin(5) + pieces + writer.end([turn]))
    assert outline(events)[1:5] == [
        "content_block_start thinking",
        "content_block_delta thinking_delta",
        "content_block_delta signature_delta",
        "content_block_stop",
    ]
    (thinking,) = [block for block in accumulated(events).content if block.type == "thinking"]
    assert (thinking.thinking, bool(thinking.signature)) == ("hm", True)
    assert [b.type for b in Message.model_validate(DIALECT.render(ask, "7", [turn])).content] == ["thinking", "text"]


def test_a_failure_in_mid_stream_is_an_error_event():
    events, _ = stream_events(DIALECT, ASKED, "so far", fail=EngineError("it died"))
    assert events[-1] == ("error", {"type": "error", "error": {"type": "overloaded_error", "message": "it died"}})


def test_errors_have_anthropics_shape():
    for kind in ["invalid", "authentication", "not_found", "closed", "quota", "context", "engine", "internal"]:
        error = DIALECT.error("no", kind=kind, param="x")
        assert ErrorResponse.model_validate(error).error.message.endswith("no")
    assert DIALECT.error("no", kind="too_large")["error"]["type"] == "request_too_large"
    full = DIALECT.error("This model's maximum context length is 8 tokens", kind="context")["error"]["message"]
    assert full == "prompt is too long: This model's maximum context length is 8 tokens"


def test_models_have_anthropics_shape():
    models = models_response(["policy"])
    assert ModelInfo.model_validate(models["data"][0]).id == "policy"
    assert (models["has_more"], models["first_id"], models["last_id"]) == (False, "policy", "policy")
    assert models_response([])["data"] == []


def outline(events):
    return [
        " ".join(
            [data["type"], *(data[key]["type"] for key in ("content_block", "delta") if "type" in data.get(key, {}))]
        )
        for _, data in events
    ]


def accumulated(events):
    """The message that the SDK assembles from a stream."""
    snapshot, buffers = None, {}
    for _, data in events:
        event = EVENT.validate_python(data)
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    return Message.model_validate(snapshot.to_dict())
