"""Options of a turn: tool choice, one call at a time, JSON, top logprobs, a prefill."""

import json

import anthropic
import openai
import pytest

from loopwright.engines.scripted import ScriptedConfig, ScriptedEngine
from loopwright.gateway.sessions.tool_calls import HERMES
from loopwright.gateway.sessions.turn_options import TurnOptions
from tests.gateway.harness import ADD, Replier, call, claude_of, client_of, run, serve, user

MUL = {"type": "function", "function": {"name": "mul", "parameters": {"type": "object", "properties": {}}}}
SHAPE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in (ADD, MUL)]
FLAT = [{"type": "function", "name": "add", "parameters": SHAPE, "strict": False}]


def kinds(session):
    return [str(verdict.kind) for verdict in session.served.session.verdicts.values()]


async def chat(client, messages=None, **more):
    return await client.chat.completions.create(model="any", messages=messages or [user("hi")], **more)


def last(engine, number=-1):
    return engine.tokenizer.decode(engine.calls[number][0])


def run_with(engine, steps, **config):
    async def main():
        async with serve(engine, **config) as gateway:
            session = await gateway.open()
            async with client_of(session) as client, claude_of(session) as claude:
                return await steps(session, client, claude)

    return run(main)


# -- tool choice -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "prefix"),
    [
        ("required", '<tool_call>\n{"name": "'),
        ({"type": "function", "function": {"name": "mul"}}, '<tool_call>\n{"name": "mul", "arguments": '),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_is_started_for_the_policy(choice, prefix, stream):
    engine = Replier(call("mul", a=1))

    async def steps(session, client, _):
        options = {"tools": [ADD, MUL], "tool_choice": choice}
        if stream:
            async with client.chat.completions.stream(model="m", messages=[user("hi")], **options) as events:
                answer = await events.get_final_completion()
        else:
            answer = await chat(client, **options)
        (tool_call,) = answer.choices[0].message.tool_calls
        assert (tool_call.function.name, json.loads(tool_call.function.arguments)) == ("mul", {"a": 1})
        assert answer.choices[0].finish_reason == "tool_calls"
        assert last(engine).endswith(f"<|im_start|>assistant\n{prefix}")
        (row,) = session.episode().rows()
        rest = call("mul", a=1)[len(prefix) :]
        assert engine.tokenizer.decode(row.response_ids) == f"{rest}<|im_end|>"
        assert all(row.response_mask), "the inserted prefix is not part of the response"
        result = {"role": "tool", "tool_call_id": tool_call.id, "content": "1"}
        message = answer.choices[0].message.model_dump(exclude_none=True)
        message.pop("parsed", None)
        for each in message["tool_calls"]:
            each["function"].pop("parsed_arguments", None)
        await chat(client, [user("hi"), message, result], tools=[ADD, MUL])
        assert kinds(session) == ["exact", "exact"]

    run_with(engine, steps)


def test_tool_choice_none_does_not_fork_the_conversation():
    engine = Replier(lambda prompt: call(a=1) if "again" in prompt else "so")

    async def steps(session, client, claude):
        message = (await chat(client, tools=[ADD])).choices[0].message
        history = [user("hi"), {"role": "assistant", "content": message.content}, user("again")]
        answer = (await chat(client, history, tools=[ADD], tool_choice="none")).choices[0]
        assert (answer.message.tool_calls, answer.message.content) == (None, call(a=1))
        assert answer.finish_reason == "stop"
        history += [{"role": "assistant", "content": answer.message.content}, user("more")]
        await chat(client, history, tools=[ADD])
        assert kinds(session) == ["exact"] * 3
        options = {"model": "m", "max_tokens": 99, "tools": TOOLS, "tool_choice": {"type": "none"}}
        blocks = (await claude.messages.create(messages=[user("again")], **options)).content
        assert [block.type for block in blocks] == ["text"]

    run_with(engine, steps)


def test_anthropic_and_responses_choose_tools_too():
    engine = Replier(call("add", a=1))

    async def steps(session, client, claude):
        options = {"model": "m", "max_tokens": 99, "messages": [user("hi")], "tools": TOOLS}
        for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
            answer = await claude.messages.create(tool_choice=choice, **options)
            assert [(block.type, block.name, block.input) for block in answer.content] == [
                ("tool_use", "add", {"a": 1})
            ]
            assert '<tool_call>\n{"name": "' in last(engine)
        for choice in ("required", {"type": "function", "name": "add"}):
            answer = await client.responses.create(model="m", input="hi", tools=FLAT, tool_choice=choice)
            assert [(item.type, item.name) for item in answer.output] == [("function_call", "add")]
            assert last(engine).endswith('{"name": "add", "arguments": ')

    run_with(engine, steps)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tool_choice": "required"}, "no tools to choose from"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "no tool 'sub'"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools"}}, "not supported"),
        ({"tools": [ADD], "parallel_tool_calls": "no"}, "true or false"),
        ({"response_format": {"type": "grammar"}}, "text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema: expected an object"),
    ],
)
def test_unsupported_options_are_refused(more, words):
    async def steps(session, client, _):
        with pytest.raises(openai.BadRequestError, match=words):
            await chat(client, **more)
        assert len(session.served.session.graph.nodes) == 1

    run_with(Replier(), steps)


