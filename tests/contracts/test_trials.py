"""Contract A04, trials for trainers elsewhere: server processes that are killed, and runs that work through them."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager

import pytest

from loopwright.core.episode import Episode, Node, Span
from loopwright.core.errors import ScenarioError
from loopwright.core.outcome import Fault, Outcome
from loopwright.engines.scripted import ScriptedConfig, ScriptedEngine
from loopwright.execution.sandbox import SandboxError, sandbox_of
from loopwright.gateway.gateway import GatewayConfig
from loopwright.rollouts.loops.worker import RolloutRequest
from loopwright.rollouts.pools.base import PoolDown, WorkerLost
from loopwright.rollouts.pools.local import LocalPool
from loopwright.rollouts.remote.config import RemoteConfig
from loopwright.rollouts.remote.gateway_host import EmbeddedGatewayHost, GatewayAccess
from loopwright.rollouts.remote.gateway_pool import GatewayPool
from loopwright.rollouts.remote.worker import RemoteRequest
from loopwright.rollouts.trial_server import artifacts
from loopwright.rollouts.trial_server.client import TrialServerClient, TrialServerLost, TrialServerWorker
from loopwright.rollouts.trial_server.result import rollout_details
from loopwright.rollouts.trial_server.submission import trial_id
from loopwright.scenario.load import load
from tests.contracts.harness import campaign, trials
from tests.gateway.serving import until
from tests.rollouts.remote.agents import CHAT, TASK, running
from tests.survival.campaign import Campaign, end_of, wait_for
from tests.survival.serving import COMMAND, Gateway

SPEAK = ("--engine", "scripted", "--set", 'engine.replies=["yes"]', "--set", "engine.slip=0")


class Server(Gateway):
    """`loopwright trials serve` in a process of its own; its agents do what their argument says."""

    command, said = (COMMAND[0], "trials", "serve", "--port", "0", "-o", "out"), r"serving trials at (http://\S+),"

    def __init__(self, home, *words):
        (home / "agent.py").write_text(CHAT + "exec(sys.argv[1])")
        super().__init__(home, *words)
        self.token = (home / "out" / "token").read_text()

    def loop(self, text, **settings):
        text = text.replace("{", "{{").replace("}", "}}")
        return {"command": [sys.executable, "{home}/agent.py", text], "deadline_s": 60, **settings}

    def submit(self, key, text, *, headers=None, loop=None, **more):
        task = {"id": "t", "prompt": "What is it?"}
        body = {"key": key, "task": task, "loop": self.loop(text, **loop or {}), **more}
        return self.ask("POST", "/trials", body, self.token)

    def shown(self, trial, **query):
        words = "&".join(f"{name}={value}" for name, value in query.items())
        return self.ask("GET", f"/trials/{trial['id']}?{words}", key=self.token)

    def ended(self, trial):
        while (told := self.shown(trial, wait_s=30))["status"] in ("queued", "running"):
            pass
        return told

    def result(self, trial):
        assert self.ended(trial)["status"] == "ended"
        return self.ask("GET", f"/trials/{trial['id']}/result", key=self.token)

    def cancel(self, trial):
        return self.ask("POST", f"/trials/{trial['id']}/cancel", key=self.token)

    def refused(self, *asked, **more):
        with pytest.raises(urllib.error.HTTPError) as raised:
            self.ask(*asked, **more)
        with raised.value as error:
            return error.code, error.headers, json.loads(error.read())["error"]


@contextmanager
def served(home, *words):
    server = Server(home, *words)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("trials"), "-j", "2", *SPEAK) as server:
        yield server


def marked(home, name):
    """An agent that says that it has begun, and waits until it may go on; and whether it has begun, how often."""
    begin = f"open({str(home / name)!r}, 'a').write('x')"
    hold = f"while not os.path.exists({str(home / 'go')!r}): time.sleep(0.01)"
    return f"{begin}\n{hold}\nchat()", lambda: len((home / name).read_text()) if (home / name).exists() else 0


# -- one trial -----------------------------------------------------------------------------------------------------


def test_a04_a_trial_is_accepted_run_and_its_result_is_harbors_filled_from_the_gateway(server):
    trial = server.submit("whole", "chat('one'); print(chat('two')); sys.stderr.write('hm'); sys.exit(3)", trial=7)
    assert trial["status"] in ("queued", "running")

    told = server.result(trial)

    assert (told["outcome"], told["exit_code"], told["attempts"]) == ("truncated", 3, 1)
    assert told["output"] == {"stdout": "yes\n", "stderr": "hm"}
    assert {"boot", "agent", "generate", "collect", "teardown"} <= set(told["phases_s"])
    assert "exited with 3" in told["exception_info"]["exception_message"]
    episode = Episode.from_json(told["episode"])
    details = told["agent_result"]["rollout_details"]
    sampled = [
        (list(episode.nodes[i].ids[span.start : span.stop]), list(episode.nodes[i].logprobs[span.start : span.stop]))
        for path in episode.branches()
        for i in path
        for span in episode.nodes[i].spans
    ]
    turns = [
        turn for detail in details for turn in zip(detail["completion_token_ids"], detail["logprobs"], strict=True)
    ]
    assert turns == sampled
    assert len(turns) == 2
    assert told["agent_result"]["n_output_tokens"] == episode.sampled


def test_a04_rollout_details_have_each_sampled_token_once_and_no_other():
    nodes = (
        Node(None, {}),
        Node(0, {}, (1, 2), (0.0, 0.0)),
        Node(1, {}, (3, 4, 5, 6, 7, 8), (0, -0.1, -0.2, 0, -0.3, 0), (Span(1, 2, 0), Span(2, 3, 1), Span(4, 5, 1))),
        Node(2, {}, (9, 10), (0.0, -0.4), (Span(1, 2, 1),)),
        Node(2, {}, (11, 12), (0.0, -0.5), (Span(1, 2, 1),)),
    )
    first, second = rollout_details(Episode(TASK, nodes))
    assert first == {
        "prompt_token_ids": [[1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9]],
        "completion_token_ids": [[4, 5], [7], [10]],
        "logprobs": [[-0.1, -0.2], [-0.3], [-0.4]],
    }
    assert second["prompt_token_ids"] == [[1, 2, 3, 4, 5, 6, 7, 8, 11]]
    assert second["completion_token_ids"] == [[12]]


def test_a04_a_tasks_tests_are_run_and_their_rewards_told(server):
    task = server.home / "task"
    (task / "tests").mkdir(parents=True)
    (task / "task.toml").write_text("")
    (task / "instruction.md").write_text("Write x.")
    (task / "tests" / "test.sh").write_text('grep -q x out.txt && echo 1 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"')
    given = {"id": "t", "prompt": "Write x.", "extra": {"local_task_path": str(task)}}
    told = server.result(server.submit("tested", "chat(); open('out.txt', 'w').write('x')", task=given, verify=True))
    assert told["verifier_result"] == {"rewards": {"reward": 1.0}}
    assert told["rewards"] == {"reward": 1.0}


def test_a04_a_long_poll_answers_when_the_status_changes(server):
    text, begun = marked(server.home, "polled")
    trial = server.submit("polled", text)
    wait_for(begun)
    assert server.shown(trial, wait_s=30, seen="queued")["status"] == "running"
    assert server.shown(trial, wait_s=0.05)["status"] == "running", "the time was up"
    (server.home / "go").touch()
    try:
        assert server.shown(trial, wait_s=60)["status"] == "ended"
    finally:
        (server.home / "go").unlink()
    assert server.refused("GET", f"/trials/{trial['id']}?wait_s=soon", key=server.token)[0] == 400


def test_a04_artifacts_are_plain_files_of_the_workspace_and_nothing_else(server):
    (server.home / "secret.txt").write_text("secret")
    text = f"""
