"""T17: tool calls that are not complete are text, results are matched by id, and an agent's echo of a turn is found."""

import json

import anthropic
import openai
import pytest

from tests.gateway.harness import ADD, Replier, call, claude_of, client_of, run, serve, user

FLAT = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
CLAUDE = [{"name": "add", "input_schema": {"type": "object"}}]
FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {}}}
BROKEN = [
    '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {',
    '<tool_call>{"name": "add", "arguments": ',
    '<tool_call>{"name": "add"',
    "<tool_call>",
]


def with_clients(engine, body):
    async def main():
        async with serve(engine) as gateway:
            session = await gateway.open()
            async with client_of(session) as client, claude_of(session) as claude:
                await body(session, client, claude)

    run(main)


def kinds(session):
    return [str(verdict.kind) for verdict in session.served.session.verdicts.values()]


def chat(client, messages, **more):
    return client.chat.completions.create(model="m", messages=messages, **more)


@pytest.mark.parametrize("reply", BROKEN)
def test_t17_a_malformed_call_is_text_in_every_dialect(reply):
    async def body(session, client, claude):
        choice = (await chat(client, [user("hi")], tools=[ADD])).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (reply, None, "stop")
        async with client.chat.completions.stream(model="m", messages=[user("hi")], tools=[ADD]) as stream:
            choice = (await stream.get_final_completion()).choices[0]
        assert (choice.message.content, choice.message.tool_calls or None, choice.finish_reason) == (
            reply,
            None,
            "stop",
        )
        request = {"model": "m", "max_tokens": 999, "tools": CLAUDE, "messages": [user("hi")]}
        async with claude.messages.stream(**request) as stream:
            streamed = await stream.get_final_message()
        for message in (await claude.messages.create(**request), streamed):
            assert [(block.type, block.text) for block in message.content] == [("text", reply)]
            assert message.stop_reason == "end_turn"
        answer = await client.responses.create(model="m", input="hi", tools=FLAT)
        assert ([item.type for item in answer.output], answer.output_text) == (["message"], reply)
        events = [
            event async for event in await client.responses.create(model="m", input="hi", tools=FLAT, stream=True)
        ]
        assert not [event for event in events if "function_call" in event.type]
        assert events[-1].response.output_text == reply
        # Sent back as it is, it is what was sampled.
        await chat(client, [user("hi"), {"role": "assistant", "content": reply}, user("no")], tools=[ADD])
        assert kinds(session)[-1] == "exact"

    with_clients(Replier(reply), body)


def test_t17_results_are_matched_by_id_whatever_their_order():
    async def body(session, client, claude):
        message = (await chat(client, [user("hi")], tools=[ADD])).choices[0].message
        first, second = (
            {"role": "tool", "tool_call_id": made.id, "content": f"of {made.id}"} for made in message.tool_calls
        )
        await chat(client, [user("hi"), message, second, first], tools=[ADD])
        await chat(client, [user("hi"), message, first, second], tools=[ADD])
        prompts = [engine.tokenizer.decode(each[0]) for each in engine.calls]
        assert prompts[1] == prompts[2]
        assert prompts[1].index(first["content"]) < prompts[1].index(second["content"])
        assert kinds(session) == ["exact"] * 3

    engine = Replier(call(a=1) + call(a=2))
    with_clients(engine, body)


def test_t17_a_result_of_an_unknown_call_is_refused_in_every_dialect():
    made = {"id": "call_a", "type": "function", "function": {"name": "add", "arguments": "{}"}}

    async def body(session, client, claude):
        history = [user("hi"), {"role": "assistant", "content": None, "tool_calls": [made]}]
        await chat(client, [*history, {"role": "tool", "tool_call_id": "call_a", "content": "1"}], tools=[ADD])
        with pytest.raises(openai.BadRequestError, match="'call_b', which no message before it contains"):
            await chat(client, [*history, {"role": "tool", "tool_call_id": "call_b", "content": "1"}], tools=[ADD])
        result = {"type": "tool_result", "tool_use_id": "toolu_b", "content": "1"}
        with pytest.raises(anthropic.BadRequestError, match="'toolu_b'"):
            await claude.messages.create(model="m", max_tokens=9, tools=CLAUDE, messages=[user("hi"), user([result])])
        output = {"type": "function_call_output", "call_id": "call_b", "output": "1"}
        with pytest.raises(openai.BadRequestError, match="'call_b'"):
            await client.responses.create(model="m", input=[user("hi"), output], tools=FLAT)
        assert len(kinds(session)) == 1, "a refused request leaves nothing"

    with_clients(Replier(), body)


