"""Contract T13 of the gateway: what requests refer to is answered from the stored session."""

import anthropic
import openai
import pytest
from anthropic import beta_async_tool

from loopwright.gateway.sessions.graph import Graph
from tests.gateway.harness import Replier, call, claude_of, client_of, run, serve, user

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
        engine = Replier(says)
        async with serve(engine) as gateway, claude_of(session := await gateway.open()) as client:
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
        async with serve(Replier(says), output=tmp_path) as gateway, claude_of(await gateway.open("s")) as client:
            more = {"model": "m", "max_tokens": 200}
            tool = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
            thread = {"type": "create"}
            first = await client.beta.messages.create(messages=[user("go")], tools=[tool], thread=thread, **more)
        engine = Replier(says)
        async with serve(engine, output=tmp_path) as gateway:
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
        async with serve(Replier(says), output=tmp_path) as gateway, client_of(await gateway.open("s")) as client:
            first = await client.responses.create(input="go", **more)
        engine = Replier(says)
        async with serve(engine, output=tmp_path) as gateway, client_of(session := await gateway.open("s")) as client:
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
def test_t13_item_references_stand_for_what_was_sampled(stream, monkeypatch):
    """As Vercel's AI SDK sends them: reasoning, text and calls by their ids. Each costs its turn, not those before."""
    monkeypatch.setattr(Graph, "conversation", None)

    async def main():
        first_turn = f"<think>so</think>Hm.{call(a=1)}Done."
        engine = Replier(lambda prompt: says(prompt) if "<|im_start|>tool" in prompt else first_turn)
        async with serve(engine) as gateway, client_of(session := await gateway.open()) as client:
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
        engine = Replier(lambda prompt: str(prompt.count("<|im_start|>")))
        async with serve(engine, output=tmp_path) as gateway, client_of(await gateway.open("s")) as client:
            conversation = await client.conversations.create(metadata={"a": "b"})
            first = await client.responses.create(model="m", input="one", conversation=conversation.id)
            assert (first.output_text, first.conversation.id) == ("1", conversation.id)
        async with serve(engine, output=tmp_path) as gateway, client_of(session := await gateway.open("s")) as client:
            same = {"id": conversation.id}
            second = await client.responses.create(model="m", input="two", conversation=same)
            third = await client.responses.create(model="m", input="three", conversation=same)
            assert (second.output_text, third.output_text) == ("3", "5")
            assert (kinds(session), spliced(engine)) == (["exact"] * 3, True)
            with pytest.raises(openai.BadRequestError, match="conv_0"):
                await client.responses.create(model="m", input="a", conversation="conv_0")
            session.served.history._turns |= {str(number): [] for number in range(1024)}
            with pytest.raises(openai.RateLimitError, match="1024 conversations"):
                await client.conversations.create()

    run(main)


