"""Operating a gateway: health, metrics, the access log, the routes, and shutdown."""

import asyncio
import gc
import re
import threading
import weakref
from contextlib import contextmanager

import aiohttp
import orjson
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from loopwright.engines.base import EngineError
from loopwright.gateway.dialects.fields import MAX_CHOICES
from loopwright.gateway.gateway import Gateway
from loopwright.gateway.server import openapi
from loopwright.gateway.server.server import Server
from loopwright.gateway.sessions.session_config import SessionConfig
from tests.gateway.harness import Replier, client_of, run, serve, until, user

TOKEN = "a token of the opener"
AUTH = {"authorization": f"Bearer {TOKEN}"}
ADMIN = ("sessions", "engines", "weights", "pause", "resume", "metrics")
HARMFUL = ("/weights", "/pause", "/sessions/{id}/complete", "/sessions/{id}/freeze")
STORED = ("responses/{response}", "responses/{response}/input_items", "conversations/{conversation}/items/{item}")
ALIASES = [f"/{{id}}/{path}{more}" for path in ("v1/v1/messages", "messages") for more in ("", "/count_tokens")]


async def got(gateway, path, headers=None):
    async with aiohttp.ClientSession() as http, http.get(gateway.address + path, headers=headers) as answer:
        return answer.status, await answer.read()


async def measured(gateway, headers=None):
    """The metrics by their names and labels; every line is one that Prometheus reads."""
    _, text = await got(gateway, "/metrics", headers)
    values = {}
    for line in text.decode().splitlines():
        if not line.startswith("#"):
            name, value = re.fullmatch(r"loopwright_gateway_([a-z_]+(?:\{.+\})?) ([0-9.e+-]+)", line).groups()
            values[name] = float(value)
    return values


def test_a_session_that_has_left_memory_is_freed_without_the_garbage_collector(tmp_path):
    """A gateway that serves collects old objects next to never."""

    async def body():
        async with serve(output=tmp_path) as gateway:
            opened = await gateway.open("s")
            messages = [user("a")]
            async with client_of(opened) as client:
                await client.chat.completions.create(model="any", messages=messages)
                await client.responses.create(model="any", input="a")
                stream = await client.chat.completions.create(model="any", messages=messages, stream=True)
                assert [chunk async for chunk in stream]
            freed = weakref.ref(opened.served.session)
            await gateway.delete("s")
            del opened
            await until(lambda: not gateway.sessions and freed() is None)

    gc.disable()
    try:
        run(body)
    finally:
        gc.enable()


# -- health ---------------------------------------------------------------------------------------------------------


def test_health_covers_engine_and_store(tmp_path, caplog):
    async def body():
        engine = Replier()
        async with serve(engine, output=tmp_path) as gateway:
            assert await got(gateway, "/healthz") == (200, b'{"status":"ok","version":0,"failing":[]}')

            async def unreachable():
                raise EngineError("no route to gpu-box")

            engine.check = unreachable
            status, answer = await got(gateway, "/healthz")
            assert (status, orjson.loads(answer)["failing"]) == (503, ["engine"])
            assert b"gpu-box" not in answer, "no token is needed"
            del engine.check
            # Closed for writing, like a disk that is remounted read-only.
            for connection in gateway.store.connections:
                connection.execute("PRAGMA query_only = 1")
            status, answer = await got(gateway, "/healthz")
            assert (status, orjson.loads(answer)["failing"]) == (503, ["store"])
            for connection in gateway.store.connections:
                connection.execute("PRAGMA query_only = 0")
            assert (await got(gateway, "/healthz"))[0] == 200
            assert gateway.store.rows("SELECT * FROM sessions") == []

    run(body)
    answer = [record.getMessage() for record in caplog.records if record.getMessage().startswith("health:")]
    assert [("gpu-box" in line, "readonly" in line, "ok again" in line) for line in answer] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]


# -- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_count_events():
    async def body():
        engine = Replier("hello", hold_at=2)
        async with serve(engine) as gateway:
            session = await gateway.open()
            async with client_of(session) as client:
                talk = client.chat.completions.create
                first = asyncio.create_task(talk(model="m", messages=[user("a")]))
                await engine.held.wait()
                now = await measured(gateway)
                assert (now["sessions_open"], now["calls_in_flight"], now["store_queue"]) == (1, 1, 0)
                engine.go.set()
                await first
                async for _ in await talk(model="m", messages=[user("b")], stream=True, max_tokens=3):
                    pass
                engine.fail_at = 1
                with pytest.raises(Exception, match="out of memory"):
                    await talk(model="m", messages=[user("c")])
                with pytest.raises(Exception, match="messages"):
                    await talk(model="m", messages=[])
            async with client_of(session, api_key="wrong") as client:
                with pytest.raises(Exception, match="API key"):
                    await client.chat.completions.create(model="m", messages=[user("d")])
            await session.close()
            now = await measured(gateway)
            route = 'route="/{id}/v1/chat/completions"'
            counts = {
                status: now.get(f'requests_total{{{route},status="{status}"}}') for status in (200, 400, 401, 503)
            }
            assert counts == {200: 2, 400: 1, 401: 1, 503: 1}
            assert now["sampled_tokens_total"] == 6 + 3 + 1
            assert now['turns_total{verdict="exact"}'] == 1
            assert now['turns_total{verdict="forked"}'] == 1
            assert (now["engine_errors_total"], now["sessions_open"], now["calls_in_flight"]) == (1, 0, 0)
            assert now[f"request_seconds_count{{{route}}}"] == now[f'request_seconds_bucket{{le="+Inf",{route}}}'] == 5
            buckets = [value for name, value in now.items() if name.startswith(f"request_seconds_bucket{{{route}")]
            assert buckets == sorted(buckets)

    run(body)


