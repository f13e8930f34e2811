"""Hostile and careless clients: bad requests are refused with a message and leave nothing behind."""

import asyncio
import json
import logging

import aiohttp
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loopwright.gateway.sessions.session_config import SessionConfig
from tests.gateway.harness import ADD, Replier, client_of, run, serve, until, user

PATHS = ["v1/chat/completions", "v1/completions", "v1/responses", "v1/messages", "v1/messages/count_tokens"]
SCALAR = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.text(max_size=5)
)
JSON = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
FIELDS = [
    "messages", "prompt", "input", "tools", "stop", "n", "seed", "temperature", "top_p", "max_tokens",
    "stream", "logprobs", "top_logprobs", "stream_options", "system", "tool_choice", "max_completion_tokens",
    "model", "instructions", "max_output_tokens", "stop_sequences", "previous_response_id", "best_of",
    "reasoning", "metadata", "top_k", "min_p",
]  # fmt: skip
ROLE = st.sampled_from(["user", "assistant", "system", "tool", "developer", "prompt", "", "x"])
PART = st.one_of(
    JSON,
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "image", "tool_use", "tool_result"])},
        optional={"text": JSON, "id": JSON, "input": JSON, "content": JSON, "name": JSON},
    ),
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {}, optional={"id": JSON, "function": JSON | st.fixed_dictionaries({"name": JSON, "arguments": JSON})}
    ),
    max_size=2,
)
MESSAGE = st.fixed_dictionaries(
    {"role": ROLE},
    optional={"content": JSON | st.lists(PART, max_size=3), "tool_calls": JSON | CALLS, "tool_call_id": JSON},
)
SOUND = {"messages": [user("hi")], "prompt": "hi", "input": "hi", "max_tokens": 3, "model": "m"}
BODY = st.tuples(
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
    st.booleans(),
    st.none() | st.lists(MESSAGE, max_size=3),
)


