"""A gateway that restarts with older weights: its rollouts are discarded, and the weights are published again."""

import asyncio

import pytest

from loopwright.core.episode import Episode, Node, Span
from loopwright.core.outcome import Fault, Outcome
from loopwright.engines.weight_update import WeightUpdate
from loopwright.gateway.client import CompletedSession
from loopwright.gateway.sessions.session import SessionLimits
from loopwright.rollouts.loops.worker import RolloutRequest
from loopwright.rollouts.pools.base import Pool, PoolDown, WorkerLost
from loopwright.rollouts.remote.agent import AgentExit
from loopwright.rollouts.remote.blame import TimeLimit, assign_blame
from loopwright.rollouts.remote.gateway_host import GatewayAccess, GatewayHost
from loopwright.rollouts.remote.gateway_pool import GatewayPool
from tests.gateway.harness import serve, until
from tests.rollouts.remote.agents import TASK, open_setup, program

REQUEST = RolloutRequest(TASK, "0", trial=1)
NO_LIMITS, TIME_LIMIT = SessionLimits(), TimeLimit(20.0, "deadline_s")


def one_token(version):
    """An episode of one token, sampled by this version."""
    return Episode(TASK, (Node(None, {}), Node(0, {}, (7,), (-0.5,), (Span(0, 1, version),))))


class FakeHost(GatewayHost):
    """A gateway that takes every update, until a test restarts it."""

    def __init__(self):
        super().__init__()
        self.version, self.updates = 0, []

    async def start(self): ...

    async def access(self):
        return GatewayAccess("http://gateway")

    async def publish(self, update):
        self.updates.append(update)
        self.version = update.version
        return self.version


class FakeWorkers(Pool):
    """Rollouts of one token, sampled by the gateway's current version."""

    in_flight = 0
    description = None

    def __init__(self, host):
        self.host, self.during_call = host, None

    async def start(self): ...

    async def call(self, request, *, timeout_s=None):
        episode = one_token(self.host.version)
        if self.during_call is not None:
            await self.during_call()
        return episode

    async def publish(self, update, *, timeout_s=None):
        return []

    async def close(self): ...


def build_pool():
    host = FakeHost()
    workers = FakeWorkers(host)
    return host, workers, GatewayPool(host, workers)


def test_the_weights_of_a_trial_servers_own_gateway_cannot_be_changed():
    async def main():
        _, workers, _ = build_pool()
        pool = GatewayPool(None, workers)
        assert (await pool.call(REQUEST)).nodes, "its rollouts run"
        with pytest.raises(PoolDown, match="takes no weights from a run"):
            await pool.publish(WeightUpdate(1, paused=True, weights="weights/1"))
        await pool.close()

    asyncio.run(main())


def test_t06_rollouts_of_older_weights_are_discarded_and_the_weights_published_again():
    async def main():
        host, _, pool = build_pool()
        await pool.publish(WeightUpdate(1, paused=True, weights="weights/1"))
        await pool.publish(WeightUpdate(1, weights="weights/1"))
        await pool.call(REQUEST)
        host.version, host.updates = 0, []
        with pytest.raises(WorkerLost, match="rollout discarded: started under policy version 1, sampled by version 0"):
            await pool.call(REQUEST)
        assert host.updates == [WeightUpdate(1, weights="weights/1")]
        await pool.call(REQUEST)

    asyncio.run(main())


def test_t06_a_rollout_in_flight_during_an_update_is_kept():
    async def main():
        host, workers, pool = build_pool()
        await pool.publish(WeightUpdate(1, weights="weights/1"))
        workers.during_call = lambda: pool.publish(WeightUpdate(2, weights="weights/0"))
        await pool.call(REQUEST)
        assert len(host.updates) == 2

    asyncio.run(main())


def test_t06_a_resumed_gateway_gets_its_weights_again():
    async def main():
        host, _, pool = build_pool()
        await pool.publish(WeightUpdate(1, weights="weights/1"))
        await pool.publish(WeightUpdate(1, paused=True))
        await pool.publish(WeightUpdate(1))
        assert host.updates[1:] == [WeightUpdate(1, paused=True), WeightUpdate(1, weights="weights/1")]

    asyncio.run(main())


@pytest.mark.parametrize("exit", [None, AgentExit("the agent exited with 1")], ids=["timeout", "failure"])
def test_a01_an_agent_that_fails_while_its_gateway_restarts_is_not_the_policys_fault(exit):
    episode = one_token(0)
    for restored, fault in ((False, Fault.POLICY), (True, Fault.INFRA)):
        completed = CompletedSession(episode, "", 0.0, restored)
        assert assign_blame(exit, completed, NO_LIMITS, TIME_LIMIT)[1] is fault
    assert assign_blame(AgentExit(), CompletedSession(episode, "", 0.0, restored=True), NO_LIMITS, TIME_LIMIT) == (
        Outcome.OK,
        None,
        "",
    )


def test_t04_a_session_records_whether_its_gateway_restarted(tmp_path):
    async def main():
        for restored in (False, True):
            async with serve(output=tmp_path) as gateway:
                session = await gateway.open("one")
                assert session.served.describe()["restored"] is restored
        async with serve(output=tmp_path) as gateway:
            await (await gateway.open("one")).close()
        async with serve(output=tmp_path) as gateway:
            assert gateway.find("one").describe()["restored"] is False, "it had ended before"

    asyncio.run(main())


def test_a01_a_gateway_that_restarts_without_its_sessions_loses_their_trials_only(tmp_path):
    """More than eight in a row, after which a pool whose gateway is unreachable would be down."""

    async def main():
        agent = "chat()\nwhile not os.path.exists(os.environ['LOOPWRIGHT_HOME'] + '/go'):\n    time.sleep(0.01)"
        async with open_setup(tmp_path, command=program(tmp_path, agent), deadline_s=60.0, concurrency=9) as setup:
            rolls = [asyncio.ensure_future(setup.roll(trial=number)) for number in range(9)]
            await until(lambda: sum(session.episode().turns for session in setup.sessions) == 9, 60)
            setup.host._gateway.sessions.clear()
            (tmp_path / "go").touch()
            for episode in await asyncio.gather(*rolls):
                assert (episode.outcome, episode.fault) == (Outcome.LOST, Fault.INFRA)
                assert "restarted without its sessions" in episode.reason

    asyncio.run(main())