def test_a_retry_is_counted_once_and_unknown_paths_make_no_labels():
    async def body():
        engine = Replier("hello", hold_at=3)
        async with serve(engine) as gateway:
            session = await gateway.open()
            async with client_of(session) as client:
                talk = asyncio.create_task(client.chat.completions.create(model="m", messages=[user("a")]))
                await engine.held.wait()
                talk.cancel()
                await until(lambda: engine.closed == 1)
                engine.hold_at = None
                for _ in range(3):
                    await client.chat.completions.create(
                        model="m", messages=[user("a")], extra_headers={"x-stainless-retry-count": "1"}
                    )
            for path in ("/nowhere", "/a/b/c", "/x/v1/chat/completions"):
                await got(gateway, path)
            now = await measured(gateway)
            assert now["sampled_tokens_total"] == 6
            assert now['turns_total{verdict="exact"}'] == 1
            assert now['requests_total{route="/{id}/v1/chat/completions",status="499"}'] == 1
            assert not [name for name in now if "nowhere" in name or '"/a' in name or "/x" in name]

    run(body)


def test_metrics_need_the_token():
    async def body():
        async with serve(token=TOKEN) as gateway:
            assert (await got(gateway, "/metrics"))[0] == 401
            assert (await got(gateway, "/metrics", {"authorization": "Bearer x"}))[0] == 401
            assert "sessions_open" in await measured(gateway, AUTH)
            assert (await got(gateway, "/healthz"))[0] == 200

    run(body)


# -- the access log -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [False, True])
def test_the_access_log_has_a_line_per_request_and_no_secrets(tmp_path, prompts):
    async def body():
        where = {"access_log": str(tmp_path / "access.jsonl"), "log_prompts": prompts}
        async with serve(Replier("a secret answer"), token=TOKEN, **where) as gateway:
            session = await gateway.open("s")
            async with client_of(session) as client:
                await client.chat.completions.create(model="m", messages=[user("my secret plan")])
                async for _ in await client.completions.create(model="m", prompt="my secret plan", stream=True):
                    pass
            await got(gateway, "/healthz")
            await got(gateway, "/metrics", AUTH)
            await got(gateway, f"/{session.key}/v1/models", {"x-api-key": session.key})
            return session.key

    key = run(body)
    text = (tmp_path / "access.jsonl").read_text()
    lines = [orjson.loads(line) for line in text.splitlines()]
    assert key not in text
    assert TOKEN not in text
    assert (text.count("my secret plan") > 0, text.count("a secret answer") > 0) == (prompts, prompts)
    assert [(line["route"], line["session"], line["status"]) for line in lines] == [
        ("/{id}/v1/chat/completions", "s", 200),
        ("/{id}/v1/completions", "s", 200),
        ("/{id}/v1/models", None, 404),
    ]
    chat, raw, _ = lines
    assert (chat["dialect"], chat["verdict"], chat["sampled_tokens"], chat["streamed"]) == (
        "chat.completions",
        "exact",
        16,
        False,
    )
    assert raw["streamed"]
    assert chat["duration_s"] > 0
    assert (tmp_path / "access.jsonl").stat().st_mode & 0o777 == 0o600


def test_an_unwritable_access_log_is_reported_at_once_and_fails_no_request(tmp_path, caplog):
    async def broken():
        async with serve(access_log=str(tmp_path / "none" / "access.jsonl")):
            pass

    with pytest.raises(OSError, match="access log"):
        run(broken)

    async def full():
        async with serve(access_log="/dev/full") as gateway:
            assert (await got(gateway, "/sessions/x"))[0] == 404
            assert (await got(gateway, "/sessions/x"))[0] == 404

    run(full)
    assert len([record for record in caplog.records if "access log /dev/full" in record.getMessage()]) == 1


# -- the description of its routes ----------------------------------------------------------------------------------


