"""Training whose gateway and engine are processes of their own, which are killed in mid-step: all steps are trained,
and on nothing but what the policy of each step said."""

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
    """A gateway, the engine behind it, and a training that has neither in its own process."""

    def __init__(self, home, *, relay=True):
        self.home, self.relay = home, relay
        self._token = "a-token-for-this-test"
        (home / "token").write_text(self._token)
        (home / "letters.py").write_text(LETTERS)
        (home / "agent.py").write_text(AGENT)
        self._port, self.worker = "0", None
        self.start_gateway()
        self._port = self.gateway.address.rpartition(":")[2]
        self.start_worker()
        command = json.dumps(["python3", "{home}/agent.py"])
        told = {"address": self.gateway.address, "token": home / "token", "command": command}
        self.campaign = Campaign(home, SCENARIO.format(**told))
        self.training = self.campaign.start()

    def start_gateway(self):
        what = ("--relay", "--output", "gw") if self.relay else ("--engine", "tiny", "--set", "engine.threads=1")
        self.gateway = Gateway(self.home, *what, "--token-file", "token", "--port", self._port)

    def start_worker(self):
        if self.relay:
            url = f"ws://127.0.0.1:{self._port}/ws/worker"
            words = ("--connect", url, "--token-file", "token", "--engine", "tiny", "--set", "engine.threads=1")
            command = [*COMMAND, "gateway", "worker", *words, "--name", "w"]
            with (self.home / "worker.log").open("ab") as log:
                self.worker = subprocess.Popen(command, cwd=self.home, stdout=log, stderr=log)

    def engines(self):
        return self.gateway.ask("GET", "/engines", key=self._token)

    def begun(self):
        """Each trial whose agent has had its first answer, as often as it had one."""
        file = self.home / "begun"
        return Counter(map(int, file.read_text().split() if file.exists() else ()))

    def hold_in_step_two(self):
        """Wait until agents of the second step are in mid-call, and have no token given to them from then on."""
        wait_for(lambda: max(self.begun(), default=0) > 6 or self.training.poll() is not None)
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
def parts(home, **how):
    made = Parts(home, **how)
    try:
        yield made
    finally:
        made.end()


def ends_well(made):
    """All steps are trained, each on what its own policy said, token by token. What the ledger has, what was said."""
    ended = end_of(made.training)
    assert ended.code == 0, ended.err
    numbers, found = training_record(made.campaign)
    assert list(numbers) == [1, 2, 3, 4]
    assert made.campaign.numbers() == list(range(1, len(found) + 1))
    assert sum(rollout.episode.trainable for rollout in found) == 24
    for rollout in found:
        assert rollout.episode.fault in (None, Fault.INFRA), rollout.episode.reason
        assert rollout.episode.turns == 2 or rollout.episode.fault is Fault.INFRA
    audit = [*COMMAND, "audit", str(made.campaign.output), "--engine", "tiny", "--json"]
    audited = subprocess.run(audit, capture_output=True, text=True, timeout=120)
    assert audited.returncode == 0, audited.stdout[-2000:] + audited.stderr
    told = json.loads(audited.stdout.splitlines()[-1])
    assert told["turns"] >= 48
    assert told["largest"] < 1e-4
    assert made.engines()["version"] == 4
    return found, ended.err


def attempts(found):
    return Counter(len(rollout.episode.attempts) for rollout in found)


def test_t06_an_engine_killed_in_mid_step_gets_the_weights_of_the_step_before_it_says_a_word(tmp_path):
    """Calls under way go on with the new one, from the ids that they had: no agent notices."""
    with parts(tmp_path) as made:
        made.hold_in_step_two()
        made.kill_worker()
        wait_for(lambda: not made.engines()["engines"])
        made.start_worker()
        found, _ = ends_well(made)
        assert (tmp_path / "gateway.log").read_text().count("tiny at version 0") == 2
    assert attempts(found) == {1: 24}


def test_t07_a_gateway_killed_in_mid_step_goes_on_with_its_sessions_or_their_trials_are_made_again(tmp_path):
    """Agents that retry go on where they were; of those that do not, not a token counts."""
    with parts(tmp_path) as made:
        made.hold_in_step_two()
        made.gateway.kill()
        time.sleep(6)  # longer than a connection that was lost is tried again
        made.start_gateway()
        made.worker.send_signal(signal.SIGCONT)
        found, said = ends_well(made)
    held = [rollout for rollout in found if len(rollout.episode.attempts) > 1]
    assert {rollout.number % 2 for rollout in held} == {1}, "agents that retry went on where they were"
    assert {str(rollout.episode.attempts[0].outcome) for rollout in held} == {"lost"}
    assert "told again" not in said


@pytest.mark.parametrize("relay", [True, False], ids=["relay", "one-process"])
def test_t06_a_gateway_and_its_engine_killed_together_are_given_the_weights_again(tmp_path, relay):
    """Nobody is left who knows of the policy but its trainer: what the old weights say counts nowhere."""
    with parts(tmp_path, relay=relay) as made:
        made.hold_in_step_two()
        if relay:
            made.kill_worker()
        made.gateway.kill()
        made.start_gateway()
        made.start_worker()
        found, said = ends_well(made)
    assert attempts(found)[2] >= 2
    assert "older weights than those of version 1: it is told again" in said
