"""Contract T07 of the gateway: clients that leave, and come back."""

import asyncio
import shutil
from contextlib import suppress

import openai
import pytest

from loopwright.gateway.dialects.chat import ChatCompletions
from loopwright.gateway.sessions.session_config import SessionConfig
from tests.gateway.clients import chat, streamed, text_of
from tests.gateway.harness import Replier, client_of, run, serve, until, user


@pytest.mark.parametrize("stream", [False, True])
def test_t07_a_disconnecting_client_ends_its_generation(stream):
    async def main():
        engine = Replier("hello", hold_at=3)
        async with serve(engine) as gateway:
            session = await gateway.open()
            async with client_of(session) as client:
                talk = asyncio.create_task(streamed(client, [user("a")]) if stream else chat(client, [user("a")]))
                await engine.held.wait()
                talk.cancel()
                await until(lambda: engine.closed == 1)
            await until(lambda: not session.served.describe()["running"])
            description = session.served.describe()
            assert [(turn["finish"], turn["sampled_tokens"]) for turn in description["turns"]] == [("cut", 3)]
            assert sum(description["rows"][0]["response_mask"]) == 3, "sampled tokens are exported"

    run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_t07_a_retry_continues_the_interrupted_turn(stream):
    async def main():
        engine = Replier("hello", hold_at=3)
        async with serve(engine) as gateway:
            session = await gateway.open()
            retry = {"extra_headers": {"x-stainless-retry-count": "1"}}
            talk = streamed if stream else chat
            async with client_of(session) as client:
                first = asyncio.create_task(talk(client, [user("a")]))
                await engine.held.wait()
                first.cancel()
                await until(lambda: engine.closed == 1)
                engine.hold_at = None
                answer = await talk(client, [user("a")], **retry)
                assert (text_of(answer) if stream else answer.choices[0].message.content) == "hello"
                again = await talk(client, [user("a")], **retry)
                assert (text_of(again) if stream else again.choices[0].message.content) == "hello"
                assert len(engine.calls) == 2
                assert [t["finish"] for t in session.served.describe()["turns"]] == ["stop"]
                await talk(client, [user("a")])
                assert len(session.served.describe()["turns"]) == 2, "an equal request later is another turn"

    run(main)


def test_t07_the_sdks_retry_joins_its_cancelled_call():
    async def main():
        engine = Replier("hello", hold_at=2)
        async with serve(engine) as gateway:
            session = await gateway.open()
            async with client_of(session, timeout=0.4, max_retries=2) as client:
                talk = asyncio.create_task(chat(client, [user("a")]))
                await engine.held.wait()
                await until(lambda: engine.closed == 1)
                engine.hold_at = None
                assert (await talk).choices[0].message.content == "hello"
            assert len(session.served.describe()["turns"]) == 1
            assert session.episode().sampled == 6

    run(main)


def test_t07_after_a_restart_a_retry_finds_its_turn(tmp_path):
    async def main():
        retry = {"extra_headers": {"x-stainless-retry-count": "1"}}
        engine = Replier("hello", hold_at=2)
        async with serve(engine, output=tmp_path) as gateway:
            session = await gateway.open("t")
            async with client_of(session) as client:
                done = await chat(client, [user("never held")], max_tokens=1)
                talk = asyncio.create_task(chat(client, [user("a")]))
                await engine.held.wait()
                shutil.copytree(tmp_path, f"{tmp_path}-crash")
                engine.go.set()
                await talk
        engine = Replier("hello")
        async with serve(engine, output=tmp_path.with_name(tmp_path.name + "-crash")) as gateway:
            session = await gateway.open("t")
            assert session.served.describe()["verdicts"]["broken"] == 1
            async with client_of(session) as client:
                again = await chat(client, [user("never held")], max_tokens=1, **retry)
                assert (again.id, again.choices) == (done.id, done.choices)
                assert not engine.calls
                assert (await chat(client, [user("a")], **retry)).choices[0].message.content == "hello"
            description = session.served.describe()
            assert (description["verdicts"]["broken"], description["trainable"], len(description["turns"])) == (
                0,
                True,
                2,
            )

    run(main)


class Lingering(Replier):
    """Ends an abandoned stream slowly."""

    def __init__(self, *words, **more):
        super().__init__(*words, **more)
        self.ending, self.closed_event = asyncio.Event(), asyncio.Event()

    async def generate(self, ids, sampling, *, seed):
        try:
            async for chunk in super().generate(ids, sampling, seed=seed):
                yield chunk
        finally:
            self.ending.set()
            await self.closed_event.wait()