@pytest.mark.parametrize(("value", "is_single"), [(False, True), (0, True), (True, False), (None, False)])
def test_a_flag_that_is_0_is_false(value, is_single):
    options = TurnOptions.from_openai({"parallel_tool_calls": value}, [ADD], HERMES, "")
    assert options.single_tool_call is is_single


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_at_a_time_ends_the_turn_before_the_second(stream):
    text = f"so {call(a=1)}\n{call('mul', b=2)}"
    engine = Replier(text)

    async def steps(session, client, claude):
        options = {"tools": [ADD, MUL], "parallel_tool_calls": False}
        if stream:
            chunks = [chunk async for chunk in await chat(client, stream=True, **options)]
            names = [
                tool_call.function.name
                for c in chunks
                for tool_call in c.choices[0].delta.tool_calls or ()
                if tool_call.id
            ]
        else:
            names = [
                tool_call.function.name for tool_call in (await chat(client, **options)).choices[0].message.tool_calls
            ]
        assert names == ["add"]
        (row,) = session.episode().rows()
        assert engine.tokenizer.decode(row.response_ids).endswith("</tool_call>\n<tool_call>"), "the ids stay complete"
        one = {"type": "auto", "disable_parallel_tool_use": True}
        answer = await claude.messages.create(
            model="m", max_tokens=999, tools=TOOLS, tool_choice=one, messages=[user("hi")]
        )
        assert [block.name for block in answer.content if block.type == "tool_use"] == ["add"]
        assert len((await chat(client, tools=[ADD, MUL])).choices[0].message.tool_calls) == 2

    run_with(engine, steps)


# -- JSON --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["json_object", "json_schema"])
def test_a_json_answer_is_requested_and_started(form):
    engine = Replier('{"a": 1}')

    async def steps(session, client, _):
        requested_format = {"type": form}
        if form == "json_schema":
            requested_format["json_schema"] = {"name": "x", "strict": True, "schema": SHAPE}
        answer = await chat(client, response_format=requested_format)
        assert json.loads(answer.choices[0].message.content) == {"a": 1}
        assert last(engine).endswith("<|im_start|>assistant\n{")
        assert "Answer with a JSON object" in last(engine)
        assert ('"required":["a"]' in last(engine)) == (form == "json_schema")
        history = [user("hi"), {"role": "assistant", "content": answer.choices[0].message.content}, user("more")]
        await chat(client, history, response_format=requested_format)
        await chat(client, [*history, {"role": "assistant", "content": '{"a": 1}'}, user("plain")])
        assert kinds(session) == ["exact"] * 3, "the instruction is not part of the conversation and forks nothing"
        text = {"format": {"type": form, **({"name": "x", "schema": SHAPE} if form == "json_schema" else {})}}
        assert (await client.responses.create(model="m", input="hi", text=text)).output_text == '{"a": 1}'

    run_with(engine, steps)


