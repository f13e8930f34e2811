"""Contracts of the gateway: T01 to T08 and T10, through the official SDKs as they are."""

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import openai
import pytest

from loopwright.core.errors import StorageError
from loopwright.engines.base import EngineError, Sampling
from loopwright.engines.fleet import Fleet, FleetSettings
from loopwright.engines.scripted import ScriptedConfig, ScriptedEngine
from loopwright.engines.tokenizer import ByteTokenizer
from loopwright.gateway.gateway import AdvertiseError, GatewayConfig
from loopwright.gateway.store import DiskStore
from loopwright.gateway.terms import Terms
from tests.gateway.relaying import TOKEN, door, relayed, working
from tests.gateway.serving import ADD, END, Teller, call, claude_of, client_of, run, served, until, user


def serving(words):
    """A gateway in a process of its own, and its address."""
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    if line := process.stdout.readline():
        return process, line.split()[3].rstrip(";")
    process.stdout.close()
    raise AssertionError(f"no gateway, but exit code {process.wait()}; its stderr says why")


async def chat(client, messages, **more):
    return await client.chat.completions.create(model="any", messages=messages, **more)


async def streamed(client, messages, **more):
    return [chunk async for chunk in await chat(client, messages, stream=True, **more)]


async def followed(client, messages, heard):
    """Streams into a list, so that what was heard before an error is there after it."""
    async for chunk in await chat(client, messages, stream=True):
        heard.append(chunk)


def text_of(chunks):
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


# -- T01: the SDKs -------------------------------------------------------------------------------------------------


def test_t01_chat_completions_whole_and_streamed():
    async def story():
        async with served(Teller("grüß dich 😀")) as gateway, client_of(await gateway.open()) as client:
            whole = await chat(client, [user("hi")])
            (choice,) = whole.choices
            assert (choice.message.content, choice.message.role, choice.finish_reason) == (
                "grüß dich 😀",
                "assistant",
                "stop",
            )
            ids = len("grüß dich 😀".encode()) + 1
            assert (whole.usage.completion_tokens, whole.usage.total_tokens) == (ids, ids + whole.usage.prompt_tokens)
            chunks = await streamed(client, [user("hi")], stream_options={"include_usage": True})
            assert text_of(chunks) == "grüß dich 😀"
            assert len(chunks) > 8, "token by token"
            assert chunks[0].choices[0].delta.role == "assistant"
            assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
            assert chunks[-1].choices == []
            assert chunks[-1].usage == whole.usage
            assert len({chunk.id for chunk in chunks}) == 1
            assert all(chunk.usage is None for chunk in await streamed(client, [user("hi")]))

    run(story)


def test_t01_the_synchronous_client():
    async def story():
        async with served() as gateway:
            session = await gateway.open()

            def talk():
                with openai.OpenAI(base_url=session.openai_base_url, api_key=session.key) as client:
                    whole = client.chat.completions.create(model="m", messages=[user("hi")])
                    stream = client.chat.completions.create(model="m", messages=[user("hi")], stream=True)
                    return whole.choices[0].message.content, text_of(list(stream)), [m.id for m in client.models.list()]

            assert await asyncio.to_thread(talk) == ("hello", "hello", ["policy"])

    run(story)


def test_t01_tools_whole_and_streamed():
    said = f"Let me see.\n{call(a=1, b='x y')}\n{call('mul', c=[2])}"

    async def story():
        async with served(Teller(said)) as gateway, client_of(await gateway.open()) as client:
            (choice,) = (await chat(client, [user("hi")], tools=[ADD])).choices
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
            made = [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]
            assert made == [("add", {"a": 1, "b": "x y"}), ("mul", {"c": [2]})]
            chunks = await streamed(client, [user("hi")], tools=[ADD])
            deltas = [d for c in chunks if c.choices for d in c.choices[0].delta.tool_calls or ()]
            assert [d.function.name for d in deltas if d.id] == ["add", "mul"]
            joined = ["".join(d.function.arguments for d in deltas if d.index == index) for index in (0, 1)]
            assert [json.loads(text) for text in joined] == [{"a": 1, "b": "x y"}, {"c": [2]}]
            assert text_of(chunks) == "Let me see."
            assert chunks[-1].choices[0].finish_reason == "tool_calls"
            async with client.chat.completions.stream(model="m", messages=[user("hi")], tools=[ADD]) as stream:
                final = await stream.get_final_completion()
            assert [c.function.name for c in final.choices[0].message.tool_calls] == ["add", "mul"]

    run(story)


@pytest.mark.parametrize("stream", [False, True])
def test_t01_logprobs_tell_every_sampled_token(stream):
    async def story():
        async with served(Teller("añb")) as gateway, client_of(await gateway.open()) as client:
            if stream:
                chunks = await streamed(client, [user("hi")], logprobs=True, top_logprobs=3)
                content = [
                    e for c in chunks if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content
                ]
                used = len(content)
            else:
                whole = await chat(client, [user("hi")], logprobs=True, top_logprobs=3)
                content, used = whole.choices[0].logprobs.content, whole.usage.completion_tokens
            assert len(content) == used == 5
            assert bytes(b for entry in content[:-1] for b in entry.bytes).decode() == "añb"
            assert [entry.logprob for entry in content] == [-0.5] * 5
            assert all(entry.top_logprobs[0].token == entry.token for entry in content)
            assert (await chat(client, [user("hi")])).choices[0].logprobs is None

    run(story)