chat()
os.makedirs("deep/er"); open("deep/er/a.txt", "w").write("a"); open("b.log", "w").write("b")
os.symlink({str(server.home / "secret.txt")!r}, "link.txt"); os.symlink({str(server.home)!r}, "door")
os.mkfifo("pipe.txt"); open("big.txt", "w").write("x" * 20_000_000)
"""
    trial = server.submit("kept", text, artifacts=["*.txt"])
    told = server.result(trial)
    assert told["artifacts"] == {"kept": {"deep/er/a.txt": 1}, "left_off": ["big.txt"]}
    path = f"/trials/{trial['id']}/artifacts"
    listed = server.ask("GET", path, key=server.token)
    assert listed == {"artifacts": [{"name": "deep/er/a.txt", "size_bytes": 1}]}
    headers = {"authorization": f"Bearer {server.token}"}
    with urllib.request.urlopen(urllib.request.Request(f"{server.address}{path}/deep/er/a.txt", None, headers)) as got:
        assert got.read() == b"a"
        assert got.headers["content-type"] == "application/octet-stream"
    for name in ("link.txt", "door/secret.txt", "b.log", "../../../secret.txt", "%2e%2e/%2e%2e/token", "/etc/passwd"):
        assert server.refused("GET", f"{path}/{name}", key=server.token)[0] == 404


def test_a04_what_is_too_large_or_one_too_many_is_not_even_read(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(artifacts, "read_inside", lambda _, name, most: read.append(name) or b"x")
    monkeypatch.setattr(artifacts, "_MAX_FILES", 2)
    for name, size in (("a", 1), ("big", 1000), ("c", 1), ("d", 1), ("huge", 1000)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    collected = artifacts.Artifacts(["*"], 100)
    collected.collect(tmp_path)
    assert read == [*collected.files] == ["a", "c"]
    assert collected.left_off == ["big", "d"]


def test_a04_artifacts_of_a_sandboxed_agent_are_kept_too(server):
    try:
        sandbox_of("bwrap").check()
    except SandboxError as error:
        pytest.skip(str(error))
    (server.home / "bin").mkdir()
    (server.home / "bin" / "agent.py").write_text(CHAT + "chat(); open('note.txt', 'w').write('!')")
    loop = {"command": [sys.executable, "{home}/bin/agent.py"], "sandbox": "bwrap", "readable": ["bin"]}
    told = server.result(server.submit("walled", "", loop=loop, artifacts=["note.*"]))
    assert (told["outcome"], told["artifacts"]["kept"]) == ("ok", {"note.txt": 1}), told["output"]


def test_a04_metrics_count_trials_by_status_and_outcome(tmp_path):
    with served(tmp_path, "-j", "1", *SPEAK) as server:
        for key, text in (("good", "chat()"), ("bad", "chat(); sys.exit(3)")):
            server.result(server.submit(key, text))
        held = server.submit("held", "time.sleep(1000)")
        server.submit("waiting", "chat()")
        wait_for(lambda: server.shown(held)["status"] == "running")
        assert server.refused("GET", "/metrics")[0] == 401
        headers = {"authorization": f"Bearer {server.token}"}
        with urllib.request.urlopen(urllib.request.Request(f"{server.address}/metrics", None, headers)) as got:
            assert got.headers["content-type"].startswith("text/plain; version=0.0.4")
            lines = got.read().decode().splitlines()
    counts = {"queued": 1, "running": 1, "cancelling": 0, "ended": 2, "cancelled": 0, "lost": 0}
    assert [line for line in lines if not line.startswith("#")] == [
        *(f'loopwright_trials{{status="{status}"}} {count}' for status, count in counts.items()),
        'loopwright_trials_ended_total{outcome="ok"} 1',
        'loopwright_trials_ended_total{outcome="truncated"} 1',
    ]


# -- who may, and how much -----------------------------------------------------------------------------------------


def test_a04_nobody_comes_in_without_the_token(server):
    for key in (None, "wrong", server.token[:-1], server.token + "x"):
        for asked in (("GET", "/trials"), ("POST", "/trials", {}), ("POST", "/trials/x/cancel"), ("GET", "/nothing")):
            assert server.refused(*asked, key=key)[0] == 401
    assert server.ask("GET", "/healthz") == {"status": "ok"}
    assert (server.home / "out" / "token").stat().st_mode & 0o777 == 0o600
    assert (server.home / "out" / "trials.db").stat().st_mode & 0o777 == 0o600


def test_a04_other_machines_are_let_in_with_a_token_of_the_users_only(tmp_path):
    command = [COMMAND[0], "trials", "serve", "--host", "0.0.0.0", "--port", "0", "-o", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--token-file" in done.stderr


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"loop": {"function": "m:f"}}, "runs commands"),
        ({"loop": {"command": ["x", "{nothing}"]}}, "unknown placeholder {nothing}"),
        ({"loop": {"command": ["x"], "sandbox": "castle"}}, "sandbox"),
        ({"task": {"id": "t"}}, "a task needs `prompt`"),
        ({"gateway": {"url": "nowhere"}}, "no URL"),
        ({"more": 1}, "unknown key 'more'"),
        ({"key": ""}, "Idempotency-Key"),
        ({"loop": {"command": ["x"], "pass_env": ["HOME"]}}, "loop.pass_env: concerns the run's own machine"),
        ({"loop": {"command": ["x"], "workers": 2}}, "loop.workers: "),
        ({"loop": {"command": ["x"], "server": "http://127.0.0.1:1"}}, "loop.server: "),
        ({"loop": {"command": ["x"], "sandbox": "docker", "bounds": {"disk": 1}}}, "neither `cpu_s` nor `disk`"),
    ],
)
def test_a04_what_can_never_run_is_refused_at_once(server, wrong, said):
    body = {"key": "k", "task": {"prompt": "p"}, "loop": {"command": ["x"]}, **wrong}
    status, _, error = server.refused("POST", "/trials", body, server.token)
    assert (status, said in error["message"]) == (400, True), error


def test_a04_no_more_run_at_a_time_than_the_cap_says_and_no_more_wait_than_there_is_room_for(tmp_path):
    with served(tmp_path, "-j", "2", *SPEAK, "--set", "queue=2", "--set", "body=8KiB") as server:
        agents = [marked(tmp_path, f"a{n}") for n in range(4)]
        accepted = [server.submit(f"cap-{n}", text) for n, (text, _) in enumerate(agents)]
        wait_for(lambda: sum(begun() for _, begun in agents) == 2)
        assert server.ask("GET", "/trials", key=server.token)["counts"] == {"running": 2, "queued": 2}
        one_more = {"key": "cap-9", "task": {"prompt": "p"}, "loop": {"command": ["x"]}}
        status, headers, _ = server.refused("POST", "/trials", one_more, server.token)
        assert (status, int(headers["retry-after"]) > 0) == (429, True)
        assert server.submit("cap-3", agents[3][0])["id"] == accepted[3]["id"], "what is queued can be asked for again"
        status, _, _ = server.refused("POST", "/trials", {**one_more, "task": {"prompt": "p" * 9000}}, server.token)
        assert status == 413
        (tmp_path / "go").touch()
        assert {server.ended(trial)["status"] for trial in accepted} == {"ended"}
        assert [begun() for _, begun in agents] == [1, 1, 1, 1]


# -- the same trial again ------------------------------------------------------------------------------------------


def test_a04_the_same_key_gives_the_same_trial_which_is_run_once(server):
    text = f"chat(); open({str(server.home / 'once')!r}, 'a').write('x')"
    first = server.submit("twice", text)
    server.ended(first)
    again = server.submit("twice", text)
    assert (again["id"], again["status"]) == (first["id"], "ended")
    elsewhere = server.submit("twice", text, gateway={"url": "http://127.0.0.1:9", "token": "t" * 20})
    assert elsewhere["id"] == first["id"], "a run that was resumed has a gateway elsewhere"
    assert (server.home / "once").read_text() == "x"
    body = {"key": "twice", "task": {"id": "t", "prompt": "Another."}, "loop": server.loop(text)}
    status, _, error = server.refused("POST", "/trials", body, server.token)
    assert (status, error["type"]) == (409, "conflict")


def test_a04_cancelling_ends_the_whole_tree(server):
    text = """
