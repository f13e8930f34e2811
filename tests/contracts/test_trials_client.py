"""Contract A04: runs whose agents run at a trial server."""

import asyncio
import json
import os
import re
import signal
from contextlib import asynccontextmanager

import pytest

from loopwright.core.errors import ScenarioError
from loopwright.core.outcome import Fault, Outcome
from loopwright.engines.scripted import ScriptedConfig, ScriptedEngine
from loopwright.gateway.gateway import GatewayConfig
from loopwright.rollouts.loops.worker import RolloutRequest
from loopwright.rollouts.pools.base import PoolDown, WorkerLost
from loopwright.rollouts.pools.local import LocalPool
from loopwright.rollouts.remote.config import RemoteConfig
from loopwright.rollouts.remote.gateway_host import EmbeddedGatewayHost, GatewayAccess
from loopwright.rollouts.remote.gateway_pool import GatewayPool
from loopwright.rollouts.remote.worker import RemoteRequest
from loopwright.rollouts.trial_server.client import TrialServerClient, TrialServerLost, TrialServerWorker
from loopwright.scenario.load import load
from tests.contracts.harness import campaign, trials
from tests.gateway.harness import until
from tests.rollouts.remote.agents import TASK, running
from tests.rollouts.trial_server.serving import ENGINE_ARGS, TrialServerProcess, held_agent, serve
from tests.survival.campaign import Campaign, end_of, wait_for


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("trials"), "-j", "2", *ENGINE_ARGS) as server:
        yield server


class ServerSetup:
    """A pool with an embedded gateway and a loop with `server`."""

    def __init__(self, server, text, *, run_id="run", token=None, patience_s=30.0, **settings):
        (server.directory / "client.token").write_text(token or server.token)
        self.engine = ScriptedEngine(ScriptedConfig(replies=("an answer",), slip=0.0), server.directory)
        self.config = RemoteConfig(server=server.address, **server.loop(text, **settings))
        client = TrialServerClient(server.address, token or server.token, patience_s=patience_s)
        self.pool = GatewayPool(
            EmbeddedGatewayHost(GatewayConfig(), lambda: self.engine),
            LocalPool(lambda: TrialServerWorker(client, self.config, run="r", run_id=run_id)),
            client.check,
        )

    async def roll(self, trial=1, attempt=0):
        return await self.pool.call(RolloutRequest(TASK, f"0:{trial}:{attempt}", trial=trial), timeout_s=90)


@asynccontextmanager
async def open_setup(server, text, **settings):
    setup = ServerSetup(server, text, **settings)
    try:
        await setup.pool.start()
        yield setup
    finally:
        await setup.pool.close()


def run_agent(server, text, **settings):
    async def main():
        async with open_setup(server, text, **settings) as setup:
            return await setup.roll()

    return asyncio.run(main())


def test_a04_the_loop_gets_the_episode_that_its_gateway_recorded(server):
    text = "print(chat(), os.environ['LOOPWRIGHT_TRIAL_NUMBER'])"
    text += "; open('note.txt', 'w').write('!')"
    episode = run_agent(server, text, run_id="own", max_turns=3, artifacts=["*.txt"])
    origin = episode.evidence["server"]
    assert (origin["url"], origin["attempts"], origin["artifacts"]) == (server.address, 1, {"note.txt": 1})
    assert origin["left_off"] == []
    assert server.status(origin)["status"] == "ended"
    assert (episode.outcome, episode.fault, episode.answer) == (Outcome.OK, None, "an answer")
    assert episode.task == TASK, "with its label, which was not sent"
    assert episode.evidence["agent"]["stdout"] == "an answer 1\n"
    assert b"secret label" not in (server.directory / "out" / "trials.db-wal").read_bytes()


