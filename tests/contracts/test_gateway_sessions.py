"""Contracts T05 and T10 of the gateway: sessions, and where agents find them."""

import asyncio
import time

import aiohttp
import openai
import pytest

from loopwright.engines.base import Sampling
from loopwright.gateway.gateway import AdvertiseError, GatewayConfig
from loopwright.gateway.sessions.session_config import SessionConfig
from tests.gateway.clients import chat, send, streamed, text_of
from tests.gateway.harness import Replier, client_of, run, serve, until, user


def test_t05_the_life_of_a_session():
    async def main():
        async with serve() as gateway, aiohttp.ClientSession() as http:
            url = gateway.address
            status, session_info, _ = await send(http, "POST", f"{url}/sessions")
            assert status == 200
            assert session_info["openai_base_url"] == f"{url}/{session_info['id']}/v1"
            stolen = await send(http, "POST", f"{url}/sessions/{session_info['id']}")
            assert (stolen[0], session_info["key"] in str(stolen[1])) == (401, False), "a URL alone is not a key"
            assert (await send(http, "POST", f"{url}/sessions/{session_info['id']}", key=session_info["key"]))[
                1
            ] == session_info
            _, mine, _ = await send(http, "POST", f"{url}/sessions/trial-1", json={"run": "r", "trial": 1})
            again = await send(http, "POST", f"{url}/sessions/trial-1", json={"run": "r", "trial": 1})
            assert again[:2] == (200, mine)
            other = await send(http, "POST", f"{url}/sessions/trial-1", json={"run": "r", "trial": 2})
            assert other[0] == 409
            assert mine["key"] not in str(other[1])
            path = f"{url}/sessions/trial-1"
            assert (await send(http, "GET", f"{url}/sessions/unknown", key=mine["key"]))[0] == 404
            for key in (None, "", "wrong", session_info["key"], mine["key"][:-1]):
                for method, at in (("GET", path), ("POST", f"{path}/complete"), ("DELETE", path)):
                    assert (await send(http, method, at, key=key))[0] == 401
                body = {"model": "m", "messages": [user("x")]}
                status, refused, headers = await send(
                    http, "POST", f"{url}/trial-1/v1/chat/completions", key=key, json=body
                )
                assert (status, headers["x-should-retry"]) == (401, "false")
                assert refused["error"]["code"] == "invalid_api_key"
            status, done, _ = await send(http, "POST", f"{path}/complete", key=mine["key"], json={"reason": "bye"})
            assert (status, done["status"], bool(done["snapshot"])) == (200, "complete", True)
            assert (await send(http, "POST", f"{path}/complete", key=mine["key"]))[1]["snapshot"] == done["snapshot"]
            status, refused, headers = await send(
                http, "POST", f"{url}/trial-1/v1/chat/completions", key=mine["key"], json=body
            )
            assert (status, headers["x-should-retry"], refused["error"]["code"]) == (409, "false", "session_closed")
            twice = [send(http, "DELETE", path, key=mine["key"]) for _ in range(2)]
            assert {status for status, _, _ in await asyncio.gather(*twice)} <= {200, 404}
            assert (await send(http, "GET", path, key=mine["key"]))[0] == 404

    run(main)


def test_t05_a_session_that_has_ended_is_not_read_for_another_run_that_wants_its_id(tmp_path):
    async def main():
        async with serve(output=tmp_path) as gateway:
            session = await gateway.open("trial-1", SessionConfig(run="r", trial=1, owner_key="the run's own key"))
            async with client_of(session) as client:
                await chat(client, [user("x")])
            await session.close()
        async with serve(output=tmp_path) as gateway, aiohttp.ClientSession() as http:
            for config in ({}, {"run": "r", "trial": 2}, {"run": "r", "trial": 1, "owner_key": "a key that is wrong"}):
                status, refused, _ = await send(http, "POST", f"{gateway.address}/sessions/trial-1", json=config)
                assert (status, "belongs to another" in refused["error"]["message"]) == (409, True)
                assert not gateway.sessions, "nothing was read"
            config = {"run": "r", "trial": 1, "owner_key": "the run's own key"}
            status, refused, _ = await send(http, "POST", f"{gateway.address}/sessions/trial-1", json=config)
            assert (status, refused["error"]["code"]) == (409, "session_closed")
            status, refused, _ = await send(
                http, "POST", f"{gateway.address}/trial-1/v1/chat/completions", key=session.key, json={}
            )
            assert (status, refused["error"]["code"]) == (409, "session_closed")
            assert not gateway.sessions, "nor for its agent, which calls on"

    run(main)


