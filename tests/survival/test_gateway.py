"""A gateway that is killed, runs out of disk and gets bad requests: it keeps exactly what it committed."""

import asyncio
import json
import random
import socket
import sqlite3
import threading
import urllib.error
from contextlib import closing, suppress
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loopwright.core.errors import StorageError
from loopwright.gateway.sessions.session_config import SessionConfig
from tests.gateway.harness import Replier, client_of, run, serve, until, user
from tests.survival.serving import serving

SLOWLY = ("--engine", "scripted", "--set", "engine.token_s=0.0005", "--port", 0, "--output", "gw")


# -- kill -9 --------------------------------------------------------------------------------------------------------


class Talker(threading.Thread):
    """An agent that talks until the gateway is gone, and records each completed turn."""

    def __init__(self, gateway, session):
        super().__init__(daemon=True)
        self.gateway, self.session, self.answers = gateway, session, []

    def run(self):
        path, messages = f"/{self.session['id']}/v1/chat/completions", [user("begin")]
        while True:
            body = {"model": "m", "messages": messages, "logprobs": True, "return_token_ids": True, "max_tokens": 40}
            try:
                answer = self.gateway.ask("POST", path, body, self.session["key"])
            except (OSError, ValueError, EOFError):
                return
            choice = answer["choices"][0]
            logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
            text = choice["message"]["content"]
            self.answers.append((answer["prompt_token_ids"], choice["token_ids"], logprobs, text))
            messages = [*messages, choice["message"], user("go on")]
            if len(messages) > 20:
                messages = [user("begin anew")]


def checked(described, answers, kills):
    """Check that all turns the agent saw are stored, token by token, and that no turn claims more."""
    nodes = [None, *described["episode"]["nodes"]]
    committed = []
    for turn in described["turns"]:
        node = nodes[turn["node"]]
        sampled = [at for start, stop, _ in node["spans"] for at in range(start, stop)]
        assert len(node["ids"]) == len(node["logprobs"])
        assert len(sampled) == turn["sampled_tokens"]
        if turn["verdict"] == "broken":
            assert turn["sampled_tokens"] == 0
            assert "is unknown" in turn["reason"]
        else:
            assert turn["finish"] in ("stop", "length")
            end = -1 if turn["finish"] == "stop" else None  # the response does not show the end token's logprob
            ids, at = [], turn["node"]
            while at:
                ids, at = [*nodes[at]["ids"], *ids], nodes[at]["parent"]
            count, logprobs = len(ids) - len(sampled), [node["logprobs"][at] for at in sampled][:end]
            committed.append((ids[:count], ids[count:], logprobs, node["message"]["content"]))
    for turn in answers:
        committed.remove(turn)  # its prompt, its tokens, their logprobs and its text are what the client received
    assert len(committed) <= kills, "at most the last turn before each kill was committed but not seen"
    assert described["trainable"] == (not described["verdicts"]["broken"] and bool(described["rows"]))
    assert sum(sum(row["response_mask"]) for row in described["rows"]) == sum(
        t["sampled_tokens"] for t in described["turns"]
    )


