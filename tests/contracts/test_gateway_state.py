"""Contract T13 of the gateway: what requests refer to is answered from the stored session."""

import anthropic
import openai
import pytest
from anthropic import beta_async_tool

from tests.gateway.harness import Teller, call, claude_of, client_of, run, served, user

TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}


def says(prompt):
    """A call first, then how many turns and results the prompt has."""
    results = prompt.count("<|im_start|>tool")
    return f"{results} results" if results else f"Hm.{call(a=1)}"


def kinds(session):
    return [turn["verdict"] for turn in session.served.describe()["turns"]]


def spliced(engine):
    """Whether the last prompt starts with all that the engine was given and gave before."""
    (given, gave, *_), (later, *_) = engine.calls[-2:]
    return later[: len(given) + len(gave)] == (*given, *gave)


@pytest.mark.parametrize("stream", [False, True])
def test_t13_anthropic_s_tool_runner_sends_only_what_is_new(stream):
    """As it is by default: with a thread, of which the server has tools, system prompt and messages."""

    @beta_async_tool
    async def add(a: int) -> str:
        """Adds."""
        return str(a + 1)

    async def main():
        engine = Teller(says)
        async with served(engine) as gateway, claude_of(session := await gateway.open()) as client:
            runner = client.beta.messages.tool_runner(
                model="m", max_tokens=200, system="Be brief.", tools=[add], messages=[user("go")], stream=stream
            )
            last = await runner.until_done()
            assert last.content[-1].text == "1 results"
            assert (kinds(session), spliced(engine)) == (["exact", "exact"], True)
            prompt = engine.tokenizer.decode(engine.calls[-1][0])
            assert "Be brief." in prompt
            assert '"add"' in prompt.split("<|im_start|>user")[0], "its tools, too"

    run(main)


def test_t13_a_thread_survives_a_restart_and_replays_what_is_lost(tmp_path):
    async def main():
        async with served(Teller(says), output=tmp_path) as gateway, claude_of(await gateway.open("s")) as client:
            more = {"model": "m", "max_tokens": 200}
            tool = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
            thread = {"type": "create"}
            first = await client.beta.messages.create(messages=[user("go")], tools=[tool], thread=thread, **more)
        engine = Teller(says)
        async with served(engine, output=tmp_path) as gateway:
            session = await gateway.open("s")
            async with claude_of(session) as client:
                (use,) = [block for block in first.content if block.type == "tool_use"]
                result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "2"}]}
                thread = {"type": "continue", "previous_message_id": first.id}
                last = await client.beta.messages.create(messages=[result], thread=thread, **more)
                assert last.content[0].text == "1 results"
                assert kinds(session) == ["exact", "exact"]
                for wrong, name in (
                    ({"thread": {**thread, "previous_message_id": "msg_0"}}, "thread"),
                    ({"thread": {"type": "fork"}}, "thread"),
                    ({"thread": thread, "system": "x"}, "system"),
                    ({"thread": thread, "messages": []}, "messages"),
                ):
                    with pytest.raises(anthropic.BadRequestError, match=name) as refused:
                        await client.beta.messages.create(**{"messages": [result], **more, **wrong})
                    details = refused.value.body["error"].get("details")
                    is_lost = wrong.get("thread", {}).get("previous_message_id") == "msg_0"
                    assert (details == {"error_code": "thread_not_found"}) == is_lost

    run(main)


