"""Contract A01: remote agents from start to end, with programs that misbehave."""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import aiohttp
import aiohttp.web
import pytest

from loopwright.core.episode import Episode
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.task import Task
from loopwright.core.trial import Reward
from loopwright.engines.base import Sampling
from loopwright.engines.scripted import ScriptedConfig, ScriptedEngine
from loopwright.execution.files import remove
from loopwright.execution.sandbox import SandboxError, sandbox_of
from loopwright.ledger.ledger import Ledger
from loopwright.rollouts.config import RolloutConfig
from loopwright.rollouts.judgers.base import Payload
from loopwright.rollouts.judgers.facts import VerifierJudger, VerifierJudgerConfig
from loopwright.rollouts.loops.worker import RolloutRequest
from loopwright.rollouts.pools.base import PoolDown, WorkerLost
from loopwright.rollouts.remote import rollout
from loopwright.rollouts.remote.config import RemoteConfig
from loopwright.rollouts.remote.gateway_host import (
    GatewayAccess,
)
from loopwright.rollouts.remote.worker import RemoteRequest
from tests.gateway.harness import Replier, until
from tests.rollouts.pools.ray_cluster import cluster  # noqa: F401
from tests.rollouts.remote.agents import (
    CHAT,
    TASK,
    alive,
    open_setup,
    program,
    run_agent,
    running,
    scenario,
)
from tests.survival.campaign import Campaign, wait_for


def test_a01_an_agent_is_started_with_its_base_urls_and_its_episode_is_returned(tmp_path):
    episode = run_agent(
        tmp_path,
        "print(json.dumps({**os.environ, 'cwd': os.getcwd(), 'argv': sys.argv, 'said': chat(sys.argv[1])}))",
        arguments=("{instruction}", "{id}", "{workspace}", "{openai_base_url}", "{key}", "{{}}"),
        env={"MORE": "1"},
    )

    assert (episode.outcome, episode.fault, episode.turns, episode.answer) == (Outcome.OK, None, 1, "an answer")
    assert episode.task == TASK
    assert episode.evidence["agent"]["exit_code"] == 0
    output = json.loads(episode.evidence["agent"]["stdout"])
    assert output["said"] == "an answer"
    url, key = output["OPENAI_BASE_URL"], output["OPENAI_API_KEY"]
    assert output["argv"][1:] == ["What is it?", "t", output["cwd"], url, key, "{}"]
    assert (output["OPENAI_API_BASE"], output["ANTHROPIC_API_KEY"]) == (url, key)
    assert output["ANTHROPIC_BASE_URL"] == url.removesuffix("/v1")
    assert (output["LOOPWRIGHT_TRIAL_NUMBER"], output["MORE"]) == ("1", "1")
    assert output["LOOPWRIGHT_WORKSPACE"] == output["cwd"]
    assert output["LOOPWRIGHT_SESSION"] in url
    assert "PYTEST_CURRENT_TEST" not in output, "only a few of our own variables"
    phases = episode.attempts[-1].phases_s
    assert set(phases) == {"boot", "agent", "generate", "collect", "teardown"}
    assert phases["agent"] >= phases["generate"]
    assert "secret label" not in json.dumps(output)


def test_a01_an_agent_that_hangs_after_a_call_is_truncated_and_scored(tmp_path):
    episode = run_agent(tmp_path, "chat(); time.sleep(1000)", deadline_s=2.0)
    assert (episode.outcome, episode.fault, episode.turns) == (Outcome.TRUNCATED, Fault.POLICY, 1)
    assert "not finished within 2 s" in episode.reason
    assert running(str(tmp_path / "agent.py")) == []


def test_a01_an_agent_that_hangs_before_its_first_call_is_not_the_policys_fault(tmp_path):
    episode = run_agent(tmp_path, "time.sleep(1000)", deadline_s=1.0)
    assert (episode.outcome, episode.fault) == (Outcome.TIMEOUT, Fault.WORKLOAD)


def test_a01_processes_that_an_agent_detached_end_with_it(tmp_path):
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
    episode = run_agent(tmp_path, text)
    assert episode.outcome is Outcome.OK
    assert not alive(int(episode.evidence["agent"]["stdout"]))
    assert running("forked-away") == []


