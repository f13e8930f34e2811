"""A gateway at its limits: a frozen engine, many half-open connections, a full disk, and many requests."""

import asyncio
import resource
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest

from loopwright.engines.http.vllm import VllmConfig, VllmEngine
from tests.gateway.clients import chat, followed, send, text_of
from tests.gateway.harness import client_of, run, serve, until, user
from tests.survival.serving import Gateway, serving
from tests.survival.test_disk import disk, fill, mount

__all__ = ["disk"]

# -- a frozen engine ------------------------------------------------------------------------------------------------

ENGINE = """
import asyncio, json
from aiohttp import web

TEXT = [*b"hello there", 257]

async def complete(request):
    response = web.StreamResponse()
    await response.prepare(request)
    for index, token in enumerate(TEXT):
        logprobs = {"tokens": [f"token_id:{token}"], "token_logprobs": [-0.5]}
        finish = "stop" if index + 1 == len(TEXT) else None
        choice = {"text": "x", "logprobs": logprobs, "finish_reason": finish}
        await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\\n\\n")
        await asyncio.sleep(0.05)
    return response

async def main():
    app = web.Application()
    app.router.add_get("/health", lambda _: asyncio.sleep(0, web.Response()))
    app.router.add_get("/v1/models", lambda _: asyncio.sleep(0, web.json_response({"data": [{"id": "m"}]})))
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
"""A server that speaks vLLM's protocol."""


@contextmanager
def engine_server():
    with subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def test_a_frozen_engine_holds_calls_is_not_healthy_and_recovers(tmp_path):
    async def story(process, url):
        engine = VllmEngine(VllmConfig(url=url, tokenizer="tiny"), tmp_path)
        async with (
            serve(engine, keepalive_s=0.1) as gateway,
            aiohttp.ClientSession() as http,
            client_of(session := await gateway.open()) as client,
        ):
            chunks, health = [], f"{gateway.address}/healthz"
            assert (await send(http, "GET", health))[0] == 200
            stream = asyncio.create_task(followed(client, [user("a")], chunks))
            await until(lambda: text_of(chunks), 20)
            process.send_signal(signal.SIGSTOP)
            late = asyncio.create_task(chat(client, [user("b")]))
            status, report, _ = await send(http, "GET", health)
            assert (status, report["failing"]) == (503, ["engine"])
            assert not stream.done(), "it is held"
            assert not late.done()
            process.send_signal(signal.SIGCONT)
            await stream
            assert text_of(chunks) == (await late).choices[0].message.content == "hello there"
            assert (await send(http, "GET", health))[0] == 200
            described = session.served.describe()
            assert (described["trainable"], described["verdicts"]["broken"], len(described["turns"])) == (True, 0, 2)
        await engine.close()

    with engine_server() as (process, url):
        run(lambda: story(process, url))


def test_a_call_to_an_engine_that_stays_frozen_fails_and_the_next_one_succeeds(tmp_path):
    async def story(process, url):
        engine = VllmEngine(VllmConfig(url=url, tokenizer="tiny", timeout_s=1.0), tmp_path)
        async with serve(engine) as gateway, client_of(session := await gateway.open()) as client:
            await chat(client, [user("a")])
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(openai.InternalServerError, match="the engine failed") as refused:
                await chat(client, [user("b")])
            assert refused.value.status_code == 503
            process.send_signal(signal.SIGCONT)
            assert (await chat(client, [user("c")])).choices[0].message.content == "hello there"
            assert [turn["verdict"] for turn in session.served.describe()["turns"]] == ["exact", "broken", "forked"]
        await engine.close()

    with engine_server() as (process, url):
        run(lambda: story(process, url))


# -- half-open connections ------------------------------------------------------------------------------------------


class FewFiles(Gateway):
    """As after `ulimit -n 256`."""

    command = ("sh", "-c", 'ulimit -n 256; exec "$0" "$@"', *Gateway.command)


def test_300_half_open_connections_at_256_files_lock_nobody_out(tmp_path):
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    gateway, strangers = FewFiles(tmp_path, "--engine", "scripted", "--port", 0, "--output", "gw"), []
    try:
        url = urlsplit(gateway.address)
        for number in range(300):
            strangers.append(socket.create_connection((url.hostname, url.port), timeout=20))
            strangers[-1].sendall(b"POST /sessions HTTP/1.1\r\nhost:")
            if number % 100 == 50:
                session = gateway.open(f"s{number}")
                path = f"/{session['id']}/v1/chat/completions"
                assert gateway.ask("POST", path, {"messages": [user("hi")]}, session["key"])["choices"]
        assert gateway.ask("GET", "/healthz")["status"] == "ok"
        assert len(list(Path(f"/proc/{gateway.process.pid}/fd").iterdir())) < 128, "a quarter of the files, and its own"
        assert gateway.end() == 143
    finally:
        for stranger in strangers:
            stranger.close()
        if gateway.process.poll() is None:
            gateway.kill()
    assert "Traceback" not in (tmp_path / "gateway.log").read_text()


