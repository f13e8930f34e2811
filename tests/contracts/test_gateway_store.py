"""Contract T04 of the gateway: what was told is on disk."""

import asyncio
import shutil
import signal
import sqlite3
from contextlib import closing

import aiohttp
import openai
import pytest

from loopwright.core.errors import StorageError
from loopwright.engines.base import Sampling
from loopwright.gateway.refusal import Refusal
from loopwright.gateway.sessions.session_config import SessionConfig
from loopwright.gateway.sessions.store import DiskStore
from tests.gateway.clients import asked, chat, exact, followed, serving, streamed, text_of
from tests.gateway.harness import Teller, client_of, run, served, until, user


def test_t04_the_intent_is_stored_before_the_engine_is_asked(tmp_path):
    async def story():
        engine, seen = Teller(), []

        def look():
            with closing(sqlite3.connect(tmp_path / "gateway.db")) as db, db:
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
                await until(lambda: session.served.session.graph.nodes[-1].finish == "stop")
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
            session = await gateway.open("trial-7", SessionConfig(run="r", trial=7, sampling=Sampling(temperature=0.5)))
            async with client_of(session) as client:
                first = (await chat(client, [user("a")])).choices[0].message
            before = session.episode()
        engine = Teller("two")
        async with served(engine, output=tmp_path) as gateway:
            session = await gateway.open("trial-7", SessionConfig(run="r", trial=7))
            assert session.episode().nodes == before.nodes
            async with client_of(session) as client:
                await chat(client, [user("a"), first, user("b")])
            episode = exact(engine, session)
            assert engine.calls[0][2].temperature == 0.5
            assert len(episode.rows()) == 1
            assert session.served.describe()["verdicts"]["exact"] == 2
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
                assert len(session.served.describe()["turns"]) == 2

    run(story)


# -- what is shown is what is stored --------------------------------------------------------------------------------


def refusing(gateway, refuses=True):
    """Have the store write nothing, as on a disk that is full or read-only."""
    gateway.store._connection.execute(f"PRAGMA query_only = {int(refuses)}")


@pytest.mark.parametrize("leaves", [False, True])
def test_t04_a_call_that_never_had_a_slot_is_in_the_snapshot_and_in_the_store(tmp_path, leaves):
    async def story():
        engine = Teller("hello", hold_at=2)
        async with served(engine, output=tmp_path) as gateway:
            session = await gateway.open("t", SessionConfig(concurrency=1))
            async with client_of(session) as client:
                talks = [asyncio.create_task(chat(client, [user("a")]))]
                await engine.held.wait()
                talks.append(asyncio.create_task(chat(client, [user("b")], temperature=0.5)))
                await until(lambda: session.served.running == 2)
                if leaves:
                    talks[1].cancel()
                    await until(lambda: session.served.running == 1)
                await session.close()
                await asyncio.gather(*talks, return_exceptions=True)
            told = session.served.verify()
            assert [turn["sampled_tokens"] for turn in told["turns"]] == [2, 0]
        async with served(output=tmp_path) as gateway:
            again = gateway.find("t").verify()
            assert (again["snapshot"], again["turns"]) == (told["snapshot"], told["turns"])

    run(story)


@pytest.mark.parametrize("fails", ["intent", "result"])
@pytest.mark.parametrize("closes", [False, True])
def test_t04_what_a_full_disk_left_out_is_written_once_there_is_room(tmp_path, fails, closes):
    async def story():
        engine = Teller("hello")
        async with served(engine, output=tmp_path) as gateway:
            session = await gateway.open("t")
            async with client_of(session) as client:
                await chat(client, [user("before")])
                engine.before = lambda: refusing(gateway)
                if fails == "intent":
                    refusing(gateway)
                with pytest.raises(openai.InternalServerError, match="cannot be recorded"):
                    await chat(client, [user("full")])
                engine.before = lambda: None
                refusing(gateway, False)
                if closes:
                    await session.close()
                else:
                    await chat(client, [user("after")])
                told = session.served.verify()
                shutil.copytree(tmp_path, f"{tmp_path}-killed")
        assert told["verdicts"]["broken"] == 0
        assert told["turns"][1]["sampled_tokens"] == (0 if fails == "intent" else 6)
        async with served(output=tmp_path.with_name(f"{tmp_path.name}-killed")) as gateway:
            again = gateway.find("t").verify()
            for part in ("snapshot", "turns", "rows", "status"):
                assert again[part] == told[part]
            assert again["episode"]["nodes"] == told["episode"]["nodes"]

    run(story)