def test_a01_an_agent_that_crashes_before_its_first_call_is_the_workloads_fault(tmp_path):
    episode = run_agent(tmp_path, "raise SystemExit('no config')")
    assert (episode.outcome, episode.fault) == (Outcome.CRASHED, Fault.WORKLOAD)
    assert "exited with 1" in episode.reason
    assert "no config" in episode.evidence["agent"]["stderr"]


def test_a01_an_agent_that_fails_over_an_answer_of_the_policy_is_scored(tmp_path):
    episode = run_agent(tmp_path, "int(chat())")
    assert (episode.outcome, episode.fault, episode.turns) == (Outcome.TRUNCATED, Fault.POLICY, 1)
    assert "exited with 1, after 1 turn" in episode.reason
    assert episode.judged(Reward(0.0)).trainable


def test_a01_the_signal_that_killed_an_agent_is_recorded(tmp_path):
    episode = run_agent(tmp_path, "chat(); os.kill(os.getpid(), 9)")
    assert (episode.fault, episode.evidence["agent"]["signal"]) == (Fault.POLICY, signal.SIGKILL)


def test_a01_an_agent_that_never_calls_is_scored_and_not_trained_on(tmp_path):
    episode = run_agent(tmp_path, "print('42')")
    assert (episode.outcome, episode.fault, episode.sampled) == (Outcome.OK, None, 0)
    assert episode.reason == "the agent never called the model"
    judged = episode.judged(Reward(1.0))
    assert judged.in_baseline
    assert not judged.trainable


def test_a01_an_agent_that_prints_without_end_keeps_the_end_of_its_output(tmp_path):
    episode = run_agent(tmp_path, "chat()\nwhile True: print('x' * 1000)", deadline_s=2.0, output=8192)
    assert episode.outcome is Outcome.TRUNCATED
    assert 0 < len(episode.evidence["agent"]["stdout"]) <= 16 * 1024


def test_a01_a_missing_program_is_found_at_load_time_or_fails_one_rollout(tmp_path):
    config = RemoteConfig(command=("no-such-agent",))
    (problem,) = config.problems(tmp_path)
    assert problem.key == "command"
    assert "no-such-agent" in problem.message

    async def main():
        async with open_setup(tmp_path, command=("no-such-agent",)) as setup:
            return await setup.roll()

    episode = asyncio.run(main())
    assert (episode.outcome, episode.fault) == (Outcome.CRASHED, Fault.WORKLOAD)
    assert "not found" in episode.reason


def test_a01_a_call_after_the_end_is_refused(tmp_path):
    async def main():
        text = "chat(); print(os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY'])"
        async with open_setup(tmp_path, command=program(tmp_path, text)) as setup:
            episode = await setup.roll()
            url, key = episode.evidence["agent"]["stdout"].split()
            body = {"model": "m", "messages": [{"role": "user", "content": "one more"}]}
            headers = {"authorization": f"Bearer {key}"}
            async with (
                aiohttp.ClientSession(headers=headers) as client,
                client.post(f"{url}/chat/completions", json=body) as response,
            ):
                assert response.status == 409
            assert len(setup.engine.calls) == 1

    asyncio.run(main())


def test_a01_an_engine_that_fails_or_stalls_is_not_the_policys_fault(tmp_path):
    failed = run_agent(tmp_path, "chat()", Replier(fail_at=2))
    assert (failed.outcome, failed.fault) == (Outcome.LOST, Fault.INFRA)
    assert "out of memory" in failed.reason
    stalled = run_agent(tmp_path, "chat()", Replier(hold_at=2), deadline_s=2.0, engine_timeout_s=2.0)
    assert (stalled.outcome, stalled.fault) == (Outcome.LOST, Fault.INFRA)
    assert "the engine sampled no token for 2 s" in stalled.reason


def test_a01_limits_and_sampling_are_set_by_the_loop(tmp_path):
    engine = Replier("a long answer")
    truncated = run_agent(tmp_path, "chat()", engine, max_tokens=3)
    assert (truncated.outcome, truncated.fault, truncated.sampled) == (Outcome.TRUNCATED, Fault.POLICY, 3)
    limited = run_agent(tmp_path, "[chat(str(n)) for n in range(3)]", engine, max_turns=2)
    assert (limited.outcome, limited.fault, limited.turns) == (Outcome.TRUNCATED, Fault.POLICY, 2)
    assert "turn limit of 2 reached" in limited.reason
    run_agent(tmp_path, "chat()", engine, sampling=Sampling(temperature=0.5, max_tokens=7))
    assert (engine.calls[-1][2].temperature, engine.calls[-1][2].max_tokens) == (0.5, 7)


