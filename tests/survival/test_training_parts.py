"""Training with the gateway and the engine in separate processes that are killed in mid-step: all steps are trained,
each on the tokens of its own policy only."""

import json
import signal
import subprocess
import time
from collections import Counter
from contextlib import contextmanager

import pytest

from loopwright.core.outcome import Fault
from tests.survival.campaign import COMMAND, Campaign, end_of, wait_for
from tests.survival.serving import Gateway
from tests.survival.test_training_agents import LETTERS, training_record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SCENARIO = """
name = "survivor"
[[run]]
name = "work"
[run.agent]
type = "grpo"
model = "tiny"
steps = 4
prompts_per_step = 2
group_size = 3
lr = 1e-2
seed = 3
keep = 9
[run.gateway]
type = "external"
url = "{address}"
token_file = "{token}"
[run.rollout]
tasks = {{ type = "python", function = "letters:tasks" }}
judger = {{ type = "python", function = "letters:judge" }}
loop = {{ type = "remote", command = {command}, deadline_s = 120, concurrency = 4, sampling = {{ max_tokens = 24 }} }}
"""
AGENT = """
import json, os, sys, time, urllib.request

trial = int(os.environ["LOOPWRIGHT_TRIAL_NUMBER"])
messages = []

def chat(text):
    messages.append({"role": "user", "content": text})
    for again in range(600):
        request = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"] + "/chat/completions",
            data=json.dumps({"model": "policy", "messages": messages}).encode(),
            headers={
                "authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
                "content-type": "application/json",
                "x-stainless-retry-count": str(again),
            },
        )
        try:
            with urllib.request.urlopen(request) as response:
                messages.append(json.load(response)["choices"][0]["message"])
                return
        except OSError as error:
            if trial % 2 or getattr(error, "code", 503) < 500:
                raise  # as agents do that know of no retries, or that are refused
            time.sleep(0.1)

chat("one")
with open(os.environ["LOOPWRIGHT_HOME"] + "/begun", "a") as file:
    file.write(f"{trial} ")
chat("two")
"""


class Parts:
    """A gateway, the engine behind it, and a training, all in separate processes."""

    def __init__(self, directory, *, relay=True):
        self.directory, self.relay = directory, relay
        self._token = "a-token-for-this-test"
        (directory / "token").write_text(self._token)
        (directory / "letters.py").write_text(LETTERS)
        (directory / "agent.py").write_text(AGENT)
        self._port, self.worker = "0", None
        self.start_gateway()
        self._port = self.gateway.address.rpartition(":")[2]
        self.start_worker()
        command = json.dumps(["python3", "{home}/agent.py"])
        settings = {"address": self.gateway.address, "token": directory / "token", "command": command}
        self.campaign = Campaign(directory, SCENARIO.format(**settings))
        self.training = self.campaign.start()

    def start_gateway(self):
        what = ("--relay", "--output", "gw") if self.relay else ("--engine", "tiny", "--set", "engine.threads=1")
        self.gateway = Gateway(self.directory, *what, "--token-file", "token", "--port", self._port)

    def start_worker(self):
        if self.relay:
            url = f"ws://127.0.0.1:{self._port}/ws/worker"
            words = ("--connect", url, "--token-file", "token", "--engine", "tiny", "--set", "engine.threads=1")
            command = [*COMMAND, "gateway", "worker", *words, "--name", "w"]
            with (self.directory / "worker.log").open("ab") as log:
                self.worker = subprocess.Popen(command, cwd=self.directory, stdout=log, stderr=log)

    def engines(self):
        return self.gateway.ask("GET", "/engines", key=self._token)

    def first_answers(self):
        """How many first answers each trial's agent has got."""
        file = self.directory / "begun"
        return Counter(map(int, file.read_text().split() if file.exists() else ()))

    def hold_in_step_two(self):
        """Wait until agents of the second step are in mid-call, and freeze the engine."""
        wait_for(lambda: max(self.first_answers(), default=0) > 6 or self.training.poll() is not None)
        engine = self.worker if self.relay else self.gateway.process
        engine.send_signal(signal.SIGSTOP)
        assert self.training.poll() is None, self.training.communicate()
        if self.relay:
            wait_for(lambda: self.engines()["engines"][0]["running"] >= 2)

    def kill_worker(self):
        self.worker.kill()
        self.worker.wait()

    def end(self):
        for process in (self.training, self.worker):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
        if self.gateway.process.poll() is None:
            self.gateway.kill()