# -- alternatives ------------------------------------------------------------------------------------------------


def test_top_logprobs_are_returned():
    engine = ScriptedEngine(ScriptedConfig(replies=("ab",), slip=0.2), None)

    async def steps(session, client, _):
        for stream in (False, True):
            options = {"logprobs": True, "top_logprobs": 3, "seed": 1}
            if stream:
                chunks = [c async for c in await chat(client, stream=True, **options)]
                content = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
            else:
                content = (await chat(client, **options)).choices[0].logprobs.content
            first = content[0].top_logprobs
            assert [entry.token for entry in first] == ["a", " ", "!"]
            assert first[0].logprob == pytest.approx(-0.2231, abs=1e-3)
            assert first[1].logprob == first[2].logprob < first[0].logprob
            (own,) = [entry.logprob for entry in first if entry.token == content[0].token] or [content[0].logprob]
            assert own == content[0].logprob
        raw = await client.completions.create(model="m", prompt="hi", logprobs=2, max_tokens=1)
        assert set(raw.choices[0].logprobs.top_logprobs[0]) >= {"a", " "}
        answer = await client.responses.create(
            model="m", input="hi", top_logprobs=2, include=["message.output_text.logprobs"]
        )
        assert [entry.token for entry in answer.output[0].content[0].logprobs[0].top_logprobs] == ["a", " "]

    run_with(engine, steps)


# -- streams -----------------------------------------------------------------------------------------------------


async def streamed(dialect, client, claude, **more):
    """The names and argument fragments of a stream's calls, its text, and why it ended."""
    names, fragments, text, reason = [], [], "", None
    match dialect:
        case "chat":
            async for event in await chat(client, tools=[ADD], stream=True, **more):
                for choice in event.choices:
                    for made in choice.delta.tool_calls or ():
                        names += [made.function.name] * bool(made.function.name)
                        fragments.append(made.function.arguments)
                    text, reason = text + (choice.delta.content or ""), choice.finish_reason or reason
        case "responses":
            limit = {"max_output_tokens": more["max_tokens"]} if more else {}
            async for event in await client.responses.create(model="m", input="hi", tools=FLAT, stream=True, **limit):
                if event.type == "response.output_item.added" and event.item.type == "function_call":
                    names.append(event.item.name)
                fragments += [event.delta] if event.type == "response.function_call_arguments.delta" else []
                text += event.delta if event.type == "response.output_text.delta" else ""
            reason = event.type
        case _:
            request = {"model": "m", "max_tokens": 999, "tools": TOOLS, "messages": [user("hi")], "stream": True}
            async for event in await claude.messages.create(**{**request, **more}):
                if event.type == "content_block_start" and event.content_block.type == "tool_use":
                    names.append(event.content_block.name)
                if event.type == "content_block_delta":
                    fragments += [event.delta.partial_json] if event.delta.type == "input_json_delta" else []
                    text += event.delta.text if event.delta.type == "text_delta" else ""
                reason = event.delta.stop_reason if event.type == "message_delta" else reason
    return names, fragments, text, reason


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_arguments_are_streamed_in_fragments_once_the_call_is_complete(dialect):
    reply = call("add", text="abcdef", more=1)
    engine = Replier(reply)

    async def steps(session, client, claude):
        names, fragments, text, reason = await streamed(dialect, client, claude)
        assert (names, text) == (["add"], "")
        assert json.loads("".join(fragments)) == {"text": "abcdef", "more": 1}
        assert len(fragments) > 20, "as they were sampled"
        assert reason in ("tool_calls", "tool_use", "response.completed")
        (row,) = session.episode().rows()
        assert engine.tokenizer.decode(row.response_ids) == f"{reply}<|im_end|>"

    run_with(engine, steps)


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
@pytest.mark.parametrize("length", range(12, 45, 4))
def test_t17_a_call_that_was_cut_is_never_shown_as_one(dialect, length):
    """Wherever it is cut: in a stream and in a whole answer, it is text, and the reason is the limit."""
    reply = call("add", text="abc")

    async def steps(session, client, claude):
        names, fragments, text, reason = await streamed(dialect, client, claude, max_tokens=length)
        assert (names, fragments, text) == ([], [], reply[:length])
        assert reason in ("length", "max_tokens", "response.incomplete")
        match dialect:
            case "chat":
                (choice,) = (await chat(client, tools=[ADD], max_tokens=length)).choices
                assert (choice.message.tool_calls, choice.finish_reason) == (None, "length")
                assert choice.message.content == reply[:length]
            case "responses":
                answer = await client.responses.create(model="m", input="hi", tools=FLAT, max_output_tokens=length)
                assert ([item.type for item in answer.output], answer.status) == (["message"], "incomplete")
            case _:
                request = {"model": "m", "max_tokens": length, "tools": TOOLS, "messages": [user("hi")]}
                answer = await claude.messages.create(**request)
                assert ([block.type for block in answer.content], answer.stop_reason) == (["text"], "max_tokens")

    assert length < len(reply)
    run_with(Replier(reply), steps)


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_text_that_resembles_a_call_is_text(dialect):
    text = "use <tool_call> tags, <tool_ca or <tool_call>{no}</tool_call>"
    engine = Replier(text)

    async def steps(session, client, claude):
        if dialect == "chat":
            chunks = [c async for c in await chat(client, tools=[ADD], stream=True)]
            streamed_text = "".join(c.choices[0].delta.content or "" for c in chunks)
        elif dialect == "messages":
            options = {"model": "m", "max_tokens": 999, "tools": TOOLS, "messages": [user("hi")]}
            async with claude.messages.stream(**options) as stream:
                streamed_text = "".join([piece async for piece in stream.text_stream])
        else:
            streamed_text = (await client.responses.create(model="m", input="hi", tools=FLAT)).output_text
        assert streamed_text == text

    run_with(engine, steps)


