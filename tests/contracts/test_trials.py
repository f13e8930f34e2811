"""Contract A04: trial servers that run, refuse, cancel and resume trials."""

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from loopwright.core.episode import Episode, Node, Span
from loopwright.execution.sandbox import SandboxError, sandbox_of
from loopwright.rollouts.trial_server import artifacts
from loopwright.rollouts.trial_server.result import rollout_details
from loopwright.rollouts.trial_server.submission import trial_id
from tests.rollouts.remote.agents import CHAT, TASK, running
from tests.rollouts.trial_server.serving import ENGINE_ARGS, TrialServerProcess, held_agent, serve
from tests.survival.campaign import wait_for
from tests.survival.serving import COMMAND


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("trials"), "-j", "2", *ENGINE_ARGS) as server:
        yield server


def test_a04_a_trial_runs_and_its_result_is_harbors_with_the_recorded_tokens(server):
    trial = server.submit("whole", "chat('one'); print(chat('two')); sys.stderr.write('hm'); sys.exit(3)", trial=7)
    assert trial["status"] in ("queued", "running")

    result = server.result(trial)

    assert (result["outcome"], result["exit_code"], result["attempts"]) == ("truncated", 3, 1)
    assert result["output"] == {"stdout": "yes\n", "stderr": "hm"}
    assert {"boot", "agent", "generate", "collect", "teardown"} <= set(result["phases_s"])
    assert "exited with 3" in result["exception_info"]["exception_message"]
    episode = Episode.from_json(result["episode"])
    details = result["agent_result"]["rollout_details"]
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
    assert result["agent_result"]["n_output_tokens"] == episode.sampled


def test_a04_rollout_details_contain_each_sampled_token_once_and_no_others():
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


def test_a04_the_tests_of_a_task_run_and_give_rewards(server):
    task = server.directory / "task"
    (task / "tests").mkdir(parents=True)
    (task / "task.toml").write_text("")
    (task / "instruction.md").write_text("Write x.")
    (task / "tests" / "test.sh").write_text('grep -q x out.txt && echo 1 > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"')
    task_fields = {"id": "t", "prompt": "Write x.", "extra": {"local_task_path": str(task)}}
    result = server.result(
        server.submit("tested", "chat(); open('out.txt', 'w').write('x')", task=task_fields, verify=True)
    )
    assert result["verifier_result"] == {"rewards": {"reward": 1.0}}
    assert result["rewards"] == {"reward": 1.0}


def test_a04_a_long_poll_answers_when_the_status_changes(server):
    text, starts = held_agent(server.directory, "polled")
    trial = server.submit("polled", text)
    wait_for(starts)
    assert server.status(trial, wait_s=30, seen="queued")["status"] == "running"
    assert server.status(trial, wait_s=0.05)["status"] == "running", "the poll timed out"
    (server.directory / "go").touch()
    try:
        assert server.status(trial, wait_s=60)["status"] == "ended"
    finally:
        (server.directory / "go").unlink()
    assert server.refusal("GET", f"/trials/{trial['id']}?wait_s=soon", key=server.token)[0] == 400


def test_a04_artifacts_are_regular_files_of_the_workspace_only(server):
    (server.directory / "secret.txt").write_text("secret")
    text = f"""
chat()
os.makedirs("deep/er"); open("deep/er/a.txt", "w").write("a"); open("b.log", "w").write("b")
os.symlink({str(server.directory / "secret.txt")!r}, "link.txt"); os.symlink({str(server.directory)!r}, "linked")
os.mkfifo("pipe.txt"); open("big.txt", "w").write("x" * 20_000_000)
"""
    trial = server.submit("kept", text, artifacts=["*.txt"])
    result = server.result(trial)
    assert result["artifacts"] == {"kept": {"deep/er/a.txt": 1}, "left_off": ["big.txt"]}
    path = f"/trials/{trial['id']}/artifacts"
    listing = server.ask("GET", path, key=server.token)
    assert listing == {"artifacts": [{"name": "deep/er/a.txt", "size_bytes": 1}]}
    headers = {"authorization": f"Bearer {server.token}"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{server.address}{path}/deep/er/a.txt", None, headers)
    ) as response:
        assert response.read() == b"a"
        assert response.headers["content-type"] == "application/octet-stream"
    for name in ("link.txt", "linked/secret.txt", "b.log", "../../../secret.txt", "%2e%2e/%2e%2e/token", "/etc/passwd"):
        assert server.refusal("GET", f"{path}/{name}", key=server.token)[0] == 404