def test_a04_faults_are_the_same_as_for_local_agents(server):
    late = run_agent(server, "chat(); time.sleep(1000)", run_id="late", deadline_s=2.0)
    assert (late.outcome, late.fault) == (Outcome.TRUNCATED, Fault.POLICY)
    crashed = run_agent(server, "sys.exit(4)", run_id="crashed")
    assert (crashed.outcome, crashed.fault) == (Outcome.CRASHED, Fault.WORKLOAD)


def test_a04_a_repeated_trial_does_not_run_twice_unless_it_was_cancelled(server):
    count = server.directory / "asked"
    text = f"chat(); open({str(count)!r}, 'a').write('x')"
    first, second = (run_agent(server, text, run_id="again") for _ in range(2))
    assert first.nodes == second.nodes
    assert count.read_text() == "x"

    async def main():
        agent, starts = held_agent(server.directory, "cancelled")
        async with open_setup(server, agent, run_id="resumed") as setup:
            flight = asyncio.ensure_future(setup.roll())
            await until(starts, 60.0)
            flight.cancel()
            with pytest.raises(asyncio.CancelledError):
                await flight
            assert running(str(server.directory / "cancelled")) == []
        (server.directory / "go").touch()
        async with open_setup(server, agent, run_id="resumed") as setup:
            assert (await setup.roll()).outcome is Outcome.OK
        assert starts() == 2

    try:
        asyncio.run(main())
    finally:
        (server.directory / "go").unlink(missing_ok=True)


def test_a04_a_key_of_another_trial_is_skipped(server):
    """After a change of the loop, the trials of a run are new ones."""
    first, second = (run_agent(server, text, run_id="changed") for text in ("print(chat())", "chat(); print('new')"))
    assert (first.evidence["agent"]["stdout"], second.evidence["agent"]["stdout"]) == ("an answer\n", "new\n")
    assert first.evidence["server"]["id"] != second.evidence["server"]["id"]