def test_t04_a_retry_that_could_not_be_recorded_is_once_there_is_room(tmp_path):
    async def story():
        engine = Teller("hello", hold_at=2)
        async with served(engine, output=tmp_path) as gateway:
            session = await gateway.open("t")
            async with client_of(session) as client:
                first = asyncio.create_task(chat(client, [user("a")]))
                await engine.held.wait()
                first.cancel()
                await until(lambda: not session.served.running)
                engine.hold_at, engine.before = None, lambda: refusing(gateway)
                with pytest.raises(openai.InternalServerError, match="cannot be recorded"):
                    await chat(client, [user("a")], extra_headers={"x-stainless-retry-count": "1"})
            refusing(gateway, False)
        async with served(output=tmp_path) as gateway:
            (turn,) = gateway.find("t").describe()["turns"]
            assert (turn["verdict"], turn["finish"], turn["sampled_tokens"]) == ("exact", "stop", 6)

    run(story)


def test_t04_nobody_is_given_a_session_that_the_store_does_not_have(tmp_path):
    async def story():
        async with served(output=tmp_path) as gateway:
            refusing(gateway)
            for _ in range(2):
                with pytest.raises(StorageError):
                    await gateway.open("t", SessionConfig(run="r"))
            both = await asyncio.gather(*(gateway.open("t") for _ in range(2)), return_exceptions=True)
            assert all(isinstance(each, StorageError) for each in both)
            refusing(gateway, False)
            session, same = await asyncio.gather(gateway.open("t"), gateway.open("t"))
            assert session.key == same.key
            assert gateway.store.rows("SELECT key FROM sessions") == [(session.key,)]
            async with client_of(session) as client:
                await chat(client, [user("a")])
        async with served(output=tmp_path) as gateway:
            assert (await gateway.open("t")).episode().sampled == 6

    run(story)


def test_t04_who_opens_a_session_at_the_same_time_waits_for_the_same_write(tmp_path, monkeypatch):
    async def story():
        async with served(output=tmp_path) as gateway:
            gate, write = asyncio.Event(), DiskStore.write

            def slow(store, statements):
                done = asyncio.ensure_future(gate.wait())
                done.add_done_callback(lambda _: write(store, statements))
                return done

            with monkeypatch.context() as patch:
                patch.setattr(DiskStore, "write", slow)
                opening = [asyncio.create_task(gateway.open("t")) for _ in range(2)]
                await asyncio.sleep(0.05)
                assert not any(each.done() for each in opening)
                gate.set()
                assert len({(await each).key for each in opening}) == 1

    run(story)


def test_t04_a_session_is_closed_once_the_store_knows_it(tmp_path):
    async def story():
        async with served(output=tmp_path) as gateway, aiohttp.ClientSession() as http:
            session = await gateway.open("t")
            async with client_of(session) as client:
                await chat(client, [user("a")])
            path = f"{gateway.address}/sessions/t/complete"
            refusing(gateway)
            for _ in range(2):
                assert (await asked(http, "POST", path, key=session.key, json={"reason": "why"}))[0] == 500
            refusing(gateway, False)
            status, told, _ = await asked(http, "POST", path, key=session.key)
            assert (status, told["status"], told["episode"]["reason"]) == (200, "complete", "why")
            stored = gateway.store.rows("SELECT status, snapshot FROM sessions")
            assert stored == [("complete", told["snapshot"])]

    run(story)


def test_t04_a_session_that_could_not_be_closed_is_not_open_again(tmp_path):
    async def story():
        now = [0.0]
        async with served(output=tmp_path, clock=lambda: now[0], ttl_s=100) as gateway:
            completed, expired = await gateway.open("c"), await gateway.open("e")
            refusing(gateway)
            with pytest.raises(StorageError):
                await completed.close()
            now[0] += 1000
            await until(lambda: expired.served.status == "expired")
            now[0] += 1000
            await asyncio.sleep(1.2)
            assert [gateway.find(id).status for id in "ce"] == ["complete", "expired"]
            refusing(gateway, False)
            await until(lambda: "c" not in gateway.sessions and "e" not in gateway.sessions)
            assert [gateway.find(id).status for id in "ce"] == ["complete", "expired"]

    run(story)


