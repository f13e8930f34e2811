"""Contract T04 of the gateway: every answered turn is on disk."""

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
from loopwright.gateway.sessions.store import RESULT, DiskStore
from tests.gateway.clients import chat, exact, followed, send, serving, streamed, text_of
from tests.gateway.harness import Replier, client_of, run, serve, until, user


def test_t04_the_intent_is_stored_before_the_engine_is_called(tmp_path):
    async def body():
        engine, rows = Replier(), []

        def look():
            with closing(sqlite3.connect(tmp_path / "gateway.db")) as db, db:
                rows.append(
                    (
                        db.execute("SELECT number, ended_at FROM nodes WHERE call IS NOT NULL").fetchall(),
                        db.execute("SELECT count(*) FROM nodes").fetchone(),
                    )
                )

        engine.before = look
        async with serve(engine, output=tmp_path) as gateway, client_of(await gateway.open()) as client:
            await chat(client, [user("hi")])
        assert rows == [([(2, None)], (2,))]

    run(body)


@pytest.mark.parametrize("stream", [False, True])
def test_t04_the_end_is_sent_once_the_turn_is_committed(tmp_path, stream, monkeypatch):
    async def body():
        gate = asyncio.Event()
        async with serve(output=tmp_path) as gateway:
            session = await gateway.open()
            write = DiskStore.write

            def slow(store, statements):
                if not any(query is RESULT for query, _ in statements):
                    return write(store, statements)
                done = asyncio.ensure_future(gate.wait())
                done.add_done_callback(lambda _: write(store, statements))
                return done

            monkeypatch.setattr(DiskStore, "write", slow)
            async with client_of(session) as client:
                events = []

                async def talk():
                    if stream:
                        await followed(client, [user("hi")], events)
                    else:
                        events.append(await chat(client, [user("hi")]))

                talking = asyncio.create_task(talk())
                await until(lambda: session.served.session.graph.nodes[-1].finish == "stop")
                await asyncio.sleep(0.1)
                assert not [answer for answer in events if answer.choices[0].finish_reason]
                assert not talking.done()
                gate.set()
                await talking
                assert events[-1].choices[0].finish_reason == "stop"

    run(body)


def test_t04_a_session_continues_after_a_restart(tmp_path):
    async def body():
        async with serve(Replier("one"), output=tmp_path) as gateway:
            session = await gateway.open("trial-7", SessionConfig(run="r", trial=7, sampling=Sampling(temperature=0.5)))
            async with client_of(session) as client:
                first = (await chat(client, [user("a")])).choices[0].message
            before = session.episode()
        engine = Replier("two")
        async with serve(engine, output=tmp_path) as gateway:
            session = await gateway.open("trial-7", SessionConfig(run="r", trial=7))
            assert session.episode().nodes == before.nodes
            async with client_of(session) as client:
                await chat(client, [user("a"), first, user("b")])
            episode = exact(engine, session)
            assert engine.calls[0][2].temperature == 0.5
            assert len(episode.rows()) == 1
            assert session.served.describe()["verdicts"]["exact"] == 2
            await session.close()
        async with serve(output=tmp_path) as gateway:
            live = gateway.find("trial-7")
            assert (live.status, live.episode().nodes) == ("complete", episode.nodes)

    run(body)


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
    """kill -9 under load: every answer that an agent received is stored, and no turn has extra tokens."""

    def start():
        return serving([*SERVE, "--output", str(tmp_path)])

    async def agent(http, url, answers, number):
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
                answers.setdefault(session["id"], []).append(text_of(chunks))
                messages += [{"role": "assistant", "content": text_of(chunks)}, user("more")]

    async def body():
        process, url = await asyncio.to_thread(start)
        answers, after = {}, None
        try:
            async with aiohttp.ClientSession() as http:
                agents = [asyncio.create_task(agent(http, url, answers, number)) for number in range(8)]
                await until(lambda: sum(map(len, answers.values())) > 40, 30)
                process.send_signal(signal.SIGKILL)
                sessions = await asyncio.gather(*agents)
                process.wait()
                after, url = await asyncio.to_thread(start)
                for session in sessions:
                    auth = {"authorization": f"Bearer {session['key']}"}
                    async with http.get(f"{url}/sessions/{session['id']}", headers=auth) as answer:
                        description = await answer.json()
                    contents = [
                        n["message"]["content"] for n in description["episode"]["nodes"] if n.get("finish") == "stop"
                    ]
                    assert contents[: len(answers[session["id"]])] == answers[session["id"]]
                    for turn in description["turns"]:
                        assert (turn["verdict"] == "broken") == (turn["finish"] == "cut")
                    assert description["trainable"] == (description["verdicts"]["broken"] == 0)
        finally:
            process.kill()
            if after is not None:
                after.send_signal(signal.SIGTERM)
                assert after.wait(60) == 128 + signal.SIGTERM
                after.stdout.close()
            process.stdout.close()

    run(body)