chat()
if os.fork() == 0:
    os.setsid()
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(1000)", "a04-forked-away"])
time.sleep(1000)
"""
    trial = server.submit("cancelled", text)
    wait_for(lambda: running("a04-forked-away"))
    assert server.cancel(trial)["status"] == "cancelled"
    assert running("a04-forked-away") == []
    assert server.cancel(trial)["status"] == "cancelled"
    assert server.refused("GET", f"/trials/{trial['id']}/result", key=server.token)[0] == 409
    assert server.refused("POST", "/trials/nobody/cancel", key=server.token)[0] == 404


def test_a04_a_cancel_that_overtakes_its_trial_is_kept(server):
    assert server.cancel({"id": trial_id("overtaken")})["status"] == "cancelled"
    trial = server.submit("overtaken", "chat()")
    assert (trial["id"], trial["status"]) == (trial_id("overtaken"), "cancelled")


def test_a04_submissions_are_answered_while_a_sandbox_is_looked_at(tmp_path, monkeypatch):
    """And it is looked at once."""
    (tmp_path / "bin").mkdir()
    bwrap = tmp_path / "bin" / "bwrap"
    bwrap.write_text(f"#!/bin/sh\necho x >> {tmp_path}/looks\nwhile [ ! -e {tmp_path}/go ]; do sleep 0.01; done\n")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    with served(tmp_path, *SPEAK) as server, ThreadPoolExecutor() as threads:
        first = threads.submit(server.submit, "first", "", loop={"sandbox": "bwrap"})
        wait_for((tmp_path / "looks").exists)
        assert server.ask("GET", "/healthz") == {"status": "ok"}
        (tmp_path / "go").touch()
        server.ended(first.result())
        looks = (tmp_path / "looks").read_text()
        server.submit("first", "", loop={"sandbox": "bwrap"})
        assert (tmp_path / "looks").read_text() == looks


# -- kill -9 -------------------------------------------------------------------------------------------------------


def test_a04_a_killed_server_goes_on_where_it_was(tmp_path):
    text, begun = marked(tmp_path, "held")
    with served(tmp_path, "-j", "1", *SPEAK) as server:
        done = server.submit("done", "chat()")
        before = server.result(done)
        held, waiting = server.submit("held", text), server.submit("waiting", "chat()")
        wait_for(begun)
        server.kill()
        wait_for(lambda: not running(str(tmp_path / "agent.py")))
    with served(tmp_path, "-j", "1", *SPEAK) as server:
        assert server.result(done) == before, "what had ended stays"
        assert server.submit("done", "chat()")["status"] == "ended"
        wait_for(lambda: begun() == 2)
        told = server.shown(held)
        assert (told["status"], told["attempts"]) == ("running", 2)
        assert server.shown(waiting)["status"] == "queued"
        (tmp_path / "go").touch()
        assert server.result(held)["attempts"] == 2
        assert server.result(waiting)["attempts"] == 1


def test_a04_a_trial_whose_server_is_killed_twice_is_lost_and_one_whose_server_is_ended_is_not(tmp_path):
    text, begun = marked(tmp_path, "held")
    with served(tmp_path, *SPEAK) as server:
        held = server.submit("held", text)
        wait_for(begun)
        assert server.end() == 128 + signal.SIGTERM, "in good order, which counts no attempt"
    assert running(str(tmp_path / "agent.py")) == []
    for number in (1, 2):
        with served(tmp_path, *SPEAK) as server:
            wait_for(lambda: begun() == number + 1)  # noqa: B023
            assert server.shown(held)["attempts"] == number
            server.kill()
    with served(tmp_path, *SPEAK) as server:
        told = server.shown(held)
        assert (told["status"], begun()) == ("lost", 3)
        assert "killed in each of its 2 attempts" in told["reason"]
        with pytest.raises(AssertionError):
            served(tmp_path, *SPEAK).__enter__()
        assert "another trial server uses" in (tmp_path / "gateway.log").read_text()


@pytest.mark.parametrize("end", [Server.kill, Server.end])
def test_a04_a_cancelled_trial_is_not_begun_again_if_its_server_goes(tmp_path, end):
    """Given an agent that takes its time to end, and a server that goes in that time."""
    began = f"open({str(tmp_path / 'began')!r}, 'a').write('x')"
    text = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {began}; time.sleep(1000)"
    with served(tmp_path, *SPEAK) as server, ThreadPoolExecutor() as threads:
        trial = server.submit("stubborn", text)
        wait_for((tmp_path / "began").exists)
        cancel = threads.submit(server.cancel, trial)
        wait_for(lambda: server.shown(trial)["status"] == "cancelling")
        end(server)
        assert isinstance(cancel.exception(), OSError)
    with served(tmp_path, *SPEAK) as server:
        assert server.shown(trial)["status"] == "cancelled"
        assert server.submit("stubborn", text)["status"] == "cancelled"
        assert server.ended(server.submit("next", "chat()"))["status"] == "ended"
    assert (tmp_path / "began").read_text() == "x"


def test_a04_secrets_are_kept_no_longer_than_the_trial(tmp_path):
    with served(tmp_path, *SPEAK) as server:
        server.ended(server.submit("k", "chat()", passed={"API": "much-too-secret"}))
        server.cancel(server.submit("cancelled", "time.sleep(1000)", passed={"API": "much-too-secret"}))
        for file in (tmp_path / "out").glob("trials.db*"):
            assert b"much-too-secret" not in file.read_bytes(), file
    log = (tmp_path / "gateway.log").read_text()
    assert "much-too-secret" not in log
    assert server.token not in log


# -- the loop that has its agents run there ------------------------------------------------------------------------


class RemoteSetup:
    """A run's own gateway, and a loop with `server`."""

    def __init__(self, server, text, *, run_id="run", token=None, patience_s=30.0, **settings):
        (server.home / "client.token").write_text(token or server.token)
        self.engine = ScriptedEngine(ScriptedConfig(replies=("an answer",), slip=0.0), server.home)
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
    setup = RemoteSetup(server, text, **settings)
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


