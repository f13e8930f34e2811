"""Weight updates of HTTP engines: while serving, after a restart of the server, and when they fail."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from loopwright.engines.base import EngineError, Sampling
from loopwright.engines.fleet import Fleet, FleetConfig
from loopwright.engines.http.client import EngineGone
from loopwright.testing.engines import ids_of
from tests.engines.fake_servers import WIRES, chunks_from, engine_of, run, serve


@pytest.mark.parametrize(
    ("wire", "routes"),
    [("vllm", ["pause?mode=abort&clear_cache=true", "collective_rpc", "resume", "update_weight_version"]),
     ("sglang", ["pause_generation", "update_weights_from_disk", "continue_generation"])],
)  # fmt: skip
def test_t06_new_weights_are_loaded_while_the_server_is_paused(server, wire, routes, tmp_path):
    (tmp_path / "model.safetensors").touch()

    async def steps(engine):
        await engine.pause()
        server.requests.clear()
        await engine.load_weights(tmp_path, 3)
        assert [route for route, _, _ in server.requests] == routes
        assert str(tmp_path) in str(server.requests[1][1])
        await engine.resume()
        assert {chunk.version for chunk in await chunks_from(engine)} == {3}

    run(server, wire, steps)


@pytest.mark.parametrize(
    ("wire", "noticed", "route"),
    [("vllm", True, "collective_rpc"), ("vllm", False, "collective_rpc"), ("sglang", True, "update_weights_from_disk")],
    ids=["vllm", "vllm-unnoticed", "sglang"],
)
def test_t06_a_restarted_server_gets_its_weights_before_it_serves(wire, noticed, route, tmp_path, monkeypatch):
    monkeypatch.setattr("loopwright.engines.http.base._TRUST_S", 0.0)
    (tmp_path / "model.safetensors").touch()

    async def steps():
        with serve() as first:
            engine = engine_of(first, wire, wait_s=0)
            await engine.load_weights(tmp_path, 3)
            await chunks_from(engine)
            await asyncio.gather(chunks_from(engine), chunks_from(engine))
            assert [routes for routes, _, _ in first.requests].count(route) == 1, "loaded once"
        if noticed:
            with pytest.raises(EngineError, match="cannot be reached"):
                await chunks_from(engine)
        with serve(int(first.url.rpartition(":")[2])) as second:
            chunks = await asyncio.gather(*(chunks_from(engine, seed=str(n)) for n in range(4)))
            assert {chunk.version for each in chunks for chunk in each} == {3}
            routes = [routes for routes, _, _ in second.requests]
            assert routes.count(route) == 1
            assert routes.index(route) < next(i for i, each in enumerate(routes) if each in ("completions", "generate"))
            await engine.close()

    asyncio.run(asyncio.wait_for(steps(), 60))


@pytest.mark.parametrize("sure_s", [0.0, 600.0], ids=["looked-at", "asked-at-once"])
@pytest.mark.parametrize(
    ("wire", "reload", "ask"),
    [("vllm", "collective_rpc", "completions"), ("sglang", "update_weights_from_disk", "generate")],
    ids=["vllm", "sglang"],
)
def test_t06_requests_wait_for_a_server_that_is_gone(wire, reload, ask, sure_s, tmp_path, monkeypatch, caplog):
    """Generation and weight updates wait for it; a health check reports it at once."""
    monkeypatch.setattr("loopwright.engines.http.base._TRUST_S", sure_s)
    (tmp_path / "model.safetensors").touch()

    async def steps():
        with serve() as first:
            engine = engine_of(first, wire)
            await engine.load_weights(tmp_path, 3)
        asking = asyncio.ensure_future(chunks_from(engine))
        with pytest.raises(EngineError, match="cannot be reached"):
            await engine.check()
        await asyncio.sleep(1)
        assert not asking.done()
        with serve(int(first.url.rpartition(":")[2])) as second:
            assert {chunk.version for chunk in await asking} == {3}
            routes = [route for route, _, _ in second.requests]
            assert routes.index(reload) < routes.index(ask), "it serves only after the weights are loaded again"
        loading = asyncio.ensure_future(engine.load_weights(tmp_path, 4))
        await asyncio.sleep(1)
        with serve(int(first.url.rpartition(":")[2])):
            await loading
            assert {chunk.version for chunk in await chunks_from(engine)} == {4}
            await engine.close()

    asyncio.run(asyncio.wait_for(steps(), 60))
    assert "is gone; waiting up to 600 s for it to return" in caplog.text


def test_t06_a_server_that_dies_during_a_weight_update_gets_the_weights_on_return(server, tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").touch()

    async def steps(engine):
        await engine.load_weights(tmp_path, 3)
        put_weights, attempts, checks = engine.put_weights, [], iter([None, EngineGone("gone"), EngineGone("gone")])

        async def dies(directory):
            attempts.append(directory)
            if len(attempts) == 1:
                raise engine.broken(EngineError("it hung up"))
            await put_weights(directory)

        async def check():
            if (error := next(checks, None)) is not None:
                raise error

        monkeypatch.setattr(engine, "put_weights", dies)
        monkeypatch.setattr(engine, "check", check)
        await engine.load_weights(tmp_path, 4)
        assert attempts == [tmp_path, tmp_path]
        assert {chunk.version for chunk in await chunks_from(engine)} == {4}

    run(server, "vllm", steps)


def test_a_fleet_does_not_wait_for_a_server_while_another_can_serve(tmp_path, caplog):
    (tmp_path / "model.safetensors").touch()

    async def steps():
        with serve() as lasting:
            with serve() as first:
                urls = [f"{server.url}/fast/vllm" for server in (first, lasting)]
                settings = FleetConfig(engines=tuple({"type": "vllm", "url": url, "tokenizer": "tiny"} for url in urls))
                fleet = Fleet(settings, Path())
                await fleet.load_weights(tmp_path, 3)
            for seed in "abcd":
                assert ids_of(await chunks_from(fleet.for_session(seed), seed=seed))
            assert not any("waiting up to" in line for line in caplog.messages)
            await fleet.close()

    asyncio.run(asyncio.wait_for(steps(), 60))


def test_t06_reloading_weights_is_retried_after_a_failure(server, tmp_path, monkeypatch):
    monkeypatch.setattr("loopwright.engines.http.base._TRUST_S", 0.0)
    (tmp_path / "model.safetensors").touch()

    async def steps(engine):
        await engine.load_weights(tmp_path, 3)
        server.mark, post = "default", engine.client.post

        async def fail(path, body, **more):
            if path == "/collective_rpc":
                raise EngineError("not yet")
            return await post(path, body, **more)

        with monkeypatch.context() as patched:
            patched.setattr(engine.client, "post", fail)
            with pytest.raises(EngineError, match="not yet"):
                await chunks_from(engine)
        assert ids_of(await chunks_from(engine))
        assert server.mark == str(tmp_path)

    run(server, "vllm", steps)


@pytest.mark.parametrize("wire", WIRES)
def test_weights_that_a_server_cannot_load_are_refused(server, wire, tmp_path):
    async def steps(engine):
        for source, match in (({"w": 1}, "not from memory"), (tmp_path, "there are no weights in")):
            with pytest.raises(EngineError, match=match):
                await engine.load_weights(source, 3)
        assert engine.version == 0
        assert ids_of(await chunks_from(engine))
        async with aclosing(engine.generate([1], Sampling(max_tokens=300), seed="s")) as stream:
            await anext(stream)
            with pytest.raises(EngineError, match="pause the engine"):
                await engine.load_weights(None, 1)

    run(server, wire, steps, speed="slow")


def test_llamacpp_says_that_it_cannot_change_its_weights(server, tmp_path):
    (tmp_path / "model.safetensors").touch()

    async def steps(engine):
        with pytest.raises(EngineError, match="cannot load weights while it runs"):
            await engine.load_weights(tmp_path, 3)
        assert engine.version == 0

    run(server, "llamacpp", steps)


def test_a_server_whose_update_failed_serves_nothing_until_the_next_update(server, tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").touch()

    async def steps(engine):
        post = engine.client.post

        async def fail(path, body, **more):
            if path == "/collective_rpc":
                raise EngineError("no such file")
            return await post(path, body, **more)

        monkeypatch.setattr(engine.client, "post", fail)
        with pytest.raises(EngineError, match="may hold only half of them: no such file"):
            await engine.load_weights(tmp_path, 3)
        with pytest.raises(EngineError, match="may hold only half of them"):
            await chunks_from(engine)
        monkeypatch.undo()
        await engine.load_weights(tmp_path, 4)
        assert {chunk.version for chunk in await chunks_from(engine)} == {4}

    run(server, "vllm", steps)
