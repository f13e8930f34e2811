"""Anthropic's SDK, unmodified, against the gateway; and any conversation, sent back as it was answered."""

import asyncio
import json

import anthropic
import pytest
from anthropic.types import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from loopwright.engines.base import ContextFull, EngineError
from loopwright.gateway.sessions.session import Session
from tests.gateway.dialects.harness import DEFAULTS, Parrot, exact, read_events, run
from tests.gateway.dialects.test_messages import (
    ADD,
    ASKED,
    DIALECT,
    IMAGE,
    ONE,
    TWO,
    accumulated,
    call,
    result,
    text,
    user,
)

# -- any conversation -------------------------------------------------------------------------------------------------

WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=8)
ARGUMENTS = st.dictionaries(WORDS, st.integers(-(2**53), 2**53) | WORDS | st.booleans() | st.none(), max_size=3)
SPEECH = st.tuples(WORDS, st.lists(ARGUMENTS, max_size=3), WORDS)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(SPEECH, st.booleans()), min_size=1, max_size=5), st.booleans())
def test_t02_what_the_policy_said_is_found_again(turns, blocks):
    """Each request sends back what was answered before: every turn goes on from the very ids that were sampled."""
    said = [before + "".join(call(json.dumps(a)) for a in calls) + after for (before, calls, after), _ in turns]

    async def story():
        session, history = Session(Parrot(*said), DEFAULTS, seed="0"), [{"role": "user", "content": "begin"}]
        for number, (_, streamed) in enumerate(turns):
            system = [text(f"x-anthropic-billing-header: cch={number};"), text("Be brief.")]
            ask = DIALECT.parse({**ASKED, "system": system, "tools": [ADD], "messages": history})
            writer, pieces = DIALECT.stream(ask, "7"), []
            turn = await session.sample(session.draft(ask.messages, ask.tools), pieces.append)
            sent = writer.begin(1) + b"".join(writer.delta(0, piece) for piece in pieces) + writer.end([turn])
            message = (
                accumulated(read_events(sent)) if streamed else Message.model_validate(DIALECT.render(ask, "7", [turn]))
            )
            history = [*history, json.loads(json.dumps({"role": "assistant", "content": message.to_dict()["content"]}))]
            answers = [result(block.id, "done") for block in message.content if block.type == "tool_use"]
            follow = [*answers, text("go on")]
            history.append(user(*follow) if blocks or answers else {"role": "user", "content": "go on"})
        return session

    session = asyncio.run(story())
    assert exact(session) == ["exact"] * len(turns)


# -- the official SDK -------------------------------------------------------------------------------------------------


def sync(opened, act):
    def inside():
        with anthropic.Anthropic(base_url=opened.anthropic_base_url, api_key=opened.key, max_retries=0) as client:
            return act(client)

    return asyncio.to_thread(inside)


def client_of(opened):
    return anthropic.AsyncAnthropic(base_url=opened.anthropic_base_url, api_key=opened.key, max_retries=0)


def asked(**more):
    return {"model": "any", "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}], **more}


def test_t01_the_sdk_gets_an_answer():
    async def story(opened, engine):
        first = await sync(opened, lambda client: client.messages.create(**asked(extra_body={"unheard_of": 1})))
        async with client_of(opened) as client:
            second = await client.messages.create(**asked(system="Be brief."))
        return first, second

    (first, second), _, engine = run(story, "yes", "no")
    assert (first.content[0].text, second.content[0].text) == ("yes", "no")
    assert first.usage.input_tokens == len(engine.prompts[0])
    assert first.usage.output_tokens == 4


@pytest.mark.parametrize("streamed", [True, False])
def test_t01_the_sdk_calls_tools(streamed):
    """Two calls at once, both answered in one message, and the conversation goes on from what was sampled."""

    async def story(opened, engine):
        async with client_of(opened) as client:

            async def create(history):
                options = asked(messages=history, tools=[ADD])
                if not streamed:
                    return await client.messages.create(**options)
                async with client.messages.stream(**options) as stream:
                    return await stream.get_final_message()

            history = [{"role": "user", "content": "add"}]
            message = await create(history)
            results = [result(b.id, str(b.input["a"] + 1)) for b in message.content if b.type == "tool_use"]
            history += [{"role": "assistant", "content": message.content}, user(*results)]
            return message, await create(history)

    calls = f"Both. {ONE}\n{TWO}"
    (message, last), session, engine = run(story, calls, "2 and 3")
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    assert (message.stop_reason, last.stop_reason) == ("tool_use", "end_turn")
    assert last.content[0].text == "2 and 3"
    assert exact(session) == ["exact", "exact"]
    said = (*engine.prompts[0], *engine.tokenizer.encode(calls), 257)
    assert engine.prompts[1][: len(said)] == said


def test_t01_the_sdk_streams():
    async def story(opened, engine):
        async with client_of(opened) as client:
            async with client.messages.stream(**asked()) as stream:
                texts = [text async for text in stream.text_stream]
            raw = await client.messages.create(**asked(stream=True))
            return texts, [event.type async for event in raw]

    (texts, kinds), _, _ = run(story, "one two three", "yes")
    assert "".join(texts) == "one two three"
    assert len(texts) > 1
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_t01_the_sdk_follows_token_by_token_through_keep_alives():
    """The rest is sampled only once the client has shown the beginning, after a silence."""

    async def story(opened, engine):
        engine.gate, texts = asyncio.Event(), []
        async with client_of(opened) as client, client.messages.stream(**asked()) as stream:
            async for said in stream.text_stream:
                texts.append(said)
                if not engine.gate.is_set():
                    await asyncio.sleep(0.2)
                    engine.gate.set()
        return texts

    texts, _, _ = run(story, "one two three")
    assert (texts[0], "".join(texts)) == ("one", "one two three")


def test_t01_the_sdk_streams_without_a_loop():
    def follow(client):
        with client.messages.stream(**asked(tools=[ADD])) as stream:
            return "".join(stream.text_stream), stream.get_final_message()

    async def story(opened, engine):
        return await sync(opened, follow)

    (said, message), _, _ = run(story, f"So: {ONE}")
    assert (said, message.stop_reason, message.content[1].input) == ("So:", "tool_use", {"a": 1})


def test_t01_the_sdk_is_told_why_a_turn_ended():
    async def story(opened, engine):
        cut = await sync(opened, lambda client: client.messages.create(**asked(max_tokens=3)))
        return cut, await sync(opened, lambda client: client.messages.create(**asked(stop_sequences=["END"])))

    (cut, stopped), _, _ = run(story, "too long", "so END it")
    assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "too")
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "END", "so ")