def test_t01_n_stop_seed_and_limits():
    async def story():
        engine = Teller("one two three")
        async with served(engine) as gateway, client_of(await gateway.open()) as client:
            several = await chat(client, [user("hi")], n=3)
            assert [c.message.content for c in several.choices] == ["one two three"] * 3
            assert len({seed for *_, seed in engine.calls}) == 3
            chunks = await streamed(client, [user("hi")], n=2)
            for index in (0, 1):
                mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
                assert "".join(c.delta.content or "" for c in mine) == "one two three"
                assert mine[-1].finish_reason == "stop"
            (stopped,) = (await chat(client, [user("hi")], stop=[" two", "x"])).choices
            assert (stopped.message.content, stopped.finish_reason) == ("one", "stop")
            assert engine.calls[-1][1] == list(b"one two"), "nothing is sampled after a stop string"
            assert text_of(await streamed(client, [user("hi")], stop="two")) == "one "
            (cut,) = (await chat(client, [user("hi")], max_tokens=3)).choices
            assert (cut.message.content, cut.finish_reason) == ("one", "length")
            await chat(client, [user("hi")], seed=7)
            await chat(client, [user("hi")], seed=7)
            assert engine.calls[-1][3] == engine.calls[-2][3]

    run(story)


def test_t01_completions():
    async def story():
        engine = Teller("lo <tool_call>x")
        async with served(engine) as gateway, client_of(await gateway.open()) as client:
            whole = await client.completions.create(model="m", prompt="hel", logprobs=1, max_tokens=50)
            (choice,) = whole.choices
            assert (choice.text, choice.finish_reason) == ("lo <tool_call>x", "stop")
            assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == whole.usage.completion_tokens
            assert engine.calls[0][0] == tuple(b"hel"), "no template touches it"
            by_ids = await client.completions.create(model="m", prompt=[104, 101], max_tokens=2, stream=True)
            chunks = [chunk async for chunk in by_ids]
            assert "".join(c.choices[0].text for c in chunks) == "lo"
            assert chunks[-1].choices[0].finish_reason == "length"
            assert engine.calls[1][0] == (104, 101)

    run(story)


def test_t01_errors_are_the_ones_that_the_sdk_knows():
    async def story():
        async with served(Teller(room=60), body_bytes=5000) as gateway:
            session = await gateway.open()
            async with client_of(session) as client:
                image = [{"type": "image_url", "image_url": {"url": "data:"}}]
                with pytest.raises(openai.BadRequestError, match="images are not supported") as caught:
                    await chat(client, [user(image)])
                assert caught.value.param == "messages.0.content.0"
                for stream in (False, True):
                    with pytest.raises(
                        openai.BadRequestError, match="This model's maximum context length is 60"
                    ) as caught:
                        await chat(client, [user("x" * 60)], stream=stream)
                    assert caught.value.code == "context_length_exceeded"
                with pytest.raises(openai.BadRequestError, match="temperature"):
                    await chat(client, [user("x")], temperature=-1)
                for modalities in (["text", "audio"], 3):
                    with pytest.raises(openai.BadRequestError, match="only text can be sampled"):
                        await chat(client, [user("x")], modalities=modalities)
                with pytest.raises(openai.APIStatusError, match="larger than 5000") as caught:
                    await chat(client, [user("x" * 6000)])
                assert caught.value.status_code == 413
                with pytest.raises(openai.NotFoundError):
                    await client.embeddings.create(model="m", input="x")
            async with claude_of(session) as client:
                with pytest.raises(Exception, match="prompt is too long"):
                    await client.messages.create(model="m", max_tokens=9, messages=[user("x" * 60)])

    run(story)


def test_t01_an_engine_that_fails_in_mid_stream_raises_in_the_sdk():
    async def story():
        async with served(Teller("hello", fail_at=2)) as gateway:
            session = await gateway.open()
            async with client_of(session) as client:
                heard = []
                with pytest.raises(openai.APIError, match="out of memory"):
                    await followed(client, [user("hi")], heard)
                assert text_of(heard) == "he"
                told = session.live.described()
                assert (told["verdicts"]["broken"], told["trainable"]) == (1, False)
                assert "out of memory" in told["turns"][0]["reason"]

    run(story)


