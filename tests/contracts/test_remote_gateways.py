"""Contracts T10, T11 and T12: where a run's gateway runs, and its client."""

import asyncio
from contextlib import aclosing, asynccontextmanager

import aiohttp
import aiohttp.web
import pytest
import ray

from loopwright.core.episode import Episode
from loopwright.core.errors import ScenarioError
from loopwright.core.outcome import Outcome
from loopwright.engines.base import Sampling, engines
from loopwright.engines.scripted import ScriptedConfig
from loopwright.engines.weight_update import WeightUpdate
from loopwright.gateway.client import GatewayClient, GatewayLost
from loopwright.gateway.gateway import AdvertiseError, Gateway, GatewayConfig
from loopwright.gateway.sessions.session_config import SessionConfig
from loopwright.ledger.ledger import Ledger
from loopwright.rollouts.build import build_gateway_host
from loopwright.rollouts.pools.resources import PlacementConfig
from loopwright.rollouts.remote.gateway_config import EmbeddedGatewayConfig, RayGatewayConfig
from loopwright.rollouts.remote.gateway_host import (
    EmbeddedGatewayHost,
    ExternalGatewayHost,
    GatewayAccess,
)
from loopwright.scenario.dispatch import dispatch
from loopwright.scenario.load import load
from loopwright.testing import GatewayContract
from loopwright.testing.gateways import chat
from tests.gateway.harness import Replier, until
from tests.gateway.relay.harness import TOKEN, relayed
from tests.rollouts.pools.ray_cluster import cluster  # noqa: F401
from tests.rollouts.remote.agents import (
    ENGINE,
    open_setup,
    run_agent,
    scenario,
    write_functions,
)

SCRIPTED = ScriptedConfig(replies=("yes", "no"), slip=0.2)
ONE_ENGINE = PlacementConfig(workers=1, cpus=0.1)


def test_t10_a_remote_agent_without_an_address_is_an_error_at_load_time(tmp_path):
    (tmp_path / "s.toml").write_text(scenario(tmp_path, "chat()", more=ENGINE + '[run.gateway]\nhost = "0.0.0.0"\n'))
    with pytest.raises(ScenarioError, match=r"\[run.gateway\] host: 0.0.0.0 means all addresses"):
        load(tmp_path / "s.toml")
    assert RayGatewayConfig(host="0.0.0.0").problems(tmp_path) == [], "an actor knows the address of its node"

    async def main():
        with pytest.raises(AdvertiseError):
            await EmbeddedGatewayHost(GatewayConfig(host="0.0.0.0"), pytest.fail).start()
        async with aclosing(ExternalGatewayHost(GatewayAccess("http://127.0.0.1:9"))) as host:
            with pytest.raises(GatewayLost, match=r"cannot reach the gateway at http://127\.0\.0\.1:9"):
                await host.start()

    asyncio.run(main())


class ScriptedContract(GatewayContract):
    def make_engine(self, directory):
        return engines.get("scripted")(SCRIPTED, directory)


class TestT11Embedded(ScriptedContract):
    def make_host(self, directory):
        return build_gateway_host(EmbeddedGatewayConfig(), SCRIPTED, directory, "r")


class TestT11External(ScriptedContract):
    """A gateway that was started elsewhere."""

    token = "the-token-of-this-test"

    @asynccontextmanager
    async def around(self, directory):
        async with Gateway(self.make_engine(directory), token=self.token, output=directory / "gw") as gateway:
            self.url = gateway.address
            yield

    def make_host(self, directory):
        return ExternalGatewayHost(GatewayAccess(self.url, self.token))

    def test_a_wrong_token_is_reported_at_the_start(self, tmp_path):
        async def main():
            async with (
                self.around(tmp_path),
                aclosing(ExternalGatewayHost(GatewayAccess(self.url, "not-the-token-at-all"))) as host,
            ):
                with pytest.raises(GatewayLost, match=r"does not open sessions.*token_file"):
                    await host.start()

        asyncio.run(main())


class TestT11Relay(TestT11External):
    """An external gateway with an engine that connects to it through a relay."""

    @asynccontextmanager
    async def around(self, directory):
        async with relayed(self.make_engine(directory), output=directory / "gw") as gateway:
            self.url, self.token = gateway.address, TOKEN
            yield


@pytest.fixture(scope="class")
def on_ray(cluster, tmp_path_factory):  # noqa: F811
    """One host for all tests of a class: actors take seconds to start."""
    host = build_gateway_host(
        RayGatewayConfig(cpus=0.1, workers=2),
        SCRIPTED,
        tmp_path_factory.mktemp("ray"),
        "r",
        PlacementConfig(workers=2, cpus=0.1),
    )
    with asyncio.Runner() as runner:
        runner.run(host.start())
        yield runner, host
        runner.run(host.aclose())


class TestT11Ray(ScriptedContract):
    @pytest.fixture(autouse=True)
    def _connect(self, on_ray):
        self.runner, self.host = on_ray

    def make_host(self, directory):
        return self.host

    def use(self, directory, body):
        return self.runner.run(asyncio.wait_for(body(self.host), 60))