def test_a01_the_sampling_of_an_evaluation_overrides_the_loops(tmp_path):
    engine, sampling = Replier("a long answer"), Sampling(temperature=0.5, max_tokens=7)

    async def main():
        async with open_setup(tmp_path, engine, command=program(tmp_path, "chat()"), sampling=sampling) as setup:
            return await setup.pool.call(RolloutRequest(TASK, "0", Sampling(temperature=0), 1), timeout_s=60)

    assert asyncio.run(main()).sampled == 7
    assert engine.calls[-1][2].temperature == 0


def test_a01_cancelling_releases_session_process_and_workspace(tmp_path):
    async def main():
        command = program(tmp_path, "chat(); time.sleep(1000)")
        async with open_setup(tmp_path, command=command) as setup:
            flight = asyncio.ensure_future(setup.roll())
            await until(lambda: setup.sessions and len(setup.engine.calls) == 1, 20.0)
            assert running(str(tmp_path / "agent.py"))
            flight.cancel()
            with pytest.raises(asyncio.CancelledError):
                await flight
            await until(lambda: not running(str(tmp_path / "agent.py")), 20.0)
            await until(lambda: [session.status for session in setup.sessions] == ["complete"], 20.0)
            assert setup.sessions[0].outcome is Outcome.ABORTED
            await until(lambda: list(setup.directory.iterdir()) == [], 20.0)

    asyncio.run(main())


def test_a01_deeply_nested_directories_lose_no_episode(tmp_path):
    dig = "chat()\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')"
    assert run_agent(tmp_path, dig).outcome is Outcome.OK


def test_a01_an_agent_cannot_delay_its_episode_by_the_files_it_leaves(tmp_path, monkeypatch):
    """A workspace that takes long to delete does not delay the episode; the pool closes once it is deleted."""
    release, gone = threading.Event(), []
    monkeypatch.setattr(rollout, "remove", lambda path: release.wait(30) and gone.append(remove(path)))

    async def main():
        async with open_setup(tmp_path, command=program(tmp_path, "chat()")) as setup:
            episode = await setup.roll()
            assert list(setup.directory.iterdir()) != []
            closing = asyncio.ensure_future(setup.pool.close())
            await asyncio.sleep(0.2)
            assert not closing.done()
            release.set()
            await closing
        return episode

    episode = asyncio.run(main())
    assert (episode.outcome, episode.turns, len(gone)) == (Outcome.OK, 1, 1)
    assert 0.5 < episode.attempts[-1].phases_s["teardown"] < 5


def test_a01_a_failed_clean_up_loses_no_episode(tmp_path, monkeypatch, caplog):
    def fail(_):
        raise RuntimeError("the disk is broken")

    monkeypatch.setattr(rollout, "remove", fail)

    async def main():
        async with open_setup(tmp_path, command=program(tmp_path, "chat()")) as setup:
            return await setup.roll()

    assert asyncio.run(main()).outcome is Outcome.OK
    assert "the disk is broken" in caplog.text


def test_a01_a_slow_workspace_hook_does_not_delay_the_episode(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout, "_HOOK_S", 0.2)
    release = threading.Event()

    async def main():
        async with open_setup(tmp_path, command=program(tmp_path, "chat()")) as setup:
            request = RemoteRequest(
                await setup.host.access(), RolloutRequest(TASK, "0", trial=1), lambda _: release.wait(30)
            )
            return await asyncio.wait_for(setup.worker.handle(request), 20)

    try:
        assert asyncio.run(main()).outcome is Outcome.OK
    finally:
        release.set()


def test_a01_a_trial_without_a_gateway_leaves_no_directory(tmp_path):
    async def main():
        async with open_setup(tmp_path, command=program(tmp_path, "chat()"), over_http=True) as setup:
            with pytest.raises(ValueError, match="URL"):
                await setup.worker.handle(RemoteRequest(GatewayAccess("nowhere"), RolloutRequest(TASK, "0", trial=1)))
            assert list(setup.directory.iterdir()) == []

    asyncio.run(main())


