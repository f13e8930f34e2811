"""Contract T15: large bodies leave the event loop, and a refused request leaves nothing."""

import asyncio
import gzip
import io
import os
import signal
import threading

import aiohttp
import openai
import orjson
import pytest

from loopwright.gateway.dialects.chat import ChatCompletions
from loopwright.gateway.server.body_worker import LARGE_BYTES, BodyWorker
from loopwright.gateway.sessions.session_config import SessionConfig
from loopwright.gateway.sessions.template import FamilyTemplate
from tests.gateway.clients import chat, send
from tests.gateway.harness import Replier, client_of, run, serve, user

LARGE = "large " * (LARGE_BYTES // 4)


def traces(session):
    """All that a session holds of its requests, in memory and on disk."""
    live, store = session.served, session.served.store
    graph = live.session.graph
    tables = () if store is None else store.rows("SELECT * FROM nodes")
    prefixes = [p for dialect in live.dialects.values() for p in dialect.bodies._prefixes if len(p.data) > 500]
    indexes = (graph._by_key, graph._children, graph.keys)
    return len(graph.nodes), graph.tokens, live.session.verdicts, dict(live._calls), indexes, prefixes, tables


@pytest.fixture
def prepared(monkeypatch):
    """The bodies that went to the worker."""
    bodies, prepare = list[int](), BodyWorker.prepare

    async def spy(self, session, dialect, body):
        bodies.append(len(body))
        return await prepare(self, session, dialect, body)

    monkeypatch.setattr(BodyWorker, "prepare", spy)
    return bodies


@pytest.mark.parametrize("text", ["x" * 600, LARGE])
@pytest.mark.parametrize("is_known", [True, False])
def test_t15_a_refused_request_leaves_nothing(tmp_path, text, is_known):
    async def story():
        engine = Replier(room=500)
        engine.max_context = 500 if is_known else None
        async with serve(engine, output=tmp_path) as gateway, client_of(await gateway.open()) as client:
            session = gateway.sessions[client.base_url.path.split("/")[1]]
            await chat(client, [user("before")])
            opened = type("Opened", (), {"served": session})
            before = str(traces(opened))
            for more in ({}, {"n": 2}):
                with pytest.raises(openai.BadRequestError, match="maximum context length is 500 tokens"):
                    await chat(client, [user("before"), user(text)], **more)
                assert str(traces(opened)) == before
            assert engine.max_context == 500, "what an engine refuses once is not sent to it again"
            calls = len(engine.calls)
            with pytest.raises(openai.BadRequestError):
                await chat(client, [user(text)])
            assert len(engine.calls) == calls
            await chat(client, [user("before"), user("and after")])
        async with serve(Replier(), output=tmp_path) as gateway:
            described = (await gateway.open(session.id)).served.describe()
            assert (len(described["turns"]), described["trainable"]) == (2, True)

    run(story)


def test_t15_a_message_that_cannot_be_rendered_leaves_nothing():
    async def story():
        async with serve() as gateway, client_of(session := await gateway.open()) as client:
            await chat(client, [user("before")])
            before = str(traces(session))
            broken = {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}
            with pytest.raises(openai.BadRequestError):
                await chat(client, [user("new"), user("newer"), broken])
            assert str(traces(session)) == before

    run(story)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
@pytest.mark.parametrize("path", ["{id}/v1/chat/completions", "sessions"])
def test_t15_a_compressed_body_is_refused_and_never_decompressed(encoding, path):
    """Given a small one that would become a huge one, with a key or without one."""
    bomb = gzip.compress(bytes(1 << 20)) * 64

    async def story():
        async with serve() as gateway, aiohttp.ClientSession() as http:
            session = await gateway.open()
            url = f"{gateway.address}/{path.format(id=session.id)}"
            headers = {"authorization": f"Bearer {session.key}", "content-encoding": encoding}
            async with http.post(url, data=bomb, headers=headers) as response:
                assert (response.status, response.headers["x-should-retry"]) == (415, "false")
                assert "uncompressed" in (await response.json())["error"]["message"]
            headers["content-encoding"] = "identity"
            async with http.post(url, json={"messages": [user("hi")]}, headers=headers) as response:
                assert response.status == (200 if "chat" in path else 400)

    run(story)


def test_t15_a_prompt_is_bounded_before_it_is_rendered(monkeypatch):
    async def story():
        engine = Replier()
        engine.max_context = 1000
        async with serve(engine) as gateway, client_of(await gateway.open()) as client:
            await chat(client, [user("before")])
            monkeypatch.setattr(FamilyTemplate, "begin", pytest.fail)
            with pytest.raises(openai.BadRequestError, match=f"but the prompt has {len(LARGE)}"):
                await chat(client, [user(LARGE)])

    run(story)


def test_t15_large_bodies_are_prepared_by_the_worker_with_the_same_ids(prepared):
    async def story():
        engine = Replier("hello")
        async with (
            serve(engine) as gateway,
            client_of(session := await gateway.open()) as client,
            aiohttp.ClientSession() as http,
        ):
            small = [user("small")]
            await chat(client, small)
            assert prepared == []
            large = [user(LARGE), {"role": "assistant", "content": "é" * 9}, user(LARGE + "more")]
            await chat(client, large)
            assert len(prepared) == 1
            await chat(client, [*large, {"role": "assistant", "content": "hello"}, user("next")])
            assert len(prepared) == 1, "only what is new counts"
            alone = gateway._serve("alone", SessionConfig()).session
            for messages, (ids, *_) in zip((small, large), engine.calls, strict=False):
                assert list(alone.draft(messages).prompt) == list(ids)
            status, counted, _ = await send(
                http,
                "POST",
                f"{session.anthropic_base_url}/v1/messages/count_tokens",
                key=session.key,
                json={"model": "m", "max_tokens": 1, "messages": [user(LARGE)]},
            )
            assert (status, len(prepared)) == (200, 2)
            assert counted["input_tokens"] == len(alone.prompts.ids([user(LARGE)]))

    run(story)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"messages": [' + b" " * LARGE_BYTES, 400, "not valid JSON"),
        (b'{"messages": [{"role": "moon", "content": "%b"}]}' % LARGE.encode(), 400, "messages.0.role"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "x": [%b0]}' % (b"[]," * 200_000), 413, "JSON values"),
        (
            b'{"messages": [{"role": "user", "content": "hi"}], "x": "%b"}' % (b"x" * 2**22 + b"x"),
            413,
            "besides its messages",
        ),
    ],
)
def test_t15_what_is_wrong_with_a_large_body_is_reported(body, status, message):
    async def story():
        async with serve() as gateway, aiohttp.ClientSession() as http:
            session = await gateway.open()
            before = str(traces(session))
            url, headers = f"{session.openai_base_url}/chat/completions", {"authorization": f"Bearer {session.key}"}
            async with http.post(url, data=io.BytesIO(body), headers=headers) as answer:
                assert answer.status == status
                assert message in await answer.text()
            session.served.dialects.clear()
            assert str(traces(session)) == before

    run(story)