def test_t01_anthropic_and_responses_are_served_too():
    async def story():
        async with served(Teller(f"Hm. {call(a=1)}")) as gateway:
            session = await gateway.open()
            async with claude_of(session) as claude, client_of(session) as client:
                said = await claude.messages.create(model="m", max_tokens=99, messages=[user("hi")])
                assert [block.type for block in said.content] == ["text", "tool_use"]
                async with claude.messages.stream(model="m", max_tokens=99, messages=[user("hi")]) as stream:
                    assert (await stream.get_final_message()).content[1].input == {"a": 1}
                counted = await claude.messages.count_tokens(model="m", messages=[user("hi")])
                assert counted.input_tokens == said.usage.input_tokens
                answer = await client.responses.create(model="m", input="hi")
                assert answer.output_text == "Hm."
                kinds = [
                    event.type async for event in await client.responses.create(model="m", input="hi", stream=True)
                ]
                assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
            dialects = {turn["dialect"] for turn in session.live.described()["turns"]}
            assert len(dialects) == 2

    run(story)


# -- T02 and T03: tokens -------------------------------------------------------------------------------------------


def exact(engine, session):
    """What the engine was given and gave is what the paths through the episode hold."""
    episode = session.episode()
    paths = {tuple(t for i in episode.path(n) for t in episode.nodes[i].ids) for n in range(1, len(episode.nodes))}
    assert {(*given, *gave) for given, gave, *_ in engine.calls} <= paths
    assert sum(sum(row.response_mask) for row in episode.rows()) == episode.sampled
    return episode


def test_t02_t03_a_conversation_is_spliced_and_exported_once():
    async def story():
        engine = Teller(lambda prompt: f"turn {prompt.count('assistant')} {call(b=1, a=2)}")
        async with served(engine) as gateway:
            session = await gateway.open()
            async with client_of(session) as client:
                messages = [user("go")]
                for _ in range(4):
                    message = (await chat(client, messages, tools=[ADD])).choices[0].message
                    arguments = json.loads(message.tool_calls[0].function.arguments)
                    sent = message.model_dump(exclude_none=True)
                    sent["content"] = f" {sent['content']}\n"
                    sent["tool_calls"][0]["function"]["arguments"] = json.dumps(
                        dict(sorted(arguments.items())), indent=1
                    )
                    messages += [sent, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}]
            assert session.live.described()["verdicts"] == {"exact": 4, "bridged": 0, "forked": 0, "broken": 0}
            assert len(exact(engine, session).rows()) == 1

    run(story)


def test_t02_verdicts_say_what_parted_and_where():
    async def story():
        engine = Teller("hello there")
        async with served(engine) as gateway:
            session = await gateway.open()
            async with client_of(session) as client:
                first = (await chat(client, [user("a")], max_tokens=5)).choices[0].message
                await chat(client, [user("a"), first, user("b")])
                await chat(client, [user("a"), {"role": "assistant", "content": "hellish"}, user("b")])
                await chat(client, [user("z")])
            turns = session.live.described()["turns"]
            assert [turn["verdict"] for turn in turns] == ["exact", "bridged", "forked", "forked"]
            bridged, forked, other = (turn["token"] for turn in turns[1:])
            assert engine.calls[1][0][bridged] == END, "the end that nobody sampled"
            assert bytes(engine.calls[2][0][forked - 4 : forked + 1]) == b"helli"
            assert bytes(engine.calls[3][0][other : other + 1]) == b"z"
            assert "message 2" in turns[2]["reason"]
            exact(engine, session)

    run(story)


def test_t02_raw_text_goes_on_from_what_was_sampled():
    async def story():
        engine = Teller(lambda prompt: "xyz")
        async with served(engine) as gateway:
            session = await gateway.open()
            async with client_of(session) as client:
                await client.completions.create(model="m", prompt="ab", max_tokens=2)
                await client.completions.create(model="m", prompt="abxyc", max_tokens=3)
                await client.completions.create(model="m", prompt=list(b"abxycxyz"), max_tokens=3)
                await client.completions.create(model="m", prompt="abq", max_tokens=3, n=2)
            turns = session.live.described()["turns"]
            assert [turn["verdict"] for turn in turns] == ["exact", "exact", "exact", "forked", "forked"]
            assert turns[-1]["token"] == 2
            assert [bytes(given) for given, *_ in engine.calls] == [b"ab", b"abxyc", b"abxycxyz", b"abq", b"abq"]
            assert len(exact(engine, session).rows()) == 3

    run(story)


def test_t03_turns_that_were_left_and_sub_agents_are_exported():
    async def story():
        engine = Teller("hello")
        async with served(engine) as gateway:
            session = await gateway.open()
            async with client_of(session) as client:
                await asyncio.gather(*(chat(client, [user(f"agent {n}")]) for n in range(8)))
                await chat(client, [user("agent 0"), user("and again")])
            assert exact(engine, session).sampled == 9 * 6

    run(story)


# -- T04: durability -----------------------------------------------------------------------------------------------


def test_t04_the_intent_is_stored_before_the_engine_is_asked(tmp_path):
    async def story():
        engine, seen = Teller(), []

        def look():
            with sqlite3.connect(tmp_path / "gateway.db") as db:
                seen.append(
                    (
                        db.execute("SELECT node, ended_at FROM calls").fetchall(),
                        db.execute("SELECT count(*) FROM nodes").fetchone(),
                    )
                )

        engine.before = look
        async with served(engine, output=tmp_path) as gateway, client_of(await gateway.open()) as client:
            await chat(client, [user("hi")])
        assert seen == [([(2, None)], (2,))]

    run(story)


