"""Training that is killed and resumed ends with the same weights."""

import os
import signal
import sqlite3

import pytest
import torch
from safetensors.torch import load_file

from loopwright.ledger.ledger import Ledger
from loopwright.ledger.steps import steps
from tests.survival.campaign import Campaign, end_of, kill_repeatedly, processes, wait_for

SCENARIO = """
name = "survivor"
[[run]]
name = "work"
agent = {{ {agent} }}
[run.engine]
type = "transformers"
model = "tiny"
threads = 1
[run.rollout]
tasks = {{ type = "python", function = "letters:tasks" }}
loop = {{ type = "single_turn", sampling = {{ max_tokens = 6 }} }}
judger = {{ type = "python", function = "letters:vowels" }}
produce = {{ {produce} }}
[run.eval]
every = 4
tasks = {{ type = "python", function = "letters:held_out" }}
"""
LETTERS = """
def tasks():
    return [{"prompt": letter} for letter in "abcdefgh"]

def held_out():
    return [{"prompt": letter} for letter in "xyz"]

def vowels(answer):
    return sum(letter in "aeiou" for letter in answer) / 6
"""
GRPO = 'type = "grpo", steps = 8, prompts_per_step = 3, group_size = 4, lr = 1e-3, seed = 3'


def make_campaign(directory, agent=GRPO, produce='type = "sync"'):
    campaign = Campaign(directory, SCENARIO.format(agent=agent, produce=produce))
    (directory / "letters.py").write_text(LETTERS)
    return campaign


def policy(campaign):
    return load_file(campaign.output / "work" / "policy" / "model.safetensors")


def statuses(campaign):
    connection = sqlite3.connect(campaign.ledger)
    counts = dict(connection.execute("SELECT status, count(*) FROM groups GROUP BY 1"))
    connection.close()
    return counts


def close(mine, theirs):
    """Equal up to rounding: the rest of the engine's batch affects the last digits of logprobs."""
    assert mine.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(mine[name], weight, atol=2e-5, rtol=1e-4)


def ends_alike(tmp_path, agent, kills, seed):
    calm, stormy = make_campaign(tmp_path / "calm", agent), make_campaign(tmp_path / "stormy", agent)
    assert calm.call().code == 0
    hits = kill_repeatedly(stormy, kills, within_s=3.0, seed=seed)
    assert stormy.result() == calm.result()
    assert statuses(stormy) == statuses(calm) == {"trained": 24}
    close(policy(stormy), policy(calm))
    with Ledger.read(calm.ledger) as one, Ledger.read(stormy.ledger) as other:
        for kind, expected in (("train", list(range(1, 9))), ("eval", [0, 4, 8])):
            assert [step.step for step in steps(one, kind)] == [step.step for step in steps(other, kind)] == expected
    return hits


@pytest.mark.timeout(300)
def test_l09_a_killed_training_ends_with_the_same_weights(tmp_path):
    assert ends_alike(tmp_path, GRPO, kills=3, seed=1) >= 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "agent",
    [
        GRPO + ", checkpoint_every = 3",
        GRPO + ", lora = { r = 4 }, epochs = 2, minibatches = 2, kl = 0.01",
        GRPO.replace("grpo", "ppo"),
        GRPO.replace("grpo", "rloo") + ", checkpoint_every = 100",
    ],
    ids=["checkpoints", "adapters", "ppo", "rloo"],
)
def test_l09_every_kind_of_training_ends_with_the_same_weights(tmp_path, agent):
    assert ends_alike(tmp_path, agent, kills=8, seed=2) >= 6


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_l09_a_killed_asynchronous_training_trains_on_no_group_twice(tmp_path):
    campaign = make_campaign(tmp_path, produce='type = "async", max_staleness = 2')
    kill_repeatedly(campaign, 6, within_s=6.0, seed=4)
    connection = sqlite3.connect(campaign.ledger)
    trained = connection.execute("SELECT step, count(*) FROM groups WHERE status = 'trained' GROUP BY 1").fetchall()
    connection.close()
    assert trained == [(step, 3) for step in range(1, 9)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_l09_a_killed_ray_train_worker_loses_no_step(tmp_path):
    calm, stormy = (
        make_campaign(tmp_path / "calm"),
        make_campaign(tmp_path / "stormy", f"{GRPO}, workers = 2, cpus = 0.5"),
    )
    assert calm.call().code == 0
    process = stormy.start(env={**os.environ, "SURVIVOR": str(tmp_path)})
    wait_for((stormy.output / "work" / "checkpoints" / "step-000002").exists)
    ours = [command for environment, command in processes() if f"SURVIVOR={tmp_path}".encode() in environment]
    worker = next(command for command in ours if "ray::RayTrainWorker" in command)
    os.kill(int(worker.split()[0]), signal.SIGKILL)
    result = end_of(process)
    assert (result.code, "the Ray Train workers are gone" in result.err) == (1, True), result.err
    resumed = stormy.call("resume")
    assert resumed.code == 0, resumed.err
    assert statuses(stormy) == {"trained": 24}
    close(policy(stormy), policy(calm))