def test_the_openapi_description_matches_the_routes():
    async def body():
        router = Server(Gateway(Replier()))._runner.app.router
        routes = {(route.method, route.resource.canonical) for route in router.routes()}
        return routes, openapi.describe_routes(router)

    routes, description = run(body)
    assert not [route for route in routes if openapi.find_route(*route) is None]
    assert {(method.upper(), path) for path, each in description["paths"].items() for method in each} == routes
    ours = {tuple(name.split(" ")) for name in openapi._ROUTES} - {("GET", "/ws/worker")}
    assert ours <= routes, "every described route exists"
    assert {"/{id}/" + path for path in openapi._DIALECTS} <= {path for _, path in routes}
    chat = description["paths"]["/{id}/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert chat["schema"]["properties"]["n"]["maximum"] == MAX_CHOICES


@contextmanager
def in_thread():
    """A gateway with a session, served by a separate thread."""
    ready, done, running = threading.Event(), asyncio.Event(), {}

    async def main():
        async with serve(Replier("hello"), token=TOKEN, body_bytes=100_000) as gateway:
            session = await gateway.open("known", SessionConfig(max_tokens=8))
            running.update(url=gateway.address, key=session.key, loop=asyncio.get_running_loop())
            async with client_of(session) as client:
                conversation = await client.conversations.create()
                response = await client.responses.create(model="m", input="hi", conversation=conversation.id)
            running["known"] = {"id": "known", "conversation": conversation.id, "response": response.id}
            running["known"]["item"] = response.output[0].id
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert ready.wait(30)
        yield running
    finally:
        running["loop"].call_soon_threadsafe(done.set)
        thread.join()


def test_requests_that_fit_the_description_get_described_responses():
    _explored(examples=2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_requests_that_fit_the_description_get_described_responses_at_length():
    _explored(examples=100)


def _explored(examples):
    schemathesis = pytest.importorskip("schemathesis")  # slow to import, and used by no other test
    from schemathesis.core.failures import FailureGroup
    from schemathesis.specs.openapi import checks

    checked = [
        schemathesis.checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    quick = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        phases=[Phase.generate],
    )
    statuses, problems = set(), []
    with in_thread() as server:

        def check(case):
            # Most requests are for what exists, with its key; the session and the engine are unchanged.
            parameters = case.path_parameters or {}
            if "id" in parameters and len(str(parameters) + str(case.body)) % 4:
                case.path_parameters = {name: server["known"].get(name, value) for name, value in parameters.items()}
            key = TOKEN if case.path.split("/")[1] in ADMIN else server["key"]
            harmful = case.path in HARMFUL or case.method == "DELETE"
            case.headers = {**(case.headers or {}), "authorization": f"Bearer {'x' if harmful else key}"}
            response = case.call(timeout=60)
            statuses.add((case.path, response.status_code))
            try:
                case.validate_response(response, checks=checked)
            except FailureGroup as error:  # not raised: hypothesis would try to shrink it
                problems.append(
                    (case.method, case.path, case.body, response.status_code, response.text[:300], str(error))
                )

        schema = schemathesis.openapi.from_url(f"{server['url']}/openapi.json")
        for operation in (result.ok() for result in schema.get_all_operations()):
            if operation.path not in ALIASES:
                quick(given(case=operation.as_strategy())(check))()
    assert not problems, "\n\n".join(map(str, problems))
    model_routes = {f"/{{id}}/v1/{path}" for path in ("chat/completions", "completions", "responses", "messages")}
    stored_routes = {f"/{{id}}/v1/{path}" for path in STORED}
    right = {path for path, status in statuses if status == 200}
    # A few draws may all be invalid.
    assert right & model_routes if examples < 100 else right >= model_routes | stored_routes, sorted(statuses)


# -- how it ends ----------------------------------------------------------------------------------------------------


def test_a_closing_gateway_finishes_streams_and_accepts_no_new_ones(tmp_path):
    async def body():
        engine = Replier("hello", hold_at=2)
        async with serve(engine, output=tmp_path, drain_s=30) as gateway:
            session = await gateway.open("t")
            async with client_of(session) as client:
                stream = await client.chat.completions.create(model="m", messages=[user("a")], stream=True)
                await engine.held.wait()
                ending = asyncio.create_task(gateway._server.stop())
                await asyncio.sleep(0.05)
                async with client_of(session) as late:
                    with pytest.raises(Exception, match="Connection"):
                        await late.chat.completions.create(model="m", messages=[user("b")])
                engine.go.set()
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
                assert text == "hello"
                await ending
        async with serve(output=tmp_path) as gateway:
            (turn,) = gateway.find("t").describe()["turns"]
            assert (turn["finish"], turn["verdict"]) == ("stop", "exact")

    run(body)


def test_a_stream_that_exceeds_the_drain_time_is_cut_and_its_tokens_are_kept(tmp_path):
    async def body():
        engine = Replier("hello", hold_at=2)
        async with serve(engine, output=tmp_path, drain_s=0.1) as gateway:
            session = await gateway.open("t")
            async with client_of(session) as client:
                talk = asyncio.create_task(client.chat.completions.create(model="m", messages=[user("a")]))
                await engine.held.wait()
        with pytest.raises(Exception, match=r"Connection|accepts no more"):
            await talk
        async with serve(output=tmp_path) as gateway:
            (turn,) = gateway.find("t").describe()["turns"]
            assert (turn["finish"], turn["sampled_tokens"]) == ("cut", 2)

    run(body)