def test_a04_another_kind_of_server_is_recognised(server):
    """A server that answers but is not a trial server."""

    async def main():
        async def foreign(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 13\r\nconnection: close\r\n\r\n{"hello": 42}')
            writer.close()

        listening = await asyncio.start_server(foreign, "127.0.0.1", 0)
        async with listening:
            client = TrialServerClient(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", patience_s=0.0)
            with pytest.raises(TrialServerLost, match="Is it a trial server"):
                await client.check()
            client = TrialServerClient(client.url, patience_s=0.0)
            worker = TrialServerWorker(client, RemoteConfig(**server.loop("chat()")), run="r", run_id="r")
            with pytest.raises(TrialServerLost, match="Is it a trial server"):
                await worker.handle(RemoteRequest(GatewayAccess(client.url), RolloutRequest(TASK, "0:1:0")))
            await worker.close()

    asyncio.run(main())


def test_a04_a_resumed_run_restarts_trials_whose_gateway_is_gone(server):
    async def main():
        agent, starts = held_agent(server.directory, "moved")
        async with open_setup(server, agent, run_id="moved") as former:
            first = asyncio.ensure_future(former.roll())
            await until(starts, 60.0)
            async with open_setup(server, agent, run_id="moved") as resumed:
                second = asyncio.ensure_future(resumed.roll())
                await until(lambda: starts() == 2, 60.0)
                with pytest.raises(WorkerLost, match="cancelled"):
                    await first
                (server.directory / "go").touch()
                assert (await second).turns == 1

    try:
        asyncio.run(main())
    finally:
        (server.directory / "go").unlink(missing_ok=True)


def test_a04_a_server_that_is_killed_and_restarted_loses_no_rollout(tmp_path):
    async def main():
        agent, starts = held_agent(tmp_path, "held")
        with serve(tmp_path) as first:
            async with open_setup(first, agent) as setup:
                flight = asyncio.ensure_future(setup.roll())
                await until(starts, 60.0)
                await asyncio.to_thread(first.kill)
                port = re.search(r":(\d+)$", first.address)[1]
                second = await asyncio.to_thread(TrialServerProcess, tmp_path, "--port", port)
                try:
                    await until(lambda: starts() == 2, 60.0)
                    (tmp_path / "go").touch()
                    episode = await flight
                finally:
                    await asyncio.to_thread(second.end)
        assert (episode.outcome, episode.turns) == (Outcome.OK, 1)

    asyncio.run(main())


def test_a04_a_server_that_stays_down_is_not_the_policys_fault(tmp_path):
    async def main():
        agent, starts = held_agent(tmp_path, "held")
        with serve(tmp_path) as server:
            async with open_setup(server, agent, patience_s=0.1) as setup:
                flight = asyncio.ensure_future(setup.roll())
                await until(starts, 60.0)
                await asyncio.to_thread(server.kill)
                with pytest.raises(WorkerLost, match="cannot reach the trial server"):
                    await flight

    asyncio.run(main())


def test_a04_a_wrong_token_stops_the_run_before_it_starts(server):
    with pytest.raises(PoolDown, match="token_file"):
        run_agent(server, "chat()", token="no-such-token-at-all")


SCENARIO = """
name = "served"
[[run]]
name = "work"
agent = {{ type = "collect", trials = {trials}, group_size = 2 }}
[run.rollout]
tasks = {{ type = "jsonl", path = "tasks.jsonl" }}
loop = {{ type = "remote", server = "{address}", token_file = "out/token", command = {command}, deadline_s = 60{more} }}
judger = {{ type = "python", function = "served_judge:one" }}
{engine}
"""
ENGINE = '[run.engine]\ntype = "scripted"\nreplies = ["an answer"]'


def scenario(server, text, *, trials=4, engine=ENGINE, more=""):
    (server.directory / "tasks.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    (server.directory / "served_judge.py").write_text("def one(answer):\n    return float(len(answer) > 0)\n")
    command = json.dumps(server.loop(text)["command"])
    return SCENARIO.format(trials=trials, address=server.address, command=command, engine=engine, more=more)


def test_a04_a_run_can_use_its_own_engine_or_the_servers(server):
    assert campaign(server.directory, scenario(server, "chat()"), output="run") == 0
    own = scenario(server, "chat()", engine='[run.gateway]\ntype = "server"')
    assert campaign(server.directory, own, output="own") == 0
    for output in ("run", "own"):
        results = trials(server.directory, "work", output)
        assert [(trial.outcome, trial.reward.value) for trial in results] == [(Outcome.OK, 1.0)] * 4


@pytest.mark.parametrize(
    ("more", "engine", "message"),
    [
        (", workers = 2", ENGINE, "loop.workers: has no meaning with `server`"),
        ("", ENGINE + '\n[run.gateway]\ntype = "server"', "[run.engine]: has no meaning with a trial server's"),
    ],
)
def test_a04_conflicting_settings_are_errors_at_load_time(server, more, engine, message):
    file = server.directory / "wrong.toml"
    file.write_text(scenario(server, "chat()", engine=engine, more=more))
    with pytest.raises(ScenarioError) as raised:
        load(file)
    assert message in str(raised.value)
    with pytest.raises(ValueError, match="`artifacts` has no meaning without `server`"):
        RemoteConfig(command=("x",), artifacts=("*",))


@pytest.mark.slow
def test_a04_a_run_that_is_killed_and_resumed_does_not_repeat_finished_trials(tmp_path):
    with serve(tmp_path, "-j", "1") as server:
        text = f"chat(); open({str(tmp_path / 'count')!r}, 'a').write('x')"
        campaign_run = Campaign(tmp_path, scenario(server, text, trials=12))
        process = campaign_run.start()
        wait_for(lambda: (tmp_path / "count").exists() and len((tmp_path / "count").read_text()) >= 4)
        os.killpg(process.pid, signal.SIGKILL)
        end_of(process)
        result = campaign_run.call("resume")
        assert result.code == 0, result.err
        assert [trial.outcome for trial in campaign_run.trials()] == [Outcome.OK] * 12
        assert len((tmp_path / "count").read_text()) <= 13, "at most the one that was running"
