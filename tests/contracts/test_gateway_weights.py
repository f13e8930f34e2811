"""Contract T06 of the gateway: new weights while calls are running."""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from loopwright.engines.base import EngineError
from loopwright.engines.fleet import Fleet, FleetSettings
from tests.gateway.clients import COUNTED, chat, slow_engine, spans_of
from tests.gateway.harness import Replier, client_of, run, serve, user
from tests.gateway.relay.harness import TOKEN


@pytest.mark.parametrize("count", [1, 3])
def test_t06_running_calls_are_paused_and_continue_under_the_new_version(count):
    async def main():
        engines = [slow_engine() for _ in range(count)]
        engine = engines[0]
        if count > 1:
            engine = Fleet(FleetSettings(type="fleet"), Path())
            for number, each in enumerate(engines):
                engine.add(str(number), each)
        async with serve(engine, token=TOKEN, keepalive_s=0.05) as gateway, aiohttp.ClientSession() as http:
            admin = {"authorization": f"Bearer {TOKEN}"}
            session = await gateway.open()
            auth = {"authorization": f"Bearer {session.key}"}
            url = f"{session.openai_base_url}/chat/completions"
            body = {"model": "m", "messages": [user("count")], "stream": True}
            async with client_of(session) as client, http.post(url, json=body, headers=auth) as stream:
                whole = asyncio.create_task(chat(client, [user("count, please")]))
                lines = []
                while sum(line.startswith(b"data: ") for line in lines) < 4:
                    lines.append(await stream.content.readline())
                async with http.post(f"{gateway.address}/pause", headers=admin) as answer:
                    assert (await answer.json())["version"] == 0
                while lines.count(b": keepalive\n") < 3:
                    lines.append(await stream.content.readline())
                assert not whole.done()
                async with http.post(
                    f"{gateway.address}/weights", json={"source": None, "version": 5}, headers=admin
                ) as answer:
                    result = await answer.json()
                assert result["version"] == 5
                assert [each["state"] for each in result.get("engines", [])] == ["serving"] * (
                    count if count > 1 else 0
                )
                lines += [line async for line in stream.content]
                assert (await whole).choices[0].message.content == COUNTED
            data = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
            assert "".join(each["choices"][0]["delta"].get("content") or "" for each in data) == COUNTED
            for spans in (spans_of(session.episode())[:2], spans_of(session.episode())[2:]):
                (old, zero), (new, five) = spans
                assert (zero, five, old + new) == (0, 5, len(COUNTED) + 1)
            assert session.served.describe()["trainable"]

    run(main)


def test_t06_from_python_and_without_running_calls():
    async def main():
        async with serve(slow_engine("hi")) as gateway:
            session = await gateway.open()
            await gateway.pause()
            await gateway.pause()
            async with client_of(session) as client:
                call = asyncio.create_task(chat(client, [user("a")]))
                await asyncio.sleep(0.1)
                assert not call.done()
                await gateway.update(1)
                await call
                await gateway.update(2)
                await chat(client, [user("b")])
            assert spans_of(session.episode()) == [(3, 1), (3, 2)]

    run(main)


def test_t06_a_request_without_the_token_changes_nothing():
    async def main():
        for token in (TOKEN, None):
            async with serve(token=token) as gateway, aiohttp.ClientSession() as http:
                session = await gateway.open()
                for key in ("", session.key, TOKEN[:-1]):
                    headers = {"authorization": f"Bearer {key}"}
                    for method, path in (
                        ("POST", "weights"),
                        ("POST", "pause"),
                        ("POST", "resume"),
                        ("GET", "engines"),
                    ):
                        async with http.request(method, f"{gateway.address}/{path}", headers=headers) as answer:
                            assert answer.status == 401
                assert gateway.engine.version == 0
                if token is None:
                    continue
                bad_updates = (
                    {"version": 1, "paused": 1},
                    {"version": 1, "source": 7},
                    {"version": 1, "source": {"w": []}},
                )
                for body in ({}, {"version": "1"}, {"version": -1}, {"version": True}, *bad_updates):
                    headers = {"authorization": f"Bearer {TOKEN}"}
                    async with http.post(f"{gateway.address}/weights", json=body, headers=headers) as answer:
                        assert answer.status == 400

    run(main)


def test_t06_an_engine_that_cannot_load_the_weights_is_excluded_and_unloadable_weights_are_refused():
    class Picky(Replier):
        async def load_weights(self, source, version):
            if source != "good":
                raise EngineError(f"{source}: no such file")
            self.version = version

    async def main():
        fleet = Fleet(FleetSettings(type="fleet", check_s=60), Path())
        for name, engine in (("any", Replier()), ("picky", Picky())):
            fleet.add(name, engine)
        async with serve(fleet, token=TOKEN) as gateway, aiohttp.ClientSession() as http:
            headers = {"authorization": f"Bearer {TOKEN}"}

            async def update(source, version):
                body = {"source": source, "version": version}
                async with http.post(f"{gateway.address}/weights", json=body, headers=headers) as answer:
                    return answer.status, await answer.json()

            status, result = await update("bad", 1)
            assert status == 200
            states = {each["name"]: each["state"] for each in result["engines"]}
            assert states["any"] == "serving"
            assert "version 0, not 1 (bad: no such file)" in states["picky"]
            session = await gateway.open()
            async with client_of(session) as client:
                for text in "abcdef":
                    await chat(client, [user(text)])
            assert {version for _, version in spans_of(session.episode())} == {1}
            status, result = await update("good", 2)
            assert [each["version"] for each in result["engines"]] == [2, 2]
        async with serve(Picky(), token=TOKEN) as gateway, aiohttp.ClientSession() as http:
            status, result = await update("bad", 1)
            assert (status, gateway.engine.version) == (503, 0)
            assert "no such file" in result["error"]["message"]
            async with client_of(await gateway.open()) as client:
                await chat(client, [user("still there")])
        await fleet.close()

    run(main)
