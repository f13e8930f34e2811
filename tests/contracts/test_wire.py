"""Known problems of captured tokens, each with its name and its remedy.

Problems that agents cause are tested through the unmodified official SDKs.
"""

import asyncio
import json
import sqlite3
from contextlib import closing
from itertools import pairwise

import aiohttp
import openai
import pytest

from loopwright.engines.base import Chunk
from loopwright.gateway.sessions.description import snapshot_of
from tests.engines.fake_servers import chunks_from, engine_of
from tests.engines.fake_servers import serve as serve_engine
from tests.gateway.harness import ADD, END, Replier, call, claude_of, client_of, run, serve, user
from tests.gateway.sessions.test_template import Player

ROWS = {
    "text re-tokenised at the next turn gives other ids": "retokenised",
    "a tool call re-rendered with other white space or key order": "rerendered_call",
    "chat template drops old reasoning": "dropped_reasoning",
    "engine omits ids for tool or reasoning parsers; stop strings cut text but not ids": "omitted_ids",
    "BOS doubled or missing": "bos",
    "an agent drops the assistant turn that it could not parse and goes on": "dropped_turn",
    "an agent ends before its last turn is stored": "ended_early",
    "parallel calls and sub-agents in one session": "parallel",
    "a lost call makes policy tokens look like environment tokens": "lost_call",
    "`None` logprobs skipped": "none_logprobs",
    "stale pooled sockets after a weight update": "stale_sockets",
}


def test_every_row_of_the_table_has_a_test():
    names = [name.removeprefix("test_row_") for name in globals() if name.startswith("test_row_")]
    for row, name in ROWS.items():
        assert any(each.startswith(name) for each in names), row


async def chat(client, messages, **more):
    return await client.chat.completions.create(model="any", messages=messages, **more)


def kinds(session):
    return [str(verdict.kind) for verdict in session.served.session.verdicts.values()]


def spliced(engine):
    """Check that each prompt starts with all earlier prompt and sampled tokens."""
    streams = [(tuple(ids), tuple(gave)) for ids, gave, *_ in engine.calls]
    return all(later[: len(ids) + len(gave)] == (*ids, *gave) for (ids, gave), (later, _) in pairwise(streams))


class Odd(Replier):
    """Samples `yes` in tokens that no tokenizer would choose: here, with an invalid byte after it."""

    async def generate(self, ids, sampling, *, seed):
        gave = [*b"yes", 0xFF, END]
        self.calls.append((tuple(ids), gave, sampling, seed))
        yield Chunk(tuple(gave), (-0.5,) * len(gave), 0, "stop")


def test_row_retokenised():
    async def body():
        engine = Odd()
        async with serve(engine) as gateway, client_of(session := await gateway.open()) as client:
            history = [user("hi")]
            for _ in range(3):
                answer = (await chat(client, history)).choices[0].message
                assert engine.tokenizer.encode(answer.content) != [*b"yes", 0xFF], "its text encodes to other ids"
                history += [{"role": "assistant", "content": answer.content}, user("more")]
            assert spliced(engine)
            assert kinds(session) == ["exact"] * 3

    run(body)


@pytest.mark.parametrize("number", ["7", "7.0", "123456789012345678901234567890", "-1e2"])
def test_row_rerendered_call(number):
    """By Anthropic's SDK, which parses arguments, and by an OpenAI client that does."""
    call_text = f'<tool_call>{{"name":"add",  "arguments":{{ "b" : {number}, "a":"\\u20ac" }}}}</tool_call>'

    async def body():
        engine = Replier(lambda prompt: "done" if "tool\n" in prompt else call_text)
        async with serve(engine) as gateway:
            async with client_of(session := await gateway.open()) as client:
                (call,) = (await chat(client, [user("hi")], tools=[ADD])).choices[0].message.tool_calls
                assert call.function.arguments == f'{{ "b" : {number}, "a":"\\u20ac" }}', "the sampled ids are kept"
                again = json.dumps(dict(reversed(json.loads(call.function.arguments).items())), indent=2)
                resent = {"id": "x", "type": "function", "function": {"name": "add", "arguments": again}}
                history = [user("hi"), {"role": "assistant", "content": None, "tool_calls": [resent]}]
                await chat(client, [*history, {"role": "tool", "tool_call_id": "x", "content": "8"}], tools=[ADD])
                assert (spliced(engine), kinds(session)) == (True, ["exact", "exact"])
            engine.calls.clear()
            async with claude_of(session := await gateway.open()) as claude:
                tools = [{"name": "add", "input_schema": {"type": "object"}}]
                options = {"model": "any", "max_tokens": 900, "tools": tools}
                answer = await claude.messages.create(messages=[user("hi")], **options)
                (block,) = answer.content
                assert block.input["b"] == json.loads(number)
                result = {"type": "tool_result", "tool_use_id": block.id, "content": "8"}
                history = [user("hi"), {"role": "assistant", "content": answer.content}, user([result])]
                await claude.messages.create(messages=history, **options)
                assert (spliced(engine), kinds(session)) == (True, ["exact", "exact"])

    run(body)