@contextmanager
def parts(directory, **how):
    running = Parts(directory, **how)
    try:
        yield running
    finally:
        running.end()


def ends_well(running):
    """Check that all steps were trained, each on the tokens of its own policy; returns the rollouts and the log."""
    result = end_of(running.training)
    assert result.code == 0, result.err
    numbers, rollouts = training_record(running.campaign)
    assert list(numbers) == [1, 2, 3, 4]
    assert running.campaign.numbers() == list(range(1, len(rollouts) + 1))
    assert sum(rollout.episode.trainable for rollout in rollouts) == 24
    for rollout in rollouts:
        assert rollout.episode.fault in (None, Fault.INFRA), rollout.episode.reason
        assert rollout.episode.turns == 2 or rollout.episode.fault is Fault.INFRA
    audit = [*COMMAND, "audit", str(running.campaign.output), "--engine", "tiny", "--json"]
    audited = subprocess.run(audit, capture_output=True, text=True, timeout=120)
    assert audited.returncode == 0, audited.stdout[-2000:] + audited.stderr
    summary = json.loads(audited.stdout.splitlines()[-1])
    assert summary["turns"] >= 48
    assert summary["largest"] < 1e-4
    assert running.engines()["version"] == 4
    return rollouts, result.err


def attempts(rollouts):
    return Counter(len(rollout.episode.attempts) for rollout in rollouts)


def test_t06_an_engine_killed_in_mid_step_gets_the_weights_before_it_serves(tmp_path):
    """Calls in flight continue on the new engine from their ids, unnoticed by the agents."""
    with parts(tmp_path) as running:
        running.hold_in_step_two()
        running.kill_worker()
        wait_for(lambda: not running.engines()["engines"])
        running.start_worker()
        rollouts, _ = ends_well(running)
        assert (tmp_path / "gateway.log").read_text().count("tiny at version 0") == 2
    assert attempts(rollouts) == {1: 24}


def test_t07_a_gateway_killed_in_mid_step_resumes_its_sessions_or_their_trials_are_repeated(tmp_path):
    """Agents that retry continue; the tokens of agents that do not retry are discarded."""
    with parts(tmp_path) as running:
        running.hold_in_step_two()
        running.gateway.kill()
        time.sleep(6)  # longer than a lost connection is retried
        running.start_gateway()
        running.worker.send_signal(signal.SIGCONT)
        rollouts, log = ends_well(running)
    retried = [rollout for rollout in rollouts if len(rollout.episode.attempts) > 1]
    assert {rollout.number % 2 for rollout in retried} == {1}, "agents that retry continued"
    assert {str(rollout.episode.attempts[0].outcome) for rollout in retried} == {"lost"}
    assert "publishing 1 again" not in log


@pytest.mark.parametrize("relay", [True, False], ids=["relay", "one-process"])
def test_t06_a_gateway_and_engine_killed_together_get_the_weights_again(tmp_path, relay):
    """Only the trainer still has the policy; tokens sampled with the old weights are discarded."""
    with parts(tmp_path, relay=relay) as running:
        running.hold_in_step_two()
        if relay:
            running.kill_worker()
        running.gateway.kill()
        running.start_gateway()
        running.start_worker()
        rollouts, log = ends_well(running)
    assert attempts(rollouts)[2] >= 2
    assert "the gateway serves version 0; publishing 1 again" in log
