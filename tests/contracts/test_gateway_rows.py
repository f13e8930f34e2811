"""Contracts T16 and T18: rows that can be filtered, and turns that a restart cut off."""

import asyncio
import shutil

import pytest

from loopwright.gateway.sessions.session_config import SessionConfig
from tests.gateway.clients import chat
from tests.gateway.harness import Teller, client_of, run, served, user


def test_t16_a_row_names_its_nodes_finishes_verdicts_and_sampling():
    async def story():
        async with served(Teller("hello")) as gateway, client_of(session := await gateway.open()) as client:
            await chat(client, [user("one")], temperature=0.5)
            await chat(client, [user("one"), {"role": "assistant", "content": "other"}, user("two")], max_tokens=2)
            described = session.served.describe()
            first, second = described["rows"]
            assert (first["nodes"], second["nodes"]) == ((1, 2), (1, 3, 4, 5))
            turns = [
                (each["node"], each["finish"], each["verdict"]) for row in (first, second) for each in row["turns"]
            ]
            assert turns == [(2, "stop", "exact"), (5, "length", "forked")]
            assert first["turns"][0]["sampling"]["temperature"] == 0.5
            assert second["turns"][0]["sampling"] == {}

    run(story)


def test_t16_a_turn_that_was_cut_off_and_repeated_is_marked_and_not_trained():
    async def story():
        engine = Teller("hello", hold_at=2)
        async with served(engine) as gateway, client_of(session := await gateway.open()) as client:
            stream = await chat(client, [user("hi")], stream=True)
            await engine.held.wait()
            await stream.close()
            while session.served.running:
                await asyncio.sleep(0.01)
            (turn,), (row,) = (session.served.describe()[name] for name in ("turns", "rows"))
            assert (turn["finish"], turn["abandoned"]) == ("cut", False)
            assert sum(row["response_mask"]) == 2, "it may be the end of the session"
            engine.go.set()
            assert (await chat(client, [user("hi")])).choices[0].message.content == "hello"
            first, second = session.served.describe()["turns"]
            assert (first["abandoned"], second["abandoned"]) == (True, False)
            (row,) = session.served.describe()["rows"]
            assert [each["node"] for each in row["turns"]] == [second["node"]]
            assert len(session.served.episode().rows(with_abandoned=True)) == 2

    run(story)


@pytest.mark.parametrize("n", [1, 2])
def test_t18_a_lost_turn_is_sampled_again_when_the_call_is_repeated(tmp_path, n):
    async def story():
        engine = Teller("hello", hold_at=1)
        async with served(engine, output=tmp_path / "before") as gateway:
            session = await gateway.open("t")
            async with client_of(session) as client:
                talk = asyncio.create_task(chat(client, [user("hi")], n=n))
                await engine.held.wait()
                shutil.copytree(tmp_path / "before", tmp_path / "after")  # as a kill would leave it
                talk.cancel()
                await asyncio.wait([talk])
        async with served(Teller("hello"), output=tmp_path / "after") as gateway:
            session = await gateway.open("t")
            assert not session.served.describe()["trainable"]
            async with client_of(session) as client:
                answer = await chat(client, [user("hi")], n=n)
                assert [choice.message.content for choice in answer.choices] == ["hello"] * n
                described = session.served.describe()
                assert (described["trainable"], len(described["turns"])) == (True, n)
                await chat(client, [user("hi")], n=n)
                assert len(session.served.describe()["turns"]) == 2 * n, "the same call again is another one"
        async with served(Teller("hello"), output=tmp_path / "after") as gateway:
            assert (await gateway.open("t")).served.describe()["trainable"]

    run(story)


def test_a_turn_may_fill_the_context_unless_something_limits_it():
    async def story():
        engine = Teller("x" * 900)
        engine.max_context = 600
        async with served(engine) as gateway:
            for config, expected in ((SessionConfig(), None), (SessionConfig(max_tokens=7), 7)):
                async with client_of(await gateway.open(config=config)) as client:
                    usage = (await chat(client, [user("hi")])).usage
                    assert usage.completion_tokens == (expected or 600 - usage.prompt_tokens)
            assert engine.calls[0][2].max_tokens == 600 - len(engine.calls[0][0])
        assert SessionConfig(tokens=100_000).defaults.max_tokens == 4096

    run(story)