def test_a04_the_loop_gets_the_episode_that_its_own_gateway_captured(server):
    text = "print(chat(), os.environ['LOOPWRIGHT_TRIAL_NUMBER'])"
    text += "; open('note.txt', 'w').write('!')"
    episode = run_agent(server, text, run_id="own", max_turns=3, artifacts=["*.txt"])
    told = episode.evidence["server"]
    assert (told["url"], told["attempts"], told["artifacts"]) == (server.address, 1, {"note.txt": 1})
    assert told["left_off"] == []
    assert server.shown(told)["status"] == "ended"
    assert (episode.outcome, episode.fault, episode.answer) == (Outcome.OK, None, "an answer")
    assert episode.task == TASK, "with its label, which stayed here"
    assert episode.evidence["agent"]["stdout"] == "an answer 1\n"
    assert b"secret label" not in (server.home / "out" / "trials.db-wal").read_bytes()


def test_a04_faults_are_as_where_the_agent_runs_here(server):
    late = run_agent(server, "chat(); time.sleep(1000)", run_id="late", deadline_s=2.0)
    assert (late.outcome, late.fault) == (Outcome.TRUNCATED, Fault.POLICY)
    crashed = run_agent(server, "sys.exit(4)", run_id="crashed")
    assert (crashed.outcome, crashed.fault) == (Outcome.CRASHED, Fault.WORKLOAD)


