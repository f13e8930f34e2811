"""Anthropic's unmodified SDK against the gateway, and any conversation that is sent back as it was received."""

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
def test_t02_the_policys_turns_are_recognised(turns, blocks):
    """Each request repeats the earlier answers: every turn continues from exactly the sampled ids."""
    replies = [before + "".join(call(json.dumps(a)) for a in calls) + after for (before, calls, after), _ in turns]

    async def main():
        session, history = Session(Parrot(*replies), DEFAULTS, seed="0"), [{"role": "user", "content": "begin"}]
        for number, (_, streamed) in enumerate(turns):
            system = [text(f"x-anthropic-billing-header: cch={number};"), text("Be brief.")]
            ask = DIALECT.parse({**ASKED, "system": system, "tools": [ADD], "messages": history})
            writer, pieces = DIALECT.stream(ask, "7"), []
            turn = await session.sample(session.draft(ask.messages, ask.tools), pieces.append)
            stream = writer.begin(1) + b"".join(writer.delta(0, piece) for piece in pieces) + writer.end([turn])
            message = (
                accumulated(read_events(stream))
                if streamed
                else Message.model_validate(DIALECT.render(ask, "7", [turn]))
            )
            history = [*history, json.loads(json.dumps({"role": "assistant", "content": message.to_dict()["content"]}))]
            answers = [result(block.id, "done") for block in message.content if block.type == "tool_use"]
            follow = [*answers, text("go on")]
            history.append(user(*follow) if blocks or answers else {"role": "user", "content": "go on"})
        return session

    session = asyncio.run(main())
    assert exact(session) == ["exact"] * len(turns)


# -- the official SDK -------------------------------------------------------------------------------------------------


def sync(open_session, act):
    def inside():
        with anthropic.Anthropic(
            base_url=open_session.anthropic_base_url, api_key=open_session.key, max_retries=0
        ) as client:
            return act(client)

    return asyncio.to_thread(inside)


def client_of(open_session):
    return anthropic.AsyncAnthropic(base_url=open_session.anthropic_base_url, api_key=open_session.key, max_retries=0)


def request_of(**more):
    return {"model": "any", "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}], **more}


def test_t01_the_sdk_gets_an_answer():
    async def main(open_session, engine):
        first = await sync(
            open_session, lambda client: client.messages.create(**request_of(extra_body={"unheard_of": 1}))
        )
        async with client_of(open_session) as client:
            second = await client.messages.create(**request_of(system="Be brief."))
        return first, second

    (first, second), _, engine = run(main, "yes", "no")
    assert (first.content[0].text, second.content[0].text) == ("yes", "no")
    assert first.usage.input_tokens == len(engine.prompts[0])
    assert first.usage.output_tokens == 4


@pytest.mark.parametrize("streamed", [True, False])
def test_t01_the_sdk_calls_tools(streamed):
    """Two calls at once, both answered in one message, and the conversation continues from the sampled ids."""

    async def main(open_session, engine):
        async with client_of(open_session) as client:

            async def create(history):
                options = request_of(messages=history, tools=[ADD])
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
    (message, last), session, engine = run(main, calls, "2 and 3")
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    assert (message.stop_reason, last.stop_reason) == ("tool_use", "end_turn")
    assert last.content[0].text == "2 and 3"
    assert exact(session) == ["exact", "exact"]
    expected = (*engine.prompts[0], *engine.tokenizer.encode(calls), 257)
    assert engine.prompts[1][: len(expected)] == expected


def test_t01_the_sdk_streams():
    async def main(open_session, engine):
        async with client_of(open_session) as client:
            async with client.messages.stream(**request_of()) as stream:
                texts = [text async for text in stream.text_stream]
            raw = await client.messages.create(**request_of(stream=True))
            return texts, [event.type async for event in raw]

    (texts, kinds), _, _ = run(main, "one two three", "yes")
    assert "".join(texts) == "one two three"
    assert len(texts) > 1
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_t01_the_sdk_follows_token_by_token_through_keep_alives():
    """The rest is sampled only once the client has received the beginning, after a pause."""

    async def main(open_session, engine):
        engine.gate, texts = asyncio.Event(), []
        async with client_of(open_session) as client, client.messages.stream(**request_of()) as stream:
            async for text in stream.text_stream:
                texts.append(text)
                if not engine.gate.is_set():
                    await asyncio.sleep(0.2)
                    engine.gate.set()
        return texts

    texts, _, _ = run(main, "one two three")
    assert (texts[0], "".join(texts)) == ("one", "one two three")


def test_t01_the_sdk_streams_without_a_loop():
    def follow(client):
        with client.messages.stream(**request_of(tools=[ADD])) as stream:
            return "".join(stream.text_stream), stream.get_final_message()

    async def main(open_session, engine):
        return await sync(open_session, follow)

    (text, message), _, _ = run(main, f"So: {ONE}")
    assert (text, message.stop_reason, message.content[1].input) == ("So:", "tool_use", {"a": 1})


def test_t01_the_sdk_gets_the_stop_reason():
    async def main(open_session, engine):
        truncated = await sync(open_session, lambda client: client.messages.create(**request_of(max_tokens=3)))
        return truncated, await sync(
            open_session, lambda client: client.messages.create(**request_of(stop_sequences=["END"]))
        )

    (truncated, stopped), _, _ = run(main, "too long", "so END it")
    assert (truncated.stop_reason, truncated.content[0].text) == ("max_tokens", "too")
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "END", "so ")