def test_a01_agents_cannot_read_what_they_are_judged_by(tmp_path):
    """`readable` may not contain the scenario, a source of tasks or a part of one; checked at load time."""
    task = harbor(tmp_path, "true")
    (tmp_path / "agents").mkdir()
    tasks = [{"type": "harbor", "path": "task"}]
    for name, message in {".": "all of", "task": "the tasks of 'task'", "task/tests": "the tasks of 'task'"}.items():
        loop = {"type": "remote", "command": ["true"], "sandbox": "bwrap", "readable": [name]}
        config = RolloutConfig(tasks=tasks, loop=loop, judger={"type": "verifier"})
        assert [problem for problem in config.problems(tmp_path) if message in problem.message], name
    loop["readable"] = ["agents"]
    config = RolloutConfig(tasks=tasks, loop=loop, judger={"type": "verifier"})
    assert config.problems(tmp_path) == []
    assert config.loop.task_problem(task, tmp_path) == ""
    assert "would show" in config.loop.model_copy(update={"readable": ("task",)}).task_problem(task, tmp_path)


def test_a01_a_lost_gateway_fails_rollouts_and_then_the_run(tmp_path):
    async def main():
        async with open_setup(tmp_path, command=program(tmp_path, "chat()"), over_http=True) as setup:
            await setup.host._gateway.__aexit__(None, None, None)
            results = await asyncio.gather(*(setup.roll(trial=n) for n in range(8)), return_exceptions=True)
            assert [type(error) for error in results].count(WorkerLost) == 7
            assert [type(error) for error in results].count(PoolDown) == 1
            assert "cannot reach the gateway" in str(results[0])

    asyncio.run(main())


def harbor(directory, test):
    """A task with a file that the agent should change, and a test of it."""
    task = directory / "task"
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


def run_with_tests(directory, text, test, **config):
    async def main():
        command = program(directory, text, "{instruction}")
        async with open_setup(directory, command=command, run_tests=True, **config) as setup:
            return await setup.roll(harbor(directory, test))

    return asyncio.run(main())


def test_a01_the_tests_of_the_task_run_after_the_agent(tmp_path):
    text = "chat(sys.argv[1]); print(open('answer.txt').read()); open('answer.txt', 'w').write('yes')"
    test = 'grep -q yes answer.txt && echo 1 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"'
    episode = run_with_tests(tmp_path, text, test)
    assert episode.outcome is Outcome.OK, episode.reason
    assert episode.evidence["agent"]["stdout"] == "no\n\n", "the task's files were copied for it"
    assert episode.evidence["verifier"]["rewards"] == {"reward": 1.0}
    assert "verify" in episode.attempts[-1].phases_s


def test_a01_an_api_key_of_the_task_does_not_bypass_the_gateway(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "ours, which costs money")
    task = harbor(tmp_path, "true")
    file = Path(task.extra["local_task_path"]) / "task.toml"
    own = '[environment.env]\nOPENAI_API_KEY = "${OPENAI_API_KEY}"\nOPENAI_BASE_URL = "http://no"\nMORE = "1"\n'
    file.write_text(file.read_text().replace("[environment]\n", own))

    async def main():
        command = program(tmp_path, "chat(); print(os.environ['MORE'], 'money' in str(os.environ))")
        async with open_setup(tmp_path, command=command) as setup:
            return await setup.roll(task)

    episode = asyncio.run(main())
    assert (episode.outcome, episode.turns) == (Outcome.OK, 1), episode
    assert episode.evidence["agent"]["stdout"] == "1 False\n"


@pytest.mark.slow
def test_p02_an_image_that_is_built_slowly_takes_no_time_from_the_agent(tmp_path, monkeypatch):
    prepare = rollout.prepare

    def prepare_slowly(*args, **settings):
        time.sleep(20)
        return prepare(*args, **settings)

    monkeypatch.setattr(rollout, "prepare", prepare_slowly)
    episode = run_agent(tmp_path, "time.sleep(15); chat()", deadline_s=30.0)
    assert (episode.outcome, episode.fault) == (Outcome.OK, None)
    assert episode.attempts[-1].phases_s["boot"] >= 20