def test_t05_a_session_that_has_ended_is_read_from_the_store_only_with_its_key(tmp_path):
    async def main():
        async with serve(output=tmp_path) as gateway:
            session = await gateway.open("ended", SessionConfig(owner_key="the key of its run"))
            await session.close()
        async with serve(output=tmp_path, token="secret") as gateway, aiohttp.ClientSession() as http:
            path = f"{gateway.address}/sessions/ended"
            for key in (None, "wrong"):
                assert (await send(http, "GET", path, key=key))[0] == 401
                assert (await send(http, "GET", f"{gateway.address}/ended/v1/models", key=key))[0] == 401
                assert not gateway.sessions
            for key, status in ((session.key, 403), ("the key of its run", 200), ("secret", 200)):
                gateway.sessions.clear()
                assert (await send(http, "GET", path, key=key))[0] == status

    run(main)


@pytest.mark.parametrize("id", ["..", "%2e%2e", "a%2Fb", "sessions", ".x", "a b", "x" * 129, "healthz", "é"])
def test_t05_an_id_is_a_plain_word(id):
    async def main():
        async with serve() as gateway, aiohttp.ClientSession() as http:
            from yarl import URL

            async with http.post(URL(f"{gateway.address}/sessions/{id}", encoded=True)) as answer:
                assert answer.status in (400, 404, 405)

    run(main)


def test_t05_opening_a_session_needs_the_token_if_there_is_one():
    async def main():
        async with serve(token="a token of the gateway") as gateway, aiohttp.ClientSession() as http:
            assert (await send(http, "POST", f"{gateway.address}/sessions"))[0] == 401
            status, session_info, _ = await send(
                http, "POST", f"{gateway.address}/sessions", key="a token of the gateway"
            )
            assert status == 200
            path = f"{gateway.address}/sessions/{session_info['id']}"
            assert (await send(http, "GET", path, key="a token of the gateway"))[0] == 200
            chatting = f"{gateway.address}/{session_info['id']}/v1/models"
            assert (await send(http, "GET", chatting, key="a token of the gateway"))[0] == 401

    run(main)


def test_t05_sessions_expire():
    async def main():
        now = [1000.0]
        async with serve(clock=lambda: now[0], ttl_s=60) as gateway:
            session = await gateway.open()
            async with client_of(session) as client:
                now[0] += 50
                await chat(client, [user("hi")])
                now[0] += 50
                await asyncio.sleep(1.2)
                assert session.served.status == "open"
                now[0] += 60
                await until(lambda: session.served.status == "expired")
                with pytest.raises(openai.ConflictError, match="expired"):
                    await chat(client, [user("hi")])

    run(main)


def test_t05_quotas_and_pinned_sampling():
    async def main():
        engine, now = Replier("hello"), [0.0]
        async with serve(engine, clock=lambda: now[0]) as gateway:
            pinned = SessionConfig(sampling=Sampling(temperature=0.25, max_tokens=4), calls=3, time_s=100)
            async with client_of(await gateway.open(config=pinned), max_retries=2) as client:
                await chat(client, [user("a")], temperature=1.5, max_tokens=100, top_p=0.5)
                assert (engine.calls[-1][2].temperature, engine.calls[-1][2].max_tokens) == (0.25, 4)
                assert engine.calls[-1][2].top_p == 0.5
                await chat(client, [user("a")], max_tokens=2)
                assert engine.calls[-1][2].max_tokens == 2
                await chat(client, [user("a")])
                start = time.monotonic()
                with pytest.raises(openai.RateLimitError, match="all 3 turns are used up"):
                    await chat(client, [user("a")])
                assert time.monotonic() - start < 0.4, "not retried"
            async with client_of(await gateway.open(config=SessionConfig(tokens=8, time_s=10))) as client:
                assert (await chat(client, [user("a")])).usage.completion_tokens == 6
                assert (await chat(client, [user("a")])).usage.completion_tokens == 2
                with pytest.raises(openai.RateLimitError, match="all 8 tokens"):
                    await chat(client, [user("a")])
            async with client_of(await gateway.open(config=SessionConfig(time_s=10))) as client:
                now[0] += 10
                with pytest.raises(openai.RateLimitError, match="10 s are over"):
                    await chat(client, [user("a")])

    run(main)


def test_t05_choices_share_a_quota_or_cost_nothing():
    async def main():
        async with serve(Replier("hello")) as gateway:
            async with client_of(await gateway.open(config=SessionConfig(tokens=16))) as client:
                shared = await chat(client, [user("a")], n=2)
                assert shared.usage.completion_tokens == 12, "each choice had eight tokens and used six"
                with pytest.raises(openai.RateLimitError, match="12 of 16 tokens are used up"):
                    await chat(client, [user("a")], n=5)
                assert (await chat(client, [user("a")], n=4)).usage.completion_tokens == 4
                with pytest.raises(openai.RateLimitError, match="all 16 tokens are used up"):
                    await chat(client, [user("a")])
            session = await gateway.open(config=SessionConfig(calls=3))
            async with client_of(session) as client:
                await chat(client, [user("a")])
                with pytest.raises(openai.RateLimitError, match="1 of 3 turns are used up; 3 more"):
                    await chat(client, [user("a")], n=3)
                await chat(client, [user("a")], n=2)
            assert len(session.served.describe()["turns"]) == 3, "a refused call is not a turn"

    run(main)


