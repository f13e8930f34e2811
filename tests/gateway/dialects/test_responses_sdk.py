"""OpenAI's unmodified SDK (Responses) against the gateway, and any conversation that is sent back as received."""

import asyncio
import json

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from loopwright.engines.base import ContextFull, EngineError
from loopwright.gateway.sessions.session import Session
from tests.gateway.dialects.harness import DEFAULTS, Parrot, exact, read_events, run
from tests.gateway.dialects.test_responses import ADD, ASKED, DIALECT, ONE, TWO, accumulated, call, output, user

# -- any conversation -------------------------------------------------------------------------------------------------

WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=8)
ARGUMENTS = st.dictionaries(WORDS, st.integers() | WORDS | st.booleans() | st.none(), max_size=3)
SPEECH = st.tuples(WORDS, st.lists(ARGUMENTS, max_size=3), WORDS)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(SPEECH, st.booleans()), min_size=1, max_size=5), st.booleans())
def test_t02_the_policys_turns_are_recognised(turns, follow):
    """Each request repeats the earlier answers: every turn continues from exactly the sampled ids."""
    replies = [before + "".join(call(json.dumps(a)) for a in calls) + after for (before, calls, after), _ in turns]

    async def main():
        session, history = Session(Parrot(*replies), DEFAULTS, seed="0"), [user("begin")]
        for _, streamed in turns:
            ask = DIALECT.parse({**ASKED, "instructions": "Be brief.", "tools": [ADD], "input": history})
            writer, pieces = DIALECT.stream(ask, "7"), []
            turn = await session.sample(session.draft(ask.messages, ask.tools), pieces.append)
            stream = writer.begin(1) + b"".join(writer.delta(0, piece) for piece in pieces) + writer.end([turn])
            rendered = Response.model_validate(DIALECT.render(ask, "7", [turn]))
            response = accumulated(read_events(stream)) if streamed else rendered
            items = [item.to_dict() for item in response.output]
            answers = [output(item["call_id"], "done") for item in items if item["type"] == "function_call"]
            history = [*history, *items, *answers, *([user("go on")] if follow or not answers else [])]
        return session

    session = asyncio.run(main())
    assert exact(session) == ["exact"] * len(turns)


# -- the official SDK -------------------------------------------------------------------------------------------------


def sync(open_session, act):
    def inside():
        with openai.OpenAI(base_url=open_session.openai_base_url, api_key=open_session.key, max_retries=0) as client:
            return act(client)

    return asyncio.to_thread(inside)


def client_of(open_session):
    return openai.AsyncOpenAI(base_url=open_session.openai_base_url, api_key=open_session.key, max_retries=0)


def test_t01_the_sdk_gets_an_answer():
    async def main(open_session, engine):
        first = await sync(open_session, lambda client: client.responses.create(**ASKED, extra_body={"unheard_of": 1}))
        async with client_of(open_session) as client:
            second = await client.responses.create(**ASKED, instructions="Be brief.", max_output_tokens=2)
        return first, second

    (first, second), _, engine = run(main, "yes", "no, never")
    assert (first.output_text, second.output_text) == ("yes", "no")
    assert second.incomplete_details.reason == "max_output_tokens"
    assert first.usage.input_tokens == len(engine.prompts[0])
    assert first.usage.output_tokens == 4


@pytest.mark.parametrize("streamed", [True, False])
def test_t01_the_sdk_calls_tools(streamed):
    """Two calls at once, both answered, and the conversation continues from the sampled ids."""

    async def main(open_session, engine):
        async with client_of(open_session) as client:

            async def create(history):
                if not streamed:
                    return await client.responses.create(model="any", input=history, tools=[ADD])
                async with client.responses.stream(model="any", input=history, tools=[ADD]) as stream:
                    return await stream.get_final_response()

            history = [user("add")]
            response = await create(history)
            history += [item.to_dict() for item in response.output]
            for item in response.output:
                if item.type == "function_call":
                    history.append(output(item.call_id, str(json.loads(item.arguments)["a"] + 1)))
            return response, await create(history)

    calls = f"Both. {ONE}\n{TWO}"
    (response, last), session, engine = run(main, calls, "2 and 3")
    assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
    assert last.output_text == "2 and 3"
    assert exact(session) == ["exact", "exact"]
    expected = (*engine.prompts[0], *engine.tokenizer.encode(calls), 257)
    assert engine.prompts[1][: len(expected)] == expected


