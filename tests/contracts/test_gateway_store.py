"""Contract T04 of the gateway: what was told is on disk."""

import asyncio
import signal
import sqlite3

import aiohttp
import openai
import pytest

from loopwright.core.errors import StorageError
from loopwright.engines.base import Sampling
from loopwright.gateway.store import DiskStore
from loopwright.gateway.terms import Terms
from tests.gateway.asking import chat, exact, followed, serving, streamed, text_of
from tests.gateway.serving import Teller, client_of, run, served, until, user


def test_t04_the_intent_is_stored_before_the_engine_is_asked(tmp_path):
    async def story():
        engine, seen = Teller(), []

        def look():
            with sqlite3.connect(tmp_path / "gateway.db") as db:
                seen.append(
                    (
                        db.execute("SELECT node, ended_at FROM calls").fetchall(),
                        db.execute("SELECT count(*) FROM nodes").fetchone(),
                    )
                )

        engine.before = look
        async with served(engine, output=tmp_path) as gateway, client_of(await gateway.open()) as client:
            await chat(client, [user("hi")])
        assert seen == [([(2, None)], (2,))]

    run(story)


@pytest.mark.parametrize("stream", [False, True])
def test_t04_the_end_is_told_once_the_turn_is_committed(tmp_path, stream, monkeypatch):
    async def story():
        gate = asyncio.Event()
        async with served(output=tmp_path) as gateway:
            session = await gateway.open()
            write = DiskStore.write

            def slow(store, statements):
                if not any("UPDATE calls" in query for query, _ in statements):
                    return write(store, statements)
                done = asyncio.ensure_future(gate.wait())
                done.add_done_callback(lambda _: write(store, statements))
                return done

            monkeypatch.setattr(DiskStore, "write", slow)
            async with client_of(session) as client:
                heard = []

                async def talk():
                    if stream:
                        await followed(client, [user("hi")], heard)
                    else:
                        heard.append(await chat(client, [user("hi")]))

                talking = asyncio.create_task(talk())
                await until(lambda: session.live.session.graph.nodes[-1].finish == "stop")
                await asyncio.sleep(0.1)
                assert not [answer for answer in heard if answer.choices[0].finish_reason]
                assert not talking.done()
                gate.set()
                await talking
                assert heard[-1].choices[0].finish_reason == "stop"

    run(story)


def test_t04_a_session_goes_on_after_a_restart(tmp_path):
    async def story():
        async with served(Teller("one"), output=tmp_path) as gateway:
            session = await gateway.open("trial-7", Terms(run="r", trial=7, sampling=Sampling(temperature=0.5)))
            async with client_of(session) as client:
                first = (await chat(client, [user("a")])).choices[0].message
            before = session.episode()
        engine = Teller("two")
        async with served(engine, output=tmp_path) as gateway:
            session = await gateway.open("trial-7", Terms(run="r", trial=7))
            assert session.episode().nodes == before.nodes
            async with client_of(session) as client:
                await chat(client, [user("a"), first, user("b")])
            episode = exact(engine, session)
            assert engine.calls[0][2].temperature == 0.5
            assert len(episode.rows()) == 1
            assert session.live.described()["verdicts"]["exact"] == 2
            await session.close()
        async with served(output=tmp_path) as gateway:
            live = gateway.find("trial-7")
            assert (live.status, live.episode().nodes) == ("complete", episode.nodes)

    run(story)


SERVE = [
    "-m",
    "loopwright",
    "gateway",
    "serve",
    "--engine",
    "scripted",
    "--port",
    "0",
    "--set",
    "engine.token_s=0.0005",
]


def test_t04_killed_under_load_no_committed_turn_is_lost(tmp_path):
    """kill -9 while many agents talk; what each of them was told is there, and no turn has tokens that it has not."""

    def start():
        return serving([*SERVE, "--output", str(tmp_path)])

    async def agent(http, url, told, number):
        async with http.post(f"{url}/sessions/a{number}") as answer:
            session = await answer.json()
        async with client_of(
            type("S", (), {"openai_base_url": session["openai_base_url"], "key": session["key"]})
        ) as client:
            messages = [user("go")]
            while True:
                chunks = []
                try:
                    await followed(client, messages, chunks)
                except (openai.APIError, aiohttp.ClientError):
                    return session
                if not chunks or not chunks[-1].choices[0].finish_reason:
                    return session
                told.setdefault(session["id"], []).append(text_of(chunks))
                messages += [{"role": "assistant", "content": text_of(chunks)}, user("more")]

    async def story():
        process, url = await asyncio.to_thread(start)
        told, after = {}, None
        try:
            async with aiohttp.ClientSession() as http:
                agents = [asyncio.create_task(agent(http, url, told, number)) for number in range(8)]
                await until(lambda: sum(map(len, told.values())) > 40, 30)
                process.send_signal(signal.SIGKILL)
                sessions = await asyncio.gather(*agents)
                process.wait()
                after, url = await asyncio.to_thread(start)
                for session in sessions:
                    auth = {"authorization": f"Bearer {session['key']}"}
                    async with http.get(f"{url}/sessions/{session['id']}", headers=auth) as answer:
                        found = await answer.json()
                    said = [n["message"]["content"] for n in found["episode"]["nodes"] if n.get("finish") == "stop"]
                    assert said[: len(told[session["id"]])] == told[session["id"]]
                    for turn in found["turns"]:
                        assert (turn["verdict"] == "broken") == (turn["finish"] == "cut")
                    assert found["trainable"] == (found["verdicts"]["broken"] == 0)
        finally:
            process.kill()
            if after is not None:
                after.send_signal(signal.SIGTERM)
                assert after.wait(60) == 128 + signal.SIGTERM
                after.stdout.close()
            process.stdout.close()

    run(story)


def test_t04_a_turn_that_cannot_be_recorded_is_not_told(tmp_path, monkeypatch):
    async def story():
        async with served(output=tmp_path) as gateway:
            session = await gateway.open()
            write = DiskStore.write

            def full(store, statements):
                if not any("UPDATE calls" in query for query, _ in statements):
                    return write(store, statements)
                done = asyncio.get_running_loop().create_future()
                done.set_exception(StorageError("the disk is full"))
                return done

            async with client_of(session) as client:
                with monkeypatch.context() as patch:
                    patch.setattr(DiskStore, "write", full)
                    for talk in (chat, streamed):
                        with pytest.raises(openai.APIError, match="the disk is full"):
                            await talk(client, [user("a")])
                retry = {"extra_headers": {"x-stainless-retry-count": "1"}}
                assert text_of(await streamed(client, [user("a")], **retry)) == "hello"
                assert len(session.live.described()["turns"]) == 2

    run(story)