@pytest.mark.parametrize("policy", ["preserve", "fork"])
@pytest.mark.parametrize("sends_back", [False, True])
def test_row_dropped_reasoning(policy, sends_back):
    async def body():
        engine = Replier(lambda prompt: f"<think>\nhm {prompt.count('user')}\n</think>\n\nyes {prompt.count('user')}")
        async with serve(engine, reasoning=policy) as gateway, client_of(session := await gateway.open()) as client:
            history = [user("a")]
            for turn in range(3):
                message = (await chat(client, history)).choices[0].message
                assert (message.reasoning_content, message.content) == (f"hm {turn + 1}", f"yes {turn + 1}")
                thought = {"reasoning_content": message.reasoning_content} if sends_back else {}
                history += [{"role": "assistant", "content": message.content, **thought}, user("more")]
            last = engine.tokenizer.decode(engine.calls[-1][0])
            if policy == "preserve":
                assert (spliced(engine), kinds(session)) == (True, ["exact"] * 3)
                assert last.count("<think>") == 2
            else:
                assert kinds(session) == ["exact", "forked", "forked"], "never a silent mask"
                assert "<think>" not in last
                reason = session.served.session.verdicts[max(session.served.session.verdicts)].reason
                assert reason == "message 4 lacks its reasoning"
            rows = session.episode().rows()
            assert len(rows) == (1 if policy == "preserve" else 3)
            assert sum(sum(row.response_mask) for row in rows) == sum(len(gave) for _, gave, *_ in engine.calls)

    run(body)


def test_row_dropped_reasoning_stays_until_the_next_user_message():
    """As in the model families' templates: between the calls of one task the reasoning is kept."""

    async def body():
        engine = Replier(lambda prompt: "<think>so</think>7" if "tool\n" in prompt else f"<think>hm</think>{call(a=1)}")
        async with serve(engine, reasoning="fork") as gateway, client_of(session := await gateway.open()) as client:
            message = (await chat(client, [user("a")], tools=[ADD])).choices[0].message
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7"}
            history = [user("a"), message.model_dump(exclude_none=True), result]
            final = (await chat(client, history, tools=[ADD])).choices[0].message
            assert (spliced(engine), kinds(session)) == (True, ["exact", "exact"])
            await chat(client, [*history, {"role": "assistant", "content": final.content}, user("b")], tools=[ADD])
            assert kinds(session)[-1] == "forked"
            assert "<think>" not in engine.tokenizer.decode(engine.calls[-1][0])

    run(body)


def test_row_omitted_ids():
    """Reasoning, calls and stop strings do not remove ids."""
    text = f"<think>hm</think>so{call(a=1)}END and more"

    async def body():
        engine = Replier(text)
        async with serve(engine) as gateway, client_of(session := await gateway.open()) as client:
            options = {"tools": [ADD], "logprobs": True, "stop": ["END"]}
            whole = await chat(client, [user("hi")], **options)
            (choice,) = whole.choices
            assert (choice.message.content, choice.message.reasoning_content) == ("so", "hm")
            assert [call.function.name for call in choice.message.tool_calls] == ["add"]
            ids = engine.tokenizer.encode(text[: text.index("END") + 3])
            assert whole.usage.completion_tokens == len(ids)
            assert "".join(entry.token for entry in choice.logprobs.content) == "so"
            chunks = [chunk async for chunk in await chat(client, [user("hi")], stream=True, **options)]
            logprobs = [
                entry for c in chunks if c.choices and c.choices[0].logprobs for entry in c.choices[0].logprobs.content
            ]
            assert "".join(entry.token for entry in logprobs) == "so"
            for row in session.episode().rows():
                assert [i for i, mark in zip(row.response_ids, row.response_mask, strict=True) if mark] == ids

    run(body)