def test_t01_the_sdk_streams():
    async def main(open_session, engine):
        async with client_of(open_session) as client:
            stream = await client.responses.create(**ASKED, stream=True)
            return [event async for event in stream]

    events, _, _ = run(main, "one two three")
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == "one two three"
    assert len(texts) > 1
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")


def test_t01_the_sdk_follows_token_by_token_through_keep_alives():
    """The rest is sampled only once the client has received the beginning, after a pause."""

    async def main(open_session, engine):
        engine.gate, texts = asyncio.Event(), []
        async with client_of(open_session) as client, client.responses.stream(**ASKED) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    texts.append(event.delta)
                    if not engine.gate.is_set():
                        await asyncio.sleep(0.2)
                        engine.gate.set()
        return texts

    texts, _, _ = run(main, "one two three")
    assert (texts[0], "".join(texts)) == ("one", "one two three")


def test_t01_the_sdk_streams_without_a_loop():
    def follow(client):
        with client.responses.stream(**ASKED, tools=[ADD]) as stream:
            return [event.type for event in stream], stream.get_final_response()

    async def main(open_session, engine):
        return await sync(open_session, follow)

    (kinds, response), _, _ = run(main, f"So: {ONE}")
    assert kinds[-1] == "response.completed"
    assert (response.output_text, response.output[1].arguments) == ("So:", '{"a": 1}')


def test_t01_the_sdk_raises_refusals():
    async def main(open_session, engine):
        with pytest.raises(openai.BadRequestError, match="not in this session") as refused:
            await sync(open_session, lambda client: client.responses.create(**ASKED, previous_response_id="resp_1"))
        return refused.value

    error, _, _ = run(main)
    assert error.param == "previous_response_id"


def test_t01_the_sdk_raises_in_mid_stream():
    async def main(open_session, engine):
        events = []

        async def follow(client):
            async for event in await client.responses.create(**ASKED, stream=True):
                events.append(event)  # noqa: PERF401  what came before the failure counts

        async with client_of(open_session) as client:
            with pytest.raises(openai.APIError, match="it died"):
                await follow(client)
        return events

    events, _, _ = run(main, ("so far", EngineError("it died")))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "so far"
    assert events[-1].type == "response.failed"


def test_t01_the_sdk_knows_each_refusal():
    async def main(open_session, engine):
        async with openai.AsyncOpenAI(base_url=open_session.openai_base_url, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.responses.create(**ASKED)
        async with client_of(open_session) as client:
            with pytest.raises(openai.InternalServerError, match="it died"):
                await client.responses.create(**ASKED)
            with pytest.raises(openai.BadRequestError, match="This model's maximum context length is") as full:
                await client.responses.create(**ASKED, stream=True)
            await open_session.close()
            with pytest.raises(openai.ConflictError, match="accepts no more calls"):
                await client.responses.create(**ASKED)
        return full.value.code

    code, _, _ = run(main, ("", EngineError("it died")), ("", ContextFull(8, 9)))
    assert code == "context_length_exceeded"


def test_t01_the_sdk_gets_logprobs():
    async def main(open_session, engine):
        async with client_of(open_session) as client:
            return await client.responses.create(**ASKED, include=["message.output_text.logprobs"], top_logprobs=1)

    response, _, _ = run(main, "yes")
    logprobs = response.output[0].content[0].logprobs
    assert [(each.token, each.logprob) for each in logprobs] == [(t, -0.25) for t in "yes"]
    assert logprobs[0].top_logprobs[0].token == "y"
