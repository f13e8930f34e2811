"""Engines that connect to the gateway keep the engine contract over the connection, also when it fails."""

import asyncio
import math
from contextlib import asynccontextmanager
from typing import ClassVar

import aiohttp
import orjson
import pytest
from openai import APIConnectionError

from loopwright.engines.base import ContextFull, EngineError, Sampling
from loopwright.engines.scripted import ScriptedConfig, ScriptedEngine
from loopwright.engines.tokenizer import ByteTokenizer, fingerprint
from loopwright.gateway.gateway import Gateway, GatewayConfig
from loopwright.gateway.relay.link import PROTOCOL
from loopwright.gateway.relay.relay import Relay, RelayConfig
from loopwright.gateway.relay.worker import RelayWorker, WorkerRefused
from loopwright.testing import EngineContract
from tests.gateway.harness import END, Replier, client_of, run, until, user
from tests.gateway.relay.harness import TOKEN, door, relayed, working


async def chunks_from(engine, text="hi", most=64):
    ids = ByteTokenizer().encode(text)
    return [chunk async for chunk in engine.generate(ids, Sampling(max_tokens=most), seed="s")]


def ids_of(chunks):
    return [token for chunk in chunks for token in chunk.ids]


class TestContract(EngineContract):
    def make_engine(self, directory, *, slow=False):
        replies = ("one two three four five six seven eight nine ten", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16")
        return ScriptedEngine(ScriptedConfig(replies=replies, slip=0.1, token_s=0.005 if slow else 0.0), directory)

    def use(self, directory, body, *, slow=False):
        async def main():
            workers = [self.make_engine(directory, slow=slow) for _ in range(2)]
            async with relayed(*workers) as gateway:
                return await asyncio.wait_for(body(gateway.engine), 60)

        return asyncio.run(main())

    def test_its_config_survives_pickling_and_json(self):
        pytest.skip("a relay is made by its gateway, from settings that need not travel")


def test_logprobs_alternatives_and_errors_are_relayed_unchanged():
    async def body():
        class Exact(Replier):
            async def generate(self, ids, sampling, *, seed):
                async for chunk in super().generate(ids, sampling, seed=seed):
                    tops = (((chunk.ids[0], -0.1 - 1e-16), (7, -math.inf)),)
                    yield chunk.__class__(chunk.ids, (-0.1 - 1e-16,), 7, chunk.finish, tops)

        engine = Exact("abc", room=9)
        engine.version = 7
        async with relayed(engine) as gateway:
            chunks = await chunks_from(gateway.engine)
            assert ids_of(chunks) == [*b"abc", END]
            assert {c.logprobs for c in chunks} == {(-0.1 - 1e-16,)}
            assert {c.version for c in chunks} == {7}
            assert [c.tops for c in chunks] == [(((t, -0.1 - 1e-16), (7, -math.inf)),) for t in (*b"abc", END)]
            with pytest.raises(ContextFull) as full:
                await chunks_from(gateway.engine, "far too long")
            assert (full.value.limit, full.value.length) == (9, 12)

    run(body)


def test_a_stopped_worker_finishes_its_streams_first():
    async def body():
        first, other = Replier("hello", hold_at=2), Replier("hello")
        async with relayed() as gateway, working(gateway, first, "first") as worker:
            relay = gateway.engine
            stream = asyncio.create_task(chunks_from(relay))
            await first.held.wait()
            async with working(gateway, other, "other"):
                await until(lambda: len(relay.describe()) == 2)
                worker.stop()
                await until(lambda: relay.describe()[0]["state"] == "leaving")
                assert ids_of(await chunks_from(relay)) == [*b"hello", END]
                assert len(first.calls) == 1, "nothing new"
                first.go.set()
                assert ids_of(await stream) == [*b"hello", END]
                assert len(other.calls) == 1, "its streams finished on the same worker"
                await until(lambda: [each["name"] for each in relay.describe()] == ["other"])

    run(body)


def test_a_worker_without_the_token_is_refused_and_gives_up():
    async def body():
        async with relayed() as gateway:
            for token in ("wrong-token-of-the-gateway", "", TOKEN + "x"):
                with pytest.raises(WorkerRefused, match="does not accept this token"):
                    await RelayWorker(Replier(), door(gateway), token).run()
            assert gateway.engine.describe() == []
        async with Gateway(Replier(), token=TOKEN) as plain:
            with pytest.raises(WorkerRefused, match="start it with --relay"):
                await RelayWorker(Replier(), door(plain), TOKEN).run()

    run(body)


def test_a_worker_with_other_tokens_is_refused_with_the_reason():
    class Other(ByteTokenizer):
        specials: ClassVar = {"<|im_start|>": 256, "<|eot|>": 257}

    async def body():
        other = Replier()
        other.tokenizer = Other()
        async with relayed(Replier()) as gateway:
            with pytest.raises(WorkerRefused, match="all workers must serve the same model"):
                await RelayWorker(other, door(gateway), TOKEN).run()
        async with relayed(tokenizer=Other()) as gateway:
            with pytest.raises(WorkerRefused, match="all workers must serve the same model"):
                await RelayWorker(Replier(), door(gateway), TOKEN).run()

    run(body)


def test_the_tokenizer_of_a_hub_model_is_sent():
    tokenizers = pytest.importorskip("tokenizers")
    from loopwright.engines.tokenizer import HubTokenizer

    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    raw.train_from_iterator(["hello hello world, hello there"] * 9, trainer)

    async def body():
        engine = Replier("x")
        engine.tokenizer = HubTokenizer(raw)
        async with relayed(engine) as gateway:
            mine = gateway.engine.tokenizer
            assert isinstance(mine, HubTokenizer)
            assert fingerprint(mine) == fingerprint(engine.tokenizer) != fingerprint(ByteTokenizer())
            assert mine.encode("hello <|im_end|>") == engine.tokenizer.encode("hello <|im_end|>")

    run(body)


async def responses_to(gateway, *messages):
    """The gateway's responses to a worker that sends these messages after the greeting."""
    answers = []
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(door(gateway), headers={"authorization": f"Bearer {TOKEN}"}) as socket,
    ):
        await socket.receive()
        for message in messages:
            await socket.send_bytes(message if isinstance(message, bytes) else orjson.dumps(message))
        async for got in socket:
            answers.append(orjson.loads(got.data))
            if len(answers) == 9:
                break
    return answers


