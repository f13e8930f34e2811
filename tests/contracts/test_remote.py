"""Contracts of remote agents and of a run's gateway: A01, A03, T09, T11 and T12, with programs that misbehave."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import aiohttp
import aiohttp.web
import pytest
import ray

from loopwright.core.episode import Episode
from loopwright.core.errors import ScenarioError
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.reward import Reward
from loopwright.core.task import Task
from loopwright.engines.base import Sampling, engines
from loopwright.engines.scripted import ScriptedConfig
from loopwright.engines.weight_update import WeightUpdate
from loopwright.execution.sandbox import SandboxError, sandbox_of
from loopwright.execution.sandbox.files import remove
from loopwright.gateway.client import GatewayClient, GatewayLost, endpoint
from loopwright.gateway.gateway import AdvertiseError, Gateway, GatewayConfig
from loopwright.gateway.sessions.session_config import SessionConfig
from loopwright.ledger.ledger import Ledger
from loopwright.rollouts.config import RolloutConfig
from loopwright.rollouts.loops.worker import RolloutRequest
from loopwright.rollouts.pools.base import PoolDown, WorkerLost
from loopwright.rollouts.remote import rollout as trial
from loopwright.rollouts.remote.access import GatewayAccess
from loopwright.rollouts.remote.config import RemoteConfig
from loopwright.rollouts.remote.gateway_host import (
    EmbeddedGatewayConfig,
    EmbeddedGatewayHost,
    ExternalGatewayHost,
    RayGatewayConfig,
    build_gateway_host,
)
from loopwright.rollouts.remote.worker import RemoteRequest
from loopwright.scenario.dispatch import dispatch
from loopwright.scenario.load import load
from loopwright.scenario.overrides import parse_assignments
from loopwright.testing import GatewayContract, LoopContract
from loopwright.testing.gateways import said
from loopwright.testing.loops import RecordingEngine
from tests.gateway import relaying
from tests.gateway.relaying import relayed
from tests.gateway.serving import Teller, until
from tests.rollouts.pools.ray_cluster import cluster  # noqa: F401
from tests.rollouts.remote.agents import CHAT, TASK, Stage, alive, program, rolled, running, staged
from tests.survival.campaign import Campaign, wait_for

SCRIPTED = ScriptedConfig(replies=("yes", "no"), slip=0.2)


# -- A01: an agent from its start to its end -----------------------------------------------------------------------


def test_a01_an_agent_is_started_with_its_base_urls_and_its_episode_comes_home(tmp_path):
    told = rolled(
        tmp_path,
        "print(json.dumps({**os.environ, 'cwd': os.getcwd(), 'argv': sys.argv, 'said': chat(sys.argv[1])}))",
        arguments=("{instruction}", "{id}", "{workspace}", "{openai_base_url}", "{key}", "{{}}"),
        env={"MORE": "1"},
    )

    assert (told.outcome, told.fault, told.turns, told.answer) == (Outcome.OK, None, 1, "an answer")
    assert told.task == TASK
    assert told.evidence["agent"]["exit_code"] == 0
    seen = json.loads(told.evidence["agent"]["stdout"])
    assert seen["said"] == "an answer"
    url, key = seen["OPENAI_BASE_URL"], seen["OPENAI_API_KEY"]
    assert seen["argv"][1:] == ["What is it?", "t", seen["cwd"], url, key, "{}"]
    assert (seen["OPENAI_API_BASE"], seen["ANTHROPIC_API_KEY"]) == (url, key)
    assert seen["ANTHROPIC_BASE_URL"] == url.removesuffix("/v1")
    assert (seen["LOOPWRIGHT_TRIAL_NUMBER"], seen["LOOPWRIGHT_WORKSPACE"], seen["MORE"]) == ("1", seen["cwd"], "1")
    assert seen["LOOPWRIGHT_SESSION"] in url
    assert "PYTEST_CURRENT_TEST" not in seen, "little of our own environment"
    phases = told.attempts[-1].phases_s
    assert set(phases) == {"boot", "agent", "generate", "collect", "teardown"}
    assert phases["agent"] >= phases["generate"]
    assert "secret label" not in json.dumps(seen)


def test_a01_an_agent_that_hangs_after_it_spoke_is_truncated_and_scored(tmp_path):
    episode = rolled(tmp_path, "chat(); time.sleep(1000)", deadline_s=2.0)
    assert (episode.outcome, episode.fault, episode.turns) == (Outcome.TRUNCATED, Fault.POLICY, 1)
    assert "not done within 2 s" in episode.reason
    assert running(str(tmp_path / "agent.py")) == []


def test_a01_an_agent_that_hangs_without_a_word_is_no_fault_of_the_policy(tmp_path):
    episode = rolled(tmp_path, "time.sleep(1000)", deadline_s=1.0)
    assert (episode.outcome, episode.fault) == (Outcome.TIMEOUT, Fault.WORKLOAD)


def test_a01_what_an_agent_forked_away_is_gone_with_it(tmp_path):
    text = """