@pytest.mark.parametrize("given_up", [False, True])
def test_t07_a_retry_waits_until_the_cancelled_call_has_ended(given_up):
    async def main():
        engine = Lingering("hello", hold_at=3)
        retry = {"extra_headers": {"x-stainless-retry-count": "1"}}
        async with serve(engine) as gateway:
            session = await gateway.open(config=SessionConfig(tokens=7))
            async with client_of(session) as client:
                first = asyncio.create_task(chat(client, [user("a")]))
                await engine.held.wait()
                first.cancel()
                await engine.ending.wait()
                engine.hold_at = None
                again = asyncio.create_task(chat(client, [user("a")], **retry))
                await asyncio.sleep(0.1)
                if given_up:
                    again.cancel()
                    again = asyncio.create_task(chat(client, [user("a")], **retry))
                    await asyncio.sleep(0.1)
                assert len(engine.calls) == 1, "one at a time"
                engine.closed_event.set()
                assert (await again).choices[0].message.content == "hello"
            (turn,) = session.served.describe()["turns"]
            assert (turn["finish"], turn["verdict"], turn["sampled_tokens"]) == ("stop", "exact", 6)

    run(main)


def test_t07_a_session_is_closed_once_the_cancelled_call_has_ended():
    async def main():
        engine = Lingering("hello", hold_at=3)
        retry = {"extra_headers": {"x-stainless-retry-count": "1"}}
        async with serve(engine) as gateway:
            session = await gateway.open()
            async with client_of(session) as client:
                first = asyncio.create_task(chat(client, [user("a")]))
                await engine.held.wait()
                first.cancel()
                await engine.ending.wait()
                again = asyncio.create_task(chat(client, [user("a")], **retry))
                await asyncio.sleep(0.1)
                closing = asyncio.create_task(session.close())
                with pytest.raises(openai.ConflictError, match="complete"):
                    await again
                assert not closing.done()
                engine.closed_event.set()
                assert (await closing).sampled == 3
            assert (session.served.running, len(engine.calls)) == (0, 1)

    run(main)


class Moved(Replier):
    """Its own time limit cancels it, as in a fleet, and then it continues elsewhere, for ever."""

    async def generate(self, ids, sampling, *, seed):
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                try:
                    await asyncio.Event().wait()
                finally:
                    self.held.set()
                    await self.go.wait()
        await asyncio.Event().wait()
        yield


def test_t07_a_call_that_is_moving_to_another_engine_can_be_cancelled():
    async def main():
        engine = Moved()
        async with serve(engine) as gateway:
            session = await gateway.open()
            async with client_of(session) as client:
                talk = asyncio.create_task(chat(client, [user("a")]))
                await engine.held.wait()
                talk.cancel()
                closing = asyncio.create_task(session.close())
                await asyncio.sleep(0.1)
                engine.go.set()
                assert (await asyncio.wait_for(closing, 10)).sampled == 0

    run(main)


def test_t07_a_call_cancelled_at_once_holds_nothing():
    async def main():
        async with serve(Replier("hello")) as gateway:
            live = (await gateway.open(config=SessionConfig(tokens=6))).served
            dialect = ChatCompletions(live.session.engine.tokenizer, live.config.defaults)
            body, digest = dialect.bodies.read(b'{"model": "m", "messages": [{"role": "user", "content": "a"}]}')
            call = live.call("chat", dialect.parse(body), digest, is_retry=False)
            call.join()
            call.leave(is_delivered=False)
            await asyncio.sleep(0.01)
            assert (await live.session.turn([user("b")])).sampled_tokens == 6

    run(main)


def test_t07_a_client_that_disconnects_while_waiting_uses_nothing():
    async def main():
        engine = Replier("hello", hold_at=1)
        async with serve(engine) as gateway:
            session = await gateway.open(config=SessionConfig(concurrency=1, tokens=20, max_tokens=10))
            async with client_of(session) as client:
                first = asyncio.create_task(chat(client, [user("a")]))
                await engine.held.wait()
                second = asyncio.create_task(chat(client, [user("b")]))
                await until(lambda: session.served.describe()["running"] == 2)
                second.cancel()
                await until(lambda: session.served.describe()["running"] == 1)
                engine.go.set()
                await first
                assert (await chat(client, [user("c")])).usage.completion_tokens == 6
                assert (await chat(client, [user("d")])).usage.completion_tokens == 6

    run(main)