ANNOUNCED = {"t": "announce", "protocol": PROTOCOL, "name": "n", "version": 0, "tokenizer": "bytes"}


@pytest.mark.parametrize(
    ("message", "chunks_from"),
    [
        ({**ANNOUNCED, "protocol": 99}, "protocol"),
        ({**ANNOUNCED, "name": None}, "name and version"),
        ({**ANNOUNCED, "version": "1"}, "name and version"),
        ({**ANNOUNCED, "steering": 5}, "than a list"),
        ({**ANNOUNCED, "fingerprint": "0"}, "differs from its own"),
        ({**ANNOUNCED, "tokenizer": "other"}, "--tokenizer"),
        ({**ANNOUNCED, "tokenizer": "other", "tokenizer_json": "{}"}, "cannot be loaded"),
        (b"\x80\x04", "not valid JSON"),
        (b"[]", "has no type"),
    ],
)
def test_an_invalid_announcement_is_refused(message, chunks_from):
    async def body():
        async with relayed() as gateway:
            (answer,) = await responses_to(gateway, message)
            assert answer["t"] == "refused"
            assert chunks_from in answer["reason"]
            assert gateway.engine.describe() == []

    run(body)


@pytest.mark.parametrize(
    "message",
    [
        {"t": "chunk", "id": 1},
        {"t": "chunk", "id": 1, "ids": ["a"], "logprobs": [0], "version": 0, "finish": None},
        {"t": "chunk", "id": 1, "ids": [1], "logprobs": [0], "version": 0, "finish": "gone"},
        {"t": "chunk", "id": 1, "ids": 1, "logprobs": [0], "version": 0, "finish": None},
        {"t": "chunk", "id": 1, "ids": [1], "logprobs": [0], "version": 0, "finish": None, "tops": [[["a", 0]]]},
        {"t": "done", "id": 1},
        {"t": "failed", "id": 1, "kind": "context", "limit": None, "length": 1},
        {"t": "nonsense", "id": 1},
        {"t": "chunk", "id": [1], "ids": [], "logprobs": [], "version": 0, "finish": None},
    ],
)
def test_a_worker_that_sends_garbage_is_dropped_and_others_are_unaffected(message, caplog):
    async def body():
        async with relayed(Replier("hello")) as gateway:
            await responses_to(gateway, {**ANNOUNCED, "fingerprint": fingerprint(ByteTokenizer())}, message)
            await until(lambda: len(gateway.engine.describe()) == 1)
            assert ids_of(await chunks_from(gateway.engine)) == [*b"hello", END]

    run(body)
    assert "Traceback" not in caplog.text


def test_opening_a_session_waits_for_the_first_worker():
    async def body():
        async with relayed() as gateway, aiohttp.ClientSession() as http:
            auth = {"authorization": f"Bearer {TOKEN}"}
            opening = asyncio.create_task(http.post(f"{gateway.address}/sessions", headers=auth))
            await asyncio.sleep(0.1)
            async with http.get(f"{gateway.address}/healthz") as answer:
                assert answer.status == 200
            assert not opening.done()
            async with working(gateway, Replier("hello")), await opening as answer:
                assert answer.status == 200
        async with relayed(wait_s=0.1) as gateway, aiohttp.ClientSession() as http:
            answer = await http.post(f"{gateway.address}/sessions", headers=auth)
            assert answer.status == 503
            assert "no worker has connected yet" in await answer.text()

    run(body)