chat()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(1000)", "forked-away"])
    os._exit(0)
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", "left-behind"]).pid, flush=True)
time.sleep(0.3)
"""
    episode = rolled(tmp_path, text)
    assert episode.outcome is Outcome.OK
    assert not alive(int(episode.evidence["agent"]["stdout"]))
    assert running("forked-away") == []


def test_a01_an_agent_that_crashes_without_a_word_is_a_fault_of_the_workload(tmp_path):
    episode = rolled(tmp_path, "raise SystemExit('no config')")
    assert (episode.outcome, episode.fault) == (Outcome.CRASHED, Fault.WORKLOAD)
    assert "exited with 1" in episode.reason
    assert "no config" in episode.evidence["agent"]["stderr"]


def test_a01_an_agent_that_breaks_over_what_the_policy_said_is_scored(tmp_path):
    episode = rolled(tmp_path, "int(chat())")
    assert (episode.outcome, episode.fault, episode.turns) == (Outcome.TRUNCATED, Fault.POLICY, 1)
    assert "exited with 1, after 1 turn" in episode.reason
    assert episode.judged(Reward(0.0)).trainable


def test_a01_an_agent_that_is_ended_by_a_signal_says_so(tmp_path):
    episode = rolled(tmp_path, "chat(); os.kill(os.getpid(), 9)")
    assert (episode.fault, episode.evidence["agent"]["signal"]) == (Fault.POLICY, signal.SIGKILL)


def test_a01_an_agent_that_never_calls_is_scored_and_not_trained_on(tmp_path):
    episode = rolled(tmp_path, "print('42')")
    assert (episode.outcome, episode.fault, episode.sampled) == (Outcome.OK, None, 0)
    assert episode.reason == "the agent never called the model"
    judged = episode.judged(Reward(1.0))
    assert judged.in_baseline
    assert not judged.trainable


def test_a01_an_agent_that_prints_without_end_leaves_the_end_of_it(tmp_path):
    episode = rolled(tmp_path, "chat()\nwhile True: print('x' * 1000)", deadline_s=2.0, output=8192)
    assert episode.outcome is Outcome.TRUNCATED
    assert 0 < len(episode.evidence["agent"]["stdout"]) <= 16 * 1024


def test_a01_a_program_that_is_not_there_is_found_at_load_time_or_costs_one_rollout(tmp_path):
    config = RemoteConfig(command=("no-such-agent",))
    (problem,) = config.problems(tmp_path)
    assert problem.key == "command"
    assert "no-such-agent" in problem.message

    async def story():
        async with staged(tmp_path, command=("no-such-agent",)) as stage:
            return await stage.roll()

    episode = asyncio.run(story())
    assert (episode.outcome, episode.fault) == (Outcome.CRASHED, Fault.WORKLOAD)
    assert "not found" in episode.reason


def test_a01_a_call_after_the_end_is_refused(tmp_path):
    async def story():
        text = "chat(); print(os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY'])"
        async with staged(tmp_path, command=program(tmp_path, text)) as stage:
            episode = await stage.roll()
            url, key = episode.evidence["agent"]["stdout"].split()
            body = {"model": "m", "messages": [{"role": "user", "content": "one more"}]}
            headers = {"authorization": f"Bearer {key}"}
            async with (
                aiohttp.ClientSession(headers=headers) as client,
                client.post(f"{url}/chat/completions", json=body) as response,
            ):
                assert response.status == 409
            assert len(stage.engine.calls) == 1

    asyncio.run(story())


def test_a01_an_engine_that_fails_or_stalls_is_no_fault_of_the_policy(tmp_path):
    lost = rolled(tmp_path, "chat()", Teller(fail_at=2))
    assert (lost.outcome, lost.fault) == (Outcome.LOST, Fault.INFRA)
    assert "out of memory" in lost.reason
    stalled = rolled(tmp_path, "chat()", Teller(hold_at=2), deadline_s=2.0)
    assert (stalled.outcome, stalled.fault) == (Outcome.LOST, Fault.INFRA)
    assert "the engine gave no token" in stalled.reason


def test_a01_budgets_and_sampling_are_the_loops_to_set(tmp_path):
    engine = Teller("a long answer")
    cut = rolled(tmp_path, "chat()", engine, max_tokens=3)
    assert (cut.outcome, cut.fault, cut.sampled) == (Outcome.TRUNCATED, Fault.POLICY, 3)
    spent = rolled(tmp_path, "[chat(str(n)) for n in range(3)]", engine, max_turns=2)
    assert (spent.outcome, spent.fault, spent.turns) == (Outcome.TRUNCATED, Fault.POLICY, 2)
    assert "all 2 turns are used up" in spent.reason
    rolled(tmp_path, "chat()", engine, sampling=Sampling(temperature=0.5, max_tokens=7))
    assert (engine.calls[-1][2].temperature, engine.calls[-1][2].max_tokens) == (0.5, 7)


def test_a01_what_an_evaluation_says_of_sampling_lies_over_what_the_loop_says(tmp_path):
    engine, sampling = Teller("a long answer"), Sampling(temperature=0.5, max_tokens=7)

    async def story():
        async with staged(tmp_path, engine, command=program(tmp_path, "chat()"), sampling=sampling) as stage:
            return await stage.pool.call(RolloutRequest(TASK, "0", Sampling(temperature=0), 1), timeout_s=60)

    assert asyncio.run(story()).sampled == 7
    assert engine.calls[-1][2].temperature == 0


def test_a01_cancelling_releases_session_process_and_workspace(tmp_path):
    async def story():
        command = program(tmp_path, "chat(); time.sleep(1000)")
        async with staged(tmp_path, command=command) as stage:
            flight = asyncio.ensure_future(stage.roll())
            await until(lambda: stage.sessions and len(stage.engine.calls) == 1, 20.0)
            assert running(str(tmp_path / "agent.py"))
            flight.cancel()
            with pytest.raises(asyncio.CancelledError):
                await flight
            await until(lambda: not running(str(tmp_path / "agent.py")), 20.0)
            await until(lambda: [live.status for live in stage.sessions] == ["complete"], 20.0)
            assert stage.sessions[0].outcome is Outcome.ABORTED
            await until(lambda: list(stage.directory.iterdir()) == [], 20.0)

    asyncio.run(story())


def test_a01_directories_that_lie_deep_in_one_another_cost_no_episode(tmp_path):
    dig = "chat()\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')"
    assert rolled(tmp_path, dig).outcome is Outcome.OK


def test_a01_an_agent_cannot_make_its_episode_late_by_what_it_leaves(tmp_path, monkeypatch):
    """Given a workspace that takes long to delete, its episode is there before; the run ends when it is gone."""
    may, gone = threading.Event(), []
    monkeypatch.setattr(trial, "remove", lambda path: may.wait(30) and gone.append(remove(path)))

    async def story():
        async with staged(tmp_path, command=program(tmp_path, "chat()")) as stage:
            episode = await stage.roll()
            assert list(stage.directory.iterdir()) != []
            closing = asyncio.ensure_future(stage.pool.close())
            await asyncio.sleep(0.2)
            assert not closing.done()
            may.set()
            await closing
        return episode

    episode = asyncio.run(story())
    assert (episode.outcome, episode.turns, len(gone)) == (Outcome.OK, 1, 1)
    assert 0.5 < episode.attempts[-1].phases_s["teardown"] < 5


def test_a01_what_goes_wrong_with_the_clearing_up_costs_no_episode(tmp_path, monkeypatch, caplog):
    def fail(_):
        raise RuntimeError("the disk is strange")

    monkeypatch.setattr(trial, "remove", fail)

    async def story():
        async with staged(tmp_path, command=program(tmp_path, "chat()")) as stage:
            return await stage.roll()

    assert asyncio.run(story()).outcome is Outcome.OK
    assert "the disk is strange" in caplog.text


def test_a01_who_only_looks_at_a_workspace_cannot_hold_up_its_episode(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "_KEEP_S", 0.2)
    may = threading.Event()

    async def story():
        async with staged(tmp_path, command=program(tmp_path, "chat()")) as stage:
            order = RemoteRequest(await stage.home.access(), RolloutRequest(TASK, "0", trial=1), lambda _: may.wait(30))
            return await asyncio.wait_for(stage.worker.handle(order), 20)

    try:
        assert asyncio.run(story()).outcome is Outcome.OK
    finally:
        may.set()


def test_a01_a_trial_whose_gateway_is_nowhere_leaves_no_directory(tmp_path):
    async def story():
        async with staged(tmp_path, command=program(tmp_path, "chat()")) as stage:
            with pytest.raises(ValueError, match="no URL"):
                await stage.worker.handle(RemoteRequest(GatewayAccess("nowhere"), RolloutRequest(TASK, "0", trial=1)))
            assert list(stage.directory.iterdir()) == []

    asyncio.run(story())


def test_a01_agents_are_not_shown_what_they_are_judged_by(tmp_path):
    """Given `readable` with the scenario, a source of tasks or a part of it in it, it is refused at load time."""
    task = harbor(tmp_path, "true")
    (tmp_path / "agents").mkdir()
    tasks = [{"type": "harbor", "path": "task"}]
    for name, told in {".": "all of", "task": "the tasks of 'task'", "task/tests": "the tasks of 'task'"}.items():
        loop = {"type": "remote", "command": ["true"], "sandbox": "bwrap", "readable": [name]}
        config = RolloutConfig(tasks=tasks, loop=loop, judger={"type": "verifier"})
        assert [problem for problem in config.problems(tmp_path) if told in problem.message], name
    loop["readable"] = ["agents"]
    config = RolloutConfig(tasks=tasks, loop=loop, judger={"type": "verifier"})
    assert config.problems(tmp_path) == []
    assert config.loop.task_problem(task, tmp_path) == ""
    assert "would show" in config.loop.model_copy(update={"readable": ("task",)}).task_problem(task, tmp_path)


def test_a01_a_gateway_that_is_gone_costs_rollouts_and_then_ends_the_run(tmp_path):
    async def story():
        async with staged(tmp_path, command=program(tmp_path, "chat()")) as stage:
            await stage.home._gateway.__aexit__(None, None, None)
            found = await asyncio.gather(*(stage.roll(trial=n) for n in range(8)), return_exceptions=True)
            assert [type(error) for error in found].count(WorkerLost) == 7
            assert [type(error) for error in found].count(PoolDown) == 1
            assert "cannot reach the gateway" in str(found[0])

    asyncio.run(story())


def harbor(home, test):
    """A task with a file to be changed, and tests for it."""
    task = home / "task"
    for name, text in {
        "task.toml": "[environment]\n[verifier]\ntimeout_sec = 30\n",
        "instruction.md": "Say yes in answer.txt.",
        "environment/Dockerfile": "FROM scratch\nWORKDIR /app\nCOPY answer.txt /app/answer.txt\n",
        "environment/answer.txt": "no\n",
        "tests/test.sh": f"#!/bin/bash\n{test}\n",
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    message = {"role": "user", "content": "Say yes in answer.txt."}
    return Task("task", (message,), extra={"local_task_path": str(task), "instance_id": "task"})


def verified(home, text, test, **config):
    async def story():
        command = program(home, text, "{instruction}")
        async with staged(home, command=command, verifies=True, **config) as stage:
            return await stage.roll(harbor(home, test))

    return asyncio.run(story())


def test_a01_the_tasks_tests_are_run_once_the_agent_is_gone(tmp_path):
    text = "chat(sys.argv[1]); print(open('answer.txt').read()); open('answer.txt', 'w').write('yes')"
    test = 'grep -q yes answer.txt && echo 1 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"'
    episode = verified(tmp_path, text, test)
    assert episode.outcome is Outcome.OK, episode.reason
    assert episode.evidence["agent"]["stdout"] == "no\n\n", "the task's own files were laid out for it"
    assert episode.evidence["verifier"]["rewards"] == {"reward": 1.0}
    assert "verify" in episode.attempts[-1].phases_s


def test_a01_a_task_that_brings_a_key_of_its_own_does_not_lead_its_agent_past_the_gateway(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "our own, which costs money")
    task = harbor(tmp_path, "true")
    file = Path(task.extra["local_task_path"]) / "task.toml"
    own = '[environment.env]\nOPENAI_API_KEY = "${OPENAI_API_KEY}"\nOPENAI_BASE_URL = "http://no"\nMORE = "1"\n'
    file.write_text(file.read_text().replace("[environment]\n", own))

    async def story():
        command = program(tmp_path, "chat(); print(os.environ['MORE'], 'money' in str(os.environ))")
        async with staged(tmp_path, command=command) as stage:
            return await stage.roll(task)

    episode = asyncio.run(story())
    assert (episode.outcome, episode.turns) == (Outcome.OK, 1), episode
    assert episode.evidence["agent"]["stdout"] == "1 False\n"


def test_a01_one_deadline_is_over_the_agent_and_the_tests(tmp_path):
    hangs = verified(tmp_path, "chat(sys.argv[1]); time.sleep(1000)", "sleep 1000", deadline_s=4.0, verify_s=1.0)
    assert (hangs.outcome, hangs.fault) == (Outcome.TRUNCATED, Fault.POLICY)
    assert "deadline of 4 s" in hangs.evidence["verifier"]["error"]
    assert hangs.evidence["verifier"]["stopped"]
    assert running(str(tmp_path / "agent.py")) == []


def test_a01_a_sandboxed_agent_reaches_the_gateway_and_little_else(tmp_path):
    try:
        sandbox_of("bwrap").check()
    except SandboxError as error:
        pytest.skip(str(error))
    (tmp_path / "secret.txt").write_text("the labels")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "agent.py").write_text(
        f"{CHAT}\nprint(chat(), os.path.exists({str(tmp_path)!r} + '/secret.txt'))"
    )

    async def story():
        command = (sys.executable, "{home}/bin/agent.py")
        async with staged(tmp_path, command=command, sandbox="bwrap", readable=["bin"]) as stage:
            return await stage.roll()

    episode = asyncio.run(story())
    assert episode.evidence["agent"].get("stdout") == "an answer False\n", episode.evidence
    assert (episode.outcome, episode.turns) == (Outcome.OK, 1)


def test_a01_what_a_trial_may_use_is_bounded_and_the_bound_is_named(tmp_path):
    try:
        sandbox_of("bwrap").check()
    except SandboxError as error:
        pytest.skip(str(error))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "agent.py").write_text(
        f"{CHAT}\nchat(); os.fork(); os.fork(); held = b'x' * (80 << 20); time.sleep(50)"
    )

    async def story():
        command = (sys.executable, "{home}/bin/agent.py")
        walls = {"sandbox": "bwrap", "readable": ["bin"], "bounds": {"memory": "200MiB"}}
        async with staged(tmp_path, command=command, **walls) as stage:
            return await stage.roll()

    episode = asyncio.run(story())
    assert (episode.outcome, episode.fault, episode.turns) == (Outcome.TRUNCATED, Fault.POLICY, 1)
    assert "the agent was ended: memory" in episode.reason


def test_a01_bounds_that_nothing_would_hold_are_refused():
    with pytest.raises(ValueError, match=r"`bounds` need walls.*bwrap"):
        RemoteConfig(command=("agent",), bounds={"memory": "1GiB"})


REMOTE = """
name = "remote"
[[run]]
name = "work"
agent = {{ type = "collect", trials = 6, group_size = 2 }}
[run.rollout]
tasks = {{ type = "jsonl", path = "tasks.jsonl" }}
loop = {{ type = "remote", command = {command}, deadline_s = 60, concurrency = 2{loop} }}
judger = {{ type = "python", function = "judge:exact" }}
{more}
"""
ENGINE = '[run.engine]\ntype = "scripted"\nreplies = ["yes"]\nslip = 0.0\n'


def scenario(home, text, *, loop="", more=ENGINE):
    home.mkdir(parents=True, exist_ok=True)
    (home / "tasks.jsonl").write_text('{"prompt": "is it?", "label": "yes"}\n' * 3)
    (home / "judge.py").write_text("def exact(answer, label):\n    return float(answer == label)\n")
    command = json.dumps(list(program(home, text, "{instruction}")))
    return REMOTE.format(command=command, loop=loop, more=more)


def test_a01_a_run_that_is_killed_leaves_nothing_and_goes_on(tmp_path):
    text = f"""