def test_t01_the_sdk_raises_refusals():
    async def main(open_session, engine):
        with pytest.raises(anthropic.BadRequestError, match="images are not supported"):
            await sync(open_session, lambda client: client.messages.create(**request_of(messages=[user(IMAGE)])))

    run(main)


def test_t01_the_sdk_raises_in_mid_stream():
    async def main(open_session, engine):
        texts = []

        async def follow(client):
            async with client.messages.stream(**request_of()) as stream:
                async for text in stream.text_stream:
                    texts.append(text)  # noqa: PERF401  what came before the failure counts

        async with client_of(open_session) as client:
            with pytest.raises(anthropic.APIStatusError, match="it died"):
                await follow(client)
        return texts

    texts, _, _ = run(main, ("so far", EngineError("it died")))
    assert "".join(texts) == "so far"


def test_t01_the_sdk_counts_tokens_and_lists_models():
    async def main(open_session, engine):
        async with client_of(open_session) as client:
            count = await client.messages.count_tokens(
                model="any", system="Be brief.", messages=request_of()["messages"], tools=[ADD]
            )
            answer = await client.messages.create(**request_of(system="Be brief.", tools=[ADD]))
            models = [each.id async for each in client.models.list()]
        return count.input_tokens, answer.usage.input_tokens, models

    (counted, used, models), session, _ = run(main, "yes")
    assert counted == used
    assert models == ["policy"]
    assert exact(session) == ["exact"]


@pytest.mark.parametrize("path", ["v1/messages?beta=true", "v1/v1/messages", "messages"])
def test_t01_the_base_url_may_be_written_in_any_form(path):
    async def main(open_session, engine):
        async with client_of(open_session) as client:
            url = f"{open_session.anthropic_base_url}/{path}"
            return await client.post(url, cast_to=Message, body=request_of())

    message, _, _ = run(main, "yes")
    assert message.content[0].text == "yes"


def test_t01_the_sdk_knows_each_refusal():
    async def main(open_session, engine):
        async with anthropic.AsyncAnthropic(base_url=open_session.anthropic_base_url, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
                await client.messages.create(**request_of())
        async with anthropic.AsyncAnthropic(
            base_url=f"{open_session.address}/nobody", api_key=open_session.key
        ) as client:
            with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
                await client.messages.create(**request_of())
        async with client_of(open_session) as client:
            with pytest.raises(anthropic.InternalServerError, match="overloaded_error"):
                await client.messages.create(**request_of())
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long: This model's maximum context"):
                await client.messages.create(**request_of(stream=True))
            await open_session.close()
            with pytest.raises(anthropic.ConflictError, match="permission_error"):
                await client.messages.create(**request_of())

    run(main, ("", EngineError("it died")), ("", ContextFull(8, 9)))


def test_t02_a_nonce_in_each_request_does_not_fork_the_conversation():
    async def main(open_session, engine):
        history = []
        async with client_of(open_session) as client:
            for number in range(3):
                history.append({"role": "user", "content": f"question {number}"})
                system = [text(f"x-anthropic-billing-header: cc_version=2; cch={number:05};"), text("Be brief.")]
                message = await client.messages.create(**request_of(system=system, messages=history))
                history.append({"role": "assistant", "content": message.content})

    _, session, engine = run(main, "one", "two", "three")
    assert exact(session) == ["exact"] * 3
    assert engine.prompts[2][: len(engine.prompts[1])] == engine.prompts[1]