@pytest.mark.parametrize("stream", [False, True])
def test_t04_the_end_is_told_once_the_turn_is_committed(tmp_path, stream, monkeypatch):
    async def story():
        gate = asyncio.Event()
        async with served(output=tmp_path) as gateway:
            session = await gateway.open()
            write = DiskStore.write

            def slow(store, statements):
                if not any("UPDATE calls" in query for query, _ in statements):
                    return write(store, statements)
                done = asyncio.ensure_future(gate.wait())
                done.add_done_callback(lambda _: write(store, statements))
                return done

            monkeypatch.setattr(DiskStore, "write", slow)
            async with client_of(session) as client:
                heard = []

                async def talk():
                    if stream:
                        await followed(client, [user("hi")], heard)
                    else:
                        heard.append(await chat(client, [user("hi")]))

                talking = asyncio.create_task(talk())
                await until(lambda: session.live.session.graph.nodes[-1].finish == "stop")
                await asyncio.sleep(0.1)
                assert not [answer for answer in heard if answer.choices[0].finish_reason]
                assert not talking.done()
                gate.set()
                await talking
                assert heard[-1].choices[0].finish_reason == "stop"

    run(story)


def test_t04_a_session_goes_on_after_a_restart(tmp_path):
    async def story():
        async with served(Teller("one"), output=tmp_path) as gateway:
            session = await gateway.open("trial-7", Terms(run="r", trial=7, sampling=Sampling(temperature=0.5)))
            async with client_of(session) as client:
                first = (await chat(client, [user("a")])).choices[0].message
            before = session.episode()
        engine = Teller("two")
        async with served(engine, output=tmp_path) as gateway:
            session = await gateway.open("trial-7", Terms(run="r", trial=7))
            assert session.episode().nodes == before.nodes
            async with client_of(session) as client:
                await chat(client, [user("a"), first, user("b")])
            episode = exact(engine, session)
            assert engine.calls[0][2].temperature == 0.5
            assert len(episode.rows()) == 1
            assert session.live.described()["verdicts"]["exact"] == 2
            await session.close()
        async with served(output=tmp_path) as gateway:
            live = gateway.find("trial-7")
            assert (live.status, live.episode().nodes) == ("complete", episode.nodes)

    run(story)


SERVE = [
    "-m",
    "loopwright",
    "gateway",
    "serve",
    "--engine",
    "scripted",
    "--port",
    "0",
    "--set",
    "engine.token_s=0.0005",
]


def test_t04_killed_under_load_no_committed_turn_is_lost(tmp_path):
    """kill -9 while many agents talk; what each of them was told is there, and no turn has tokens that it has not."""

    def start():
        return serving([*SERVE, "--output", str(tmp_path)])

    async def agent(http, url, told, number):
        async with http.post(f"{url}/sessions/a{number}") as answer:
            session = await answer.json()
        async with client_of(
            type("S", (), {"openai_base_url": session["openai_base_url"], "key": session["key"]})
        ) as client:
            messages = [user("go")]
            while True:
                chunks = []
                try:
                    await followed(client, messages, chunks)
                except (openai.APIError, aiohttp.ClientError):
                    return session
                if not chunks or not chunks[-1].choices[0].finish_reason:
                    return session
                told.setdefault(session["id"], []).append(text_of(chunks))
                messages += [{"role": "assistant", "content": text_of(chunks)}, user("more")]

    async def story():
        process, url = await asyncio.to_thread(start)
        told, after = {}, None
        try:
            async with aiohttp.ClientSession() as http:
                agents = [asyncio.create_task(agent(http, url, told, number)) for number in range(8)]
                await until(lambda: sum(map(len, told.values())) > 40, 30)
                process.send_signal(signal.SIGKILL)
                sessions = await asyncio.gather(*agents)
                process.wait()
                after, url = await asyncio.to_thread(start)
                for session in sessions:
                    auth = {"authorization": f"Bearer {session['key']}"}
                    async with http.get(f"{url}/sessions/{session['id']}", headers=auth) as answer:
                        found = await answer.json()
                    said = [n["message"]["content"] for n in found["episode"]["nodes"] if n.get("finish") == "stop"]
                    assert said[: len(told[session["id"]])] == told[session["id"]]
                    for turn in found["turns"]:
                        assert (turn["verdict"] == "broken") == (turn["finish"] == "cut")
                    assert found["trainable"] == (found["verdicts"]["broken"] == 0)
        finally:
            process.kill()
            if after is not None:
                after.send_signal(signal.SIGTERM)
                assert after.wait(60) == 128 + signal.SIGTERM
                after.stdout.close()
            process.stdout.close()

    run(story)