def test_t04_a_turn_that_cannot_be_recorded_is_not_answered(tmp_path, monkeypatch):
    async def body():
        async with serve(output=tmp_path) as gateway:
            session = await gateway.open()
            write = DiskStore.write

            def full(store, statements):
                if not any(query is RESULT for query, _ in statements):
                    return write(store, statements)
                done = asyncio.get_running_loop().create_future()
                done.set_exception(StorageError("the disk is full"))
                return done

            async with client_of(session) as client:
                with monkeypatch.context() as patch:
                    patch.setattr(DiskStore, "write", full)
                    for talk in (chat, streamed):
                        with pytest.raises(openai.APIError, match="disk is full"):
                            await talk(client, [user("a")])
                retry = {"extra_headers": {"x-stainless-retry-count": "1"}}
                assert text_of(await streamed(client, [user("a")], **retry)) == "hello"
                assert len(session.served.describe()["turns"]) == 2

    run(body)


# -- what is shown is what is stored --------------------------------------------------------------------------------


def refusing(gateway, refuses=True):
    """Make every write of the store fail, as on a full or read-only disk."""
    for connection in gateway.store.connections:
        connection.execute(f"PRAGMA query_only = {int(refuses)}")


@pytest.mark.parametrize("leaves", [False, True])
def test_t04_a_call_that_never_had_a_slot_is_in_the_snapshot_and_in_the_store(tmp_path, leaves):
    async def body():
        engine = Replier("hello", hold_at=2)
        async with serve(engine, output=tmp_path) as gateway:
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
            verification = (await session.served.verify()).as_dict()
            assert [turn["sampled_tokens"] for turn in verification["turns"]] == [2, 0]
        async with serve(output=tmp_path) as gateway:
            again = (await gateway.find("t").verify()).as_dict()
            assert (again["snapshot"], again["turns"]) == (verification["snapshot"], verification["turns"])

    run(body)


@pytest.mark.parametrize("fails", ["intent", "result"])
@pytest.mark.parametrize("closes", [False, True])
def test_t04_rows_missed_on_a_full_disk_are_written_later(tmp_path, fails, closes):
    async def body():
        engine = Replier("hello")
        async with serve(engine, output=tmp_path) as gateway:
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
                verification = (await session.served.verify()).as_dict()
                shutil.copytree(tmp_path, f"{tmp_path}-killed")
        assert verification["verdicts"]["broken"] == 0
        assert verification["turns"][1]["sampled_tokens"] == (0 if fails == "intent" else 6)
        async with serve(output=tmp_path.with_name(f"{tmp_path.name}-killed")) as gateway:
            again = (await gateway.find("t").verify()).as_dict()
            for part in ("snapshot", "turns", "rows", "status"):
                assert again[part] == verification[part]
            assert again["episode"]["nodes"] == verification["episode"]["nodes"]

    run(body)


def test_t04_a_retry_missed_on_a_full_disk_is_written_later(tmp_path):
    async def body():
        engine = Replier("hello", hold_at=2)
        async with serve(engine, output=tmp_path) as gateway:
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
        async with serve(output=tmp_path) as gateway:
            (turn,) = gateway.find("t").describe()["turns"]
            assert (turn["verdict"], turn["finish"], turn["sampled_tokens"]) == ("exact", "stop", 6)

    run(body)