def test_row_bos():
    async def body():
        engine = Player("llama3")
        begin = engine.tokenizer.specials["<|begin_of_text|>"]
        async with serve(engine) as gateway, client_of(session := await gateway.open()) as client:
            history = [user("a <|begin_of_text|> b")]
            for _ in range(3):
                engine.plans.append("yes")
                history += [(await chat(client, history)).choices[0].message, user("more")]
            assert [ids.count(begin) for ids, _ in engine.calls] == [1, 1, 1]
            assert all(ids[0] == begin for ids, _ in engine.calls)
            assert (spliced(engine), kinds(session)) == (True, ["exact"] * 3)

    run(body)


def test_row_dropped_turn():
    async def body():
        engine = Replier(lambda prompt: "better" if "retry" in prompt else "nonsense")
        async with serve(engine) as gateway, client_of(session := await gateway.open()) as client:
            await chat(client, [user("a")])
            await chat(client, [user("a"), user("retry")])
            assert kinds(session) == ["exact", "forked"]
            trained = [sum(row.response_mask) for row in session.episode().rows()]
            assert trained == [len("nonsense") + 1, len("better") + 1], "sampled tokens are exported"

    run(body)


def test_row_ended_early(tmp_path):
    """An agent that disconnects right after its last token: the turn is already in the store."""

    async def body():
        async with serve(Replier("bye"), output=tmp_path) as gateway, client_of(await gateway.open()) as client:
            async for chunk in await chat(client, [user("a")], stream=True):
                if chunk.choices and chunk.choices[0].finish_reason:
                    with closing(sqlite3.connect(tmp_path / "gateway.db")) as store, store:
                        (ended_at,) = store.execute("SELECT ended_at FROM nodes WHERE call IS NOT NULL").fetchone()
                    assert ended_at is not None
                    return
            pytest.fail("no terminal event came")

    run(body)


def test_row_parallel():
    async def body():
        engine = Replier(lambda prompt: f"so {prompt[-24:-11]}")
        async with serve(engine) as gateway, client_of(session := await gateway.open()) as client:

            async def agent(name):
                history = [user(f"agent {name}")]
                for _ in range(3):
                    history += [(await chat(client, history)).choices[0].message, user(f"go on {name}")]
                    await asyncio.sleep(0)

            await asyncio.gather(*(agent(name) for name in "abcd"))
            rows = session.episode().rows()
            assert len(rows) == 4, "a branch for each"
            assert sum(sum(row.response_mask) for row in rows) == sum(len(gave) for _, gave, *_ in engine.calls)
            assert set(kinds(session)) <= {"exact", "forked"}
            assert kinds(session).count("exact") == 9, "only the beginnings differ"

    run(body)


def test_row_lost_call(tmp_path):
    """The gateway dies in mid-call: the turn says so after a restart, and is not trained on."""

    async def body():
        engine = Replier("a long answer", hold_at=4)
        async with serve(engine, output=tmp_path) as gateway, client_of(session := await gateway.open()) as client:
            talking = asyncio.create_task(chat(client, [user("a")]))
            await engine.held.wait()
            with closing(sqlite3.connect(tmp_path / "gateway.db")) as store, store:
                assert store.execute("SELECT ended_at FROM nodes WHERE call IS NOT NULL").fetchall() == [(None,)], (
                    "the intent is stored"
                )
            copy = tmp_path / "copy"
            copy.mkdir()
            with (
                closing(sqlite3.connect(tmp_path / "gateway.db")) as store,
                closing(sqlite3.connect(copy / "gateway.db")) as other,
            ):
                store.backup(other)  # the state after a power cut
            engine.go.set()
            await talking
        async with serve(Replier(), output=copy) as gateway:
            live = gateway.find(session.id)
            description = live.describe()
            assert (description["trainable"], description["verdicts"]["broken"]) == (False, 1)
            assert "stopped before this turn ended" in description["turns"][0]["reason"]

    run(body)


@pytest.mark.parametrize("logprob", [None, float("nan")])
def test_row_none_logprobs(logprob):
    class Silent(Replier):
        async def generate(self, ids, sampling, *, seed):
            yield Chunk((97, END), (-0.5, logprob), 0, "stop")

    async def body():
        async with serve(Silent()) as gateway, client_of(session := await gateway.open()) as client:
            with pytest.raises(openai.InternalServerError, match="as a logprob"):
                await chat(client, [user("a")])
            assert kinds(session) == ["broken"]
            description = session.served.describe()
            assert (description["trainable"], description["rows"]) == (False, [])

    run(body)


