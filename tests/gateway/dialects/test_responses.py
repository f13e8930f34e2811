"""OpenAI Responses: requests become messages for the policy, and its turns become responses."""

import json
from contextlib import suppress
from itertools import groupby

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from loopwright.engines.base import EngineError
from loopwright.engines.tokenizer import ByteTokenizer
from loopwright.gateway.dialects.fields import BadRequest
from loopwright.gateway.dialects.responses import Responses
from loopwright.gateway.sessions.graph import Graph
from loopwright.gateway.sessions.template import ChatML
from loopwright.gateway.sessions.turn import Turn
from tests.gateway.dialects.harness import DEFAULTS, JSON, stream_events

DIALECT = Responses(ByteTokenizer(), DEFAULTS)
EVENT = TypeAdapter(ResponseStreamEvent)
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "name": "add", "description": "adds", "parameters": PARAMETERS, "strict": True}
ASKED = {"model": "any", "input": "hi"}


def call(arguments):
    return f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'


ONE, TWO, NONE = call('{"a": 1}'), call('{"a":  2}'), call("{}")


def parse(**body):
    return DIALECT.parse({**ASKED, **body})


def messages(*items, **body):
    return list(parse(input=list(items), **body).messages)


def user(text):
    return {"role": "user", "content": text}


def assistant(*texts, **more):
    content = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": content, **more}


def called(id, arguments="{}"):
    return {"type": "function_call", "id": f"fc_{id}", "call_id": id, "name": "add", "arguments": arguments}


def output(id, content):
    return {"type": "function_call_output", "call_id": id, "output": content}


# -- what is asked ----------------------------------------------------------------------------------------------------


def test_input_is_a_text_or_items():
    message = {"role": "user", "content": "hi"}
    assert list(parse().messages) == [message]
    assert messages(user("hi")) == [message]
    assert messages({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}) == [message]


def test_instructions_come_first_and_developer_messages_are_system_messages():
    assert messages({"role": "developer", "content": "Be kind."}, user("hi"), instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
    ]


def test_calls_and_outputs_become_calls_and_tool_messages():
    items = [assistant("Let me see."), called("c1", '{"a":1}'), called("c2"), output("c1", "2")]
    items += [output("c2", [{"type": "input_text", "text": "3"}]), user("and now?")]
    assert messages(*items) == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
                {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "3"},
        {"role": "user", "content": "and now?"},
    ]


def test_the_items_of_one_turn_are_one_message():
    around = messages(assistant("before"), called("c"), assistant(" after"), output("c", "1"))
    assert [message["role"] for message in around] == ["assistant", "tool"]
    assert around[0]["content"] == "before after"
    assert [m["content"] for m in messages(assistant("one"), assistant("two"), user("hi"))] == ["one", "two", "hi"]


def test_reasoning_in_the_history_is_accepted_and_is_not_text():
    thought = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    hidden = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}
    assert messages(thought, assistant("yes"), hidden, called("c"), output("c", "1"))[:2] == [
        {"role": "assistant", "content": "yes", "reasoning_content": "hm"},
        {"role": "assistant", "content": "", "tool_calls": messages(called("c"), output("c", ""))[0]["tool_calls"]},
    ]


def test_tools_are_described_as_functions():
    (tool,) = parse(tools=[ADD]).tools
    assert tool == {"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}


def test_sampling_overrides_that_of_the_session():
    ask = parse(temperature=0.5, top_p=0.9, max_output_tokens=12, stream=True, include=["message.output_text.logprobs"])
    assert ask.sampling == DEFAULTS.model_copy(update={"temperature": 0.5, "top_p": 0.9, "max_tokens": 12})
    assert (ask.stream, ask.logprobs, ask.model) == (True, True, "any")


def test_unknown_fields_are_accepted():
    more = {"metadata": {"a": "b"}, "store": False, "truncation": "auto", "reasoning": {"effort": "low"}, "unheard": 1}
    ask = parse(**more, parallel_tool_calls=True, text={"verbosity": "low"}, previous_response_id=None)
    ignored = {"truncation": "auto", "reasoning": {"effort": "low"}, "unheard": 1, "text.verbosity": "low"}
    assert ask._replace(echo={}, recorded={}) == parse()._replace(ignored=ignored, echo={}, recorded={})


REFUSED = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "not in this session"),
    ({"conversation": "conv_1"}, "conversation", "not in this session"),
    ({"conversation": "c", "previous_response_id": "r"}, "previous_response_id", "this or a conversation"),
    ({"prompt": {"id": "p"}}, "prompt", "prompts are not stored"),
    ({"background": True}, "background", "while its client waits"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0", "images are not supp"),
    ({"input": [output("c", [{"type": "input_image"}])]}, "input.0.output.0", "images are not supported"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0", "'input_file' is not"),
    ({"input": [{"type": "item_reference", "id": "m"}]}, "input.0", "not in this session"),
    ({"input": [{"id": "m"}]}, "input.0", "not in this session"),
    ({"input": [{"type": "computer_call"}]}, "input.0", "'computer_call' is not supported"),
    ({"input": [{"role": "robot", "content": "hi"}]}, "input.0.role", "'robot'"),
    ({"input": [{"role": "user"}]}, "input.0.content", "required"),
    ({"input": []}, "input", "at least one"),
    ({"input": None}, "input", "at least one"),
    ({"input": 7}, "input", "expected a list"),
    ({"instructions": 7}, "instructions", "expected a text"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    ({"temperature": "hot"}, "temperature", "expected a number"),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp", "name": "x"}]}]},
        "tools.0.tools.0.type",
        "mcp",
    ),
    ({"stream": "yes"}, "stream", "true or false"),
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSED)
def test_unsupported_fields_are_refused_by_name(body, param, message):
    with pytest.raises(BadRequest, match=message) as refused:
        parse(**body)
    assert refused.value.param == param


KEYS = ["input", "instructions", "tools", "max_output_tokens", "temperature", "model", "include", "stream"]


@given(st.dictionaries(st.sampled_from(KEYS), JSON))
def test_any_body_is_read_or_refused(body):
    with suppress(BadRequest):
        DIALECT.parse(body)


ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "item_reference"])},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "developer"]),
        **dict.fromkeys(("content", "call_id", "name", "arguments", "output"), JSON),
    },
)


