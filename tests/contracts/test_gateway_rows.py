"""Contracts T16 and T18: rows that can be filtered, and turns that a restart cut off."""

import asyncio
import shutil
import socket
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest

from loopwright.core.episode import Episode
from loopwright.gateway.sessions import description
from loopwright.gateway.sessions.session_config import SessionConfig
from tests.gateway.clients import chat, text_of
from tests.gateway.harness import Replier, client_of, run, serve, until, user


def test_t16_a_row_names_its_nodes_finishes_verdicts_and_sampling():
    async def story():
        async with serve(Replier("hello")) as gateway, client_of(session := await gateway.open()) as client:
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


@pytest.mark.parametrize("status", ["open", "frozen", "complete"])
def test_t15_a_large_session_is_described_in_pieces_with_the_same_content(tmp_path, monkeypatch, status):
    """Given limits that make every session large, and numbers in several slices, the response is the same."""
    parts = {"open": "", "frozen": "/freeze", "complete": "/complete"}

    async def story():
        async with serve(Replier("hello"), output=tmp_path) as gateway, aiohttp.ClientSession() as http:
            session = await gateway.open("t")
            async with client_of(session) as client:
                for text in ("one", "two"):
                    await chat(client, [user("first"), user(text)], n=2, logit_bias=None, temperature=0.5)
            url, headers = f"{gateway.address}/sessions/t", {"authorization": f"Bearer {session.key}"}
            if parts[status]:
                async with http.post(url + parts[status], headers=headers) as response:
                    assert response.status == 200
            async with http.get(url, headers=headers) as response:
                small = await response.json()
            monkeypatch.setattr(description, "_MAX_SMALL", 0)
            monkeypatch.setattr(description, "_SLICE", 2)
            monkeypatch.setattr(description, "_PIECE_BYTES", 100)
            async with http.get(url, headers=headers) as response:
                assert response.headers["transfer-encoding"] == "chunked"
                large = await response.json()
            durations = dict.fromkeys(("silent_s", "engine_s"), 0)
            phases = {name: {**data["episode"], "attempts": []} for name, data in (("a", small), ("b", large))}
            assert {**large, **durations, "episode": phases["b"]} == {**small, **durations, "episode": phases["a"]}
            assert len(large["rows"]) == 4
            assert large["snapshot"] == (None if status == "open" else description.snapshot_of(large))

    run(story)


def test_t16_a_turn_that_was_cut_off_and_repeated_is_marked_and_not_trained():
    async def story():
        engine = Replier("hello", hold_at=2)
        async with serve(engine) as gateway, client_of(session := await gateway.open()) as client:
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


async def ask_and_leave(session, *, stream, read):
    """Send a request, wait until its turn is finished, and hang up after the first `read` bytes of the response."""
    body = orjson.dumps({"model": "any", "messages": [user("hi")], "stream": stream})
    url = urlsplit(session.openai_base_url)
    head = f"POST {url.path}/chat/completions HTTP/1.1\r\nhost: {url.netloc}\r\nauthorization: Bearer {session.key}\r\n"
    turns = len(session.served.session.verdicts)
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await until(lambda: len(session.served.session.verdicts) > turns and not session.served.running)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_recv(connection, read)  # so that the response is on its way
    await until(lambda: not session.episode().nodes[-1].is_delivered)


@pytest.mark.parametrize("stream", [False, True])
def test_t16_a_finished_turn_that_never_arrived_and_was_repeated_is_marked_and_not_trained(tmp_path, stream):
    async def story():
        async with serve(Replier("hello"), output=tmp_path) as gateway:
            session = await gateway.open("t")
            await ask_and_leave(session, stream=stream, read=50)
            (turn,), (row,) = (session.served.describe()[name] for name in ("turns", "rows"))
            assert (turn["finish"], turn["abandoned"]) == ("stop", False)
            assert sum(row["response_mask"]) == 6, "it may be the end of the session"
            async with client_of(session) as client:
                assert (await chat(client, [user("hi")])).choices[0].message.content == "hello"
                await chat(client, [user("hi")])
            turns = session.served.describe()["turns"]
            assert [each["abandoned"] for each in turns] == [True, False, False], "answers that arrived count"
            await session.close()
        async with serve(Replier(), output=tmp_path) as gateway:
            described = (await gateway.find("t").verify()).as_dict()
            assert described["turns"] == turns
            assert [row["nodes"][-1] for row in described["rows"]] == [turn["node"] for turn in turns[1:]]
            episode = Episode.from_json(orjson.loads(orjson.dumps(described["episode"])))
            assert (len(episode.rows()), len(episode.rows(with_abandoned=True))) == (2, 3)

    run(story)


def test_t16_an_sdk_that_closes_a_stream_early_or_retries_it():
    async def story():
        async with serve(Replier("x" * 2000)) as gateway, client_of(session := await gateway.open()) as client:
            stream = await chat(client, [user("hi")], stream=True)
            await until(lambda: session.served.session.verdicts and not session.served.running)
            await stream.close()
            await until(lambda: not session.episode().nodes[-1].is_delivered)
            again = await chat(client, [user("hi")], stream=True, extra_headers={"x-stainless-retry-count": "1"})
            assert len(text_of([chunk async for chunk in again])) == 2000
            (turn,) = session.served.describe()["turns"]
            assert session.episode().nodes[turn["node"]].is_delivered, "the retry has it"

    run(story)


@pytest.mark.parametrize("n", [1, 2])
def test_t18_a_lost_turn_is_sampled_again_when_the_call_is_repeated(tmp_path, n):
    async def story():
        engine = Replier("hello", hold_at=1)
        async with serve(engine, output=tmp_path / "before") as gateway:
            session = await gateway.open("t")
            async with client_of(session) as client:
                talk = asyncio.create_task(chat(client, [user("hi")], n=n))
                await engine.held.wait()
                shutil.copytree(tmp_path / "before", tmp_path / "after")  # as a kill would leave it
                talk.cancel()
                await asyncio.wait([talk])
        async with serve(Replier("hello"), output=tmp_path / "after") as gateway:
            session = await gateway.open("t")
            assert not session.served.describe()["trainable"]
            async with client_of(session) as client:
                answer = await chat(client, [user("hi")], n=n)
                assert [choice.message.content for choice in answer.choices] == ["hello"] * n
                described = session.served.describe()
                assert (described["trainable"], len(described["turns"])) == (True, n)
                await chat(client, [user("hi")], n=n)
                assert len(session.served.describe()["turns"]) == 2 * n, "the same call again is another one"
        async with serve(Replier("hello"), output=tmp_path / "after") as gateway:
            assert (await gateway.open("t")).served.describe()["trainable"]

    run(story)


def test_a_turn_may_fill_the_context_unless_something_limits_it():
    async def story():
        engine = Replier("x" * 900)
        engine.max_context = 600
        async with serve(engine) as gateway:
            for config, expected in ((SessionConfig(), None), (SessionConfig(max_tokens=7), 7)):
                async with client_of(await gateway.open(config=config)) as client:
                    usage = (await chat(client, [user("hi")])).usage
                    assert usage.completion_tokens == (expected or 600 - usage.prompt_tokens)
            assert engine.calls[0][2].max_tokens == 600 - len(engine.calls[0][0])
        assert SessionConfig(tokens=100_000).defaults.max_tokens == 4096

    run(story)