def test_t17_calls_are_parsed_only_if_the_request_has_tools():
    async def body(session, client, claude):
        choice = (await chat(client, [user("hi")])).choices[0]
        assert (choice.message.content, choice.finish_reason) == (call(a=1), "stop")

    with_clients(Replier(call(a=1)), body)


@pytest.mark.parametrize("more", ["", "\nCalling tools:\n[1]"])
def test_an_agent_that_appends_the_stop_string_continues_its_branch(more):
    """As smolagents does, which also adds what it did."""

    async def body(session, client, _):
        options, history = {"stop": ["</code>"]}, [user("hi")]
        for number in range(3):
            message = (await chat(client, history, **options)).choices[0].message
            assert message.content == "Thought.\n<code>\nx = 1\n"
            history += [
                {"role": "assistant", "content": f"{message.content}</code>{more}"},
                user(f"Observation {number}"),
            ]
        assert kinds(session) == ["exact", "bridged", "bridged"]
        assert len(list(session.episode().branches())) == 1
        prompt = engine.tokenizer.decode(engine.calls[-1][0])
        assert prompt.count(f"<code>\nx = 1\n</code>{more}<|im_end|>\n<|im_start|>user\nObservation") == 2

    engine = Replier("Thought.\n<code>\nx = 1\n</code> and so on")
    with_clients(engine, body)


@pytest.mark.parametrize(
    "inline", ["<think>\nhm\n</think>\n\nyes", "<think>hm</think>yes", "<think>\nhm\n</think>\nyes\n"]
)
def test_reasoning_that_is_sent_back_inline_continues_its_branch(inline):
    async def body(session, client, _):
        message = (await chat(client, [user("hi")])).choices[0].message
        assert (message.reasoning_content, message.content) == ("hm", "yes")
        await chat(client, [user("hi"), {"role": "assistant", "content": inline}, user("more")])
        assert kinds(session) == ["exact", "exact"]
        await chat(client, [user("hi"), {"role": "assistant", "content": inline.replace("hm", "so")}, user("more")])
        assert kinds(session)[-1] == "forked", "other reasoning is another turn"

    with_clients(Replier("<think>\nhm\n</think>\n\nyes"), body)


@pytest.mark.parametrize("stream", [False, True])
def test_functions_get_a_function_call(stream):
    async def body(session, client, _):
        request = {"functions": [FUNCTION], "function_call": {"name": "add"}}
        if stream:
            deltas = [
                chunk.choices[0]
                async for chunk in await chat(client, [user("hi")], stream=True, **request)
                if chunk.choices
            ]
            calls = [choice.delta.function_call for choice in deltas if choice.delta.function_call]
            name, arguments = calls[0].name, "".join(each.arguments for each in calls)
            reason = deltas[-1].finish_reason
        else:
            (choice,) = (await chat(client, [user("hi")], **request)).choices
            made, reason = choice.message.function_call, choice.finish_reason
            name, arguments = made.name, made.arguments
            assert (choice.message.content, choice.message.tool_calls) == (None, None)
        assert (name, json.loads(arguments), reason) == ("add", {"a": 1}, "function_call")
        turn = {"role": "assistant", "content": None, "function_call": {"name": name, "arguments": arguments}}
        result = {"role": "function", "name": "add", "content": "2"}
        await chat(client, [user("hi"), turn, result], functions=[FUNCTION])
        assert kinds(session) == ["exact", "exact"]

    with_clients(Replier(call(a=1)), body)