@pytest.mark.parametrize("depth", [70, 300])
def test_t17_arguments_too_deep_for_anybody_are_text(depth):
    nested = '{"x": ' * depth + "1" + "}" * depth
    reply = f'<tool_call>{{"name": "add", "arguments": {nested}}}</tool_call>'

    async def steps(session, client, claude):
        answer = (await chat(client, tools=[ADD])).choices[0]
        assert (answer.message.tool_calls, answer.message.content, answer.finish_reason) == (None, reply, "stop")
        await chat(client, [user("hi"), answer.message, user("no JSON")], tools=[ADD])
        request = {"model": "m", "max_tokens": 40_000, "tools": TOOLS}
        async with claude.messages.stream(messages=[user("hi")], **request) as stream:
            message = await stream.get_final_message()
        assert (message.content[0].text, message.stop_reason) == (reply, "end_turn")
        # Other tools are another conversation.
        assert kinds(session) == ["exact", "exact", "forked"]
        deep = {"id": "1", "type": "function", "function": {"name": "f", "arguments": nested}}
        await chat(client, [user("other"), {"role": "assistant", "content": None, "tool_calls": [deep]}, user("x")])

    run_with(Replier(reply), steps)


def test_reasoning_is_streamed_in_every_dialect():
    engine = Replier("<think>\nhm, so\n</think>\n\nyes")

    async def steps(session, client, claude):
        chunks = [c async for c in await chat(client, stream=True)]
        deltas = [c.choices[0].delta for c in chunks]
        assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "hm, so"
        assert "".join(d.content or "" for d in deltas) == "yes"
        async with client.responses.stream(model="m", input="hi") as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "hm, so"
        assert [item.type for item in final.output] == ["reasoning", "message"]
        assert (final.output[0].content[0].text, final.output_text) == ("hm, so", "yes")
        history = [{"role": "user", "content": "hi"}, *[item.model_dump() for item in final.output], user("more")]
        await client.responses.create(model="m", input=history)
        options = {"model": "m", "max_tokens": 999}
        async with claude.messages.stream(messages=[user("other")], **options) as stream:
            message = await stream.get_final_message()
        assert [(block.type, getattr(block, "thinking", "")) for block in message.content] == [
            ("thinking", "hm, so"),
            ("text", ""),
        ]
        assert message.content[0].signature
        await claude.messages.create(
            messages=[user("other"), {"role": "assistant", "content": message.content}, user("more")], **options
        )
        assert kinds(session) == ["exact", "exact", "exact", "forked", "exact"], "another conversation, which continues"
        changed = [
            {"type": "thinking", "thinking": "other thoughts", "signature": "x"},
            {"type": "text", "text": "yes"},
        ]
        await claude.messages.create(
            messages=[user("other"), {"role": "assistant", "content": changed}, user("more")], **options
        )
        assert kinds(session)[-1] == "forked", "changed reasoning is not the policy's"

    run_with(engine, steps)