def killed_and_restarted(tmp_path, kills, agents, seconds):
    chance, answers = random.Random(7), {}
    for _ in range(kills):
        with serving(tmp_path, *SLOWLY) as gateway:
            sessions = [gateway.open(f"agent-{number}") for number in range(agents)]
            talkers = [Talker(gateway, session) for session in sessions]
            for talker in talkers:
                talker.start()
            for talker in talkers:
                talker.join(seconds * chance.uniform(0.2, 1.0) / agents)
            threading.Event().wait(seconds * chance.uniform(0.2, 1.0))
            gateway.kill()
            for talker in talkers:
                talker.join(60)
                answers.setdefault(talker.session["id"], []).extend(talker.answers)
    assert sum(map(len, answers.values())) > kills, "the kills happened under load"
    with serving(tmp_path, *SLOWLY) as gateway:
        for id, turns in answers.items():
            described = gateway.describe(gateway.open(id))
            left_open = described["verdicts"]["broken"]
            assert left_open <= kills, "at most one call per agent was in flight at each kill"
            checked(described, turns, kills)
        assert gateway.end() == 143
    with closing(sqlite3.connect(tmp_path / "gw" / "gateway.db")) as store:
        assert store.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_kill_under_load_keeps_every_committed_turn(tmp_path):
    killed_and_restarted(tmp_path, kills=1, agents=4, seconds=2.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_repeated_kills_neither_lose_nor_invent_turns(tmp_path):
    killed_and_restarted(tmp_path, kills=8, agents=8, seconds=4.0)


# -- the disk -------------------------------------------------------------------------------------------------------


def test_a_full_disk_refuses_calls_keeps_turns_and_recovers(tmp_path):
    async def main():
        async with serve(Replier("hello"), output=tmp_path) as gateway:
            session = await gateway.open("t")
            async with client_of(session) as client, aiohttp.ClientSession() as http:
                talk = client.chat.completions.create
                await talk(model="m", messages=[user("before")])
                for connection in gateway.store.connections:
                    (pages,) = connection.execute("PRAGMA page_count").fetchone()
                    connection.execute(f"PRAGMA max_page_count = {pages}")  # not a byte more, as on a full disk
                for number in range(3):
                    with pytest.raises(Exception, match="cannot be recorded"):
                        await talk(model="m", messages=[user(f"full {number} " + "x" * 200_000)])
                with pytest.raises(StorageError):
                    await gateway.open("another", SessionConfig(run="x" * 200_000))
                assert "another" not in gateway.sessions
                for connection in gateway.store.connections:
                    connection.execute("PRAGMA max_page_count = 1073741823")
                await talk(model="m", messages=[user("after")])
                async with http.get(f"{gateway.address}/healthz") as answer:
                    assert answer.status == 200
        async with serve(output=tmp_path) as gateway:
            described = gateway.find("t").describe()
            sampled = [turn["sampled_tokens"] for turn in described["turns"]]
            prompts = [node["message"]["content"][:5] for node in described["episode"]["nodes"] if not node["spans"]]
            assert "befor" in prompts
            assert "after" in prompts
            assert sampled == [6, 0, 0, 0, 6], "refused turns have no tokens"
            assert described["verdicts"]["broken"] == 0
            assert described["trainable"]

    run(main)


# -- clients --------------------------------------------------------------------------------------------------------


def raw_request(session, gateway, body):
    data = orjson.dumps(body)
    head = f"POST /{session.id}/v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {session.key}\r\n"
    connection = socket.create_connection(("127.0.0.1", urlsplit(gateway.address).port))
    connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def test_clients_that_disconnect_in_mid_stream_lose_only_their_own_turns():
    async def main():
        engine = Replier("x" * 2000)
        async with serve(engine) as gateway:
            session = await gateway.open(config=SessionConfig(max_tokens=4000))
            body = {"model": "m", "stream": True, "messages": [user("a")]}
            sockets = [raw_request(session, gateway, {**body, "messages": [user(str(n))]}) for n in range(30)]
            await until(lambda: session.served.running, 30)
            for number, one in enumerate(sockets):
                if number % 2:  # a reset, without a closing handshake
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                one.close()
            async with client_of(session) as client:
                answer = await client.chat.completions.create(model="m", messages=[user("b")], max_tokens=5)
                assert answer.choices[0].message.content == "xxxxx"
            await until(lambda: not session.served.running and not engine.running, 30)
            described = session.served.describe()
            assert sum(sum(row["response_mask"]) for row in described["rows"]) == sum(
                turn["sampled_tokens"] for turn in described["turns"]
            )

    run(main)


@pytest.mark.slow
def test_a_client_that_reads_a_byte_a_second_delays_no_other():
    async def main():
        engine = Replier("x" * 20_000)
        async with serve(engine, write_s=3.0) as gateway:
            session = await gateway.open(config=SessionConfig(max_tokens=100_000))
            body = {"model": "m", "stream": True, "logprobs": True, "messages": [user("a")]}
            slow = raw_request(session, gateway, body)
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            slow.setblocking(False)
            async with client_of(session) as client:
                for number in range(10):
                    await asyncio.sleep(1.0)
                    with suppress(BlockingIOError, ConnectionError):
                        slow.recv(1)
                    completion = await client.chat.completions.create(
                        model="m", messages=[user(str(number))], max_tokens=5
                    )
                    assert completion.choices[0].message.content == "xxxxx"
            await until(lambda: not session.served.running, 40)
            slow.close()

    run(main)


TRICKS = [
    "/sessions/../sessions/{other}",
    "/sessions/..%2f..%2fgateway.db",
    "/sessions/%2e%2e/{other}",
    "//sessions//{other}",
    "/{mine}/../{other}/v1/models",
    "/{mine}%2f..%2f{other}/v1/models",
    "/{mine}/v1/../../{other}/v1/models",
    "/{mine}/v1/models/../../../sessions/{other}",
    "/{other}%00/v1/models",
    "/{other}%20/v1/models",
    "/{other}./v1/models",
    "/{other}/v1/models",
    "/{OTHER}/v1/models",
    "/ｏther/v1/models",
    "/%c0%ae%c0%ae/v1/models",
    "/other%0d%0ax-api-key:%20x/v1/models",
    "/sessions/{other};{mine}",
    "/sessions/{other}?id={mine}",
    "/sessions/{other}#/{mine}",
]


def raw_get(gateway, path, key):
    """Send the path unchanged; a client library would normalise some of these."""
    with socket.create_connection(("127.0.0.1", urlsplit(gateway.address).port)) as connection:
        head = f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nconnection: close\r\n\r\n"
        connection.sendall(head.encode())
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("trick", TRICKS)
def test_no_path_leads_from_one_session_to_another(tmp_path, trick):
    async def main():
        async with serve(Replier("the other's secret"), output=tmp_path) as gateway:
            mine, other = await gateway.open("mine"), await gateway.open("other")
            async with client_of(other) as client:
                await client.chat.completions.create(model="m", messages=[user("what the other asked")])
            path = trick.format(mine="mine", other="other", OTHER="OTHER")
            response = await asyncio.to_thread(raw_get, gateway, path, mine.key)
            status = int(response.split(b" ", 2)[1])
            echoed = b'"id":"../../../sessions/other"' in response  # a model may have any name
            assert status in (400, 401, 404, 405) or echoed, response
            for secret in (b"secret", b"what the other asked", other.key.encode(), mine.key.encode(), b"SQLite"):
                assert secret not in response
            assert sorted(gateway.sessions) == ["mine", "other"], "a GET creates nothing"
            assert {entry.name for entry in tmp_path.iterdir()} <= {
                "gateway.db", "gateway.db-wal", "gateway.db-shm", "gateway.lock",
            }  # fmt: skip

    run(main)


def test_no_key_but_its_own_opens_a_session(tmp_path):
    async def main():
        token = "the gateway's own token"
        async with serve(Replier("secret"), output=tmp_path, token=token) as gateway, aiohttp.ClientSession() as http:
            mine, other = await gateway.open("mine"), await gateway.open("other")
            keys = ["", " ", other.key, other.key[:-1], other.key + "x", other.key.upper(), "null", "é", token + "x"]
            keys += [mine.key + other.key, f"{mine.key},{other.key}", mine.key[::-1]]
            routes = [("GET", "/sessions/mine"), ("DELETE", "/sessions/mine"), ("POST", "/sessions/mine/complete")]
            routes += [("POST", f"/mine/v1/{path}") for path in ("chat/completions", "completions", "messages")]
            routes += [("GET", "/mine/v1/models"), ("POST", "/mine/v1/messages/count_tokens")]
            for key in keys:
                for method, path in routes:
                    for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                        async with http.request(method, gateway.address + path, headers=headers, data=b"{}") as answer:
                            text = await answer.text()
                            assert answer.status == 401, (method, path, key, text)
                            assert mine.key not in text
            # The token reads sessions but is not a key to call the model in one.
            async with http.get(f"{gateway.address}/sessions/mine", headers={"x-api-key": token}) as answer:
                assert answer.status == 200
            async with http.post(f"{gateway.address}/mine/v1/completions", headers={"x-api-key": token}) as answer:
                assert answer.status == 401

    run(main)


# -- bodies ---------------------------------------------------------------------------------------------------------

WEIRD = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from([b"[" * 3000, b'{"a":' * 3000, b"1e999", b'{"n": NaN}', b"\xef\xbb\xbf{}", b'{"a": 1, "a": 2}']),
)
HUGE = st.sampled_from([10**30, -(10**30), 1e308, -1e308, 2**63, -1, 0, 0.5, True, "9" * 400, [], {}, None])
FIELD = st.sampled_from(
    [
        "max_tokens",
        "n",
        "seed",
        "temperature",
        "top_p",
        "stop",
        "modalities",
        "audio",
        "thinking",
        "reasoning_effort",
        "response_format",
        "tool_choice",
        "parallel_tool_calls",
        "stream_options",
        "text",
        "include",
        "metadata",
        "user",
    ]
)
PATHS = st.sampled_from(
    ["v1/chat/completions", "v1/completions", "v1/responses", "v1/messages", "v1/messages/count_tokens", "v1/models"]
)
SOUND = {"messages": [user("hi")], "prompt": "hi", "input": "hi", "max_tokens": 3, "model": "m"}
BODY = WEIRD | st.dictionaries(FIELD, HUGE, max_size=3).map(lambda more: json.dumps({**SOUND, **more}).encode())