@pytest.mark.slow
def test_p02_a_slow_engine_takes_no_time_from_the_tests(tmp_path):
    engine = ScriptedEngine(ScriptedConfig(delay_s=6.0), tmp_path)
    test = 'sleep 5; echo 1 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"'
    episode = run_with_tests(tmp_path, "chat(sys.argv[1])", test, engine=engine, deadline_s=10.0, verify_s=1.0)
    assert episode.evidence["verifier"]["rewards"] == {"reward": 1.0}, episode.evidence["verifier"]


def test_a01_one_deadline_covers_the_agent_and_the_tests(tmp_path):
    episode = run_with_tests(
        tmp_path, "chat(sys.argv[1]); time.sleep(1000)", "sleep 1000", deadline_s=4.0, verify_s=1.0
    )
    assert (episode.outcome, episode.fault) == (Outcome.TRUNCATED, Fault.POLICY)
    assert "test.sh was stopped after" in episode.evidence["verifier"]["error"]
    assert episode.evidence["verifier"]["stopped"]
    assert running(str(tmp_path / "agent.py")) == []


def test_a05_an_agent_that_leaves_a_pipe_for_its_tests_scores_zero(tmp_path):
    """Given tests that wait for it until the rollout's deadline, it is not the judge that failed."""
    text = "chat(sys.argv[1]); os.unlink('answer.txt'); os.mkfifo('answer.txt')"
    episode = run_with_tests(tmp_path, text, "cat answer.txt", deadline_s=4.0, verify_s=2.0)
    assert episode.outcome is Outcome.OK, episode.reason
    assert "the agent left the pipe" in episode.evidence["verifier"]["output"]
    reward = asyncio.run(VerifierJudger(VerifierJudgerConfig()).judge(Payload.of(episode, ["evidence"])))
    assert reward.value == 0.0


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

    async def main():
        command = (sys.executable, "{home}/bin/agent.py")
        async with open_setup(tmp_path, command=command, sandbox="bwrap", readable=["bin"]) as setup:
            return await setup.roll()

    episode = asyncio.run(main())
    assert episode.evidence["agent"].get("stdout") == "an answer False\n", episode.evidence
    assert (episode.outcome, episode.turns) == (Outcome.OK, 1)


@pytest.mark.parametrize(
    ("bound", "text"),
    [
        ({"memory": "200MiB"}, "os.fork(); os.fork(); data = b'x' * (80 << 20)"),
        ({"disk": "16MiB"}, "[open(f'fill-{n}', 'wb').write(bytes(1 << 20)) for n in range(64)]"),
        ({"disk": "16MiB"}, "[open(f'/tmp/fill-{n}', 'wb').write(bytes(1 << 20)) for n in range(64)]"),
    ],
)
def test_a01_an_agent_that_exceeds_a_limit_is_killed_and_the_limit_is_named(tmp_path, bound, text):
    try:
        sandbox_of("bwrap").check()
    except SandboxError as error:
        pytest.skip(str(error))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "agent.py").write_text(
        f"""{CHAT}
chat()
try:
    {text}
finally:
    time.sleep(50)
"""
    )

    async def main():
        command = (sys.executable, "{home}/bin/agent.py")
        limits = {"sandbox": "bwrap", "readable": ["bin"], "bounds": bound}
        async with open_setup(tmp_path, command=command, **limits) as setup:
            episode = await setup.roll()
            assert list(setup.directory.iterdir()) == []
            return episode

    episode = asyncio.run(main())
    assert (episode.outcome, episode.fault, episode.turns) == (Outcome.TRUNCATED, Fault.POLICY, 1)
    assert f"the agent was killed: {next(iter(bound))}" in episode.reason


def test_a01_bounds_without_a_sandbox_are_refused():
    with pytest.raises(ValueError, match=r"`bounds` need a sandbox.*bwrap"):
        RemoteConfig(command=("agent",), bounds={"memory": "1GiB"})


def test_a01_a_run_that_is_killed_leaves_nothing_and_can_be_resumed(tmp_path):
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

    result = campaign.call("resume")

    assert result.code == 0, result.err
    with Ledger.read(campaign.ledger) as ledger:
        trials = list(ledger.trials())
        assert [trial.number for trial in trials] == [1, 2, 3, 4, 5, 6]
        assert all(trial.outcome is Outcome.OK for trial in trials)
        episodes = [Episode.from_bytes(ledger.payload(trial.number, "rollout")) for trial in trials]
        assert [episode.turns for episode in episodes] == [1] * 6, "no turns of the killed attempts"
