"""Remote workers beside a gateway that is started anew: nothing counts that older weights than it was told of said."""

import asyncio

import pytest

from loopwright.core.episode import Episode, Node, Span
from loopwright.core.outcome import Fault, Outcome
from loopwright.engines.weight_update import WeightUpdate
from loopwright.gateway.client import CompletedSession
from loopwright.gateway.sessions.session import SessionLimits
from loopwright.rollouts.loops.worker import RolloutRequest
from loopwright.rollouts.pools.base import Pool, WorkerLost
from loopwright.rollouts.remote.access import GatewayAccess
from loopwright.rollouts.remote.agent import AgentExit
from loopwright.rollouts.remote.blame import TimeLimit, verdict
from loopwright.rollouts.remote.gateway_host import GatewayHost
from loopwright.rollouts.remote.gateway_pool import GatewayPool
from tests.gateway.serving import served, until
from tests.rollouts.remote.agents import TASK, program, staged

REQUEST = RolloutRequest(TASK, "0", trial=1)
FREE, ALLOWED = SessionLimits(), TimeLimit(20.0, "deadline_s")


def spoken(version):
    """An episode of one token, by these weights."""
    return Episode(TASK, (Node(None, {}), Node(0, {}, (7,), (-0.5,), (Span(0, 1, version),))))


class FakeHost(GatewayHost):
    """A gateway that does as it is told, until it is started anew."""

    def __init__(self):
        super().__init__()
        self.version, self.heard = 0, []

    async def start(self): ...

    async def access(self):
        return GatewayAccess("http://gateway")

    async def publish(self, update):
        self.heard.append(update)
        self.version = update.version
        return self.version


class Workers(Pool):
    """Rollouts of one token, by whatever weights the gateway has."""

    in_flight = 0
    description = None

    def __init__(self, place):
        self.place, self.meanwhile = place, None

    async def start(self): ...

    async def call(self, request, *, timeout_s=None):
        episode = spoken(self.place.version)
        if self.meanwhile is not None:
            await self.meanwhile()
        return episode

    async def publish(self, update, *, timeout_s=None):
        return []

    async def close(self): ...


def housed():
    place = FakeHost()
    workers = Workers(place)
    return place, workers, GatewayPool(place, workers)


def test_t06_a_gateway_that_serves_older_weights_is_told_again_and_what_they_said_is_lost():
    async def story():
        place, _, pool = housed()
        await pool.publish(WeightUpdate(1, paused=True, weights="weights/1"))
        await pool.publish(WeightUpdate(1, weights="weights/1"))
        await pool.call(REQUEST)
        place.version, place.heard = 0, []
        with pytest.raises(WorkerLost, match="begun with version 1 of the policy, and served by 0"):
            await pool.call(REQUEST)
        assert place.heard == [WeightUpdate(1, weights="weights/1")]
        await pool.call(REQUEST)

    asyncio.run(story())


def test_t06_a_rollout_under_way_when_weights_come_is_not_lost():
    async def story():
        place, workers, pool = housed()
        await pool.publish(WeightUpdate(1, weights="weights/1"))
        workers.meanwhile = lambda: pool.publish(WeightUpdate(2, weights="weights/0"))
        await pool.call(REQUEST)
        assert len(place.heard) == 2

    asyncio.run(story())


def test_t06_a_gateway_that_was_started_anew_wakes_with_the_weights_that_it_is_said_to_have():
    async def story():
        place, _, pool = housed()
        await pool.publish(WeightUpdate(1, weights="weights/1"))
        await pool.publish(WeightUpdate(1, paused=True))
        await pool.publish(WeightUpdate(1))
        assert place.heard[1:] == [WeightUpdate(1, paused=True), WeightUpdate(1, weights="weights/1")]

    asyncio.run(story())


@pytest.mark.parametrize("ended", [None, AgentExit("the agent exited with 1")], ids=["late", "broken"])
def test_a01_an_agent_that_breaks_while_its_gateway_is_started_anew_is_no_failure_of_the_policy(ended):
    said = spoken(0)
    for restored, fault in ((False, Fault.POLICY), (True, Fault.INFRA)):
        captured = CompletedSession(said, "", 0.0, restored)
        assert verdict(ended, captured, FREE, ALLOWED)[1] is fault
    assert verdict(AgentExit(), CompletedSession(said, "", 0.0, restored=True), FREE, ALLOWED) == (Outcome.OK, None, "")


def test_t04_a_session_tells_whether_its_gateway_was_started_anew_meanwhile(tmp_path):
    async def story():
        for restored in (False, True):
            async with served(output=tmp_path) as gateway:
                session = await gateway.open("one")
                assert session.served.describe()["restored"] is restored
        async with served(output=tmp_path) as gateway:
            await (await gateway.open("one")).close()
        async with served(output=tmp_path) as gateway:
            assert gateway.find("one").describe()["restored"] is False, "it had ended before"

    asyncio.run(story())


def test_a01_a_gateway_that_is_back_without_its_sessions_costs_their_trials_and_is_not_gone(tmp_path):
    """However many these are: eight in a row would end the run, if the gateway were away."""

    async def story():
        agent = "chat()\nwhile not os.path.exists(os.environ['LOOPWRIGHT_HOME'] + '/go'):\n    time.sleep(0.01)"
        async with staged(tmp_path, command=program(tmp_path, agent), deadline_s=60.0, concurrency=9) as stage:
            rolls = [asyncio.ensure_future(stage.roll(trial=number)) for number in range(9)]
            await until(lambda: sum(live.episode().turns for live in stage.sessions) == 9, 60)
            stage.home._gateway._sessions.clear()
            (tmp_path / "go").touch()
            for episode in await asyncio.gather(*rolls):
                assert (episode.outcome, episode.fault) == (Outcome.LOST, Fault.INFRA)
                assert "has not kept its sessions" in episode.reason

    asyncio.run(story())