def test_t15_a_worker_that_dies_is_replaced_and_ends_with_the_gateway(prepared):
    async def story():
        async with serve(Replier("hello")) as gateway, client_of(await gateway.open()) as client:
            worker = gateway._server._handler._worker
            await chat(client, [user(LARGE)])
            first = worker._process
            os.kill(first.pid, signal.SIGKILL)
            answer = await chat(client, [user(LARGE + "again")])
            assert answer.choices[0].message.content == "hello"
            assert worker._process.pid != first.pid
            leaving = asyncio.create_task(chat(client, [user(LARGE + "and leave")]))
            while len(prepared) < 3:
                await asyncio.sleep(0.01)
            leaving.cancel()
            answer = await chat(client, [user(LARGE + "x" * 1000)])
            assert answer.usage.prompt_tokens > len(LARGE) + 1000, "each gets its own response"
            last = worker._process
        assert last.returncode is not None

    run(story)


def test_t15_a_session_records_no_more_than_it_may():
    async def story():
        async with serve(session_tokens=1000) as gateway, client_of(session := await gateway.open()) as client:
            await chat(client, [user("x" * 400)])
            before = str(traces(session))
            for text in ("y" * 900, LARGE):
                with pytest.raises((openai.RateLimitError, openai.APIStatusError), match=r"may (be|record)"):
                    await chat(client, [user(text)])
                assert str(traces(session)) == before
            await chat(client, [user("z")])

    run(story)


