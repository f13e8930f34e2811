"""Contract T08 of the gateway: engines that connect out to it."""

import asyncio
import json
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, suppress

import aiohttp
import openai
import pytest

from loopwright.engines.tokenizer import ByteTokenizer
from tests.gateway.clients import COUNTED, chat, followed, serving, slow_engine, spans_of, streamed, text_of
from tests.gateway.harness import Teller, client_of, run, until, user
from tests.gateway.relay.harness import TOKEN, door, relayed, working


def worker_process(gateway, tmp_path, name, **engine):
    """A worker of its own process: its engine counts, slowly."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    settings = {"replies": json.dumps([COUNTED]), "slip": 0, "token_s": 0.005, **engine}
    words = ["--connect", door(gateway), "--token-file", str(token), "--engine", "scripted", "--name", name]
    words += [word for key, value in settings.items() for word in ("--set", f"engine.{key}={value}")]
    return subprocess.Popen(
        [sys.executable, "-m", "loopwright", "gateway", "worker", *words], stderr=subprocess.PIPE, text=True
    )


def exact_count(session, turns):
    told, episode = session.served.describe(), session.episode()
    assert (len(told["turns"]), told["verdicts"]["broken"], told["trainable"]) == (turns, 0, True)
    assert spans_of(episode) == [(len(COUNTED) + 1, 0)] * turns


def test_t08_workers_that_freeze_or_are_killed_lose_nothing(tmp_path):
    """In mid-stream: another one goes on from the ids so far. One that thaws comes back; Ctrl-C ends it in order."""

    async def story():
        async with relayed() as gateway:
            relay = gateway.engine
            processes = {name: worker_process(gateway, tmp_path, name) for name in "ab"}
            try:
                await until(lambda: len(relay.describe()) == 2, 40)
                session = await gateway.open()
                async with client_of(session) as client:
                    for turn, sent in enumerate((signal.SIGSTOP, signal.SIGKILL), 1):
                        heard = []
                        stream = asyncio.create_task(followed(client, [user(f"{sent}")], heard))
                        await until(lambda: len(text_of(heard)) > 20, 20)  # noqa: B023
                        (busy,) = [each["name"] for each in relay.describe() if each["running"]]
                        processes[busy].send_signal(sent)
                        await stream
                        assert text_of(heard) == COUNTED
                        exact_count(session, turn)
                        assert [each["name"] for each in relay.describe()] == [n for n in "ab" if n != busy]
                        if sent == signal.SIGSTOP:
                            processes[busy].send_signal(signal.SIGCONT)
                            await until(lambda: len(relay.describe()) == 2, 20)
                (left,) = [each["name"] for each in relay.describe()]
                processes[left].send_signal(signal.SIGINT)
                assert await asyncio.to_thread(processes[left].wait, 20) == 130
                await until(lambda: not relay.describe())
            finally:
                for process in processes.values():
                    process.kill()
                    process.wait()
                    process.stderr.close()

    run(story)


@asynccontextmanager
async def proxied(gateway):
    """A way to the gateway that can be cut, or go silent."""
    writers, way = [], {"open": True}

    async def pump(reader, writer):
        while data := await reader.read(65536):
            if way["open"]:
                writer.write(data)
        writer.close()

    async def accept(reader, writer):
        there = await asyncio.open_connection("127.0.0.1", gateway._server.port)
        writers.extend((writer, there[1]))
        with suppress(OSError):
            await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

    def cut():
        for writer in writers:
            writer.transport.abort()
        writers.clear()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/ws/worker", way, cut
    finally:
        cut()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("silent", [False, True], ids=["cut", "silent"])
def test_t08_a_connection_that_is_lost_is_made_anew_and_the_stream_waits_for_it(silent):
    """There is no other worker: the stream is kept alive until this one is back, and goes on where it was."""

    async def story():
        engine = slow_engine()
        async with (
            relayed(tokenizer=ByteTokenizer()) as gateway,
            proxied(gateway) as (url, way, cut),
            working(gateway, engine, url=url),
        ):
            session = await gateway.open()
            async with client_of(session) as client:
                heard = []
                stream = asyncio.create_task(followed(client, [user("count")], heard))
                await until(lambda: len(text_of(heard)) > 20)
                if silent:
                    way["open"] = False
                    await until(lambda: not gateway.engine.describe())
                    way["open"] = True
                cut()
                await stream
                assert text_of(heard) == COUNTED
            exact_count(session, 1)

    run(story)


def test_t08_while_no_worker_is_there_requests_wait_up_to_a_limit():
    async def story():
        async with relayed(tokenizer=ByteTokenizer()) as gateway:
            session = await gateway.open()
            auth = {"authorization": f"Bearer {session.key}"}
            body = {"model": "m", "messages": [user("a")], "stream": True}
            async with aiohttp.ClientSession() as http, client_of(session) as client:
                whole = asyncio.create_task(chat(client, [user("b")]))
                async with http.post(f"{session.openai_base_url}/chat/completions", json=body, headers=auth) as stream:
                    lines = []
                    while lines.count(b": keepalive\n") < 2:
                        lines.append(await stream.content.readline())
                    async with working(gateway, Teller("hello")):
                        assert b"data: [DONE]" in await stream.content.read()
                        assert (await whole).choices[0].message.content == "hello"
        async with relayed(tokenizer=ByteTokenizer(), wait_s=0.2) as gateway, client_of(await gateway.open()) as client:
            with pytest.raises(openai.APIStatusError, match="no worker is connected") as refused:
                await chat(client, [user("a")])
            assert refused.value.status_code == 503

    run(story)


def test_t08_workers_find_a_gateway_that_was_killed_and_began_again(tmp_path):
    """Sessions and what was committed are there; the turn that was under way is retried and comes to its end."""
    token = tmp_path / "token"
    token.write_text(TOKEN)

    def start(port):
        words = ["--relay", "--token-file", str(token), "--port", str(port), "--output", str(tmp_path / "out")]
        return serving(["-m", "loopwright", "gateway", "serve", *words])

    async def story():
        process, url = await asyncio.to_thread(start, 0)
        try:
            admin = {"authorization": f"Bearer {TOKEN}"}
            async with (
                working(None, slow_engine(), url=f"{url.replace('http', 'ws')}/ws/worker"),
                aiohttp.ClientSession() as http,
            ):
                async with http.post(f"{url}/sessions/s", headers=admin) as answer:
                    opened = await answer.json()
                session = type("S", (), {"openai_base_url": opened["openai_base_url"], "key": opened["key"]})
                async with client_of(session) as client:
                    assert (await chat(client, [user("a")])).choices[0].message.content == COUNTED
                    heard = []
                    stream = asyncio.create_task(followed(client, [user("b")], heard))
                    await until(lambda: len(text_of(heard)) > 20)
                    process.kill()
                    with pytest.raises((openai.APIError, aiohttp.ClientError)):
                        await stream
                    process.wait()
                    process.stdout.close()
                    process, _ = await asyncio.to_thread(start, int(url.rpartition(":")[2]))
                    retry = {"extra_headers": {"x-stainless-retry-count": "1"}}
                    assert text_of(await streamed(client, [user("b")], **retry)) == COUNTED
                async with http.get(f"{url}/sessions/s", headers=admin) as answer:
                    told = await answer.json()
                assert (told["trainable"], told["verdicts"]["broken"]) == (True, 0)
                assert [turn["sampled_tokens"] for turn in told["turns"]] == [len(COUNTED) + 1] * 2
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    run(story)