@pytest.mark.parametrize(
    "examples", [150, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])], ids=["some", "many"]
)
def test_arbitrary_bytes_do_not_crash_it(examples):
    async def main():
        async with serve(body_bytes=100_000) as gateway, aiohttp.ClientSession() as http:
            session = await gateway.open(config=SessionConfig(max_tokens=8))
            loop, auth = asyncio.get_running_loop(), {"authorization": f"Bearer {session.key}"}

            async def send(path, body, kind):
                headers = {**auth, "content-type": kind}
                async with http.post(f"{gateway.address}/{session.id}/{path}", data=body, headers=headers) as answer:
                    return answer.status, await answer.read()

            def check(path, body, kind):
                status, text = asyncio.run_coroutine_threadsafe(send(path, body, kind), loop).result(60)
                assert status in (200, 400, 405, 413), (path, body, text)

            kinds = st.sampled_from(
                ["application/json", "text/plain", "multipart/form-data", "x", "application/x-gzip"]
            )
            quick = settings(
                max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
            )
            await asyncio.to_thread(quick(given(PATHS, BODY, kinds)(check)))
            assert not session.served.running

    run(main) if examples < 1000 else asyncio.run(main())


# -- SIGTERM --------------------------------------------------------------------------------------------------------


def test_sigterm_lets_calls_finish_and_refuses_new_ones(tmp_path):
    slow = ("--engine", "scripted", "--set", "engine.token_s=0.05", "--set", "engine.slip=0", "--port", 0)
    with serving(tmp_path, *slow, "--set", "drain_s=50", "--output", "gw") as gateway:
        session = gateway.open("t")
        path, body = "/t/v1/chat/completions", {"model": "m", "messages": [user("a")]}
        answers = []
        talk = threading.Thread(target=lambda: answers.append(gateway.ask("POST", path, body, session["key"])))
        talk.start()
        while not gateway.describe(session)["running"]:
            pass
        assert gateway.end() == 143
        talk.join(60)
        assert answers[0]["choices"][0]["finish_reason"] == "stop"
        with pytest.raises(urllib.error.URLError):
            gateway.open("late")
    with serving(tmp_path, *slow, "--output", "gw") as gateway:
        described = gateway.describe(session)
        assert [(turn["verdict"], turn["finish"]) for turn in described["turns"]] == [("exact", "stop")]
