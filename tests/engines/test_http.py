"""HTTP engines keep the engine contract and survive misbehaving servers."""

import asyncio
import csv
import logging
import socket
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loopwright.cli import app
from loopwright.engines.base import BadSampling, ContextFull, EngineError, Guide, Sampling, engines
from loopwright.testing import EngineContract
from loopwright.testing.engines import ids_of, logprobs_of
from tests.engines.fake_servers import CONTEXT, TROUBLES, WIRES, chunks_from, engine_of, run
from tests.engines.real_server import forward, gaps


class _Wire(EngineContract):
    wire = ""

    @pytest.fixture(autouse=True)
    def _server(self, server):
        self.server = server
        server.raw = False

    def make_engine(self, directory, *, slow=False):
        return engine_of(self.server, self.wire, speed="slow" if slow else "fast", directory=directory)

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


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.6}, {"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.2},
     {"temperature": 1.4, "top_k": 60, "top_p": 0.9, "min_p": 0.01}],
    ids=["temperature", "top_k", "top_p", "min_p", "all"],
)  # fmt: skip
@pytest.mark.parametrize("wire", ["vllm", "llamacpp"])
def test_logprobs_belong_to_the_sampled_distribution(server, wire, settings):
    """llama.cpp does not report all of them, so this checks our own arithmetic."""
    server.raw = False

    async def steps(engine):
        for seed in "abc":
            chunks = await chunks_from(engine, seed=seed, **settings)
            expected = forward(server.model, (72, 105), ids_of(chunks), Sampling(**settings))
            assert logprobs_of(chunks) == pytest.approx(expected, abs=1e-3)

    run(server, wire, steps)


def test_a_vllm_with_raw_logprobs_serves_only_plain_requests(server):
    server.raw = True

    async def steps(engine):
        assert ids_of(await chunks_from(engine))
        assert ids_of(await chunks_from(engine, temperature=0))
        with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
            await chunks_from(engine, temperature=0.5)

    run(server, "vllm", steps)


def test_sglang_refuses_settings_without_true_logprobs(server):
    async def steps(engine):
        assert ids_of(await chunks_from(engine, temperature=0.5))
        with pytest.raises(EngineError, match="before top-p"):
            await chunks_from(engine, top_p=0.5)

    run(server, "sglang", steps)


@pytest.mark.parametrize("wire", WIRES)
def test_a_stop_text_ends_a_stream_and_its_ids_stay_complete(server, wire):
    async def steps(engine):
        whole = ids_of(await chunks_from(engine))
        text = engine.tokenizer.decode(whole)
        stop = next(pair for pair in map("".join, pairwise(text)) if "\ufffd" not in pair)
        chunks = await chunks_from(engine, stop=("never said", stop))
        assert chunks[-1].finish == "stop"
        assert ids_of(chunks) == whole[: len(ids_of(chunks))]
        assert engine.tokenizer.decode(ids_of(chunks)).endswith(stop)

    run(server, wire, steps)


@pytest.mark.parametrize("wire", WIRES)
def test_the_context_ends_a_stream_and_a_prompt_that_fills_it_is_refused(server, wire):
    async def steps(engine):
        for most in (100, 4096):
            chunks = await chunks_from(engine, [65] * (CONTEXT - 4), seed="2", max_tokens=most)
            assert (len(ids_of(chunks)), chunks[-1].finish) == (4, "length")
        for length in (CONTEXT, CONTEXT + 10):
            with pytest.raises(ContextFull, match=f"maximum context length is {CONTEXT} tokens, but .* {length}"):
                await chunks_from(engine, [65] * length, max_tokens=1)

    run(server, wire, steps)


@pytest.mark.parametrize("wire", WIRES)
def test_closing_a_stream_aborts_the_request_at_the_server(server, wire):
    async def steps(engine):
        before = server.aborted
        async with aclosing(engine.generate([72, 105], Sampling(max_tokens=300), seed="s")) as stream:
            await anext(stream)
            await asyncio.sleep(0.1)  # by now llama.cpp is asked for the next block
        for _ in range(100):
            if server.aborted > before:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the server did not abort the request")

    run(server, wire, steps, speed="slow")


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
def test_t02_a_misbehaving_server_is_a_failed_engine(server, wire, kind):
    async def steps(engine):
        with pytest.raises(EngineError, match=SAYS[kind]):
            await chunks_from(engine, [0, TROUBLES.index(kind)])
        if kind != "silent":
            assert ids_of(await chunks_from(engine)), "the next request is served"

    run(server, wire, steps, timeout_s=0.3 if kind == "silent" else 60)