def test_t08_a_second_worker_with_the_same_name_replaces_the_first():
    async def body():
        first, later = Replier("hello", hold_at=2), Replier("hello")
        async with relayed() as gateway:
            worker = asyncio.create_task(RelayWorker(first, door(gateway), TOKEN, name="w").run())
            await until(lambda: gateway.engine.describe())
            async with client_of(await gateway.open()) as client:
                call = asyncio.create_task(client.chat.completions.create(model="m", messages=[user("a")]))
                await first.held.wait()
                async with working(gateway, later, "w"):
                    with pytest.raises(WorkerRefused, match="another worker has connected as 'w'"):
                        await worker
                    assert (await call).choices[0].message.content == "hello", "its running streams continue"
                    assert later.calls[0][1] == [*b"llo", END]
                    assert [each["state"] for each in gateway.engine.describe()] == ["serving"]

    run(body)


@asynccontextmanager
async def ending(engine, output, drain_s):
    """A gateway that starts to close while its worker is in mid-stream, and the running call."""
    relay = Relay(RelayConfig(heartbeat_s=0.5))
    gateway = Gateway(relay, GatewayConfig(drain_s=drain_s), token=TOKEN, output=output)
    await gateway.__aenter__()
    async with working(gateway, engine):
        await until(relay.describe)
        async with client_of(await gateway.open("s"), timeout=20.0) as client:
            call = asyncio.create_task(client.chat.completions.create(model="m", messages=[user("a")]))
            await engine.held.wait()
            end = asyncio.create_task(gateway.__aexit__(None, None, None))
            yield call, end
            await relay.close()


@pytest.mark.parametrize("drain_s", [20.0, 0.5])
def test_t08_a_closing_gateway_reads_from_its_workers_until_calls_finish(tmp_path, drain_s):
    """At most for `drain_s`: later tokens are cut."""

    async def body():
        engine, clock = Replier("hello", hold_at=2), asyncio.get_running_loop().time
        start = clock()
        async with ending(engine, tmp_path, drain_s) as (call, end):
            if drain_s > 1:
                await asyncio.sleep(0.2)
                engine.go.set()
                assert (await call).choices[0].message.content == "hello"
            else:
                with pytest.raises(APIConnectionError):
                    await call
            await end
        assert clock() - start < 5
        async with relayed(Replier(), output=tmp_path) as gateway:
            (turn,) = gateway.find("s").describe()["turns"]
            chunks_from = (6, "stop") if drain_s > 1 else (2, "cut")
            assert (turn["sampled_tokens"], turn["finish"], turn["verdict"]) == (*chunks_from, "exact")

    run(body)


def test_a_session_stays_with_its_worker():
    async def body():
        engines = [Replier("hello") for _ in range(3)]
        async with relayed(*engines) as gateway:
            for number in range(6):
                async with client_of(await gateway.open(f"s{number}")) as client:
                    before = [len(engine.calls) for engine in engines]
                    for text in "abcd":
                        await client.chat.completions.create(model="m", messages=[user(text)])
                    grown = [len(engine.calls) - was for engine, was in zip(engines, before, strict=True)]
                    assert sorted(grown) == [0, 0, 4]
            assert sum(bool(engine.calls) for engine in engines) > 1

    run(body)


def test_a_late_worker_gets_the_weights_that_it_missed():
    async def body():
        async with relayed(Replier("hello")) as gateway:
            await gateway.update(4, "w4")
            late = Replier("hello")
            async with working(gateway, late, "late"):
                await until(lambda: late.version == 4)
                await until(lambda: [e["state"] for e in gateway.engine.describe()] == ["serving"] * 2)

    run(body)


def test_weights_that_are_not_a_path_are_refused():
    async def body():
        async with relayed(Replier("hello")) as gateway:
            with pytest.raises(EngineError, match="from a path"):
                await gateway.update(1, {"w": [1.0]})
            assert ids_of(await chunks_from(gateway.engine)) == [*b"hello", END], "it keeps serving its weights"

    run(body)


def test_a_restarted_relay_reads_its_sessions_once_it_has_a_tokenizer(tmp_path):
    async def body():
        async with relayed(Replier("hello"), output=tmp_path) as gateway:
            session = await gateway.open("s")
            async with client_of(session) as client:
                await client.chat.completions.create(model="m", messages=[user("a")])
        async with relayed(Replier("hello"), output=tmp_path) as gateway:
            again = await gateway.open("s")
            assert again.key == session.key
            assert again.episode().sampled == 6

    run(body)