@given(st.lists(ITEM, max_size=3))
def test_any_items_are_read_or_refused(items):
    with suppress(BadRequest):
        ask = DIALECT.parse({"input": items})
        Graph(ChatML(ByteTokenizer())).place(ask.messages, ask.tools)


# -- what is answered -------------------------------------------------------------------------------------------------


def test_a_response_is_valid_for_the_sdk():
    _, rendered = stream_events(DIALECT, {**ASKED, "tools": [ADD]}, f"Let me see. {ONE}{TWO}")
    response = Response.model_validate(rendered)
    assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
    assert response.output_text == "Let me see."
    assert [json.loads(item.arguments) for item in response.output[1:]] == [{"a": 1}, {"a": 2}]
    assert response.status == "completed"
    assert response.tools[0].name == "add"
    assert response.usage.input_tokens + response.usage.output_tokens == response.usage.total_tokens


@pytest.mark.parametrize(
    ("body", "reply", "status", "details"),
    [({}, "yes", "completed", "yes"), ({"max_output_tokens": 2}, "yes", "incomplete", "ye"), ({}, "", "completed", "")],
)
def test_the_status_says_how_a_turn_ended(body, reply, status, details):
    events, rendered = stream_events(DIALECT, {**ASKED, **body}, reply)
    response = Response.model_validate(rendered)
    assert (response.status, response.output_text, len(response.output)) == (status, details, 1)
    assert (response.incomplete_details is not None) == (status == "incomplete")
    assert events[-1][0] == f"response.{status}"
    assert Response.model_validate(events[-1][1]["response"]).output == response.output


def test_the_order_of_a_streams_events():
    events, _ = stream_events(DIALECT, {**ASKED, "tools": [ADD]}, f"So: {ONE} then {NONE}")
    assert all(name == data["type"] for name, data in events)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    text = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    names = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    done = ["output_item.done"]
    kinds = ["created", "in_progress", *[*text, *done, *names, *done] * 2, "completed"]
    assert [name for name, _ in groupby(name for name, _ in events)] == [f"response.{kind}" for kind in kinds]
    followed = Response.model_validate(accumulated(events).to_dict())
    assert followed.output_text == "So:  then"
    assert [item.arguments for item in followed.output if item.type == "function_call"] == ['{"a": 1}', "{}"]


def test_logprobs_are_returned_on_request():
    events, rendered = stream_events(DIALECT, {**ASKED, "include": ["message.output_text.logprobs"]}, "yes!")
    logprobs = Response.model_validate(rendered).output[0].content[0].logprobs
    assert "".join(each.token for each in logprobs) == "yes!"
    assert {each.logprob for each in logprobs} == {-0.25}
    assert bytes(logprobs[0].bytes) == b"y"
    assert events[-1][1]["response"]["output"][0]["content"][0]["logprobs"] == [each.to_dict() for each in logprobs]
    streamed = [each for name, data in events if name.endswith("text.delta") for each in data["logprobs"]]
    assert "".join(each["token"] for each in streamed) == "yes!"


def test_reasoning_is_a_separate_item():
    ids = ByteTokenizer().encode("<think>hm</think>yes")
    turn = Turn({"role": "assistant", "content": "yes", "reasoning_content": "hm"}, "stop", 1, 5, 20, ids=tuple(ids))
    response = Response.model_validate(DIALECT.render(parse(), "7", [turn]))
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.usage.output_tokens_details.reasoning_tokens == len("<think>hm</think>")
    assert response.output[0].content[0].text == "hm"


def test_a_failure_in_mid_stream_is_a_failed_response_and_an_error():
    events, _ = stream_events(DIALECT, ASKED, "so far", fail=EngineError("it died"))
    (failed, data), (error, last) = events[-2:]
    assert (failed, error) == ("response.failed", "error")
    response = Response.model_validate(data["response"])
    assert (response.status, response.error.message) == ("failed", "it died")
    EVENT.validate_python(last)
    assert last["error"]["message"] == "it died"


def test_errors_have_openais_shape():
    error = DIALECT.error("no", kind="context", param="input")["error"]
    code = "context_length_exceeded"
    assert error == {"message": "no", "type": "invalid_request_error", "param": "input", "code": code}
    assert DIALECT.error("no", kind="unheard of")["error"]["type"] == "server_error"


def accumulated(events):
    """The response that the SDK assembles from a stream."""
    state = ResponseStreamState(text_format=openai.omit, input_tools=openai.omit)
    for _, data in events:
        state.handle_event(EVENT.validate_python(data))
    return state._completed_response