# -- a prefill ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_prefill_is_inserted_and_the_rest_is_sampled(stream):
    engine = Replier('{"a": 1}')

    async def steps(session, client, claude):
        options = {"model": "m", "max_tokens": 99, "messages": [user("hi"), {"role": "assistant", "content": '{"a":'}]}
        if stream:
            async with claude.messages.stream(**options) as events:
                answer = await events.get_final_message()
        else:
            answer = await claude.messages.create(**options)
        assert answer.content[0].text == " 1}"
        assert last(engine).endswith('<|im_start|>assistant\n{"a":')
        counted = await claude.messages.count_tokens(model="m", messages=options["messages"])
        assert counted.input_tokens == answer.usage.input_tokens
        whole = {"role": "assistant", "content": '{"a":' + answer.content[0].text}
        await claude.messages.create(model="m", max_tokens=99, messages=[user("hi"), whole, user("more")])
        assert kinds(session) == ["exact", "exact"]
        (row,) = session.episode().rows()
        assert engine.tokenizer.decode(row.response_ids).startswith(" 1}"), "mask 0 for inserted tokens"
        with pytest.raises(anthropic.BadRequestError, match="with a prefill cannot start with a call"):
            await claude.messages.create(**options, tools=TOOLS, tool_choice={"type": "any"})

    run_with(engine, steps)


# -- images ------------------------------------------------------------------------------------------------------


def test_images_are_refused_in_every_dialect():
    async def steps(session, client, claude):
        url = "data:image/png;base64,AAAA"
        with pytest.raises(openai.BadRequestError, match="images are not supported"):
            await chat(client, [user([{"type": "image_url", "image_url": {"url": url}}])])
        parts = [{"type": "input_image", "image_url": url, "detail": "auto"}]
        with pytest.raises(openai.BadRequestError, match="images are not supported"):
            await client.responses.create(model="m", input=[{"role": "user", "content": parts}])
        source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
        block = {"type": "image", "source": source}
        with pytest.raises(anthropic.BadRequestError, match="images are not supported"):
            await claude.messages.create(model="m", max_tokens=9, messages=[user([block])])
        result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": source}]}
        with pytest.raises(anthropic.BadRequestError, match="images are not supported"):
            await claude.messages.create(model="m", max_tokens=9, messages=[user([result])])

    run_with(Replier(), steps)


def test_a_turn_with_options_is_repeated_after_a_restart(tmp_path):
    body = {"model": "m", "messages": [user("hi")], "tools": [ADD], "tool_choice": "required"}

    async def main():
        import aiohttp

        async with aiohttp.ClientSession() as http:
            answers = []
            for retry in ("0", "1"):
                async with serve(Replier(call(a=1)), output=tmp_path) as gateway:
                    session = await gateway.open("s")
                    headers = {"authorization": f"Bearer {session.key}", "x-stainless-retry-count": retry}
                    url = f"{session.openai_base_url}/chat/completions"
                    async with http.post(url, json=body, headers=headers) as answer:
                        answers.append((await answer.json())["choices"][0]["message"])
                    assert len(session.episode().rows()) == 1
            assert answers[0] == answers[1]
            assert answers[0]["tool_calls"][0]["function"]["name"] == "add"

    run(main)