def test_t04_no_session_is_opened_that_is_not_in_the_store(tmp_path):
    async def body():
        async with serve(output=tmp_path) as gateway:
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
        async with serve(output=tmp_path) as gateway:
            assert (await gateway.open("t")).episode().sampled == 6

    run(body)


def test_t04_concurrent_opens_of_a_session_wait_for_the_same_write(tmp_path, monkeypatch):
    async def body():
        async with serve(output=tmp_path) as gateway:
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

    run(body)


def test_t04_a_session_is_closed_once_it_is_stored_as_closed(tmp_path):
    async def body():
        async with serve(output=tmp_path) as gateway, aiohttp.ClientSession() as http:
            session = await gateway.open("t")
            async with client_of(session) as client:
                await chat(client, [user("a")])
            path = f"{gateway.address}/sessions/t/complete"
            refusing(gateway)
            for _ in range(2):
                assert (await send(http, "POST", path, key=session.key, json={"reason": "why"}))[0] == 500
            refusing(gateway, False)
            status, answer, _ = await send(http, "POST", path, key=session.key)
            assert (status, answer["status"], answer["episode"]["reason"]) == (200, "complete", "why")
            rows = gateway.store.rows("SELECT status, snapshot FROM sessions")
            assert rows == [("complete", answer["snapshot"])]

    run(body)


def test_t04_a_session_that_could_not_be_closed_does_not_reopen(tmp_path):
    async def body():
        now = [0.0]
        async with serve(output=tmp_path, clock=lambda: now[0], ttl_s=100) as gateway:
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

    run(body)


def test_t05_closing_continues_when_its_client_disconnects_and_is_idempotent(tmp_path):
    async def body():
        engine = Replier("hello", hold_at=2)
        async with serve(engine, output=tmp_path) as gateway, aiohttp.ClientSession() as http:
            session = await gateway.open("t")
            async with client_of(session) as client:
                talk = asyncio.create_task(chat(client, [user("a")]))
                await engine.held.wait()
                impatient = asyncio.create_task(session.close(reason="first"))
                await asyncio.sleep(0)
                impatient.cancel()
                path = f"{gateway.address}/sessions/t"
                ways = ("complete", "complete", "freeze")
                answers = await asyncio.gather(*(send(http, "POST", f"{path}/{way}", key=session.key) for way in ways))
                with pytest.raises(openai.ConflictError):
                    await talk
            assert {status for status, _, _ in answers} == {200}
            (snapshot,) = {answer["snapshot"] for _, answer, _ in answers}
            answer = answers[0][1]
            assert (answer["running"], answer["episode"]["reason"], answer["verdicts"]["exact"]) == (0, "first", 1)
            assert gateway.store.rows("SELECT status, snapshot FROM sessions") == [("complete", snapshot)]

    run(body)


def test_t05_a_session_can_be_deleted_although_it_cannot_be_written(tmp_path):
    async def body():
        async with serve(output=tmp_path) as gateway:
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

    run(body)


def test_t05_a_session_is_deleted_also_if_its_client_disconnects():
    async def body():
        engine = Replier("hello", hold_at=1)
        async with serve(engine) as gateway:
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

    run(body)


# -- turns that failed ----------------------------------------------------------------------------------------------


def test_t02_a_failed_turn_is_exact_once_a_retry_completes_it_after_a_restart(tmp_path):
    async def body():
        engine = Replier("hello")
        async with serve(engine, output=tmp_path) as gateway:
            session = await gateway.open("t")
            async with client_of(session) as client:
                await chat(client, [user("a")])
                engine.fail_at = 2
                with pytest.raises(openai.InternalServerError, match="out of memory"):
                    await chat(client, [user("b")])
            before = session.served.describe()["turns"]
            assert [turn["verdict"] for turn in before] == ["exact", "broken"]
        async with serve(Replier("hello"), output=tmp_path) as gateway:
            session = await gateway.open("t")
            assert session.served.describe()["turns"] == before
            async with client_of(session) as client:
                answer = await chat(client, [user("b")], extra_headers={"x-stainless-retry-count": "1"})
                assert answer.choices[0].message.content == "hello"
            description = session.served.describe()
            assert [turn["verdict"] for turn in description["turns"]] == ["exact", "forked"]
            assert description["trainable"]

    run(body)
