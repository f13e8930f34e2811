"""Contract T01 of the gateway: the unmodified official SDKs."""

import asyncio
import json

import anthropic
import openai
import pytest

from loopwright.engines.base import ContextFull
from tests.gateway.clients import chat, followed, streamed, text_of
from tests.gateway.harness import ADD, Replier, call, claude_of, client_of, run, serve, user


def test_t01_chat_completions_whole_and_streamed():
    async def body():
        async with serve(Replier("grüß dich 😀")) as gateway, client_of(await gateway.open()) as client:
            whole = await chat(client, [user("hi")])
            (choice,) = whole.choices
            assert (choice.message.content, choice.message.role, choice.finish_reason) == (
                "grüß dich 😀",
                "assistant",
                "stop",
            )
            ids = len("grüß dich 😀".encode()) + 1
            assert (whole.usage.completion_tokens, whole.usage.total_tokens) == (ids, ids + whole.usage.prompt_tokens)
            chunks = await streamed(client, [user("hi")], stream_options={"include_usage": True})
            assert text_of(chunks) == "grüß dich 😀"
            assert len(chunks) > 8, "token by token"
            assert chunks[0].choices[0].delta.role == "assistant"
            assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
            assert chunks[-1].choices == []
            assert chunks[-1].usage == whole.usage
            assert len({chunk.id for chunk in chunks}) == 1
            assert all(chunk.usage is None for chunk in await streamed(client, [user("hi")]))

    run(body)


def test_t01_the_synchronous_client():
    async def body():
        async with serve() as gateway:
            session = await gateway.open()

            def talk():
                with openai.OpenAI(base_url=session.openai_base_url, api_key=session.key) as client:
                    whole = client.chat.completions.create(model="m", messages=[user("hi")])
                    stream = client.chat.completions.create(model="m", messages=[user("hi")], stream=True)
                    return whole.choices[0].message.content, text_of(list(stream)), [m.id for m in client.models.list()]

            assert await asyncio.to_thread(talk) == ("hello", "hello", ["policy"])

    run(body)


def test_t01_tools_whole_and_streamed():
    reply = f"Let me see.\n{call(a=1, b='x y')}\n{call('mul', c=[2])}"

    async def body():
        async with serve(Replier(reply)) as gateway, client_of(await gateway.open()) as client:
            (choice,) = (await chat(client, [user("hi")], tools=[ADD])).choices
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
            calls = [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]
            assert calls == [("add", {"a": 1, "b": "x y"}), ("mul", {"c": [2]})]
            chunks = await streamed(client, [user("hi")], tools=[ADD])
            deltas = [d for c in chunks if c.choices for d in c.choices[0].delta.tool_calls or ()]
            assert [d.function.name for d in deltas if d.id] == ["add", "mul"]
            joined = ["".join(d.function.arguments for d in deltas if d.index == index) for index in (0, 1)]
            assert [json.loads(text) for text in joined] == [{"a": 1, "b": "x y"}, {"c": [2]}]
            assert text_of(chunks) == "Let me see."
            assert chunks[-1].choices[0].finish_reason == "tool_calls"
            async with client.chat.completions.stream(model="m", messages=[user("hi")], tools=[ADD]) as stream:
                final = await stream.get_final_completion()
            assert [c.function.name for c in final.choices[0].message.tool_calls] == ["add", "mul"]

    run(body)


@pytest.mark.parametrize("stream", [False, True])
def test_t01_logprobs_joined_are_the_text(stream):
    async def body():
        async with serve(Replier("añb")) as gateway, client_of(await gateway.open()) as client:
            if stream:
                chunks = await streamed(client, [user("hi")], logprobs=True, top_logprobs=3)
                content = [
                    e for c in chunks if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content
                ]
            else:
                whole = await chat(client, [user("hi")], logprobs=True, top_logprobs=3)
                content = whole.choices[0].logprobs.content
                assert whole.usage.completion_tokens == len(content) + 1, "the end of the turn has no text"
            assert "".join(entry.token for entry in content) == "añb"
            assert bytes(b for entry in content for b in entry.bytes).decode() == "añb"
            assert [entry.logprob for entry in content] == [-0.5] * 4
            assert all(entry.top_logprobs[0].token == entry.token for entry in content)
            assert (await chat(client, [user("hi")])).choices[0].logprobs is None

    run(body)


def test_t01_n_stop_seed_and_limits():
    async def body():
        engine = Replier("one two three")
        async with serve(engine) as gateway, client_of(await gateway.open()) as client:
            several = await chat(client, [user("hi")], n=3)
            assert [c.message.content for c in several.choices] == ["one two three"] * 3
            assert len({seed for *_, seed in engine.calls}) == 3
            chunks = await streamed(client, [user("hi")], n=2)
            for index in (0, 1):
                mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
                assert "".join(c.delta.content or "" for c in mine) == "one two three"
                assert mine[-1].finish_reason == "stop"
            (stopped,) = (await chat(client, [user("hi")], stop=[" two", "x"])).choices
            assert (stopped.message.content, stopped.finish_reason) == ("one", "stop")
            assert engine.calls[-1][1] == list(b"one two"), "nothing is sampled after a stop string"
            assert text_of(await streamed(client, [user("hi")], stop="two")) == "one "
            (truncated,) = (await chat(client, [user("hi")], max_tokens=3)).choices
            assert (truncated.message.content, truncated.finish_reason) == ("one", "length")
            await chat(client, [user("hi")], seed=7)
            await chat(client, [user("hi")], seed=7)
            assert engine.calls[-1][3] == engine.calls[-2][3]

    run(body)


