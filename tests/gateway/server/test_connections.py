"""Connections without a key, malformed requests, and web pages."""

import asyncio

import aiohttp
import pytest

from tests.gateway.clients import chat, send
from tests.gateway.harness import Replier, client_of, run, serve, until, user


async def half_open(gateway):
    """A connection that starts a request and does not finish its headers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway._server.port)
    writer.write(b"POST /sessions HTTP/1.1\r\nhost:")
    return reader, writer


def test_half_open_connections_lock_nobody_out():
    async def story():
        async with serve(unauthenticated_connections=5) as gateway, client_of(await gateway.open()) as client:
            await chat(client, [user("hi")])
            strangers = [await half_open(gateway) for _ in range(40)]
            await asyncio.sleep(0)
            assert len(gateway._server._handler.guard.unauthenticated) <= 5
            for reader, _ in strangers[:35]:
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await asyncio.wait_for(reader.readexactly(1), 10)
            await chat(client, [user("still there")])
            async with aiohttp.ClientSession() as http:
                assert (await send(http, "GET", f"{gateway.address}/healthz"))[0] == 200
            for _, writer in strangers:
                writer.close()

    run(story)


def test_an_agent_with_many_connections_locks_nobody_out():
    """Given a limit of 5, idle connections of the session are closed; the call that runs and other sessions stay."""

    async def story():
        engine = Replier("hello", hold_at=2)
        async with serve(engine, unauthenticated_connections=5) as gateway:
            session, other = await gateway.open(), await gateway.open()
            async with client_of(session) as client, client_of(other) as neighbour:
                running = asyncio.create_task(chat(client, [user("slow")]))
                await engine.held.wait()
                held = []
                for _ in range(12):
                    reader, writer = await asyncio.open_connection("127.0.0.1", gateway._server.port)
                    head = f"GET /{session.id}/v1/models HTTP/1.1\r\nauthorization: Bearer {session.key}"
                    writer.write(f"{head}\r\nhost: x\r\n\r\n".encode())
                    assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 200 OK\r\n"
                    held.append((reader, writer))
                assert len(gateway._server._handler.guard._sessions[session.id]) <= 6
                for reader, _ in held[:7]:
                    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                        await asyncio.wait_for(reader.readexactly(10_000), 10)
                engine.go.set()
                assert (await running).choices[0].message.content == "hello"
                await chat(neighbour, [user("another")])
                for _, writer in held:
                    writer.close()
            await until(lambda: not gateway._server._handler.guard._sessions)

    run(story)


def test_a_connection_that_sends_no_request_is_closed():
    async def story():
        async with serve(header_s=0.1) as gateway:
            reader, writer = await half_open(gateway)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await asyncio.wait_for(reader.readexactly(1), 10)
            writer.close()

    run(story)


def test_a_malformed_header_is_neither_repeated_nor_logged(caplog):
    async def story():
        async with serve() as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway._server.port)
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\nAuthorization: Bearer sk-secret\x00\x01\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            return answer

    with caplog.at_level("DEBUG"):
        answer = run(story)
    assert b" 400 Bad Request" in answer
    assert b"not valid HTTP" in answer
    assert b"sk-secret" not in answer
    assert "sk-secret" not in caplog.text
    assert "malformed request" in caplog.text


@pytest.mark.parametrize(
    "line", ["OPTIONS *", "CONNECT another:443", "CONNECT mine", "GET http://x", "POST http://x/y"]
)
def test_a_request_without_a_path_is_refused(line, caplog):
    async def story():
        async with serve() as gateway:
            await gateway.open("mine")
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway._server.port)
            writer.write(f"{line} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode())
            answer = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            return answer

    assert int(run(story).split(b" ")[1]) in (400, 404, 405)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://another-site"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "none"}, 200),
        ({"host": "another-site"}, 403),
    ],
)
def test_a_web_page_cannot_open_a_session(headers, status):
    async def story():
        async with serve() as gateway, aiohttp.ClientSession() as http:
            async with http.post(f"{gateway.address}/sessions", headers=headers) as answer:
                assert answer.status == status
            assert len(gateway.sessions) == (status == 200)

    run(story)


def test_a_page_of_the_gateways_own_address_may_open_one():
    async def story():
        async with (
            serve() as gateway,
            aiohttp.ClientSession() as http,
            http.post(f"{gateway.address}/sessions", headers={"origin": gateway.address}) as answer,
        ):
            assert answer.status == 200

    run(story)