def test_t15_a_body_that_does_not_arrive_is_not_waited_for():
    async def story():
        async with serve(read_s=0.2) as gateway:
            session = await gateway.open()
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway._server.port)
            head = f"POST /{session.id}/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            writer.write(f"{head}authorization: Bearer {session.key}\r\ncontent-length: 99\r\n\r\n{{".encode())
            answer = await asyncio.wait_for(reader.read(2000), 20)
            assert answer.startswith(b"HTTP/1.1 408")
            assert b"did not arrive within 0.2 s" in answer
            writer.close()

    run(story)


def test_t15_routes_of_sessions_accept_small_bodies_only():
    """Given bodies that would take a second to parse, opening and completing refuse them unparsed."""
    large = b'{"run": [' + b"{}," * (LARGE_BYTES // 2) + b"{}]}"

    async def story():
        async with serve() as gateway, aiohttp.ClientSession() as http:
            session = await gateway.open()
            headers = {"authorization": f"Bearer {session.key}"}
            for path in ("/sessions", "/sessions/mine", f"/sessions/{session.id}/complete"):
                async with http.post(gateway.address + path, data=large, headers=headers) as response:
                    assert response.status == 413, path
                    assert "this route accepts" in (await response.json())["error"]["message"]
            assert session.served.status == "open"

    run(story)


@pytest.mark.parametrize("framing", ["content-length: 20000000", "transfer-encoding: chunked"])
@pytest.mark.parametrize("path", ["v1/chat/completions", "tokenize", "v1/conversations"])
def test_t15_a_body_beyond_the_limit_is_refused_before_it_has_arrived(framing, path):
    """Bodies that do not end, of many connections at a time, would otherwise be held in memory until they time out."""

    async def story():
        async with serve(body_bytes=200_000) as gateway:
            session = await gateway.open()
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway._server.port)
            head = f"POST /{session.id}/{path} HTTP/1.1\r\nhost: localhost\r\n{framing}\r\n"
            writer.write(f"{head}authorization: Bearer {session.key}\r\n\r\n".encode())
            if "chunked" in framing:
                writer.write(b"40000\r\n" + b" " * 0x40000 + b"\r\n")
            answer = await asyncio.wait_for(reader.readuntil(b"}}"), 20)
            assert answer.startswith(b"HTTP/1.1 413")
            assert b"larger than %d" % (200_000 if "chat" in path else LARGE_BYTES) in answer
            writer.close()

    run(story)


def test_t15_a_request_adds_a_limited_number_of_messages(tmp_path):
    """Given 6,000 messages of a letter each, the event loop does not render them; 4,000 and then 2,000 are accepted."""

    async def story():
        async with serve(output=tmp_path) as gateway, client_of(session := await gateway.open()) as client:
            await chat(client, [user("before")])
            before = str(traces(session))
            with pytest.raises(openai.BadRequestError, match="6000 of them are new; a request may add 5000"):
                await chat(client, [user("a")] * 6000)
            assert str(traces(session)) == before
            await chat(client, [user("a")] * 4000)
            await chat(client, [user("a")] * 6000)

    run(story)


CALLS = [{"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in range(5000)]
TOOLS = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(1025)]


def called(arguments):
    return {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": [user("a"), {"role": "assistant", "tool_calls": CALLS}]}, "2 of them are new, with 5000 tool"),
        ({"messages": [user("a"), called(f"[{'0,' * 60_000}0]")]}, "characters or 50000 values"),
        ({"messages": [user("a"), called(f'{{"a": "{"x" * 2**22}"}}')]}, "more than 4194304 characters"),
        ({"messages": [user("a")], "tools": TOOLS}, "tools: at most 1024, got 1025"),
        ({"messages": [user("a")], "stop": ["x"] * 129}, "stop: at most 128 texts, got 129"),
    ],
    ids=["calls", "values", "characters", "tools", "stops"],
)
def test_t15_what_would_hold_the_event_loop_is_limited(body, message):
    async def story():
        async with serve() as gateway:
            session = await gateway.open()
            async with aiohttp.ClientSession() as http:
                url = f"{session.openai_base_url}/chat/completions"
                data = io.BytesIO(orjson.dumps(body))
                status, answer, _ = await send(http, "POST", url, key=session.key, data=data)
            assert status == 400
            assert message in answer["error"]["message"]
            assert len(session.served.session.graph.nodes) == 1

    run(story)


def test_t15_a_large_response_is_written_by_a_thread(monkeypatch):
    render, in_loop = ChatCompletions.render, []
    monkeypatch.setattr(
        ChatCompletions,
        "render",
        lambda *given: in_loop.append(threading.current_thread() is threading.main_thread()) or render(*given),
    )

    async def story():
        async with serve(Replier("x" * 5000)) as gateway, client_of(await gateway.open()) as client:
            for alternatives in (0, 1):
                answer = await chat(client, [user("a")], logprobs=True, top_logprobs=alternatives)
                entries = answer.choices[0].logprobs.content
                assert "".join(each.token for each in entries) == "x" * 5000
                assert {len(each.top_logprobs) for each in entries} == {alternatives}

    run(story)
    assert in_loop == [True, False]