def test_no_body_crashes_the_gateway():
    async def steps():
        async with serve(body_bytes=100_000) as gateway, aiohttp.ClientSession() as http:
            session = await gateway.open(config=SessionConfig(max_tokens=8))
            loop = asyncio.get_running_loop()

            async def send(path, body):
                url, auth = f"{gateway.address}/{session.id}/{path}", {"authorization": f"Bearer {session.key}"}
                async with http.post(url, data=body, headers=auth) as answer:
                    content = await answer.read()
                    assert answer.status in (200, 400, 413), (path, body, content)
                    if answer.status != 200:
                        assert b"message" in content

            def check(path, payload):
                more, sound, messages = payload
                body = {
                    **(SOUND if sound else {}),
                    **more,
                    **({} if messages is None else {"messages": messages, "input": messages}),
                }
                if isinstance(body.get("n"), int) and body["n"] > 4:
                    body["n"] = 2
                asyncio.run_coroutine_threadsafe(send(path, orjson.dumps(body)), loop).result(10)

            quick = settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            await asyncio.to_thread(quick(given(st.sampled_from(PATHS), BODY)(check)))
            for raw in (b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"a":' * 5000, b"x" * 200_000):
                for path in PATHS:
                    await send(path, raw)
            assert not session.served.describe()["running"]

    run(steps)


ODD = (None, True, 3, -1.5, 2**80, "x", [], [3], ["x"], [None], {}, {"type": 3}, {"type": "x"}, {"type": "function"})
MORE = (
    *("modalities", "audio", "response_format", "text", "tool_choice", "parallel_tool_calls", "stream_options"),
    *("thinking", "reasoning", "output_config", "stop_sequences", "include", "instructions", "system", "logit_bias"),
    *("best_of", "echo", "suffix", "metadata", "user", "store", "previous_response_id", "top_logprobs", "min_p"),
)


def test_no_field_value_crashes_the_gateway():
    """Each known field alone, in each dialect, with unexpected values."""

    async def steps():
        async with serve() as gateway, aiohttp.ClientSession() as http:
            session = await gateway.open(config=SessionConfig(max_tokens=2))
            auth = {"authorization": f"Bearer {session.key}"}
            for path in PATHS:
                for field in {*FIELDS, *MORE} - {"n"}:
                    for value in ODD:
                        body = json.dumps({**SOUND, field: value})
                        url = f"{gateway.address}/{session.id}/{path}"
                        async with http.post(url, data=body, headers=auth) as answer:
                            content = await answer.read()
                            assert answer.status in (200, 400), (path, field, value, content)

    run(steps)


CONVERSATIONS = {**dict.fromkeys(PATHS, "messages"), "v1/completions": "prompt", "v1/responses": "input"}


def test_a05_deep_values_are_refused_by_name_or_recorded(tmp_path):
    """A value that the store could not write would make every later call of its session fail, and its end."""

    function = '{"name": "f", "parameters": {"x": DEEP}}'
    fields = [
        *((path, "metadata", '{"a": DEEP}') for path in (*PATHS, "v1/conversations")),
        *((path, "unknown", "DEEP") for path in PATHS),
        ("v1/chat/completions", "tools", f'[{{"type": "function", "function": {function}}}]'),
        ("v1/chat/completions", "messages", '[{"role": "user", "content": "a", "x": DEEP}]'),
        ("v1/responses", "tools", f'[{{"type": "function", {function[1:]}]'),
        ("v1/responses", "reasoning", '{"a": DEEP}'),
    ]

    async def steps():
        async with serve(output=tmp_path) as gateway, aiohttp.ClientSession() as http:
            for levels in (200, *range(243, 256), 900):
                session = await gateway.open(f"s{levels}", SessionConfig(max_tokens=1))
                auth, statuses = {"authorization": f"Bearer {session.key}"}, set()
                for path, field, value in fields:
                    known = {name: SOUND[name] for name in [CONVERSATIONS.get(path)] if name not in (None, field)}
                    body = json.dumps({**known, "max_tokens": 1, field: "DEEP"}).replace('"DEEP"', value)
                    body = body.replace("DEEP", "[" * levels + "]" * levels)
                    async with http.post(f"{gateway.address}/{session.id}/{path}", data=body, headers=auth) as answer:
                        content = await answer.text()
                        is_named = f"{field}: nested too deeply" in content
                        assert answer.status == 200 or (answer.status == 400 and is_named), (levels, path, content)
                        statuses.add(answer.status)
                assert statuses >= ({200} if levels == 200 else {400} if levels == 900 else set())
                await session.close()
        async with serve(output=tmp_path) as gateway:
            assert gateway.find("s254").status == "complete"

    run(steps)


@pytest.mark.parametrize("header", ["x-loopwright-branch", "thread-id"])
def test_a05_the_name_of_a_branch_may_be_any_bytes(tmp_path, header):
    """Given a header that is not UTF-8, the turn is recorded, and the session can go on and be closed."""

    async def steps():
        async with serve(Replier("hello"), output=tmp_path) as gateway:
            session = await gateway.open("t")
            for _ in range(2):
                answer = await send_raw(gateway, session, f"{header}: ".encode() + b"\xff\xed\xa0\x80\r\n", SOUND)
                assert answer.startswith(b"HTTP/1.1 200"), answer
            await session.close()
        async with serve(output=tmp_path) as gateway:
            described = gateway.find("t").describe()
            assert (described["trainable"], len(described["turns"])) == (True, 2)

    run(steps)


async def send_raw(gateway, session, headers, body):
    """A chat completion with headers that no client library would send; the whole response."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway._server.port)
    head = f"POST /{session.id}/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    auth = f"authorization: Bearer {session.key}\r\ncontent-length: {len(data)}\r\n"
    writer.write(f"{head}{auth}".encode() + headers + b"\r\n" + data)
    try:
        return await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()


def test_a_client_that_does_not_read_is_dropped_and_delays_no_other():
    async def steps():
        engine = Replier("x" * 3000)
        async with serve(engine, write_s=0.3) as gateway:
            session = await gateway.open(config=SessionConfig(max_tokens=100_000))
            body = orjson.dumps({"model": "m", "stream": True, "logprobs": True, "messages": [user("a")]})
            head = (
                f"POST /{session.id}/v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {session.key}\r\n"
                f"content-length: {len(body)}\r\n\r\n"
            )
            import socket

            deaf = socket.socket()
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            deaf.connect(("127.0.0.1", int(gateway.address.rpartition(":")[2])))
            deaf.sendall(head.encode() + body)
            async with client_of(session) as client:
                completion = await client.chat.completions.create(model="m", messages=[user("b")], max_tokens=5)
                assert completion.choices[0].message.content == "xxxxx"
            await until(lambda: not session.served.describe()["running"], 20)
            deaf.close()

    run(steps)


def test_deltas_that_follow_each_other_at_once_are_written_together():
    async def steps():
        engine = Replier("x" * 200, hold_at=100)
        async with serve(engine) as gateway, aiohttp.ClientSession() as http:
            session = await gateway.open(config=SessionConfig(max_tokens=1000))
            auth, body = {"authorization": f"Bearer {session.key}"}, {"model": "m", "stream": True}
            url = f"{session.openai_base_url}/chat/completions"
            async with http.post(url, json={**body, "messages": [user("a")]}, headers=auth) as response:
                await engine.held.wait()
                data = b""
                while data.count(b'"content":"x"') < 100:  # they arrive, though nothing follows them
                    data += await response.content.readany()
                engine.go.set()
                chunks = [data async for data, _ in response.content.iter_chunks()]
            assert sum(chunk.count(b'"content":"x"') for chunk in chunks) == 100
            assert chunks[-1].endswith(b"[DONE]\n\n")
            assert len(chunks) < 50

    run(steps)


def test_calls_wait_for_a_weight_update_with_keep_alives():
    async def steps():
        engine = Replier("hello", hold_at=0)
        async with serve(engine, keepalive_s=0.05) as gateway, aiohttp.ClientSession() as http:
            session = await gateway.open()
            auth = {"authorization": f"Bearer {session.key}"}
            for path, more in (("v1/chat/completions", {}), ("v1/messages", {"max_tokens": 9})):
                engine.go.clear()
                body = {"model": "m", "stream": True, "messages": [user("a")], **more}
                async with http.post(f"{gateway.address}/{session.id}/{path}", json=body, headers=auth) as answer:
                    first = await answer.content.readuntil(b": keepalive\n\n")
                    assert b"hello" not in first
                    engine.go.set()
                    rest = await answer.read()
                    assert b"[DONE]" in rest or b"message_stop" in rest

    run(steps)


def test_nothing_secret_is_logged(caplog):
    caplog.set_level(logging.DEBUG)

    async def steps():
        async with serve(Replier(fail_at=0), token="a token for the opener") as gateway:
            session = await gateway.open()
            async with client_of(session) as client:
                with pytest.raises(Exception, match="out of memory"):
                    await client.chat.completions.create(model="m", messages=[user("my secret plan")], tools=[ADD])
            return session.key

    key = run(steps)
    ours = [record.getMessage() for record in caplog.records if record.name.startswith(("loopwright", "aiohttp"))]
    assert not [line for line in ours if key in line or "my secret plan" in line or "a token for" in line]


def test_a_closing_gateway_answers_waiting_calls(tmp_path):
    async def steps():
        engine = Replier("hello", hold_at=2)
        async with serve(engine, output=tmp_path) as gateway:
            session = await gateway.open("t")
            async with client_of(session) as client:
                talk = asyncio.create_task(client.chat.completions.create(model="m", messages=[user("a")]))
                await engine.held.wait()
                await session.close()
                with pytest.raises(Exception, match="accepts no more calls"):
                    await talk
        assert engine.running == 0
        async with serve(output=tmp_path) as gateway:
            description = gateway.find("t").describe()
            assert [(turn["finish"], turn["sampled_tokens"]) for turn in description["turns"]] == [("cut", 2)]

    run(steps)


def test_a_foreign_host_name_opens_no_session():
    """DNS rebinding from a browser page: the connection is to 127.0.0.1, the host name is the page's."""

    async def main():
        async with serve() as gateway, aiohttp.ClientSession() as http:
            statuses = {}
            for host in ("evil.example:8400", "localhost:8400", "127.0.0.1"):
                async with http.post(f"{gateway.address}/sessions", headers={"host": host}) as answer:
                    statuses[host] = answer.status
            return statuses

    assert run(main) == {"evil.example:8400": 403, "localhost:8400": 200, "127.0.0.1": 200}


@pytest.mark.parametrize(
    ("version", "header", "stays_open"),
    [
        ("1.1", "", True),
        ("1.1", "connection: close", False),
        ("1.0", "", False),
        ("1.0", "connection: keep-alive", True),
    ],
)
def test_an_answer_keeps_the_connection_as_long_as_its_client_wants(version, header, stays_open):
    async def steps():
        async with serve(Replier("yes")) as gateway:
            session = await gateway.open()
            body = orjson.dumps({"model": "m", "messages": [user("hi")]})
            head = [
                f"POST /{session.id}/v1/chat/completions HTTP/{version}", "host: x",
                f"authorization: Bearer {session.key}", f"content-length: {len(body)}", *([header] if header else []),
            ]  # fmt: skip
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway._server.port)
            for _ in range(2 if stays_open else 1):
                writer.write("\r\n".join([*head, "\r\n"]).encode() + body)
                status, *lines = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).decode().split("\r\n")
                names = dict(line.lower().split(": ", 1) for line in lines if line)
                assert status == f"HTTP/{version} 200 OK"
                assert names["content-type"] == "application/json"
                assert names["date"].endswith("gmt")
                answer = orjson.loads(await reader.readexactly(int(names["content-length"])))
                assert answer["choices"][0]["message"]["content"] == "yes"
            if not stays_open:
                assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()

    run(steps)
