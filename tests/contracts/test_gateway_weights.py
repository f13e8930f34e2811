"""Contract T06 of the gateway: new weights while calls are under way."""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from loopwright.engines.base import EngineError
from loopwright.engines.fleet import Fleet, FleetSettings
from tests.gateway.clients import COUNTED, chat, slow_engine, spans_of
from tests.gateway.harness import Teller, client_of, run, served, user
from tests.gateway.relay.harness import TOKEN


@pytest.mark.parametrize("count", [1, 3])
def test_t06_running_calls_are_held_kept_alive_and_go_on_under_the_new_version(count):
    async def story():
        engines = [slow_engine() for _ in range(count)]
        engine = engines[0]
        if count > 1:
            engine = Fleet(FleetSettings(type="fleet"), Path())
            for number, each in enumerate(engines):
                engine.add(str(number), each)
        async with served(engine, token=TOKEN, keepalive_s=0.05) as gateway, aiohttp.ClientSession() as http:
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
                    told = await answer.json()
                assert told["version"] == 5
                assert [each["state"] for each in told.get("engines", [])] == ["serving"] * (count if count > 1 else 0)
                lines += [line async for line in stream.content]
                assert (await whole).choices[0].message.content == COUNTED
            data = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
            assert "".join(each["choices"][0]["delta"].get("content") or "" for each in data) == COUNTED
            for spans in (spans_of(session.episode())[:2], spans_of(session.episode())[2:]):
                (old, zero), (new, five) = spans
                assert (zero, five, old + new) == (0, 5, len(COUNTED) + 1)
            assert session.served.describe()["trainable"]

    run(story)


def test_t06_in_python_and_without_anybody_there():
    async def story():
        async with served(slow_engine("hi")) as gateway:
            session = await gateway.open()
            await gateway.pause()
            await gateway.pause()
            async with client_of(session) as client:
                held = asyncio.create_task(chat(client, [user("a")]))
                await asyncio.sleep(0.1)
                assert not held.done()
                await gateway.update(1)
                await held
                await gateway.update(2)
                await chat(client, [user("b")])
            assert spans_of(session.episode()) == [(3, 1), (3, 2)]

    run(story)


def test_t06_who_has_not_the_token_changes_nothing():
    async def story():
        for token in (TOKEN, None):
            async with served(token=token) as gateway, aiohttp.ClientSession() as http:
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
                wrong = ({"version": 1, "paused": 1}, {"version": 1, "source": 7}, {"version": 1, "source": {"w": []}})
                for body in ({}, {"version": "1"}, {"version": -1}, {"version": True}, *wrong):
                    headers = {"authorization": f"Bearer {TOKEN}"}
                    async with http.post(f"{gateway.address}/weights", json=body, headers=headers) as answer:
                        assert answer.status == 400

    run(story)


def test_t06_an_engine_that_cannot_take_the_weights_is_left_out_and_weights_that_none_can_take_are_refused():
    class Picky(Teller):
        async def load_weights(self, source, version):
            if source != "good":
                raise EngineError(f"{source}: no such file")
            self.version = version

    async def story():
        fleet = Fleet(FleetSettings(type="fleet", check_s=60), Path())
        for name, engine in (("any", Teller()), ("picky", Picky())):
            fleet.add(name, engine)
        async with served(fleet, token=TOKEN) as gateway, aiohttp.ClientSession() as http:
            headers = {"authorization": f"Bearer {TOKEN}"}

            async def update(source, version):
                body = {"source": source, "version": version}
                async with http.post(f"{gateway.address}/weights", json=body, headers=headers) as answer:
                    return answer.status, await answer.json()

            status, told = await update("bad", 1)
            assert status == 200
            states = {each["name"]: each["state"] for each in told["engines"]}
            assert states["any"] == "serving"
            assert "version 0, not 1 (bad: no such file)" in states["picky"]
            session = await gateway.open()
            async with client_of(session) as client:
                for text in "abcdef":
                    await chat(client, [user(text)])
            assert {version for _, version in spans_of(session.episode())} == {1}
            status, told = await update("good", 2)
            assert [each["version"] for each in told["engines"]] == [2, 2]
        async with served(Picky(), token=TOKEN) as gateway, aiohttp.ClientSession() as http:
            status, told = await update("bad", 1)
            assert (status, gateway.engine.version) == (503, 0)
            assert "no such file" in told["error"]["message"]
            async with client_of(await gateway.open()) as client:
                await chat(client, [user("still there")])
        await fleet.close()

    run(story)