def test_t04_a_turn_that_cannot_be_recorded_is_not_told(tmp_path, monkeypatch):
    async def story():
        async with served(output=tmp_path) as gateway:
            session = await gateway.open()
            write = DiskStore.write

            def full(store, statements):
                if not any("UPDATE calls" in query for query, _ in statements):
                    return write(store, statements)
                done = asyncio.get_running_loop().create_future()
                done.set_exception(StorageError("the disk is full"))
                return done

            async with client_of(session) as client:
                with monkeypatch.context() as patch:
                    patch.setattr(DiskStore, "write", full)
                    for talk in (chat, streamed):
                        with pytest.raises(openai.APIError, match="the disk is full"):
                            await talk(client, [user("a")])
                retry = {"extra_headers": {"x-stainless-retry-count": "1"}}
                assert text_of(await streamed(client, [user("a")], **retry)) == "hello"
                assert len(session.live.described()["turns"]) == 2

    run(story)


# -- T05: sessions -------------------------------------------------------------------------------------------------


async def asked(http, method, url, *, key=None, **more):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with http.request(method, url, headers=headers, **more) as answer:
        return answer.status, await answer.json(), answer.headers


def test_t05_the_life_of_a_session():
    async def story():
        async with served() as gateway, aiohttp.ClientSession() as http:
            url = gateway.address
            status, opened, _ = await asked(http, "POST", f"{url}/sessions")
            assert status == 200
            assert opened["openai_base_url"] == f"{url}/{opened['id']}/v1"
            stolen = await asked(http, "POST", f"{url}/sessions/{opened['id']}")
            assert (stolen[0], opened["key"] in str(stolen[1])) == (401, False), "who has seen a URL has no key yet"
            assert (await asked(http, "POST", f"{url}/sessions/{opened['id']}", key=opened["key"]))[1] == opened
            _, mine, _ = await asked(http, "POST", f"{url}/sessions/trial-1", json={"run": "r", "trial": 1})
            again = await asked(http, "POST", f"{url}/sessions/trial-1", json={"run": "r", "trial": 1})
            assert again[:2] == (200, mine)
            other = await asked(http, "POST", f"{url}/sessions/trial-1", json={"run": "r", "trial": 2})
            assert other[0] == 409
            assert mine["key"] not in str(other[1])
            path = f"{url}/sessions/trial-1"
            assert (await asked(http, "GET", f"{url}/sessions/unknown", key=mine["key"]))[0] == 404
            for key in (None, "", "wrong", opened["key"], mine["key"][:-1]):
                for method, at in (("GET", path), ("POST", f"{path}/complete"), ("DELETE", path)):
                    assert (await asked(http, method, at, key=key))[0] == 401
                body = {"model": "m", "messages": [user("x")]}
                status, refused, headers = await asked(
                    http, "POST", f"{url}/trial-1/v1/chat/completions", key=key, json=body
                )
                assert (status, headers["x-should-retry"]) == (401, "false")
                assert refused["error"]["code"] == "invalid_api_key"
            status, done, _ = await asked(http, "POST", f"{path}/complete", key=mine["key"], json={"reason": "bye"})
            assert (status, done["status"], bool(done["snapshot"])) == (200, "complete", True)
            assert (await asked(http, "POST", f"{path}/complete", key=mine["key"]))[1]["snapshot"] == done["snapshot"]
            status, refused, headers = await asked(
                http, "POST", f"{url}/trial-1/v1/chat/completions", key=mine["key"], json=body
            )
            assert (status, headers["x-should-retry"], refused["error"]["code"]) == (409, "false", "session_closed")
            twice = [asked(http, "DELETE", path, key=mine["key"]) for _ in range(2)]
            assert {status for status, _, _ in await asyncio.gather(*twice)} <= {200, 404}
            assert (await asked(http, "GET", path, key=mine["key"]))[0] == 404

    run(story)


@pytest.mark.parametrize("id", ["..", "%2e%2e", "a%2Fb", "sessions", ".x", "a b", "x" * 129, "healthz", "é"])
def test_t05_an_id_is_a_plain_word(id):
    async def story():
        async with served() as gateway, aiohttp.ClientSession() as http:
            from yarl import URL

            async with http.post(URL(f"{gateway.address}/sessions/{id}", encoded=True)) as answer:
                assert answer.status in (400, 404, 405)

    run(story)


def test_t05_who_opens_a_session_needs_the_token_if_there_is_one():
    async def story():
        async with served(token="a token of the gateway") as gateway, aiohttp.ClientSession() as http:
            assert (await asked(http, "POST", f"{gateway.address}/sessions"))[0] == 401
            status, opened, _ = await asked(http, "POST", f"{gateway.address}/sessions", key="a token of the gateway")
            assert status == 200
            path = f"{gateway.address}/sessions/{opened['id']}"
            assert (await asked(http, "GET", path, key="a token of the gateway"))[0] == 200
            chatting = f"{gateway.address}/{opened['id']}/v1/models"
            assert (await asked(http, "GET", chatting, key="a token of the gateway"))[0] == 401

    run(story)


def test_t05_sessions_expire():
    async def story():
        now = [1000.0]
        async with served(clock=lambda: now[0], ttl_s=60) as gateway:
            session = await gateway.open()
            async with client_of(session) as client:
                now[0] += 50
                await chat(client, [user("hi")])
                now[0] += 50
                await asyncio.sleep(1.2)
                assert session.live.status == "open"
                now[0] += 60
                await until(lambda: session.live.status == "expired")
                with pytest.raises(openai.ConflictError, match="expired"):
                    await chat(client, [user("hi")])

    run(story)