def test_t13_previous_response_id_continues_what_was_stored(tmp_path):
    async def main():
        more = {"model": "m", "tools": [TOOL], "instructions": "Be brief."}
        async with served(Teller(says), output=tmp_path) as gateway, client_of(await gateway.open("s")) as client:
            first = await client.responses.create(input="go", **more)
        engine = Teller(says)
        async with served(engine, output=tmp_path) as gateway, client_of(session := await gateway.open("s")) as client:
            (made,) = [item for item in first.output if item.type == "function_call"]
            result = {"type": "function_call_output", "call_id": made.call_id, "output": "2"}
            second = await client.responses.create(input=[result], previous_response_id=first.id, **more)
            assert (second.output_text, second.previous_response_id) == ("1 results", first.id)
            third = await client.responses.create(input="more", previous_response_id=second.id, **more)
            assert third.output_text == "1 results"
            assert (kinds(session), spliced(engine)) == (["exact"] * 3, True)
            other = {**more, "instructions": "Be long."}
            await client.responses.create(input="more", previous_response_id=second.id, **other)
            prompt = engine.tokenizer.decode(engine.calls[-1][0])
            assert "Be long." in prompt
            assert "Be brief." not in prompt, "instructions are those of one request"
            raw = await client.completions.create(model="m", prompt="a")
            for id in ("resp_0", raw.id.replace("cmpl-", "resp_")):
                with pytest.raises(openai.BadRequestError, match=id) as refused:
                    await client.responses.create(input="a", previous_response_id=id, **more)
                assert refused.value.code == "previous_response_not_found"

    run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_t13_item_references_stand_for_what_was_sampled(stream):
    """As Vercel's AI SDK sends them: reasoning, text and calls by their ids."""

    async def main():
        first_turn = f"<think>so</think>Hm.{call(a=1)}Done."
        engine = Teller(lambda prompt: says(prompt) if "<|im_start|>tool" in prompt else first_turn)
        async with served(engine) as gateway, client_of(session := await gateway.open()) as client:
            more = {"model": "m", "tools": [TOOL]}
            items = [user("go")]
            first = await client.responses.create(input=items, stream=stream, **more)
            if stream:
                first = [event async for event in first][-1].response
            assert {item.type for item in first.output} == {"reasoning", "message", "function_call"}
            items += [{"type": "item_reference", "id": item.id} for item in first.output]
            (made,) = [item for item in first.output if item.type == "function_call"]
            items += [{"type": "function_call_output", "call_id": made.call_id, "output": "2"}]
            second = await client.responses.create(input=items, **more)
            assert second.output_text == "1 results"
            assert (kinds(session), spliced(engine)) == (["exact", "exact"], True)
            with pytest.raises(openai.BadRequestError, match="fc_0_7"):
                await client.responses.create(input=[{"type": "item_reference", "id": "fc_0_7"}], **more)

    run(main)


def test_t13_a_conversation_is_continued_turn_by_turn(tmp_path):
    async def main():
        engine = Teller(lambda prompt: str(prompt.count("<|im_start|>")))
        async with served(engine, output=tmp_path) as gateway, client_of(await gateway.open("s")) as client:
            conversation = await client.conversations.create(metadata={"a": "b"})
            first = await client.responses.create(model="m", input="one", conversation=conversation.id)
            assert (first.output_text, first.conversation.id) == ("1", conversation.id)
        async with served(engine, output=tmp_path) as gateway, client_of(session := await gateway.open("s")) as client:
            same = {"id": conversation.id}
            second = await client.responses.create(model="m", input="two", conversation=same)
            third = await client.responses.create(model="m", input="three", conversation=same)
            assert (second.output_text, third.output_text) == ("3", "5")
            assert (kinds(session), spliced(engine)) == (["exact"] * 3, True)
            with pytest.raises(openai.BadRequestError, match="conv_0"):
                await client.responses.create(model="m", input="a", conversation="conv_0")
            with pytest.raises(openai.BadRequestError, match="items"):
                await client.conversations.create(items=[user("x")])
            session.served._conversations |= {str(number): [] for number in range(1024)}
            with pytest.raises(openai.RateLimitError, match="1024 conversations"):
                await client.conversations.create()

    run(main)


def test_t13_a_large_body_may_refer_to_what_is_stored():
    """Which another process prepares, without the session."""

    async def main():
        async with served(Teller(says)) as gateway, client_of(session := await gateway.open()) as client:
            more = {"model": "m", "tools": [TOOL]}
            first = await client.responses.create(input="go", **more)
            (made,) = [item for item in first.output if item.type == "function_call"]
            result = {"type": "function_call_output", "call_id": made.call_id, "output": "x" * 100_000}
            second = await client.responses.create(input=[result], previous_response_id=first.id, **more)
            assert second.output_text == "1 results"
            assert kinds(session) == ["exact", "exact"]

    run(main)


def test_t13_another_session_s_state_is_out_of_reach():
    async def main():
        async with served() as gateway:
            async with client_of(await gateway.open()) as client:
                first = await client.responses.create(model="m", input="secret")
            async with client_of(await gateway.open()) as client:
                with pytest.raises(openai.BadRequestError, match="not in this session"):
                    await client.responses.create(model="m", input="more", previous_response_id=first.id)

    run(main)