def test_t11_an_embedded_gateway_hands_its_episode_over_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(GatewayClient, "request", None)  # the run makes no HTTP request to its own gateway
    episode = run_agent(tmp_path, "chat()")
    assert (episode.outcome, episode.turns, episode.answer) == (Outcome.OK, 1, "an answer")
    assert Episode.from_json(episode.as_json()) == episode, "equal to an episode that was sent over HTTP"


@pytest.mark.usefixtures("cluster")
def test_t11_a_gateway_actor_that_dies_is_replaced(tmp_path):
    async def main():
        host = build_gateway_host(RayGatewayConfig(cpus=0.1), SCRIPTED, tmp_path, "r", ONE_ENGINE)
        await host.start()
        try:
            before = await host.access()
            await host.publish(WeightUpdate(4))
            ray.kill(host._gateways._router.backends[0].actor)
            async with asyncio.timeout(60):
                while (after := await host.access()).url == before.url:
                    await asyncio.sleep(0.1)
            session = await host.open("after")
            assert (await chat(session))[0] == 200
            assert (await session.close()).oldest_version == 4, "it got the latest update"
            assert after.token == before.token
        finally:
            await host.aclose()

    asyncio.run(main())


@pytest.mark.usefixtures("cluster")
def test_t11_an_engine_actor_that_dies_is_replaced_and_gets_the_latest_weights(tmp_path):
    async def main():
        host = build_gateway_host(RayGatewayConfig(cpus=0.1), SCRIPTED, tmp_path, "r", ONE_ENGINE)
        await host.start()
        try:
            await host.publish(WeightUpdate(4))
            session = await host.open("s", SessionConfig(sampling=Sampling(max_tokens=4)))
            assert (await chat(session))[0] == 200
            ray.kill(host._engines.pool._router.backends[0].actor)
            assert (await chat(session, "still there?"))[0] == 200, "the call waits for the replacement"
            episode = await session.close()
            assert [span.version for node in episode.nodes for span in node.spans] == [4, 4]
        finally:
            await host.aclose()

    asyncio.run(asyncio.wait_for(main(), 100))


@pytest.mark.usefixtures("cluster")
def test_t11_a_run_with_its_gateway_and_agents_on_ray(tmp_path, monkeypatch):
    """Also T09: settings that are resolved in the driver reach the agents of workers on other machines."""
    more = ENGINE + '[run.gateway]\ntype = "ray"\nworkers = 2\ncpus = 0.1\n[run.rollout.engines]\ncpus = 0.1\n'
    text = "chat(); print(os.environ['FLAVOUR'], os.environ['PASSED'])"
    loop = ', workers = 2, cpus = 0.1, pass_env = ["PASSED"]'
    file = tmp_path / "s.toml"
    file.write_text(scenario(tmp_path, text, more=more, loop=loop))
    monkeypatch.setenv("REMOTE_ENV", '{"FLAVOUR": "sweet"}')
    monkeypatch.setenv("PASSED", "on")

    assert dispatch(load(file), tmp_path / "out") == 0

    with Ledger.read(tmp_path / "out" / "work" / "ledger.db") as ledger:
        episodes = [Episode.from_bytes(ledger.payload(trial.number, "rollout")) for trial in ledger.trials()]
    assert {episode.evidence["agent"]["stdout"] for episode in episodes} == {"sweet on\n"}
    assert {episode.outcome for episode in episodes} == {Outcome.OK}


def test_t11_a_runs_gateway_releases_sessions_that_have_ended():
    async def main():
        now = 0.0
        async with Gateway(Replier(), clock=lambda: now, forgets=True) as gateway:
            first, other = await gateway.open("ended"), await gateway.open("open")
            await first.close()
            now = 100.0
            await until(lambda: list(gateway.sessions) == [other.id])

    asyncio.run(main())


# -- T12: one client -----------------------------------------------------------------------------------------------


def test_t12_one_http_session_is_reused_and_closed(tmp_path):
    async def main():
        function = f"{write_functions(tmp_path)}:solve"
        async with open_setup(tmp_path, function=function, args={"state": {"trials": []}}, over_http=True) as setup:
            await setup.roll(trial=1)
            (client,) = setup.worker._clients.values()
            session = client._session
            await asyncio.gather(*(setup.roll(trial=n) for n in range(2, 5)))
            assert setup.worker._clients == {await setup.host.access(): client}
            assert client._session is session
        assert session.closed
        with pytest.raises(GatewayLost, match="is closed"):
            await client.open()

    asyncio.run(main())


def test_t12_a_client_recognises_a_server_that_is_not_a_gateway(tmp_path):
    async def main():
        async def not_found(_):
            return aiohttp.web.Response(text="<html>hello</html>")

        app = aiohttp.web.Application()
        app.router.add_route("*", "/{path:.*}", not_found)
        runner = aiohttp.web.AppRunner(app)
        await runner.setup()
        site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            async with GatewayClient(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
                with pytest.raises(GatewayLost, match="Is it a Loopwright gateway"):
                    await client.check()
        finally:
            await runner.cleanup()

    asyncio.run(main())
