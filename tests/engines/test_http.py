"""Engines behind HTTP keep the contract of all engines, and survive what servers do."""

import asyncio
import logging
import socket
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loopwright.cli import app
from loopwright.engines.base import ContextFull, EngineError, Sampling, engines
from loopwright.engines.fleet import Fleet, FleetConfig
from loopwright.engines.http.client import EngineGone
from loopwright.testing import EngineContract
from loopwright.testing.engines import ids_of, logprobs_of
from tests.engines.real import forward, gaps
from tests.engines.wires import CONTEXT, TROUBLES, served

WIRES = ("vllm", "llamacpp", "sglang")


@pytest.fixture(scope="module")
def server():
    with served() as found:
        yield found


def engine_of(server, wire, *, speed="fast", home=None, **config):
    kind = engines.get(wire)
    return kind(kind.Config(url=f"{server.url}/{speed}/{wire}", tokenizer="tiny", **config), home or Path())


class _Wire(EngineContract):
    wire = ""

    @pytest.fixture(autouse=True)
    def _server(self, server):
        self.server = server
        server.raw = False

    def make_engine(self, home, *, slow=False):
        return engine_of(self.server, self.wire, speed="slow" if slow else "fast", home=home)

    def logprobs_of(self, engine, prompt, ids):
        return forward(self.server.model, prompt, ids)

    def gaps_of(self, engine, prompt, ids):
        return gaps(self.server.model, prompt, ids)


class TestVllm(_Wire):
    wire = "vllm"


class TestLlamaCpp(_Wire):
    wire = "llamacpp"


class TestSglang(_Wire):
    wire = "sglang"


def run(server, wire, story, **config):
    async def main():
        engine = engine_of(server, wire, **config)
        try:
            return await asyncio.wait_for(story(engine), 60)
        finally:
            await engine.close()

    return asyncio.run(main())


async def said(engine, prompt=(72, 105), seed="s", **sampling):
    settings = Sampling(**{"max_tokens": 24, **sampling})
    return [chunk async for chunk in engine.generate(list(prompt), settings, seed=seed)]