def test_t05_quotas_and_pinned_sampling():
    async def story():
        engine, now = Teller("hello"), [0.0]
        async with served(engine, clock=lambda: now[0]) as gateway:
            pinned = Terms(sampling=Sampling(temperature=0.25, max_tokens=4), calls=3, time_s=100)
            async with client_of(await gateway.open(terms=pinned), max_retries=2) as client:
                await chat(client, [user("a")], temperature=1.5, max_tokens=100, top_p=0.5)
                assert (engine.calls[-1][2].temperature, engine.calls[-1][2].max_tokens) == (0.25, 4)
                assert engine.calls[-1][2].top_p == 0.5
                await chat(client, [user("a")], max_tokens=2)
                assert engine.calls[-1][2].max_tokens == 2
                await chat(client, [user("a")])
                begun = time.monotonic()
                with pytest.raises(openai.RateLimitError, match="all 3 turns are used up"):
                    await chat(client, [user("a")])
                assert time.monotonic() - begun < 0.4, "not retried"
            async with client_of(await gateway.open(terms=Terms(tokens=8, time_s=10))) as client:
                assert (await chat(client, [user("a")])).usage.completion_tokens == 6
                assert (await chat(client, [user("a")])).usage.completion_tokens == 2
                with pytest.raises(openai.RateLimitError, match="all 8 tokens"):
                    await chat(client, [user("a")])
            async with client_of(await gateway.open(terms=Terms(time_s=10))) as client:
                now[0] += 10
                with pytest.raises(openai.RateLimitError, match="10 s are over"):
                    await chat(client, [user("a")])

    run(story)


def test_t05_calls_beyond_the_concurrency_wait():
    async def story():
        engine = Teller("hello", hold_at=1)
        async with (
            served(engine, keepalive_s=0.05) as gateway,
            client_of(await gateway.open(terms=Terms(concurrency=2))) as client,
        ):
            talks = [asyncio.create_task(streamed(client, [user(str(n))])) for n in range(5)]
            await until(lambda: engine.running == 2)
            await asyncio.sleep(0.2)
            assert engine.running == 2
            engine.go.set()
            assert [text_of(chunks) for chunks in await asyncio.gather(*talks)] == ["hello"] * 5

    run(story)


# -- T06: weights ---------------------------------------------------------------------------------------------------


COUNTED = " ".join(map(str, range(100)))


def slow_engine(said=COUNTED):
    return ScriptedEngine(ScriptedConfig(replies=(said,), slip=0.0, token_s=0.005), Path())


def spans_of(episode):
    return [(span.stop - span.start, span.version) for node in episode.nodes for span in node.spans]


@pytest.mark.parametrize("count", [1, 3])
def test_t06_running_calls_are_held_kept_alive_and_go_on_under_the_new_version(count):
    async def story():
        engines = [slow_engine() for _ in range(count)]
        engine = engines[0]
        if count > 1:
            engine = Fleet(FleetSettings(type="fleet"), Path())
            for number, each in enumerate(engines):
                engine._put(str(number), each)
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
            assert session.live.described()["trainable"]

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
            fleet._put(name, engine)
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


# -- T07: clients that leave, and come back ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_t07_a_client_that_leaves_ends_its_generation(stream):
    async def story():
        engine = Teller("hello", hold_at=3)
        async with served(engine) as gateway:
            session = await gateway.open()
            async with client_of(session) as client:
                talk = asyncio.create_task(streamed(client, [user("a")]) if stream else chat(client, [user("a")]))
                await engine.held.wait()
                talk.cancel()
                await until(lambda: engine.closed == 1)
            await until(lambda: not session.live.described()["running"])
            told = session.live.described()
            assert [(turn["finish"], turn["sampled_tokens"]) for turn in told["turns"]] == [("cut", 3)]
            assert sum(told["rows"][0]["response_mask"]) == 3, "it was sampled, so it is exported"

    run(story)


@pytest.mark.parametrize("stream", [False, True])
def test_t07_a_retry_goes_on_with_the_turn_that_was_cut(stream):
    async def story():
        engine = Teller("hello", hold_at=3)
        async with served(engine) as gateway:
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
                assert [t["finish"] for t in session.live.described()["turns"]] == ["stop"]
                await talk(client, [user("a")])
                assert len(session.live.described()["turns"]) == 2, "the same question again is another turn"

    run(story)


def test_t07_the_sdk_s_own_retry_joins_the_call_that_it_gave_up():
    async def story():
        engine = Teller("hello", hold_at=2)
        async with served(engine) as gateway:
            session = await gateway.open()
            async with client_of(session, timeout=0.4, max_retries=2) as client:
                talk = asyncio.create_task(chat(client, [user("a")]))
                await engine.held.wait()
                await until(lambda: engine.closed == 1)
                engine.hold_at = None
                assert (await talk).choices[0].message.content == "hello"
            assert len(session.live.described()["turns"]) == 1
            assert session.episode().sampled == 6

    run(story)


