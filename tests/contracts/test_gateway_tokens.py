"""Contracts T02 and T03 of the gateway: exactly the sampled tokens, each once."""

import asyncio
import json

from tests.gateway.clients import chat, exact
from tests.gateway.harness import ADD, END, Replier, call, client_of, run, serve, user


def test_t02_t03_a_conversation_is_spliced_and_exported_once():
    async def body():
        engine = Replier(lambda prompt: f"turn {prompt.count('assistant')} {call(b=1, a=2)}")
        async with serve(engine) as gateway:
            session = await gateway.open()
            async with client_of(session) as client:
                messages = [user("go")]
                for _ in range(4):
                    message = (await chat(client, messages, tools=[ADD])).choices[0].message
                    arguments = json.loads(message.tool_calls[0].function.arguments)
                    message_again = message.model_dump(exclude_none=True)
                    message_again["content"] = f" {message_again['content']}\n"
                    message_again["tool_calls"][0]["function"]["arguments"] = json.dumps(
                        dict(sorted(arguments.items())), indent=1
                    )
                    messages += [
                        message_again,
                        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"},
                    ]
            assert session.served.describe()["verdicts"] == {"exact": 4, "bridged": 0, "forked": 0, "broken": 0}
            assert len(exact(engine, session).rows()) == 1

    run(body)


def test_t02_verdicts_name_the_difference_and_its_place():
    async def body():
        engine = Replier("hello there")
        async with serve(engine) as gateway:
            session = await gateway.open()
            async with client_of(session) as client:
                first = (await chat(client, [user("a")], max_tokens=5)).choices[0].message
                await chat(client, [user("a"), first, user("b")])
                await chat(client, [user("a"), {"role": "assistant", "content": "hellish"}, user("b")])
                await chat(client, [user("z")])
            turns = session.served.describe()["turns"]
            assert [turn["verdict"] for turn in turns] == ["exact", "bridged", "forked", "forked"]
            bridged, forked, other = (turn["token"] for turn in turns[1:])
            assert engine.calls[1][0][bridged] == END, "the end token that was not sampled"
            assert bytes(engine.calls[2][0][forked - 4 : forked + 1]) == b"helli"
            assert bytes(engine.calls[3][0][other : other + 1]) == b"z"
            assert "message 2" in turns[2]["reason"]
            exact(engine, session)

    run(body)


def test_t02_raw_text_continues_from_the_sampled_ids():
    async def body():
        engine = Replier(lambda prompt: "xyz")
        async with serve(engine) as gateway:
            session = await gateway.open()
            async with client_of(session) as client:
                await client.completions.create(model="m", prompt="ab", max_tokens=2)
                await client.completions.create(model="m", prompt="abxyc", max_tokens=3)
                await client.completions.create(model="m", prompt=list(b"abxycxyz"), max_tokens=3)
                await client.completions.create(model="m", prompt="abq", max_tokens=3, n=2)
            turns = session.served.describe()["turns"]
            assert [turn["verdict"] for turn in turns] == ["exact", "exact", "exact", "forked", "forked"]
            assert turns[-1]["token"] == 2
            assert [bytes(prompt_ids) for prompt_ids, *_ in engine.calls] == [
                b"ab",
                b"abxyc",
                b"abxycxyz",
                b"abq",
                b"abq",
            ]
            assert len(exact(engine, session).rows()) == 3

    run(body)


def test_t03_abandoned_turns_and_sub_agents_are_exported():
    async def body():
        engine = Replier("hello")
        async with serve(engine) as gateway:
            session = await gateway.open()
            async with client_of(session) as client:
                await asyncio.gather(*(chat(client, [user(f"agent {n}")]) for n in range(8)))
                await chat(client, [user("agent 0"), user("and again")])
            assert exact(engine, session).sampled == 9 * 6

    run(body)
