"""Training with a real vLLM server: it samples from the weights of each step, also after it was killed."""

import os
import signal
from functools import cache

import pytest
from benchmarks.servers import kill, missing, vllm
from peft import PeftModel
from transformers import AutoModelForCausalLM

from loopwright.engines.inprocess import smollm2
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import rollouts
from loopwright.ledger.steps import steps
from tests.engines.real_server import forward, reference
from tests.survival.campaign import Campaign, end_of, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(missing("vllm") is not None, reason=str(missing("vllm"))),
]
TOLERANCE = 1e-3
MOVED = 0.05
STEP = 4
"""Rollouts of a step."""
SCENARIO = """
name = "vllm"
[[run]]
name = "work"
[run.agent]
type = "grpo"
steps = {steps}
prompts_per_step = 2
group_size = 2
lr = 5e-3
lora = {{ r = 4 }}
seed = {seed}
keep = 9
[run.engine]
type = "vllm"
url = "{url}"
tokenizer = "smollm2"
[run.gateway]
type = "embedded"
[run.rollout]
tasks = {{ type = "python", function = "story:tasks" }}
loop = {{ type = "remote", function = "story:tell", sampling = {{ max_tokens = 8 }} }}
judger = {{ type = "python", function = "story:judge" }}
produce = {{ type = "sync" }}
"""
STORY = """
import asyncio
from pathlib import Path

from aiohttp import ClientSession, ClientTimeout

HOME = Path(__file__).parent

def tasks():
    return [{"prompt": f"Tell me a story about {animal}."} for animal in ("an owl", "a fox", "a cat", "a cow")]

def judge(answer):
    return sum(map(ord, answer)) % 97 / 96

async def tell(instruction, base_url, api_key):
    messages = [{"role": "user", "content": instruction}]
    async with ClientSession(headers={"authorization": f"Bearer {api_key}"}, timeout=ClientTimeout(None)) as web:
        for more in ("Go on.", ""):
            body = {"model": "policy", "messages": messages}
            async with web.post(f"{base_url}/chat/completions", json=body, raise_for_status=True) as response:
                answer = (await response.json())["choices"][0]["message"]
            messages += [answer, {"role": "user", "content": more}]
            if more:
                await between_turns()

async def between_turns():
    with (HOME / "begun").open("a") as begun:
        begun.write("x")
    while len((HOME / "begun").read_text()) > 4 and (HOME / "hold").exists():
        await asyncio.sleep(0.05)
"""


class TwoTurnTraining(Campaign):
    """A training with two turns per rollout; with `hold`, rollouts of the second step wait between their turns."""

    def __init__(self, directory, url, *, steps, seed, hold=False):
        super().__init__(directory, SCENARIO.format(url=url, steps=steps, seed=seed))
        (directory / "story.py").write_text(STORY)
        self.directory = directory
        if hold:
            (directory / "hold").touch()

    def first_turns(self):
        """How many rollouts have finished their first turn."""
        file = self.directory / "begun"
        return len(file.read_text()) if file.exists() else 0

    @cache  # noqa: B019  two of them, for the length of this module
    def policy(self, step):
        """The policy after a step, as transformers and peft load its checkpoint."""
        if step == 0:
            return reference()
        base = AutoModelForCausalLM.from_pretrained(smollm2.directory(), dtype="auto")
        return PeftModel.from_pretrained(base, self.output / "work" / "checkpoints" / f"step-{step:06d}").eval()

    def distance(self, version, model):
        """Mean and largest difference between the recorded logprobs of a version and those of a model."""
        differences = []
        rows = [row for rollout in self.rollouts() for row in rollout.episode.rows() if version in row.versions]
        for row in rows:
            computed = forward(model, row.prompt_ids, row.response_ids)
            tokens = zip(row.versions, row.logprobs, computed, strict=True)
            differences += [abs(recorded - ours) for by, recorded, ours in tokens if by == version]
        mean, largest = sum(differences) / len(differences), max(differences)
        print(f"version {version}: {len(differences)} tokens, mean {mean:.2e}, largest {largest:.2e}")
        return mean, largest

    def rollouts(self):
        with Ledger.read(self.ledger) as ledger:
            return list(rollouts(ledger))

    def versions(self):
        """The versions that sampled each rollout, in turn."""
        return [
            {span.version for node in rollout.episode.nodes for span in node.spans}
            for rollout in sorted(self.rollouts(), key=lambda rollout: rollout.number)
        ]

    def steps(self):
        with Ledger.read(self.ledger) as ledger:
            return [step.numbers for step in steps(ledger, "train")]


@pytest.fixture(scope="module")
def url():
    with vllm() as url:
        yield url


@pytest.fixture(scope="module")
def first(url, tmp_path_factory):
    """Two steps."""
    training = TwoTurnTraining(tmp_path_factory.mktemp("first"), url, steps=2, seed=1)
    result = training.call()
    assert result.code == 0, result.err
    return training


@pytest.fixture(scope="module")
def second(first, url, tmp_path_factory):
    """Three steps by the same server, from the beginning. It is killed during the rollouts of the second step, which
    wait while it restarts."""
    training = TwoTurnTraining(tmp_path_factory.mktemp("second"), url, steps=3, seed=2, hold=True)
    process = training.start()
    try:
        wait_for(lambda: process.poll() is not None or training.first_turns() == 2 * STEP)
        kill(url)
        (training.directory / "hold").unlink()
        with vllm(int(url.rpartition(":")[2])):
            training.result = end_of(process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return training


def test_t06_a_vllm_server_samples_from_the_weights_of_each_step(first):
    assert first.versions() == [{0}] * STEP + [{1}] * STEP
    assert [step["updates"] for step in first.steps()] == [1, 1]
    for version in (0, 1):
        assert first.distance(version, first.policy(version))[1] < TOLERANCE
    assert first.distance(1, first.policy(0))[0] > MOVED, "the weights differ"


def test_t06_a_run_does_not_start_from_the_weights_of_another_run(first, second):
    assert second.distance(0, second.policy(0))[1] < TOLERANCE
    assert second.distance(0, first.policy(2))[0] > MOVED, "the weights that the server had before"


def test_t06_a_restarted_server_continues_with_the_weights_of_the_step(second):
    assert second.result.code == 0, second.result.err
    assert "waiting up to" in second.result.err
    assert "was restarted; loading version 1 of the weights again" in second.result.err
    assert second.versions() == [{0}] * STEP + [{1}] * STEP + [{2}] * STEP, "none was lost"
    for version in (1, 2):
        assert second.distance(version, second.policy(version))[1] < TOLERANCE
        assert second.distance(version, second.policy(version - 1))[0] > MOVED, "the weights differ"