@pytest.mark.parametrize("wire", ["vllm", "llamacpp"])
def test_a05_a_guide_that_a_healthy_server_refuses_is_the_requests_fault(server, wire):
    """Or an agent could break its session with a malformed grammar, and would not be scored."""

    async def steps(engine):
        guide = Guide(kind="grammar", value="(", source="guided_grammar")
        with pytest.raises(BadSampling, match="guided_grammar: refused by the engine") as refused:
            await chunks_from(engine, [0, TROUBLES.index("500")], guide=guide)
        assert refused.value.param == "guided_grammar"

    run(server, wire, steps)


@pytest.mark.parametrize("wire", WIRES)
def test_an_unreachable_server_is_named(wire):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    async def main():
        kind = engines.get(wire)
        engine = kind(kind.Config(url=f"http://127.0.0.1:{port}", tokenizer="tiny"), Path())
        try:
            with pytest.raises(EngineError, match=rf"127.0.0.1:{port}.* cannot be reached.*Is the server running\?"):
                await chunks_from(engine)
            with pytest.raises(EngineError, match="cannot be reached"):
                await engine.check()
        finally:
            await engine.close()

    asyncio.run(main())


def test_t12_connections_are_reused_and_stale_ones_are_replaced(server):
    async def steps(engine):
        server.connections.clear()
        for _ in range(3):
            await chunks_from(engine)
        (used,) = server.connections
        await asyncio.gather(*(chunks_from(engine, seed=str(n)) for n in range(8)))
        assert used in server.connections
        server.stale = set(server.connections)
        for n in range(8):
            assert ids_of(await chunks_from(engine, seed=str(n)))
        assert server.connections - server.stale

    run(server, "sglang", steps)


@pytest.mark.parametrize("wire", WIRES)
def test_the_key_is_sent_and_never_shown(server, wire, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("MY_KEY", "sesame-open-1234")
    (tmp_path / "key").write_text("sesame-open-1234\n")

    async def steps(engine):
        await engine.check()
        server.requests.clear()
        await chunks_from(engine)
        assert {key for _, _, key in server.requests} == {"Bearer sesame-open-1234"}
        with pytest.raises(EngineError) as failure:
            await chunks_from(engine, [0, 0])
        assert "sesame" not in f"{failure.value}{engine.config!r}{engine.config.model_dump_json()}{caplog.text}"

    run(server, wire, steps, api_key_env="MY_KEY")
    run(server, wire, steps, api_key_file=tmp_path / "key")


@pytest.mark.parametrize(
    ("config", "match"),
    [({"url": "localhost:8000"}, "is not a URL"), ({"url": "http://me:secret@there"}, "put the key into api_key_env"),
     ({"api_key_env": "NOT_THERE"}, "NOT_THERE holds no API key"),
     ({"api_key_file": "nowhere"}, "API key cannot be read"), ({"tokenizer": "nowhere/at/all"}, "cannot be loaded")],
)  # fmt: skip
def test_config_errors_are_reported_at_construction(config, match, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    kind = engines.get("vllm")
    with pytest.raises(EngineError, match=match):
        kind(kind.Config(**{"url": "http://localhost:1", "tokenizer": "tiny", **config}), tmp_path)


def test_a_closed_engine_raises(server):
    async def main():
        engine = engine_of(server, "vllm")
        await engine.pause()
        stream = asyncio.ensure_future(chunks_from(engine))
        await asyncio.sleep(0.01)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await stream

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
    with (tmp_path / "out" / "roll" / "trajectory.csv").open(newline="") as file:
        outcomes = [row["outcome"] for row in csv.DictReader(file)]
    assert (len(outcomes), set(outcomes) - {"ok", "truncated"}) == (8, set())