def test_t01_completions():
    async def body():
        engine = Replier("lo <tool_call>x")
        async with serve(engine) as gateway, client_of(await gateway.open()) as client:
            whole = await client.completions.create(model="m", prompt="hel", logprobs=1, max_tokens=50)
            (choice,) = whole.choices
            assert (choice.text, choice.finish_reason) == ("lo <tool_call>x", "stop")
            assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == whole.usage.completion_tokens
            assert engine.calls[0][0] == tuple(b"hel"), "no template is applied"
            by_ids = await client.completions.create(model="m", prompt=[104, 101], max_tokens=2, stream=True)
            chunks = [chunk async for chunk in by_ids]
            assert "".join(c.choices[0].text for c in chunks) == "lo"
            assert chunks[-1].choices[0].finish_reason == "length"
            assert engine.calls[1][0] == (104, 101)

    run(body)


def test_t01_errors_have_the_types_of_the_sdk():
    async def body():
        async with serve(Replier(room=60), body_bytes=5000) as gateway:
            session = await gateway.open()
            async with client_of(session) as client:
                image = [{"type": "image_url", "image_url": {"url": "data:"}}]
                with pytest.raises(openai.BadRequestError, match="images are not supported") as caught:
                    await chat(client, [user(image)])
                assert caught.value.param == "messages.0.content.0"
                for stream in (False, True):
                    with pytest.raises(
                        openai.BadRequestError, match="This model's maximum context length is 60"
                    ) as caught:
                        await chat(client, [user("x" * 60)], stream=stream)
                    assert caught.value.code == "context_length_exceeded"
                with pytest.raises(openai.BadRequestError, match="temperature"):
                    await chat(client, [user("x")], temperature=-1)
                for modalities in (["text", "audio"], 3):
                    with pytest.raises(openai.BadRequestError, match="only text can be sampled"):
                        await chat(client, [user("x")], modalities=modalities)
                with pytest.raises(openai.APIStatusError, match="larger than 5000") as caught:
                    await chat(client, [user("x" * 6000)])
                assert caught.value.status_code == 413
                with pytest.raises(openai.NotFoundError):
                    await client.embeddings.create(model="m", input="x")
            async with claude_of(session) as client:
                with pytest.raises(Exception, match="prompt is too long"):
                    await client.messages.create(model="m", max_tokens=9, messages=[user("x" * 60)])

    run(body)


def test_t01_an_engine_that_fails_in_mid_stream_raises_in_the_sdk():
    async def body():
        async with serve(Replier("hello", fail_at=2)) as gateway:
            session = await gateway.open()
            async with client_of(session) as client:
                events = []
                with pytest.raises(openai.APIError, match="out of memory"):
                    await followed(client, [user("hi")], events)
                assert text_of(events) == "he"
                description = session.served.describe()
                assert (description["verdicts"]["broken"], description["trainable"]) == (1, False)
                assert "out of memory" in description["turns"][0]["reason"]

    run(body)


def test_t01_a_refusal_after_a_keepalive_has_the_same_error():
    class Late(Replier):
        async def generate(self, ids, sampling, *, seed):
            await asyncio.sleep(0.2)
            raise ContextFull(8, len(ids))
            yield

    async def body():
        options = {"model": "m", "max_tokens": 9, "messages": [user("hi")], "stream": True}
        async with serve(Late(), keepalive_s=0.02) as gateway:
            session = await gateway.open()
            async with client_of(session) as client, claude_of(session) as claude:
                for create, more in (
                    (client.chat.completions.create, options),
                    (client.completions.create, {"model": "m", "prompt": "hi", "stream": True}),
                    (client.responses.create, {"model": "m", "input": "hi", "stream": True}),
                ):
                    with pytest.raises(openai.APIError, match="maximum context length is 8") as caught:
                        [_ async for _ in await create(**more)]
                    assert caught.value.code == "context_length_exceeded"
                with pytest.raises(
                    anthropic.APIStatusError, match="prompt is too long: This model's maximum"
                ) as caught:
                    [_ async for _ in await claude.messages.create(**options)]
                assert caught.value.body["error"]["type"] == "invalid_request_error"

    run(body)


def test_t01_anthropic_and_responses_are_served_too():
    async def body():
        async with serve(Replier(f"Hm. {call(a=1)}")) as gateway:
            session = await gateway.open()
            async with claude_of(session) as claude, client_of(session) as client:
                asked = {
                    "model": "m",
                    "messages": [user("hi")],
                    "tools": [{"name": "add", "input_schema": {"type": "object"}}],
                }
                said = await claude.messages.create(max_tokens=99, **asked)
                assert [block.type for block in said.content] == ["text", "tool_use"]
                async with claude.messages.stream(max_tokens=99, **asked) as stream:
                    assert (await stream.get_final_message()).content[1].input == {"a": 1}
                counted = await claude.messages.count_tokens(**asked)
                assert counted.input_tokens == said.usage.input_tokens
                answer = await client.responses.create(
                    model="m", input="hi", tools=[{"type": "function", "name": "add"}]
                )
                assert answer.output_text == "Hm."
                kinds = [
                    event.type async for event in await client.responses.create(model="m", input="hi", stream=True)
                ]
                assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
            dialects = {turn["dialect"] for turn in session.served.describe()["turns"]}
            assert len(dialects) == 2

    run(body)