@pytest.mark.parametrize(
    "asked",
    [{"temperature": 0.6}, {"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.2},
     {"temperature": 1.4, "top_k": 60, "top_p": 0.9, "min_p": 0.01}],
    ids=["temperature", "top_k", "top_p", "min_p", "all"],
)  # fmt: skip
@pytest.mark.parametrize("wire", ["vllm", "llamacpp"])
def test_logprobs_are_those_of_what_was_sampled_from(server, wire, asked):
    """For llama.cpp, which does not tell all of them, this is our own arithmetic."""
    server.raw = False

    async def story(engine):
        for seed in "abc":
            chunks = await said(engine, seed=seed, **asked)
            expected = forward(server.model, (72, 105), ids_of(chunks), Sampling(**asked))
            assert logprobs_of(chunks) == pytest.approx(expected, abs=1e-3)

    run(server, wire, story)


def test_a_vllm_that_tells_raw_logprobs_serves_plain_requests_only(server):
    server.raw = True

    async def story(engine):
        assert ids_of(await said(engine))
        assert ids_of(await said(engine, temperature=0))
        with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
            await said(engine, temperature=0.5)

    run(server, "vllm", story)


def test_what_sglang_has_no_true_logprobs_for_is_refused(server):
    async def story(engine):
        assert ids_of(await said(engine, temperature=0.5))
        with pytest.raises(EngineError, match="before top-p"):
            await said(engine, top_p=0.5)

    run(server, "sglang", story)


@pytest.mark.parametrize("wire", WIRES)
def test_a_stop_text_ends_a_stream_and_its_ids_stay_complete(server, wire):
    async def story(engine):
        whole = ids_of(await said(engine))
        text = engine.tokenizer.decode(whole)
        stop = next(pair for pair in map("".join, pairwise(text)) if "\ufffd" not in pair)
        cut = await said(engine, stop=("never said", stop))
        assert cut[-1].finish == "stop"
        assert ids_of(cut) == whole[: len(ids_of(cut))]
        assert engine.tokenizer.decode(ids_of(cut)).endswith(stop)

    run(server, wire, story)


@pytest.mark.parametrize("wire", WIRES)
def test_the_context_ends_a_stream_and_a_prompt_that_fills_it_is_refused(server, wire):
    async def story(engine):
        for most in (100, 4096):
            chunks = await said(engine, [65] * (CONTEXT - 4), seed="2", max_tokens=most)
            assert (len(ids_of(chunks)), chunks[-1].finish) == (4, "length")
        for length in (CONTEXT, CONTEXT + 10):
            with pytest.raises(ContextFull, match=f"maximum context length is {CONTEXT} tokens, but .* {length}"):
                await said(engine, [65] * length, max_tokens=1)

    run(server, wire, story)


@pytest.mark.parametrize("wire", WIRES)
def test_closing_a_stream_aborts_the_request_at_the_server(server, wire):
    async def story(engine):
        before = server.aborted
        async with aclosing(engine.generate([72, 105], Sampling(max_tokens=300), seed="s")) as stream:
            await anext(stream)
            await asyncio.sleep(0.1)  # llama.cpp's is asked for the next block by now
        for _ in range(100):
            if server.aborted > before:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the server went on")

    run(server, wire, story, speed="slow")


SAYS = {
    "500": "answered 500.*out of memory",
    "killed": "closed the connection in mid-stream",
    "silent": "sent nothing for 0.3 s",
    "lengths": "ids but|no logprob for|sent",
    "json": "did not answer JSON",
    "list": "did not answer a JSON object",
    "error": "EngineCore encountered an issue|unexpected answer",
    "endless": "without a finish reason|'none'",
    "nan": "as a logprob|unexpected answer",
    "ids": "as an id|unexpected answer",
}


@pytest.mark.parametrize("kind", TROUBLES)
@pytest.mark.parametrize("wire", WIRES)
def test_t02_what_no_server_should_do_is_an_engine_that_failed(server, wire, kind):
    async def story(engine):
        with pytest.raises(EngineError, match=SAYS[kind]):
            await said(engine, [0, TROUBLES.index(kind)])
        if kind != "silent":
            assert ids_of(await said(engine)), "and the next one is served"

    run(server, wire, story, timeout_s=0.3 if kind == "silent" else 60)


@pytest.mark.parametrize("wire", WIRES)
def test_a_server_that_is_not_there_is_named(wire):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    async def main():
        kind = engines.get(wire)
        engine = kind(kind.Config(url=f"http://127.0.0.1:{port}", tokenizer="tiny"), Path())
        try:
            with pytest.raises(EngineError, match=rf"127.0.0.1:{port}.* cannot be reached.*Is the server running\?"):
                await said(engine)
            with pytest.raises(EngineError, match="cannot be reached"):
                await engine.check()
        finally:
            await engine.close()

    asyncio.run(main())


def test_t12_connections_are_reused_and_stale_ones_are_replaced(server):
    async def story(engine):
        server.connections.clear()
        for _ in range(3):
            await said(engine)
        (used,) = server.connections
        await asyncio.gather(*(said(engine, seed=str(n)) for n in range(8)))
        assert used in server.connections
        server.stale = set(server.connections)
        for n in range(8):
            assert ids_of(await said(engine, seed=str(n)))
        assert server.connections - server.stale

    run(server, "sglang", story)


@pytest.mark.parametrize("wire", WIRES)
def test_the_key_is_sent_and_never_told(server, wire, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("MY_KEY", "sesame-open-1234")
    (tmp_path / "key").write_text("sesame-open-1234\n")

    async def story(engine):
        await engine.check()
        server.asked.clear()
        await said(engine)
        assert {key for _, _, key in server.asked} == {"Bearer sesame-open-1234"}
        with pytest.raises(EngineError) as failure:
            await said(engine, [0, 0])
        assert "sesame" not in f"{failure.value}{engine.config!r}{engine.config.model_dump_json()}{caplog.text}"

    run(server, wire, story, api_key_env="MY_KEY")
    run(server, wire, story, api_key_file=tmp_path / "key")


@pytest.mark.parametrize(
    ("config", "match"),
    [({"url": "localhost:8000"}, "is not a URL"), ({"url": "http://me:secret@there"}, "put the key into api_key_env"),
     ({"api_key_env": "NOT_THERE"}, "NOT_THERE holds no API key"),
     ({"api_key_file": "nowhere"}, "API key cannot be read"), ({"tokenizer": "nowhere/at/all"}, "cannot be loaded")],
)  # fmt: skip
def test_what_is_wrong_with_a_config_is_found_before_anything_starts(config, match, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    kind = engines.get("vllm")
    with pytest.raises(EngineError, match=match):
        kind(kind.Config(**{"url": "http://localhost:1", "tokenizer": "tiny", **config}), tmp_path)


@pytest.mark.parametrize(
    ("wire", "routes"),
    [("vllm", ["pause?mode=abort&clear_cache=true", "collective_rpc", "resume", "update_weight_version"]),
     ("sglang", ["pause_generation", "update_weights_from_disk", "continue_generation"])],
)  # fmt: skip
def test_t06_new_weights_are_loaded_while_the_server_holds(server, wire, routes, tmp_path):
    (tmp_path / "model.safetensors").touch()

    async def story(engine):
        await engine.pause()
        server.asked.clear()
        await engine.load_weights(tmp_path, 3)
        assert [route for route, _, _ in server.asked] == routes
        assert str(tmp_path) in str(server.asked[1][1])
        await engine.resume()
        assert {chunk.version for chunk in await said(engine)} == {3}

    run(server, wire, story)


@pytest.mark.parametrize(
    ("wire", "noticed", "route"),
    [("vllm", True, "collective_rpc"), ("vllm", False, "collective_rpc"), ("sglang", True, "update_weights_from_disk")],
    ids=["vllm", "vllm-unnoticed", "sglang"],
)
def test_t06_a_server_that_was_started_anew_gets_its_weights_again_before_it_serves(
    wire, noticed, route, tmp_path, monkeypatch
):
    monkeypatch.setattr("loopwright.engines.http.base._TRUST_S", 0.0)
    (tmp_path / "model.safetensors").touch()

    async def story():
        with served() as first:
            engine = engine_of(first, wire, wait_s=0)
            await engine.load_weights(tmp_path, 3)
            await said(engine)
            await asyncio.gather(said(engine), said(engine))
            assert [asked for asked, _, _ in first.asked].count(route) == 1, "not as long as it has them"
        if noticed:
            with pytest.raises(EngineError, match="cannot be reached"):
                await said(engine)
        with served(int(first.url.rpartition(":")[2])) as second:
            chunks = await asyncio.gather(*(said(engine, seed=str(n)) for n in range(4)))
            assert {chunk.version for each in chunks for chunk in each} == {3}
            asked = [asked for asked, _, _ in second.asked]
            assert asked.count(route) == 1
            assert asked.index(route) < next(i for i, each in enumerate(asked) if each in ("completions", "generate"))
            await engine.close()

    asyncio.run(asyncio.wait_for(story(), 60))


@pytest.mark.parametrize("sure_s", [0.0, 600.0], ids=["looked-at", "asked-at-once"])
@pytest.mark.parametrize(
    ("wire", "reload", "ask"),
    [("vllm", "collective_rpc", "completions"), ("sglang", "update_weights_from_disk", "generate")],
    ids=["vllm", "sglang"],
)
def test_t06_a_server_with_our_weights_that_is_gone_is_waited_for(
    wire, reload, ask, sure_s, tmp_path, monkeypatch, caplog
):
    """By whoever asks for tokens, and by whoever has newer weights for it; how it is, is told at once."""
    monkeypatch.setattr("loopwright.engines.http.base._TRUST_S", sure_s)
    (tmp_path / "model.safetensors").touch()

    async def story():
        with served() as first:
            engine = engine_of(first, wire)
            await engine.load_weights(tmp_path, 3)
        asking = asyncio.ensure_future(said(engine))
        with pytest.raises(EngineError, match="cannot be reached"):
            await engine.check()
        await asyncio.sleep(1)
        assert not asking.done()
        with served(int(first.url.rpartition(":")[2])) as second:
            assert {chunk.version for chunk in await asking} == {3}
            asked = [route for route, _, _ in second.asked]
            assert asked.index(reload) < asked.index(ask), "not under the weights that it came with"
        loading = asyncio.ensure_future(engine.load_weights(tmp_path, 4))
        await asyncio.sleep(1)
        with served(int(first.url.rpartition(":")[2])):
            await loading
            assert {chunk.version for chunk in await said(engine)} == {4}
            await engine.close()

    asyncio.run(asyncio.wait_for(story(), 60))
    assert "is gone; waiting up to 600 s for it to return" in caplog.text


def test_t06_a_server_that_dies_while_it_takes_on_weights_gets_them_when_it_is_back(server, tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").touch()

    async def story(engine):
        await engine.load_weights(tmp_path, 3)
        put, tried, checks = engine.put_weights, [], iter([None, EngineGone("gone"), EngineGone("gone")])

        async def dies(directory):
            tried.append(directory)
            if len(tried) == 1:
                raise engine.broken(EngineError("it hung up"))
            await put(directory)

        async def check():
            if (error := next(checks, None)) is not None:
                raise error

        monkeypatch.setattr(engine, "put_weights", dies)
        monkeypatch.setattr(engine, "check", check)
        await engine.load_weights(tmp_path, 4)
        assert tried == [tmp_path, tmp_path]
        assert {chunk.version for chunk in await said(engine)} == {4}

    run(server, "vllm", story)


def test_a_fleet_waits_for_none_of_its_servers_while_another_can_serve(tmp_path, caplog):
    (tmp_path / "model.safetensors").touch()

    async def story():
        with served() as lasting:
            with served() as first:
                urls = [f"{server.url}/fast/vllm" for server in (first, lasting)]
                settings = FleetConfig(engines=tuple({"type": "vllm", "url": url, "tokenizer": "tiny"} for url in urls))
                fleet = Fleet(settings, Path())
                await fleet.load_weights(tmp_path, 3)
            for seed in "abcd":
                assert ids_of(await said(fleet.for_session(seed), seed=seed))
            assert not any("waited for" in line for line in caplog.messages)
            await fleet.close()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_t06_a_server_that_failed_to_take_its_weights_again_is_asked_again(server, tmp_path, monkeypatch):
    monkeypatch.setattr("loopwright.engines.http.base._TRUST_S", 0.0)
    (tmp_path / "model.safetensors").touch()

    async def story(engine):
        await engine.load_weights(tmp_path, 3)
        server.mark, post = "default", engine.client.post

        async def fail(path, body, **more):
            if path == "/collective_rpc":
                raise EngineError("not yet")
            return await post(path, body, **more)

        with monkeypatch.context() as patched:
            patched.setattr(engine.client, "post", fail)
            with pytest.raises(EngineError, match="not yet"):
                await said(engine)
        assert ids_of(await said(engine))
        assert server.mark == str(tmp_path)

    run(server, "vllm", story)


@pytest.mark.parametrize("wire", WIRES)
def test_weights_that_a_server_cannot_take_are_refused(server, wire, tmp_path):
    async def story(engine):
        for source, match in (({"w": 1}, "not from memory"), (tmp_path, "there are no weights in")):
            with pytest.raises(EngineError, match=match):
                await engine.load_weights(source, 3)
        assert engine.version == 0
        assert ids_of(await said(engine))
        async with aclosing(engine.generate([1], Sampling(max_tokens=300), seed="s")) as stream:
            await anext(stream)
            with pytest.raises(EngineError, match="pause the engine"):
                await engine.load_weights(None, 1)

    run(server, wire, story, speed="slow")


def test_llamacpp_says_that_it_cannot_change_its_weights(server, tmp_path):
    (tmp_path / "model.safetensors").touch()

    async def story(engine):
        with pytest.raises(EngineError, match="cannot load weights while it runs"):
            await engine.load_weights(tmp_path, 3)
        assert engine.version == 0

    run(server, "llamacpp", story)


def test_a_server_that_failed_while_it_took_on_weights_serves_nobody_until_it_has_others(server, tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").touch()

    async def story(engine):
        post = engine.client.post

        async def fail(path, body, **more):
            if path == "/collective_rpc":
                raise EngineError("no such file")
            return await post(path, body, **more)

        monkeypatch.setattr(engine.client, "post", fail)
        with pytest.raises(EngineError, match="may hold only half of them: no such file"):
            await engine.load_weights(tmp_path, 3)
        with pytest.raises(EngineError, match="may hold only half of them"):
            await said(engine)
        monkeypatch.undo()
        await engine.load_weights(tmp_path, 4)
        assert {chunk.version for chunk in await said(engine)} == {4}

    run(server, "vllm", story)


def test_a_closed_engine_says_so(server):
    async def main():
        engine = engine_of(server, "vllm")
        await engine.pause()
        held = asyncio.ensure_future(said(engine))
        await asyncio.sleep(0.01)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await held

    asyncio.run(main())


@pytest.mark.parametrize("wire", WIRES)
def test_a_scenario_runs_on_a_server(server, wire, tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "say something"}\n{"prompt": "say more"}\n')
    (tmp_path / "study.toml").write_text(
        f"""
name = "study"
[[run]]
name = "roll"
agent = {{ type = "collect", trials = 8, group_size = 4 }}
[run.rollout]
tasks = {{ type = "jsonl", path = "tasks.jsonl" }}
loop = {{ type = "single_turn", sampling = {{ max_tokens = 12 }} }}
judger = {{ type = "length" }}
[run.engine]
type = "{wire}"
url = "{server.url}/fast/{wire}"
tokenizer = "bytes"
"""
    )
    done = CliRunner().invoke(app, ["run", str(tmp_path / "study.toml"), "-o", str(tmp_path / "out"), "-q"])
    assert done.exit_code == 0, done.output
    rows = (tmp_path / "out" / "roll" / "trajectory.csv").read_text().splitlines()
    outcomes = [row.rpartition(",")[2] for row in rows[1:]]
    assert (len(outcomes), set(outcomes) - {"ok", "truncated"}) == (8, set())