def test_t07_after_a_restart_a_retry_finds_its_turn(tmp_path):
    async def story():
        retry = {"extra_headers": {"x-stainless-retry-count": "1"}}
        engine = Teller("hello", hold_at=2)
        async with served(engine, output=tmp_path) as gateway:
            session = await gateway.open("t")
            async with client_of(session) as client:
                done = await chat(client, [user("never held")], max_tokens=1)
                talk = asyncio.create_task(chat(client, [user("a")]))
                await engine.held.wait()
                os.system(f"cp -r {tmp_path} {tmp_path}-crash")
                engine.go.set()
                await talk
        engine = Teller("hello")
        async with served(engine, output=tmp_path.with_name(tmp_path.name + "-crash")) as gateway:
            session = await gateway.open("t")
            assert session.live.described()["verdicts"]["broken"] == 1
            async with client_of(session) as client:
                again = await chat(client, [user("never held")], max_tokens=1, **retry)
                assert (again.id, again.choices) == (done.id, done.choices)
                assert not engine.calls
                assert (await chat(client, [user("a")], **retry)).choices[0].message.content == "hello"
            told = session.live.described()
            assert (told["verdicts"]["broken"], told["trainable"], len(told["turns"])) == (0, True, 2)

    run(story)


def test_t07_a_client_that_leaves_while_it_waits_costs_nothing():
    async def story():
        engine = Teller("hello", hold_at=1)
        async with served(engine) as gateway:
            session = await gateway.open(terms=Terms(concurrency=1, tokens=20, max_tokens=10))
            async with client_of(session) as client:
                first = asyncio.create_task(chat(client, [user("a")]))
                await engine.held.wait()
                second = asyncio.create_task(chat(client, [user("b")]))
                await until(lambda: session.live.described()["running"] == 2)
                second.cancel()
                await until(lambda: session.live.described()["running"] == 1)
                engine.go.set()
                await first
                assert (await chat(client, [user("c")])).usage.completion_tokens == 6
                assert (await chat(client, [user("d")])).usage.completion_tokens == 6

    run(story)


# -- T08: the relay -------------------------------------------------------------------------------------------------