chat(sys.argv[1])
if not os.path.exists({str(tmp_path / "go")!r}):
    open({str(tmp_path)!r} + "/pid-" + str(os.getpid()), "w").close()
    time.sleep(1000)
"""
    campaign = Campaign(tmp_path, scenario(tmp_path, text))
    process = campaign.start()
    wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not running(str(tmp_path / "agent.py")))
    (tmp_path / "go").touch()

    ended = campaign.call("resume")

    assert ended.code == 0, ended.err
    with Ledger.read(campaign.ledger) as ledger:
        trials = list(ledger.trials())
        assert [trial.number for trial in trials] == [1, 2, 3, 4, 5, 6]
        assert all(trial.outcome is Outcome.OK for trial in trials)
        episodes = [Episode.from_bytes(ledger.payload(trial.number, "rollout")) for trial in trials]
        assert [episode.turns for episode in episodes] == [1] * 6, "nothing of the killed attempts is in them"


# -- A03: arguments ------------------------------------------------------------------------------------------------

AGENT = """
import aiohttp

async def solve(task, base_url, api_key, seen, more=()):
    assert seen == {"trials": []}, seen
    seen["trials"].append(task.id)
    headers = {"authorization": f"Bearer {api_key}"}
    body = {"model": "m", "messages": list(task.messages)}
    async with aiohttp.ClientSession(headers=headers) as client:
        async with client.post(f"{base_url}/chat/completions", json=body) as response:
            response.raise_for_status()
            return {"said": (await response.json())["choices"][0]["message"]["content"], "more": more}