def test_row_stale_sockets():
    async def main(server):
        engine = engine_of(server, "vllm")
        try:
            await chunks_from(engine)
            server.stale = set(server.connections)  # as after an update, when the server closed them
            assert await chunks_from(engine, seed="2")
            assert server.connections - server.stale, "on a fresh connection"
        finally:
            await engine.close()

    with serve_engine() as server:
        asyncio.run(main(server))


# -- the remedies that are not in the table ------------------------------------------------------------------------


def test_a_nonce_in_the_system_message_is_stripped():
    async def body():
        engine = Replier("yes")
        async with serve(engine) as gateway, claude_of(session := await gateway.open()) as claude:
            history = [user("a")]
            for number in range(3):
                nonce = f"x-anthropic-billing-header: cc_version=2.1; cch={number:05x};"
                system = [{"type": "text", "text": nonce}, {"type": "text", "text": "Be brief."}]
                answer = await claude.messages.create(model="m", max_tokens=9, system=system, messages=history)
                history += [{"role": "assistant", "content": answer.content}, user("more")]
            assert (spliced(engine), kinds(session)) == (True, ["exact"] * 3)
            assert "cch=" not in engine.tokenizer.decode(engine.calls[-1][0])

    run(body)


def test_a_truncated_turn_is_bridged_and_says_so():
    async def body():
        engine = Replier("one two")
        async with serve(engine) as gateway, client_of(session := await gateway.open()) as client:
            choice = (await chat(client, [user("a")], max_tokens=3)).choices[0]
            assert (choice.message.content, choice.finish_reason) == ("one", "length")
            await chat(client, [user("a"), {"role": "assistant", "content": "one"}, user("b")])
            assert kinds(session) == ["exact", "bridged"]
            (row,) = session.episode().rows()
            assert row.response_mask[:5] == (1, 1, 1, 0, 0), "the end token was added, not sampled"

    run(body)


def test_t05_a_frozen_session_matches_its_snapshot(tmp_path):
    async def request(http, method, url, key, expected=200, **more):
        async with http.request(method, url, headers={"authorization": f"Bearer {key}"}, **more) as answer:
            assert answer.status == expected, await answer.text()
            return await answer.json()

    async def body():
        async with serve(Replier("yes"), output=tmp_path) as gateway, aiohttp.ClientSession() as http:
            session = await gateway.open()
            url, key = f"{gateway.address}/sessions/{session.id}", session.key
            async with client_of(session) as client:
                await chat(client, [user("a")])
                early = await request(http, "GET", f"{url}?snapshot=0", key, 409)
                assert "not frozen" in early["error"]["message"]
                frozen = await request(http, "POST", f"{url}/freeze", key)
                assert (frozen["status"], len(frozen["snapshot"])) == ("frozen", 32)
                assert frozen == await request(http, "POST", f"{url}/freeze", key), "once is enough"
                with pytest.raises(openai.ConflictError, match="frozen"):
                    await chat(client, [user("b")])
            description = await request(http, "GET", f"{url}?snapshot={frozen['snapshot']}", key)
            assert snapshot_of(description) == description["snapshot"] == frozen["snapshot"], "it can be verified"
            done = await request(http, "POST", f"{url}/complete", key, json={"outcome": "ok"})
            assert (done["status"], done["snapshot"]) == ("complete", frozen["snapshot"])
            other = await request(http, "GET", f"{url}?snapshot={'0' * 32}", key, 409)
            assert frozen["snapshot"] in other["error"]["message"]
        with closing(sqlite3.connect(tmp_path / "gateway.db")) as store, store:
            blob = store.execute("SELECT logprobs FROM nodes WHERE finish = 'stop'").fetchone()[0]
        async with serve(Replier("yes"), output=tmp_path) as gateway:
            assert (await gateway.find(session.id).verify(frozen["snapshot"])).as_dict()["rows"], "after a restart too"
        with closing(sqlite3.connect(tmp_path / "gateway.db")) as store, store:
            store.execute("UPDATE nodes SET logprobs = ? WHERE finish = 'stop'", (blob[:-8] + bytes(8),))
        async with serve(Replier("yes"), output=tmp_path) as gateway:
            with pytest.raises(PermissionError, match="differs from what was frozen"):
                (await gateway.find(session.id).verify()).as_dict()

    run(body)


def test_a_template_that_the_tokenizer_cannot_encode_is_refused_at_the_start():
    async def body():
        with pytest.raises(ValueError, match="'llama3' needs the special tokens"):
            async with serve(Replier(), template="llama3"):
                pass

    run(body)