# -- a full disk ----------------------------------------------------------------------------------------------------


def test_every_write_of_a_gateway_survives_a_full_disk(disk):
    """Calls, new sessions, conversations, and the ends of sessions: refused, then served once there is space."""

    async def story():
        async with serve(output=disk, access_log=str(disk / "access.jsonl")) as gateway:
            sessions = [await gateway.open(f"s{number}") for number in range(3)]
            async with aiohttp.ClientSession() as http, client_of(sessions[0]) as client:
                first = await client.responses.create(model="m", input="before")
                talk = (await client.conversations.create()).id
                assert mount("-o", "remount,size=64m", disk)
                fill(disk, leaving=0)
                long = "x" * 60_000  # more than the last pages of the write-ahead log have room for
                for attempt in (
                    lambda: chat(client, [user(long)]),
                    lambda: client.conversations.create(items=[user(long)]),
                    lambda: client.conversations.items.create(talk, items=[user(long)]),
                ):
                    for _ in range(3):
                        with pytest.raises(openai.InternalServerError, match="disk"):
                            await attempt()
                opened = await send(http, "POST", f"{gateway.address}/sessions/new", json={"run": long})
                ended = await send(
                    http,
                    "POST",
                    f"{gateway.address}/sessions/s1/complete",
                    key=sessions[1].key,
                    json={"reason": long},
                )
                assert (opened[0], ended[0]) == (500, 500)
                assert (await send(http, "GET", f"{gateway.address}/healthz"))[0] == 503
                assert (await send(http, "GET", f"{gateway.address}/sessions/s0", key=sessions[0].key))[0] == 200
                (disk / "ballast").unlink()
                assert (await send(http, "GET", f"{gateway.address}/healthz"))[0] == 200
                assert (await client.responses.create(model="m", input="after")).output_text == "hello"
                await client.conversations.items.create(talk, items=[user("kept")])
                await sessions[1].close()
                assert (await send(http, "DELETE", f"{gateway.address}/sessions/s2", key=sessions[2].key))[0] == 200
        async with serve(output=disk) as gateway:
            described = gateway.find("s0").describe()
            assert (described["trainable"], described["verdicts"]["broken"]) == (True, 0)
            assert (gateway.find("s1").status, gateway.find("s1").reason) == ("complete", long)
            async with client_of(await gateway.open("s0")) as client:
                assert (await client.responses.retrieve(first.id)).output_text == "hello"
                items = (await client.conversations.items.list(talk)).data
                assert [item.content[0].text for item in items] == ["kept"], "refused items are not there"
            with pytest.raises(PermissionError, match="does not exist"):
                gateway.find("s2")

    run(story)


# -- many requests --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_is_flat_over_20_000_requests(tmp_path):
    """Sessions of ten turns, plain and streamed, each completed and deleted."""

    def resident_kib(process):
        status = map(str.split, Path(f"/proc/{process.pid}/status").read_text().splitlines())
        return next(int(words[1]) for words in status if words[0] == "VmRSS:")

    async def agent(gateway, http, name, requests):
        for number in range(requests // 10):
            session = (await send(http, "POST", f"{gateway.address}/sessions/{name}-{number}", json={}))[1]
            url, messages = f"{gateway.address}/{session['id']}/v1/chat/completions", [user("begin")]
            for turn in range(10):
                body = {"messages": messages, "max_tokens": 20, "stream": turn % 2 == 1}
                headers = {"authorization": f"Bearer {session['key']}"}
                async with http.post(url, json=body, headers=headers) as answer:
                    assert answer.status == 200
                    reply = await answer.read()
                assert not body["stream"] or reply.endswith(b"data: [DONE]\n\n")
                messages = [*messages, {"role": "assistant", "content": "other"}, user("go on")]
            for method, path in (("POST", "/complete"), ("DELETE", "")):
                done = await send(http, method, f"{gateway.address}/sessions/{session['id']}{path}", key=session["key"])
                assert done[0] == 200

    async def story(gateway):
        sizes = []
        async with aiohttp.ClientSession() as http:
            for part in range(20):
                await asyncio.gather(*(agent(gateway, http, f"{part}-{number}", 100) for number in range(10)))
                sizes.append(resident_kib(gateway.process))
        return sizes

    with serving(tmp_path, "--engine", "scripted", "--port", 0, "--output", "gw") as gateway:
        sizes = asyncio.run(story(gateway))
    print("resident KiB after each 1,000 requests:", sizes)
    first, second = sizes[1:10], sizes[10:]  # without the first 1,000, which fill its caches
    assert max(second) <= 1.05 * max(first), sizes