def test_a04_files_beyond_the_limits_are_not_read(tmp_path, monkeypatch):
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


def test_a04_artifacts_of_a_sandboxed_agent_are_kept(server):
    try:
        sandbox_of("bwrap").check()
    except SandboxError as error:
        pytest.skip(str(error))
    (server.directory / "bin").mkdir()
    (server.directory / "bin" / "agent.py").write_text(CHAT + "chat(); open('note.txt', 'w').write('!')")
    loop = {"command": [sys.executable, "{home}/bin/agent.py"], "sandbox": "bwrap", "readable": ["bin"]}
    result = server.result(server.submit("walled", "", loop=loop, artifacts=["note.*"]))
    assert (result["outcome"], result["artifacts"]["kept"]) == ("ok", {"note.txt": 1}), result["output"]


def test_a04_agents_are_not_shown_the_output_of_the_server(server):
    output = server.directory / "out"
    for readable in ("out", str(output), str(output / "deeper")):
        loop = {**server.loop("chat()"), "sandbox": "bwrap", "readable": [readable]}
        body = {"key": readable, "task": {"id": "t", "prompt": "?"}, "loop": loop}
        code, _, error = server.refusal("POST", "/trials", body, server.token)
        assert (code, "the server's own output" in error["message"]) == (400, True), error


def test_a04_metrics_count_trials_by_status_and_outcome(tmp_path):
    with serve(tmp_path, "-j", "1", *ENGINE_ARGS) as server:
        for key, text in (("good", "chat()"), ("bad", "chat(); sys.exit(3)")):
            server.result(server.submit(key, text))
        trial = server.submit("trial", "time.sleep(1000)")
        server.submit("waiting", "chat()")
        wait_for(lambda: server.status(trial)["status"] == "running")
        assert server.refusal("GET", "/metrics")[0] == 401
        headers = {"authorization": f"Bearer {server.token}"}
        with urllib.request.urlopen(urllib.request.Request(f"{server.address}/metrics", None, headers)) as response:
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            lines = response.read().decode().splitlines()
    counts = {"queued": 1, "running": 1, "cancelling": 0, "ended": 2, "cancelled": 0, "lost": 0}
    assert [line for line in lines if not line.startswith("#")] == [
        *(f'loopwright_trials{{status="{status}"}} {count}.0' for status, count in counts.items()),
        'loopwright_trials_ended_total{outcome="ok"} 1.0',
        'loopwright_trials_ended_total{outcome="truncated"} 1.0',
    ]


# -- authentication and limits -------------------------------------------------------------------------------------


def test_a04_requests_without_the_token_are_refused(server):
    for key in (None, "wrong", server.token[:-1], server.token + "x"):
        for request in (("GET", "/trials"), ("POST", "/trials", {}), ("POST", "/trials/x/cancel"), ("GET", "/nothing")):
            assert server.refusal(*request, key=key)[0] == 401
    # aiohttp decompresses a body before anybody reads it, unless it is told not to.
    request = urllib.request.Request(f"{server.address}/trials", b"x" * 100, {"content-encoding": "gzip"})
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request, timeout=10)
    assert server.ask("GET", "/healthz") == {"status": "ok"}
    assert (server.directory / "out" / "token").stat().st_mode & 0o777 == 0o600
    assert (server.directory / "out" / "trials.db").stat().st_mode & 0o777 == 0o600