def test_t01_the_sdk_raises_what_is_refused():
    async def story(opened, engine):
        with pytest.raises(anthropic.BadRequestError, match="images are not supported"):
            await sync(opened, lambda client: client.messages.create(**asked(messages=[user(IMAGE)])))

    run(story)


def test_t01_the_sdk_raises_in_mid_stream():
    async def story(opened, engine):
        texts = []

        async def follow(client):
            async with client.messages.stream(**asked()) as stream:
                async for said in stream.text_stream:
                    texts.append(said)  # noqa: PERF401  what came before the failure counts

        async with client_of(opened) as client:
            with pytest.raises(anthropic.APIStatusError, match="it died"):
                await follow(client)
        return texts

    texts, _, _ = run(story, ("so far", EngineError("it died")))
    assert "".join(texts) == "so far"


def test_t01_the_sdk_counts_tokens_and_lists_models():
    async def story(opened, engine):
        async with client_of(opened) as client:
            count = await client.messages.count_tokens(
                model="any", system="Be brief.", messages=asked()["messages"], tools=[ADD]
            )
            answer = await client.messages.create(**asked(system="Be brief.", tools=[ADD]))
            models = [each.id async for each in client.models.list()]
        return count.input_tokens, answer.usage.input_tokens, models

    (counted, used, models), session, _ = run(story, "yes")
    assert counted == used
    assert models == ["policy"]
    assert exact(session) == ["exact"]


@pytest.mark.parametrize("path", ["v1/messages?beta=true", "v1/v1/messages", "messages"])
def test_t01_however_the_base_url_was_written(path):
    async def story(opened, engine):
        async with client_of(opened) as client:
            url = f"{opened.anthropic_base_url}/{path}"
            return await client.post(url, cast_to=Message, body=asked())

    message, _, _ = run(story, "yes")
    assert message.content[0].text == "yes"


def test_t01_the_sdk_knows_each_refusal():
    async def story(opened, engine):
        async with anthropic.AsyncAnthropic(base_url=opened.anthropic_base_url, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
                await client.messages.create(**asked())
        async with anthropic.AsyncAnthropic(base_url=f"{opened.address}/nobody", api_key=opened.key) as client:
            with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
                await client.messages.create(**asked())
        async with client_of(opened) as client:
            with pytest.raises(anthropic.InternalServerError, match="overloaded_error"):
                await client.messages.create(**asked())
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long: This model's maximum context"):
                await client.messages.create(**asked(stream=True))
            await opened.close()
            with pytest.raises(anthropic.ConflictError, match="permission_error"):
                await client.messages.create(**asked())

    run(story, ("", EngineError("it died")), ("", ContextFull(8, 9)))


def test_t02_a_nonce_in_each_request_does_not_part_the_conversation():
    async def story(opened, engine):
        history = []
        async with client_of(opened) as client:
            for number in range(3):
                history.append({"role": "user", "content": f"question {number}"})
                system = [text(f"x-anthropic-billing-header: cc_version=2; cch={number:05};"), text("Be brief.")]
                message = await client.messages.create(**asked(system=system, messages=history))
                history.append({"role": "assistant", "content": message.content})

    _, session, engine = run(story, "one", "two", "three")
    assert exact(session) == ["exact"] * 3
    assert engine.prompts[2][: len(engine.prompts[1])] == engine.prompts[1]
