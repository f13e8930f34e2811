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
from tests.gateway.harness import Replier, client_of, run, until, user
from tests.gateway.relay.harness import TOKEN, door, relayed, working


def worker_process(gateway, tmp_path, name, **engine):
    """A worker in a separate process: its engine counts, slowly."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    settings = {"replies": json.dumps([COUNTED]), "slip": 0, "token_s": 0.005, **engine}
    words = ["--connect", door(gateway), "--token-file", str(token), "--engine", "scripted", "--name", name]
    words += [word for key, value in settings.items() for word in ("--set", f"engine.{key}={value}")]
    return subprocess.Popen(
        [sys.executable, "-m", "loopwright", "gateway", "worker", *words], stderr=subprocess.PIPE, text=True
    )


def exact_count(session, turns):
    description, episode = session.served.describe(), session.episode()
    assert (len(description["turns"]), description["verdicts"]["broken"], description["trainable"]) == (turns, 0, True)
    assert spans_of(episode) == [(len(COUNTED) + 1, 0)] * turns


def test_t08_workers_that_freeze_or_are_killed_lose_nothing(tmp_path):
    """In mid-stream another worker continues from the ids so far. A thawed worker returns; Ctrl-C stops it cleanly."""

    async def main():
        async with relayed() as gateway:
            relay = gateway.engine
            processes = {name: worker_process(gateway, tmp_path, name) for name in "ab"}
            try:
                await until(lambda: len(relay.describe()) == 2, 40)
                session = await gateway.open()
                async with client_of(session) as client:
                    for turn, signal_number in enumerate((signal.SIGSTOP, signal.SIGKILL), 1):
                        chunks = []
                        stream = asyncio.create_task(followed(client, [user(f"{signal_number}")], chunks))
                        await until(lambda: len(text_of(chunks)) > 20, 20)  # noqa: B023
                        (busy,) = [each["name"] for each in relay.describe() if each["running"]]
                        processes[busy].send_signal(signal_number)
                        await stream
                        assert text_of(chunks) == COUNTED
                        exact_count(session, turn)
                        assert [each["name"] for each in relay.describe()] == [n for n in "ab" if n != busy]
                        if signal_number == signal.SIGSTOP:
                            processes[busy].send_signal(signal.SIGCONT)
                            await until(lambda: len(relay.describe()) == 2, 20)
                (remaining,) = [each["name"] for each in relay.describe()]
                processes[remaining].send_signal(signal.SIGINT)
                assert await asyncio.to_thread(processes[remaining].wait, 20) == 130
                await until(lambda: not relay.describe())
            finally:
                for process in processes.values():
                    process.kill()
                    process.wait()
                    process.stderr.close()

    run(main)


@asynccontextmanager
async def proxied(gateway):
    """A proxy to the gateway that can disconnect or go silent."""
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

    def disconnect():
        for writer in writers:
            writer.transport.abort()
        writers.clear()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/ws/worker", way, disconnect
    finally:
        disconnect()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("silent", [False, True], ids=["disconnect", "silent"])
def test_t08_a_lost_connection_is_restored_and_the_stream_waits_for_it(silent):
    """There is no other worker: the stream is kept alive until this one returns, and continues."""

    async def main():
        engine = slow_engine()
        async with (
            relayed(tokenizer=ByteTokenizer()) as gateway,
            proxied(gateway) as (url, way, disconnect),
            working(gateway, engine, url=url),
        ):
            session = await gateway.open()
            async with client_of(session) as client:
                chunks = []
                stream = asyncio.create_task(followed(client, [user("count")], chunks))
                await until(lambda: len(text_of(chunks)) > 20)
                if silent:
                    way["open"] = False
                    await until(lambda: not gateway.engine.describe())
                    way["open"] = True
                disconnect()
                await stream
                assert text_of(chunks) == COUNTED
            exact_count(session, 1)

    run(main)


def test_t08_without_a_worker_requests_wait_up_to_a_limit():
    async def main():
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
                    async with working(gateway, Replier("hello")):
                        assert b"data: [DONE]" in await stream.content.read()
                        assert (await whole).choices[0].message.content == "hello"
        async with relayed(tokenizer=ByteTokenizer(), wait_s=0.2) as gateway, client_of(await gateway.open()) as client:
            with pytest.raises(openai.APIStatusError, match="no worker is connected") as refused:
                await chat(client, [user("a")])
            assert refused.value.status_code == 503

    run(main)


def test_t08_workers_reconnect_to_a_restarted_gateway(tmp_path):
    """Sessions and committed turns are kept; the running turn is retried and finishes."""
    token = tmp_path / "token"
    token.write_text(TOKEN)

    def start(port):
        words = ["--relay", "--token-file", str(token), "--port", str(port), "--output", str(tmp_path / "out")]
        return serving(["-m", "loopwright", "gateway", "serve", *words])

    async def main():
        process, url = await asyncio.to_thread(start, 0)
        try:
            admin = {"authorization": f"Bearer {TOKEN}"}
            async with (
                working(None, slow_engine(), url=f"{url.replace('http', 'ws')}/ws/worker"),
                aiohttp.ClientSession() as http,
            ):
                async with http.post(f"{url}/sessions/s", headers=admin) as answer:
                    session_info = await answer.json()
                session = type(
                    "S", (), {"openai_base_url": session_info["openai_base_url"], "key": session_info["key"]}
                )
                async with client_of(session) as client:
                    assert (await chat(client, [user("a")])).choices[0].message.content == COUNTED
                    chunks = []
                    stream = asyncio.create_task(followed(client, [user("b")], chunks))
                    await until(lambda: len(text_of(chunks)) > 20)
                    process.kill()
                    with pytest.raises((openai.APIError, aiohttp.ClientError)):
                        await stream
                    process.wait()
                    process.stdout.close()
                    process, _ = await asyncio.to_thread(start, int(url.rpartition(":")[2]))
                    retry = {"extra_headers": {"x-stainless-retry-count": "1"}}
                    assert text_of(await streamed(client, [user("b")], **retry)) == COUNTED
                async with http.get(f"{url}/sessions/s", headers=admin) as answer:
                    description = await answer.json()
                assert (description["trainable"], description["verdicts"]["broken"]) == (True, 0)
                assert [turn["sampled_tokens"] for turn in description["turns"]] == [len(COUNTED) + 1] * 2
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    run(main)