async def rewrite(task):
    task.messages[0]["content"] = f"not {task.messages[0]['content']}"
    task.extra["seen"].append(task.id)
    return {"label": task.label, "seen": task.extra["seen"], "said": task.messages[0]["content"]}

async def ask_for_the_moon(task, moon):
    ...

async def deaf():
    import asyncio
    try:
        await asyncio.sleep(1000)
    except asyncio.CancelledError:
        await asyncio.sleep(1000)  # until the event loop itself ends

def not_async(task):
    ...
"""


def with_agents(home):
    name = f"my_agents_{home.name.replace('-', '_')}"
    (home / f"{name}.py").write_text(AGENT)
    return name


def test_a03_arguments_are_copied_for_each_trial(tmp_path):
    async def story():
        args = {"seen": {"trials": []}, "more": [1]}
        name = with_agents(tmp_path)
        async with staged(tmp_path, function=f"{name}:solve", args=args) as stage:
            episodes = await asyncio.gather(*(stage.roll(trial=n) for n in range(4)))
        assert [episode.reason for episode in episodes] == [""] * 4
        assert episodes[0].evidence["agent"]["returned"] == {"said": "an answer", "more": [1]}
        assert stage.config.args == {"seen": {"trials": []}, "more": [1]}

    asyncio.run(story())


def test_a03_a_task_is_copied_for_each_trial_without_its_label(tmp_path):
    async def story():
        task = Task("t", ({"role": "user", "content": "this"},), "secret label", extra={"seen": []})
        async with staged(tmp_path, function=f"{with_agents(tmp_path)}:rewrite") as stage:
            episodes = await asyncio.gather(*(stage.roll(task, trial=n) for n in range(2)))
        for episode in episodes:
            told = episode.evidence["agent"]["returned"]
            assert told == {"label": None, "seen": ["t"], "said": "not this"}
            assert (episode.task.messages[0]["content"], episode.task.extra) == ("this", {"seen": []})
            assert episode.task.label == "secret label", "the judger has it"

    asyncio.run(story())


def test_a03_a_command_finds_its_arguments_as_json(tmp_path):
    episode = rolled(tmp_path, "print(json.loads(os.environ['LOOPWRIGHT_ARGS'])['depth'])", args={"depth": 3})
    assert episode.evidence["agent"]["stdout"] == "3\n"


def test_a03_a_function_that_raises_after_a_call_or_never_ends(tmp_path):
    async def story():
        name = with_agents(tmp_path)
        async with staged(tmp_path, function=f"{name}:solve", args={"seen": {}}) as stage:
            crashed = await stage.roll()
        async with staged(tmp_path, function=f"{name}:deaf", deadline_s=0.5) as stage:
            late = await stage.roll()
            assert stage.sessions[0].status == "complete"
        return crashed, late

    crashed, late = asyncio.run(story())
    assert (crashed.outcome, crashed.fault) == (Outcome.CRASHED, Fault.WORKLOAD)
    assert "AssertionError" in crashed.reason
    assert (late.outcome, late.fault) == (Outcome.TIMEOUT, Fault.WORKLOAD)


def test_a03_what_a_function_takes_is_checked_before_anything_starts(tmp_path):
    name = with_agents(tmp_path)

    def problems(function, **more):
        return "; ".join(map(str, RemoteConfig(function=f"{name}:{function}", **more).problems(tmp_path)))

    assert problems("solve", args={"seen": {}}) == ""
    assert "asks for 'moon', which nobody gives it" in problems("ask_for_the_moon")
    assert "does not take 'depth' of `args`" in problems("solve", args={"seen": {}, "depth": 3})
    assert "no async function" in problems("not_async")
    assert "no sandbox can hold" in problems("deaf", sandbox="bwrap")
    with pytest.raises(ValueError, match=r"nothing is called \{instructions\}.*Did you mean 'instruction'"):
        RemoteConfig(command=("agent", "{instructions}"))
    with pytest.raises(ValueError, match="either `command` or `function`"):
        RemoteConfig()


class TestRemoteFunction(LoopContract):
    """A remote loop keeps the contract of all loops."""

    def make_config(self, home, **settings):
        return RemoteConfig(function=f"{with_agents(home)}:solve", args={"seen": {"trials": []}}, **settings)

    def use(self, home, story, *, engine=None, **settings):
        async def main():
            config = self.make_config(home, **settings)
            policy = RecordingEngine(ScriptedConfig(replies=self.replies, **(engine or {})), home)
            stage = Stage(home, policy, **config.model_dump(exclude_unset=True))
            await stage.pool.start()
            stage.pool.handle = stage.pool.call
            stage.pool.apply_update = stage.pool.publish
            try:
                return await asyncio.wait_for(story(stage.pool, policy), 60)
            finally:
                await stage.pool.close()

        return asyncio.run(main())


# -- T09: settings -------------------------------------------------------------------------------------------------


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("REMOTE_", "LLM_PROXY", "PROXY_SERVER"))]:
        monkeypatch.delenv(name)
    file = tmp_path / "s.toml"

    def of(*settings, more=ENGINE, environ=None, loop=""):
        file.write_text(scenario(tmp_path, "chat()", more=more, loop=loop))
        with monkeypatch.context() as patched:
            for name, value in (environ or {}).items():
                patched.setenv(name, value)
            return load(file, set=parse_assignments(settings)).scenario.run[0]

    return of


def test_t09_the_command_line_comes_over_the_environment_over_the_file(loaded):
    gateway = ENGINE + "[run.gateway]\nport = 1111\nttl_s = 5\n"
    assert loaded(more=gateway).gateway == EmbeddedGatewayConfig(port=1111, ttl_s=5)
    environ = {"REMOTE_GATEWAY_PORT": "2222", "REMOTE_DEADLINE_S": "30", "REMOTE_ENV": '{"A": "1"}'}
    run = loaded(more=gateway, environ=environ)
    assert run.gateway == EmbeddedGatewayConfig(port=2222, ttl_s=5)
    assert (run.rollout.loop.deadline_s, run.rollout.loop.env) == (30.0, {"A": "1"})
    run = loaded("gateway.port=3333", "loop.deadline_s=7", more=gateway, environ=environ)
    assert (run.gateway.port, run.rollout.loop.deadline_s) == (3333, 7.0)
    assert run.rollout.loop.env == {"A": "1"}


def test_t09_an_external_gateway_by_its_url(loaded):
    run = loaded(environ={"PROXY_SERVER_URL": "https://gateway.example", "REMOTE_GATEWAY_TOKEN": "0123456789abcdef"})
    assert (run.gateway.type, run.gateway.url, run.engine.type) == ("external", "https://gateway.example", "external")
    assert "0123456789abcdef" not in run.model_dump_json()
    assert endpoint(run.gateway.url) == ("gateway.example", 443)
    assert endpoint("http://gpu-box/proxy/") == ("gpu-box", 80)
    assert endpoint("http://gpu-box:8400") == ("gpu-box", 8400)
    for bad in ("gpu-box:8400", "http://gpu-box:port", "ftp://gpu-box", "http://"):
        with pytest.raises(ValueError, match="no URL of a gateway"):
            endpoint(bad)


def test_t09_the_address_that_agents_are_given(loaded):
    environ = {"LLM_PROXY_IP": "10.0.0.7"}
    with pytest.raises(ScenarioError, match=r"advertise_host: agents would look for the gateway at 10.0.0.7, but it"):
        loaded(environ=environ)
    gateway = loaded("gateway.host=0.0.0.0", environ=environ).gateway
    assert gateway.address(8400) == "http://10.0.0.7:8400"


def test_t09_what_is_wrong_is_named(loaded):
    with pytest.raises(ScenarioError, match=r"environment variable REMOTE_ARGS is broken JSON"):
        loaded(environ={"REMOTE_ARGS": '{"a": '})
    with pytest.raises(ScenarioError, match=r"environment variable REMOTE_GATEWAY_PORT is broken JSON"):
        loaded(environ={"REMOTE_GATEWAY_PORT": "[84"})
    with pytest.raises(ScenarioError, match=r"\[run.gateway\]: unknown key 'prot'. Known: .* Did you mean 'port'"):
        loaded("gateway.prot=1")
    with pytest.raises(ScenarioError, match=r"unknown key 'port'. Known: name, home, system, run"):
        loaded("port=1")
    with pytest.raises(ScenarioError, match=r"unknown gateway 'rai'. Known: embedded, ray, .* Did you mean 'ray'"):
        loaded(environ={"REMOTE_GATEWAY_TYPE": "rai"})
    with pytest.raises(ScenarioError, match=r"\[run.engine\]: has no meaning with an external gateway"):
        loaded(more=ENGINE + '[run.gateway]\ntype = "external"\nurl = "http://g"\n')


def test_t09_settings_of_a_run_are_those_of_its_resume(tmp_path):
    campaign = Campaign(tmp_path, scenario(tmp_path, "chat(); print(os.environ['FLAVOUR'])"))
    command = [sys.executable, "-m", "loopwright", "run", str(campaign.scenario), "--output", str(campaign.output)]
    ended = subprocess.run(
        [*command, "--set", 'loop.env={"FLAVOUR": "set"}'], capture_output=True, text=True, timeout=90
    )
    assert ended.returncode == 0, ended.stderr
    assert campaign.call("resume").code == 0, "the same settings, so the same inputs"
    with Ledger.read(campaign.ledger) as ledger:
        episode = Episode.from_bytes(ledger.payload(1, "rollout"))
    assert episode.evidence["agent"]["stdout"] == "set\n"


# -- T10, T11: where the gateway lives -----------------------------------------------------------------------------


def test_t10_a_remote_agent_without_an_address_is_an_error_before_anything_starts(loaded, tmp_path):
    with pytest.raises(ScenarioError, match=r"\[run.gateway\] host: 0.0.0.0 means all addresses"):
        loaded("gateway.host=0.0.0.0")
    assert RayGatewayConfig(host="0.0.0.0").problems(tmp_path) == [], "an actor knows the address of its node"

    async def story():
        with pytest.raises(AdvertiseError):
            await EmbeddedGatewayHost(GatewayConfig(host="0.0.0.0"), pytest.fail).start()
        async with aclosing(ExternalGatewayHost(GatewayAccess("http://127.0.0.1:9"))) as home:
            with pytest.raises(GatewayLost, match=r"cannot reach the gateway at http://127\.0\.0\.1:9"):
                await home.start()

    asyncio.run(story())


class OfScripted(GatewayContract):
    def make_engine(self, home):
        return engines.get("scripted")(SCRIPTED, home)


class TestT11Embedded(OfScripted):
    def make_home(self, home):
        return build_gateway_host(EmbeddedGatewayConfig(), SCRIPTED, home, "r")


class TestT11External(OfScripted):
    """A gateway that somebody else started."""

    token = "a-token-of-the-test"

    @asynccontextmanager
    async def around(self, home):
        async with Gateway(self.make_engine(home), token=self.token, output=home / "gw") as gateway:
            self.url = gateway.address
            yield

    def make_home(self, home):
        return ExternalGatewayHost(GatewayAccess(self.url, self.token))

    def test_a_wrong_token_is_known_before_anything_starts(self, tmp_path):
        async def story():
            async with (
                self.around(tmp_path),
                aclosing(ExternalGatewayHost(GatewayAccess(self.url, "not-the-token-at-all"))) as home,
            ):
                with pytest.raises(GatewayLost, match=r"opens no session.*token_file"):
                    await home.start()

        asyncio.run(story())


class TestT11Relay(TestT11External):
    """A gateway elsewhere whose engine has connected out to it."""

    @asynccontextmanager
    async def around(self, home):
        async with relayed(self.make_engine(home), output=home / "gw") as gateway:
            self.url, self.token = gateway.address, relaying.TOKEN
            yield


@pytest.fixture(scope="class")
def on_ray(cluster, tmp_path_factory):  # noqa: F811
    """One home for all tests of a class: actors take seconds to come."""
    home = build_gateway_host(
        RayGatewayConfig(cpus=0.1, engine_cpus=0.1, engines=2), SCRIPTED, tmp_path_factory.mktemp("ray"), "r"
    )
    with asyncio.Runner() as runner:
        runner.run(home.start())
        yield runner, home
        runner.run(home.aclose())


class TestT11Ray(OfScripted):
    @pytest.fixture(autouse=True)
    def _there(self, on_ray):
        self.runner, self.home = on_ray

    def make_home(self, home):
        return self.home

    def use(self, home, story):
        return self.runner.run(asyncio.wait_for(story(self.home), 60))


@pytest.mark.usefixtures("cluster")
def test_t11_a_gateway_actor_that_dies_is_replaced(tmp_path):
    async def story():
        home = build_gateway_host(RayGatewayConfig(cpus=0.1, engine_cpus=0.1), SCRIPTED, tmp_path, "r")
        await home.start()
        try:
            before = await home.access()
            await home.publish(WeightUpdate(4))
            ray.kill(home._gateway._router.seats[0].actor)
            async with asyncio.timeout(60):
                while (after := await home.access()).url == before.url:
                    await asyncio.sleep(0.1)
            session = await home.open("after")
            assert (await said(session))[0] == 200
            assert (await session.close()).oldest_version == 4, "it was told the latest update"
            assert after.token == before.token
        finally:
            await home.aclose()

    asyncio.run(story())


@pytest.mark.usefixtures("cluster")
def test_t11_an_engine_actor_that_dies_is_replaced_and_given_the_latest_weights(tmp_path):
    async def story():
        home = build_gateway_host(RayGatewayConfig(cpus=0.1, engine_cpus=0.1), SCRIPTED, tmp_path, "r")
        await home.start()
        try:
            await home.publish(WeightUpdate(4))
            session = await home.open("s", SessionConfig(sampling=Sampling(max_tokens=4)))
            assert (await said(session))[0] == 200
            ray.kill(home._engines._router.seats[0].actor)
            assert (await said(session, "still there?"))[0] == 200, "the call waits for the one that takes its place"
            episode = await session.close()
            assert [span.version for node in episode.nodes for span in node.spans] == [4, 4]
        finally:
            await home.aclose()

    asyncio.run(asyncio.wait_for(story(), 100))


@pytest.mark.usefixtures("cluster")
def test_t11_a_run_with_its_gateway_and_agents_on_ray(tmp_path, monkeypatch):
    """Also T09: what is resolved in the driver reaches the agents of workers that know nothing of it."""
    more = ENGINE + '[run.gateway]\ntype = "ray"\ncpus = 0.1\nengine_cpus = 0.1\n'
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


def test_t11_a_runs_gateway_lets_go_of_sessions_that_have_ended():
    async def story():
        now = 0.0
        async with Gateway(Teller(), clock=lambda: now, forgets=True) as gateway:
            ended, other = await gateway.open("ended"), await gateway.open("open")
            await ended.close()
            now = 100.0
            await until(lambda: list(gateway._sessions) == [other.id])

    asyncio.run(story())


# -- T12: one client -----------------------------------------------------------------------------------------------


def test_t12_one_http_session_is_reused_and_closed(tmp_path):
    async def story():
        async with staged(tmp_path, function=f"{with_agents(tmp_path)}:solve", args={"seen": {"trials": []}}) as stage:
            await stage.roll(trial=1)
            (client,) = stage.worker._clients.values()
            session = client._session
            await asyncio.gather(*(stage.roll(trial=n) for n in range(2, 5)))
            assert stage.worker._clients == {await stage.home.access(): client}
            assert client._session is session
        assert session.closed
        with pytest.raises(GatewayLost, match="was closed"):
            await client.open()

    asyncio.run(story())


def test_t12_a_client_tells_a_gateway_from_something_else(tmp_path):
    async def story():
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

    asyncio.run(story())