def test_t05_quota_held_by_running_calls_is_not_reported_as_used_up():
    async def main():
        engine = Replier("hello", hold_at=1)
        async with serve(engine) as gateway, client_of(await gateway.open(config=SessionConfig(tokens=100))) as client:
            first = asyncio.create_task(chat(client, [user("a")]))
            await engine.held.wait()
            with pytest.raises(
                openai.RateLimitError, match="0 of 100 tokens are used up, and 100 are reserved"
            ) as stream:
                await chat(client, [user("b")])
            assert stream.value.response.headers.get("x-should-retry") != "false", "it may be released"
            engine.go.set()
            await first
            assert (await chat(client, [user("b")])).usage.completion_tokens == 6

    run(main)


def test_t05_a_retry_gets_the_rest_of_the_quotas():
    async def main():
        engine, now = Replier("x" * 50, hold_at=1), [0.0]
        retry = {"extra_headers": {"x-stainless-retry-count": "1"}}
        async with serve(engine, clock=lambda: now[0]) as gateway:
            session = await gateway.open(config=SessionConfig(tokens=40, time_s=100))
            async with client_of(session) as client:
                for number in range(4):
                    engine.held.clear()
                    talk = asyncio.create_task(chat(client, [user(str(number))], n=1 + (number == 0)))
                    await engine.held.wait()
                    talk.cancel()
                    await until(lambda: not session.served.running)
                sampled = session.episode().sampled
                engine.hold_at = None
                both = await chat(client, [user("0")], n=2, **retry)
                assert [choice.finish_reason for choice in both.choices] == ["length", "length"]
                assert both.usage.completion_tokens == 40 - sampled + 2, "each choice continued with its share"
                with pytest.raises(openai.RateLimitError, match="all 40 tokens are used up"):
                    await chat(client, [user("1")], **retry)
                assert session.episode().sampled == 40
                now[0] += 100
                again = await chat(client, [user("0")], n=2, **retry)
                assert again.choices == both.choices, "a repeated answer costs nothing"
                with pytest.raises(openai.RateLimitError, match="100 s are over"):
                    await chat(client, [user("2")], **retry)

    run(main)


def test_t05_a_closed_session_keeps_only_what_can_be_requested():
    async def main():
        now = [0.0]
        async with serve(clock=lambda: now[0], kept_s=100, ttl_s=50) as gateway:
            abandoned, completed = await gateway.open("left"), await gateway.open("done")
            for session in (abandoned, completed):
                async with client_of(session) as client:
                    await chat(client, [user("hi")])
            snapshot = await completed.close()
            async with client_of(completed) as client:
                with pytest.raises(openai.ConflictError, match="complete"):
                    await chat(client, [user("hi"), user("once more")])
            live = completed.served
            assert [len(items) for items in (live.dialects, live._calls, live.session.graph._recent)] == [0, 0, 0]
            now[0] += 60
            await until(lambda: abandoned.served.status == "expired")
            assert gateway.find("done").episode() == snapshot
            now[0] += 60
            await until(lambda: "done" not in gateway.sessions)
            now[0] += 1000
            await asyncio.sleep(1.2)
            assert "left" in gateway.sessions, "its record has not been fetched"

    run(main)


def test_t05_calls_beyond_the_concurrency_wait():
    async def main():
        engine = Replier("hello", hold_at=1)
        async with (
            serve(engine, keepalive_s=0.05) as gateway,
            client_of(await gateway.open(config=SessionConfig(concurrency=2))) as client,
        ):
            talks = [asyncio.create_task(streamed(client, [user(str(n))])) for n in range(5)]
            await until(lambda: engine.running == 2)
            await asyncio.sleep(0.2)
            assert engine.running == 2
            engine.go.set()
            assert [text_of(chunks) for chunks in await asyncio.gather(*talks)] == ["hello"] * 5

    run(main)


@pytest.mark.parametrize(
    "config", [{"host": "0.0.0.0"}, {"host": "::"}, {"advertise": "http://0.0.0.0:1"}, {"advertise": "gpu-box"}]
)
def test_t10_an_unusable_address_is_refused_at_the_start(config):
    async def main():
        with pytest.raises(AdvertiseError):
            async with serve(**config):
                pass

    run(main)


def test_t10_agents_get_the_advertised_address():
    async def main():
        async with serve(host="0.0.0.0", advertise="http://gpu-box:8400/") as gateway:
            session = await gateway.open()
            assert session.openai_base_url == f"http://gpu-box:8400/{session.id}/v1"
            assert session.anthropic_base_url == f"http://gpu-box:8400/{session.id}"

    run(main)
    assert not GatewayConfig().public