def test_a04_other_machines_can_connect_only_with_a_token_file(tmp_path):
    command = [COMMAND[0], "trials", "serve", "--host", "0.0.0.0", "--port", "0", "-o", str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert process.returncode == 2
    assert "--token-file" in process.stderr


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loop": {"function": "m:f"}}, "runs commands"),
        ({"loop": {"command": ["x", "{nothing}"]}}, "unknown placeholder {nothing}"),
        ({"loop": {"command": ["x"], "sandbox": "castle"}}, "sandbox"),
        ({"task": {"id": "t"}}, "a task needs `prompt`"),
        ({"gateway": {"url": "nowhere"}}, "not the URL"),
        ({"more": 1}, "unknown key 'more'"),
        ({"key": ""}, "Idempotency-Key"),
        ({"loop": {"command": ["x"], "pass_env": ["HOME"]}}, "loop.pass_env: concerns the run's own machine"),
        ({"loop": {"command": ["x"], "workers": 2}}, "loop.workers: "),
        ({"loop": {"command": ["x"], "server": "http://127.0.0.1:1"}}, "loop.server: "),
        ({"loop": {"command": ["x"], "sandbox": "docker", "bounds": {"disk": 1}}}, "neither `cpu_s` nor `disk`"),
    ],
)
def test_a04_submissions_that_cannot_run_are_refused_at_once(server, fields, message):
    body = {"key": "k", "task": {"prompt": "p"}, "loop": {"command": ["x"]}, **fields}
    status, _, error = server.refusal("POST", "/trials", body, server.token)
    assert (status, message in error["message"]) == (400, True), error


def test_a04_running_and_queued_trials_are_limited(tmp_path):
    with serve(tmp_path, "-j", "2", *ENGINE_ARGS, "--set", "queue=2", "--set", "body=8KiB") as server:
        agents = [held_agent(tmp_path, f"a{n}") for n in range(4)]
        accepted = [server.submit(f"cap-{n}", text) for n, (text, _) in enumerate(agents)]
        wait_for(lambda: sum(starts() for _, starts in agents) == 2)
        assert server.ask("GET", "/trials", key=server.token)["counts"] == {"running": 2, "queued": 2}
        one_more = {"key": "cap-9", "task": {"prompt": "p"}, "loop": {"command": ["x"]}}
        status, headers, _ = server.refusal("POST", "/trials", one_more, server.token)
        assert (status, int(headers["retry-after"]) > 0) == (429, True)
        assert server.submit("cap-3", agents[3][0])["id"] == accepted[3]["id"], "a queued trial can be submitted again"
        status, _, _ = server.refusal("POST", "/trials", {**one_more, "task": {"prompt": "p" * 9000}}, server.token)
        assert status == 413
        (tmp_path / "go").touch()
        assert {server.wait(trial)["status"] for trial in accepted} == {"ended"}
        assert [starts() for _, starts in agents] == [1, 1, 1, 1]


# -- repeated submissions and cancellation -------------------------------------------------------------------------


def test_a04_the_same_key_gives_the_same_trial_which_runs_once(server):
    text = f"chat(); open({str(server.directory / 'once')!r}, 'a').write('x')"
    first = server.submit("twice", text)
    server.wait(first)
    again = server.submit("twice", text)
    assert (again["id"], again["status"]) == (first["id"], "ended")
    elsewhere = server.submit("twice", text, gateway={"url": "http://127.0.0.1:9", "token": "t" * 20})
    assert elsewhere["id"] == first["id"], "a resumed run has another gateway"
    assert (server.directory / "once").read_text() == "x"
    body = {"key": "twice", "task": {"id": "t", "prompt": "Another."}, "loop": server.loop(text)}
    status, _, error = server.refusal("POST", "/trials", body, server.token)
    assert (status, error["type"]) == (409, "conflict")


def test_a04_cancelling_ends_all_processes(server):
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
    assert server.refusal("GET", f"/trials/{trial['id']}/result", key=server.token)[0] == 409
    assert server.refusal("POST", "/trials/nobody/cancel", key=server.token)[0] == 404


def test_a04_a_cancellation_that_arrives_before_its_trial_is_remembered(server):
    assert server.cancel({"id": trial_id("overtaken")})["status"] == "cancelled"
    trial = server.submit("overtaken", "chat()")
    assert (trial["id"], trial["status"]) == (trial_id("overtaken"), "cancelled")


def test_a04_submissions_are_answered_while_a_sandbox_is_checked(tmp_path, monkeypatch):
    """It is checked once."""
    (tmp_path / "bin").mkdir()
    bwrap = tmp_path / "bin" / "bwrap"
    bwrap.write_text(f"#!/bin/sh\necho x >> {tmp_path}/checks\nwhile [ ! -e {tmp_path}/go ]; do sleep 0.01; done\n")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    with serve(tmp_path, *ENGINE_ARGS) as server, ThreadPoolExecutor() as threads:
        first = threads.submit(server.submit, "first", "", loop={"sandbox": "bwrap"})
        wait_for((tmp_path / "checks").exists)
        assert server.ask("GET", "/healthz") == {"status": "ok"}
        (tmp_path / "go").touch()
        server.wait(first.result())
        checks = (tmp_path / "checks").read_text()
        server.submit("first", "", loop={"sandbox": "bwrap"})
        assert (tmp_path / "checks").read_text() == checks