def test_a04_a_trial_that_is_asked_for_again_is_not_run_twice_unless_it_was_cancelled(server):
    count = server.home / "asked"
    text = f"chat(); open({str(count)!r}, 'a').write('x')"
    first, second = (run_agent(server, text, run_id="again") for _ in range(2))
    assert first.nodes == second.nodes
    assert count.read_text() == "x"

    async def main():
        held, begun = marked(server.home, "cancelled")
        async with open_setup(server, held, run_id="resumed") as setup:
            flight = asyncio.ensure_future(setup.roll())
            await until(begun, 60.0)
            flight.cancel()
            with pytest.raises(asyncio.CancelledError):
                await flight
            assert running(str(server.home / "cancelled")) == []
        (server.home / "go").touch()
        async with open_setup(server, held, run_id="resumed") as setup:
            assert (await setup.roll()).outcome is Outcome.OK
        assert begun() == 2

    try:
        asyncio.run(main())
    finally:
        (server.home / "go").unlink(missing_ok=True)


def test_a04_a_key_that_asks_for_something_else_is_passed_over(server):
    """Given a run whose loop has changed since, its trials are new ones."""
    first, second = (run_agent(server, text, run_id="changed") for text in ("print(chat())", "chat(); print('new')"))
    assert (first.evidence["agent"]["stdout"], second.evidence["agent"]["stdout"]) == ("an answer\n", "new\n")
    assert first.evidence["server"]["id"] != second.evidence["server"]["id"]