def test_t13_stored_responses_are_retrieved_and_deleted(tmp_path):
    async def main():
        more = {"model": "m", "tools": [TOOL], "instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5}
        engine = Replier(
            lambda prompt: says(prompt) if "<|im_start|>tool" in prompt else f"<think>so</think>{says('')}"
        )
        async with serve(engine, output=tmp_path) as gateway, client_of(session := await gateway.open("s")) as client:
            first = await client.responses.create(input="go", **more)
            *_, made = first.output
            result = {"type": "function_call_output", "call_id": made.call_id, "output": "2"}
            second = await client.responses.create(input=[result], previous_response_id=first.id, **more)
            other = await client.chat.completions.create(model="m", messages=[user("chat")])
            await client.responses.delete(second.id)
            turns = session.served.describe()["turns"]
        async with serve(engine, output=tmp_path) as gateway, client_of(session := await gateway.open("s")) as client:
            again = await client.responses.retrieve(first.id)
            same = {"id", "created_at", "output", "usage", "status", "model", "instructions", "metadata", "tools"}
            assert again.model_dump(include=same | {"temperature"}) == first.model_dump(include=same | {"temperature"})
            items = [item async for item in client.responses.input_items.list(first.id, limit=1, order="asc")]
            assert [(item.role, item.content[0].text) for item in items] == [("user", "go")]
            for id in (second.id, other.id.replace("chatcmpl-", "resp_"), "resp_0"):
                for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
                    with pytest.raises(openai.NotFoundError, match=id):
                        await ask(id)
            with pytest.raises(openai.BadRequestError, match=second.id):
                await client.responses.create(input="a", previous_response_id=second.id, model="m")
            with pytest.raises(openai.BadRequestError, match="stream"):
                await client.responses.retrieve(first.id, stream=True)
            assert session.served.describe()["turns"] == turns, "what was sampled stays recorded"

    run(main)


def test_t13_the_items_of_a_conversation(tmp_path):
    async def main():
        engine = Replier(lambda prompt: f"{prompt.count('<|im_start|>')}")
        async with serve(engine, output=tmp_path) as gateway, client_of(await gateway.open("s")) as client:
            conversations = client.conversations
            id = (await conversations.create(metadata={"a": "b"}, items=[user("one"), user("two")])).id
            (three,) = (await conversations.items.create(id, items=[user("three")])).data
            reply = await client.responses.create(model="m", input="four", instructions="Be brief.", conversation=id)
            assert reply.output_text == "5"
            await conversations.items.create(id, items=[{"role": "assistant", "content": "five"}, user("six")])
            assert (await conversations.update(id, metadata={"c": "d"})).metadata == {"c": "d"}
            gone = (await conversations.create(items=[user("x")])).id
            assert (await conversations.delete(gone)).deleted
        async with serve(engine, output=tmp_path) as gateway, client_of(session := await gateway.open("s")) as client:
            conversations = client.conversations
            items = [item async for item in conversations.items.list(id, limit=2, order="asc")]
            assert [item.content[0].text for item in items] == ["one", "two", "three", "four", "5", "five", "six"]
            assert (items[2].id, items[4].id) == (three.id, reply.output[0].id)
            newest = await conversations.items.list(id, limit=1)
            assert (newest.data[0].content[0].text, newest.has_more) == ("six", True)
            assert (await conversations.items.retrieve(items[3].id, conversation_id=id)).content[0].text == "four"
            assert (await conversations.retrieve(id)).metadata == {"c": "d"}
            seventh = await client.responses.create(model="m", input="seven", conversation=id)
            assert (seventh.output_text, kinds(session)[-1]) == ("8", "forked"), "without the instructions"
            for ask in (
                conversations.items.retrieve("msg_0", conversation_id=id),
                conversations.retrieve(gone),
                conversations.update(gone, metadata={}),
                conversations.delete("conv_0"),
            ):
                with pytest.raises(openai.NotFoundError):
                    await ask
            for query in ({"limit": 0}, {"order": "up"}, {"after": "msg_0"}):
                with pytest.raises(openai.BadRequestError, match=next(iter(query))):
                    await conversations.items.list(id, **query)
            for items in ([user("x")] * 21, [], [{"type": "image"}]):
                with pytest.raises(openai.BadRequestError, match="items"):
                    await conversations.items.create(id, items=items)
            with pytest.raises(openai.APIStatusError, match="this route accepts"):
                await conversations.items.create(id, items=[user("x" * 70_000)])
            await conversations.delete(id)
            with pytest.raises(openai.BadRequestError, match=id):
                await client.responses.create(model="m", input="eight", conversation=id)
        async with serve(engine, output=tmp_path) as gateway, client_of(await gateway.open("s")) as client:
            with pytest.raises(openai.NotFoundError):
                await client.conversations.retrieve(id)

    run(main)


def test_t13_deleted_items_leave_a_conversation_and_stay_recorded(tmp_path):
    async def main():
        engine = Replier(lambda prompt: f"<think>so</think>{prompt.count('<|im_start|>')}")
        async with serve(engine, output=tmp_path) as gateway, client_of(session := await gateway.open("s")) as client:
            items = client.conversations.items
            id = (await client.conversations.create(items=[user("one")])).id
            reply = await client.responses.create(model="m", input="two", conversation=id)
            (three,) = (await items.create(id, items=[user("three")])).data
            turns = session.served.describe()["turns"]
            assert (await items.delete(reply.output[-1].id, conversation_id=id)).id == id
            assert (await items.delete(three.id, conversation_id=id)).object == "conversation"
            for gone in (three.id, reply.output[0].id, "msg_0"):
                with pytest.raises(openai.NotFoundError):
                    await items.delete(gone, conversation_id=id)
            assert session.served.describe()["turns"] == turns, "what was sampled stays recorded"
            (four,) = (await items.create(id, items=[user("four")])).data
            assert four.id != three.id
        async with serve(engine, output=tmp_path) as gateway, client_of(await gateway.open("s")) as client:
            items = client.conversations.items
            before = [item async for item in items.list(id, order="asc")]
            assert [item.content[0].text for item in before] == ["one", "two", "four"]
            reply = await client.responses.create(model="m", input="five", conversation=id)
            assert reply.output_text == "4", "one, two, four and five"
            after = [item async for item in items.list(id, order="asc")]
            assert [item.id for item in after[:3]] == [item.id for item in before]
            assert [item.id for item in after[4:]] == [item.id for item in reply.output]
            assert len({item.id for item in after}) == len(after)

    run(main)


def test_t13_a_call_is_deleted_after_those_that_follow_it():
    async def main():
        engine = Replier(call(a=1) + call(a=2))
        async with serve(engine) as gateway, client_of(await gateway.open()) as client:
            items, id = client.conversations.items, (await client.conversations.create()).id
            reply = await client.responses.create(model="m", input="go", tools=[TOOL], conversation=id)
            first, second = (item.id for item in reply.output)
            with pytest.raises(openai.BadRequestError, match="delete those first"):
                await items.delete(first, conversation_id=id)
            for each in (second, first):
                await items.delete(each, conversation_id=id)
            assert [item.content[0].text async for item in items.list(id)] == ["go"]

    run(main)


def test_t13_what_a_client_adds_to_conversations_is_bounded():
    async def main():
        async with serve() as gateway, client_of(await gateway.open()) as client:
            id = (await client.conversations.create()).id
            for _ in range(69):
                await client.conversations.items.create(id, items=[user("x" * 60_000)])
            with pytest.raises(openai.RateLimitError, match="bytes of items"):
                await client.conversations.items.create(id, items=[user("x" * 60_000)])
            assert (await client.responses.create(model="m", input="a")).output_text == "hello"

    run(main)


def test_t13_a_large_body_may_refer_to_what_is_stored():
    """Which another process prepares, without the session."""

    async def main():
        async with serve(Replier(says)) as gateway, client_of(session := await gateway.open()) as client:
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
        async with serve() as gateway:
            async with client_of(await gateway.open()) as client:
                first = await client.responses.create(model="m", input="secret")
            async with client_of(await gateway.open()) as client:
                with pytest.raises(openai.BadRequestError, match="not in this session"):
                    await client.responses.create(model="m", input="more", previous_response_id=first.id)

    run(main)