# -- kill -9 -------------------------------------------------------------------------------------------------------


def test_a04_a_killed_server_continues_after_a_restart(tmp_path):
    text, starts = held_agent(tmp_path, "trial")
    with serve(tmp_path, "-j", "1", *ENGINE_ARGS) as server:
        process = server.submit("process", "chat()")
        before = server.result(process)
        trial, waiting = server.submit("trial", text), server.submit("waiting", "chat()")
        wait_for(starts)
        server.kill()
        wait_for(lambda: not running(str(tmp_path / "agent.py")))
    with serve(tmp_path, "-j", "1", *ENGINE_ARGS) as server:
        assert server.result(process) == before, "finished trials stay"
        assert server.submit("process", "chat()")["status"] == "ended"
        wait_for(lambda: starts() == 2)
        result = server.status(trial)
        assert (result["status"], result["attempts"]) == ("running", 2)
        assert server.status(waiting)["status"] == "queued"
        (tmp_path / "go").touch()
        assert server.result(trial)["attempts"] == 2
        assert server.result(waiting)["attempts"] == 1


def test_a04_a_trial_whose_server_is_killed_twice_is_lost_but_not_if_it_is_stopped(tmp_path):
    text, starts = held_agent(tmp_path, "trial")
    with serve(tmp_path, *ENGINE_ARGS) as server:
        trial = server.submit("trial", text)
        wait_for(starts)
        assert server.end() == 128 + signal.SIGTERM, "a regular stop, which does not count as an attempt"
    assert running(str(tmp_path / "agent.py")) == []
    for number in (1, 2):
        with serve(tmp_path, *ENGINE_ARGS) as server:
            wait_for(lambda: starts() == number + 1)  # noqa: B023
            assert server.status(trial)["attempts"] == number
            server.kill()
    with serve(tmp_path, *ENGINE_ARGS) as server:
        result = server.status(trial)
        assert (result["status"], starts()) == ("lost", 3)
        assert "killed in each of its 2 attempts" in result["reason"]
        with pytest.raises(AssertionError):
            serve(tmp_path, *ENGINE_ARGS).__enter__()
        assert "another trial server uses" in (tmp_path / "gateway.log").read_text()


@pytest.mark.parametrize("end", [TrialServerProcess.kill, TrialServerProcess.end])
def test_a04_a_cancelled_trial_is_not_restarted_if_its_server_stops(tmp_path, end):
    """The agent takes long to end, and the server stops before it has ended."""
    began = f"open({str(tmp_path / 'began')!r}, 'a').write('x')"
    text = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {began}; time.sleep(1000)"
    with serve(tmp_path, *ENGINE_ARGS) as server, ThreadPoolExecutor() as threads:
        trial = server.submit("stubborn", text)
        wait_for((tmp_path / "began").exists)
        cancel = threads.submit(server.cancel, trial)
        wait_for(lambda: server.status(trial)["status"] == "cancelling")
        end(server)
        assert isinstance(cancel.exception(), OSError)
    with serve(tmp_path, *ENGINE_ARGS) as server:
        assert server.status(trial)["status"] == "cancelled"
        assert server.submit("stubborn", text)["status"] == "cancelled"
        assert server.wait(server.submit("next", "chat()"))["status"] == "ended"
    assert (tmp_path / "began").read_text() == "x"


def test_a04_secrets_are_deleted_when_the_trial_ends(tmp_path):
    with serve(tmp_path, *ENGINE_ARGS) as server:
        server.wait(server.submit("k", "chat()", passed={"API": "much-too-secret"}))
        server.cancel(server.submit("cancelled", "time.sleep(1000)", passed={"API": "much-too-secret"}))
        for file in (tmp_path / "out").glob("trials.db*"):
            assert b"much-too-secret" not in file.read_bytes(), file
    log = (tmp_path / "gateway.log").read_text()
    assert "much-too-secret" not in log
    assert server.token not in log