def test_a04_a_foreign_server_is_named_as_one(server):
    """Given something that answers, but is no trial server."""

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


def test_a04_a_resumed_run_leaves_no_trial_to_a_gateway_that_is_gone(server):
    async def main():
        held, begun = marked(server.home, "moved")
        async with open_setup(server, held, run_id="moved") as former:
            order = asyncio.ensure_future(former.roll())
            await until(begun, 60.0)
            async with open_setup(server, held, run_id="moved") as resumed:
                again = asyncio.ensure_future(resumed.roll())
                await until(lambda: begun() == 2, 60.0)
                with pytest.raises(WorkerLost, match="cancelled"):
                    await order
                (server.home / "go").touch()
                assert (await again).turns == 1

    try:
        asyncio.run(main())
    finally:
        (server.home / "go").unlink(missing_ok=True)


def test_a04_a_server_that_is_killed_and_started_anew_costs_no_rollout(tmp_path):
    async def main():
        held, begun = marked(tmp_path, "held")
        with served(tmp_path) as first:
            async with open_setup(first, held) as setup:
                flight = asyncio.ensure_future(setup.roll())
                await until(begun, 60.0)
                await asyncio.to_thread(first.kill)
                port = re.search(r":(\d+)$", first.address)[1]
                second = await asyncio.to_thread(Server, tmp_path, "--port", port)
                try:
                    await until(lambda: begun() == 2, 60.0)
                    (tmp_path / "go").touch()
                    episode = await flight
                finally:
                    await asyncio.to_thread(second.end)
        assert (episode.outcome, episode.turns) == (Outcome.OK, 1)

    asyncio.run(main())