def worker_process(gateway, tmp_path, name, **engine):
    """A worker of its own process: its engine counts, slowly."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    settings = {"replies": json.dumps([COUNTED]), "slip": 0, "token_s": 0.005, **engine}
    words = ["--connect", door(gateway), "--token-file", str(token), "--engine", "scripted", "--name", name]
    words += [word for key, value in settings.items() for word in ("--set", f"engine.{key}={value}")]
    return subprocess.Popen(
        [sys.executable, "-m", "loopwright", "gateway", "worker", *words], stderr=subprocess.PIPE, text=True
    )


def exact_count(session, turns):
    told, episode = session.live.described(), session.episode()
    assert (len(told["turns"]), told["verdicts"]["broken"], told["trainable"]) == (turns, 0, True)
    assert spans_of(episode) == [(len(COUNTED) + 1, 0)] * turns


def test_t08_workers_that_freeze_or_are_killed_lose_nothing(tmp_path):
    """In mid-stream: another one goes on from the ids so far. One that thaws comes back; Ctrl-C ends it in order."""

    async def story():
        async with relayed() as gateway:
            relay = gateway.engine
            processes = {name: worker_process(gateway, tmp_path, name) for name in "ab"}
            try:
                await until(lambda: len(relay.described()) == 2, 40)
                session = await gateway.open()
                async with client_of(session) as client:
                    for turn, sent in enumerate((signal.SIGSTOP, signal.SIGKILL), 1):
                        heard = []
                        stream = asyncio.create_task(followed(client, [user(f"{sent}")], heard))
                        await until(lambda: len(text_of(heard)) > 20, 20)  # noqa: B023
                        (busy,) = [each["name"] for each in relay.described() if each["running"]]
                        processes[busy].send_signal(sent)
                        await stream
                        assert text_of(heard) == COUNTED
                        exact_count(session, turn)
                        assert [each["name"] for each in relay.described()] == [n for n in "ab" if n != busy]
                        if sent == signal.SIGSTOP:
                            processes[busy].send_signal(signal.SIGCONT)
                            await until(lambda: len(relay.described()) == 2, 20)
                (left,) = [each["name"] for each in relay.described()]
                processes[left].send_signal(signal.SIGINT)
                assert await asyncio.to_thread(processes[left].wait, 20) == 130
                await until(lambda: not relay.described())
            finally:
                for process in processes.values():
                    process.kill()
                    process.wait()
                    process.stderr.close()

    run(story)


@asynccontextmanager
async def proxied(gateway):
    """A way to the gateway that can be cut, or go silent."""
    writers, way = [], {"open": True}

    async def pump(reader, writer):
        while data := await reader.read(65536):
            if way["open"]:
                writer.write(data)
        writer.close()

    async def accept(reader, writer):
        there = await asyncio.open_connection("127.0.0.1", gateway._server.port)
        writers.extend((writer, there[1]))
        with suppress(OSError):
            await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

    def cut():
        for writer in writers:
            writer.transport.abort()
        writers.clear()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/ws/worker", way, cut
    finally:
        cut()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("silent", [False, True], ids=["cut", "silent"])
def test_t08_a_connection_that_is_lost_is_made_anew_and_the_stream_waits_for_it(silent):
    """There is no other worker: the stream is kept alive until this one is back, and goes on where it was."""

    async def story():
        engine = slow_engine()
        async with (
            relayed(tokenizer=ByteTokenizer()) as gateway,
            proxied(gateway) as (url, way, cut),
            working(gateway, engine, url=url),
        ):
            session = await gateway.open()
            async with client_of(session) as client:
                heard = []
                stream = asyncio.create_task(followed(client, [user("count")], heard))
                await until(lambda: len(text_of(heard)) > 20)
                if silent:
                    way["open"] = False
                    await until(lambda: not gateway.engine.described())
                    way["open"] = True
                cut()
                await stream
                assert text_of(heard) == COUNTED
            exact_count(session, 1)

    run(story)


def test_t08_while_no_worker_is_there_requests_wait_up_to_a_limit():
    async def story():
        async with relayed(tokenizer=ByteTokenizer()) as gateway:
            session = await gateway.open()
            auth = {"authorization": f"Bearer {session.key}"}
            body = {"model": "m", "messages": [user("a")], "stream": True}
            async with aiohttp.ClientSession() as http, client_of(session) as client:
                whole = asyncio.create_task(chat(client, [user("b")]))
                async with http.post(f"{session.openai_base_url}/chat/completions", json=body, headers=auth) as stream:
                    lines = []
                    while lines.count(b": keepalive\n") < 2:
                        lines.append(await stream.content.readline())
                    async with working(gateway, Teller("hello")):
                        assert b"data: [DONE]" in await stream.content.read()
                        assert (await whole).choices[0].message.content == "hello"
        async with relayed(tokenizer=ByteTokenizer(), wait_s=0.2) as gateway, client_of(await gateway.open()) as client:
            with pytest.raises(openai.APIStatusError, match="no worker is connected") as refused:
                await chat(client, [user("a")])
            assert refused.value.status_code == 503

    run(story)


def test_t08_workers_find_a_gateway_that_was_killed_and_began_again(tmp_path):
    """Sessions and what was committed are there; the turn that was under way is retried and comes to its end."""
    token = tmp_path / "token"
    token.write_text(TOKEN)

    def start(port):
        words = ["--relay", "--token-file", str(token), "--port", str(port), "--output", str(tmp_path / "out")]
        return serving(["-m", "loopwright", "gateway", "serve", *words])

    async def story():
        process, url = await asyncio.to_thread(start, 0)
        try:
            admin = {"authorization": f"Bearer {TOKEN}"}
            async with (
                working(None, slow_engine(), url=f"{url.replace('http', 'ws')}/ws/worker"),
                aiohttp.ClientSession() as http,
            ):
                async with http.post(f"{url}/sessions/s", headers=admin) as answer:
                    opened = await answer.json()
                session = type("S", (), {"openai_base_url": opened["openai_base_url"], "key": opened["key"]})
                async with client_of(session) as client:
                    assert (await chat(client, [user("a")])).choices[0].message.content == COUNTED
                    heard = []
                    stream = asyncio.create_task(followed(client, [user("b")], heard))
                    await until(lambda: len(text_of(heard)) > 20)
                    process.kill()
                    with pytest.raises((openai.APIError, aiohttp.ClientError)):
                        await stream
                    process.wait()
                    process.stdout.close()
                    process, _ = await asyncio.to_thread(start, int(url.rpartition(":")[2]))
                    retry = {"extra_headers": {"x-stainless-retry-count": "1"}}
                    assert text_of(await streamed(client, [user("b")], **retry)) == COUNTED
                async with http.get(f"{url}/sessions/s", headers=admin) as answer:
                    told = await answer.json()
                assert (told["trainable"], told["verdicts"]["broken"]) == (True, 0)
                assert [turn["sampled_tokens"] for turn in told["turns"]] == [len(COUNTED) + 1] * 2
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    run(story)


# -- T10: the address ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [{"host": "0.0.0.0"}, {"host": "::"}, {"advertise": "http://0.0.0.0:1"}, {"advertise": "gpu-box"}]
)
def test_t10_an_address_that_no_agent_can_use_is_refused_before_anything_starts(config):
    async def story():
        with pytest.raises(AdvertiseError):
            async with served(**config):
                pass

    run(story)


def test_t10_agents_are_given_the_advertised_address():
    async def story():
        async with served(host="0.0.0.0", advertise="http://gpu-box:8400/") as gateway:
            session = await gateway.open()
            assert session.openai_base_url == f"http://gpu-box:8400/{session.id}/v1"
            assert session.anthropic_base_url == f"http://gpu-box:8400/{session.id}"

    run(story)
    assert not GatewayConfig().public