def test_t05_closing_goes_on_when_its_client_leaves_and_is_the_same_for_all(tmp_path):
    async def story():
        engine = Teller("hello", hold_at=2)
        async with served(engine, output=tmp_path) as gateway, aiohttp.ClientSession() as http:
            session = await gateway.open("t")
            async with client_of(session) as client:
                talk = asyncio.create_task(chat(client, [user("a")]))
                await engine.held.wait()
                impatient = asyncio.create_task(session.close(reason="first"))
                await asyncio.sleep(0)
                impatient.cancel()
                path = f"{gateway.address}/sessions/t"
                ways = ("complete", "complete", "freeze")
                answers = await asyncio.gather(*(asked(http, "POST", f"{path}/{way}", key=session.key) for way in ways))
                with pytest.raises(openai.ConflictError):
                    await talk
            assert {status for status, _, _ in answers} == {200}
            (snapshot,) = {told["snapshot"] for _, told, _ in answers}
            told = answers[0][1]
            assert (told["running"], told["episode"]["reason"], told["verdicts"]["exact"]) == (0, "first", 1)
            assert gateway.store.rows("SELECT status, snapshot FROM sessions") == [("complete", snapshot)]

    run(story)


def test_t05_a_session_can_be_deleted_though_nothing_more_can_be_written_of_it(tmp_path):
    async def story():
        async with served(output=tmp_path) as gateway:
            session = await gateway.open("t")
            async with client_of(session) as client:
                await chat(client, [user("a")])
            refusing(gateway)
            with pytest.raises(StorageError):
                await gateway.delete("t")
            with pytest.raises(Refusal, match="deleted"):
                await gateway.open("t")
            refusing(gateway, False)
            await asyncio.gather(gateway.delete("t"), gateway.delete("t"))
            again = await gateway.open("t")
            assert (again.key != session.key, again.episode().sampled) == (True, 0)

    run(story)


def test_t05_a_session_is_gone_also_if_whoever_deletes_it_leaves():
    async def story():
        engine = Teller("hello", hold_at=1)
        async with served(engine) as gateway:
            session = await gateway.open("t")
            async with client_of(session) as client:
                talk = asyncio.create_task(chat(client, [user("a")]))
                await engine.held.wait()
                deleting = asyncio.create_task(gateway.delete("t"))
                await asyncio.sleep(0)
                deleting.cancel()
                with pytest.raises(openai.ConflictError):
                    await talk
            await until(lambda: not gateway.sessions)

    run(story)


# -- turns that failed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [False, True])
def test_t02_a_turn_that_failed_is_as_good_as_its_prompt_once_a_retry_ends_it_after_a_restart(tmp_path, old):
    async def story():
        engine = Teller("hello")
        async with served(engine, output=tmp_path) as gateway:
            session = await gateway.open("t")
            async with client_of(session) as client:
                await chat(client, [user("a")])
                engine.fail_at = 2
                with pytest.raises(openai.InternalServerError, match="out of memory"):
                    await chat(client, [user("b")])
            before = session.served.describe()["turns"]
            assert [turn["verdict"] for turn in before] == ["exact", "broken"]
        if old:
            as_format_2(tmp_path)
        async with served(Teller("hello"), output=tmp_path) as gateway:
            session = await gateway.open("t")
            assert session.served.describe()["turns"] == before
            async with client_of(session) as client:
                answer = await chat(client, [user("b")], extra_headers={"x-stainless-retry-count": "1"})
                assert answer.choices[0].message.content == "hello"
            told = session.served.describe()
            assert [turn["verdict"] for turn in told["turns"]] == ["exact", "exact" if old else "forked"]
            assert told["trainable"]

    run(story)


def as_format_2(output):
    """What a store was before failures had columns of their own."""
    with closing(sqlite3.connect(output / "gateway.db")) as store, store:
        store.execute(
            "UPDATE calls SET verdict = 'broken', reason = failure, token = failed_at WHERE failure IS NOT NULL"
        )
        for column in ("failure", "failed_at"):
            store.execute(f"ALTER TABLE calls DROP COLUMN {column}")
        store.execute("PRAGMA user_version = 2")