def test_a04_a_server_that_stays_away_is_no_fault_of_the_policy(tmp_path):
    async def main():
        held, begun = marked(tmp_path, "held")
        with served(tmp_path) as server:
            async with open_setup(server, held, patience_s=0.1) as setup:
                flight = asyncio.ensure_future(setup.roll())
                await until(begun, 60.0)
                await asyncio.to_thread(server.kill)
                with pytest.raises(WorkerLost, match="cannot reach the trial server"):
                    await flight

    asyncio.run(main())


def test_a04_a_wrong_token_ends_the_run_before_it_starts(server):
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
    (server.home / "tasks.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    (server.home / "served_judge.py").write_text("def one(answer):\n    return float(len(answer) > 0)\n")
    command = json.dumps(server.loop(text)["command"])
    return SCENARIO.format(trials=trials, address=server.address, command=command, engine=engine, more=more)


def test_a04_a_whole_run_works_through_a_server_with_the_runs_engine_or_the_servers(server):
    assert campaign(server.home, scenario(server, "chat()"), output="run") == 0
    own = scenario(server, "chat()", engine='[run.gateway]\ntype = "server"')
    assert campaign(server.home, own, output="own") == 0
    for output in ("run", "own"):
        found = trials(server.home, "work", output)
        assert [(trial.outcome, trial.reward.value) for trial in found] == [(Outcome.OK, 1.0)] * 4


@pytest.mark.parametrize(
    ("more", "engine", "said"),
    [
        (", workers = 2", ENGINE, "loop.workers: has no meaning with `server`"),
        ("", ENGINE + '\n[run.gateway]\ntype = "server"', "[run.engine]: has no meaning with a trial server's"),
    ],
)
def test_a04_what_cannot_be_together_is_said_at_load_time(server, more, engine, said):
    file = server.home / "wrong.toml"
    file.write_text(scenario(server, "chat()", engine=engine, more=more))
    with pytest.raises(ScenarioError) as raised:
        load(file)
    assert said in str(raised.value)
    with pytest.raises(ValueError, match="`artifacts` has no meaning without `server`"):
        RemoteConfig(command=("x",), artifacts=("*",))


@pytest.mark.slow
def test_a04_a_run_that_is_killed_and_resumed_runs_no_trial_twice_that_had_ended(tmp_path):
    with served(tmp_path, "-j", "1") as server:
        text = f"chat(); open({str(tmp_path / 'count')!r}, 'a').write('x')"
        made = Campaign(tmp_path, scenario(server, text, trials=12))
        process = made.start()
        wait_for(lambda: (tmp_path / "count").exists() and len((tmp_path / "count").read_text()) >= 4)
        os.killpg(process.pid, signal.SIGKILL)
        end_of(process)
        ended = made.call("resume")
        assert ended.code == 0, ended.err
        assert [trial.outcome for trial in made.trials()] == [Outcome.OK] * 12
        assert len((tmp_path / "count").read_text()) <= 13, "at most the one that ran when its gateway went"
