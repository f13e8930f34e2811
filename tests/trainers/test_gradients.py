"""P01 from end to end: every optimizer step of real runs, recomputed from the published formulas.

All that this reads comes from outside of the trainers: rollouts from the ledger as plain JSON, weights and gradients
from torch's own optimizer hook, logprobs from transformers' (and peft's) own forward pass.
"""

import math
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import Any

import orjson
import peft
import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.optim.optimizer import register_optimizer_step_pre_hook

import loopwright
from loopwright.engines.inprocess.models import tiny
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.steps import steps

MAX_TOKENS = 6
LETTERS = """
import asyncio
from itertools import count
from loopwright import AgentLoop

def tasks():
    return [{"prompt": letter} for letter in "abcdefg"]

def judge(answer):
    return sum(map(ord, answer)) % 7 / 6

def moody(answer):
    if sum(map(ord, answer)) % 5 == 0:
        raise ValueError("no verdict")
    return judge(answer)

class Branching(AgentLoop):
    numbers, slow = count(), ""

    async def run(self, task, session):
        kind = next(self.numbers) % 7
        if kind == 0:
            return session.episode(task)  # it never calls the policy
        first = await session.turn(task.messages)
        again = [*task.messages, first.message, {"role": "user", "content": "again"}]
        if task.messages[0]["content"] in self.slow:  # waits for two updates, if there are any
            version = session.engine.version
            for _ in range(100):
                if session.engine.version < version + 2:
                    await asyncio.sleep(0.01)
        if kind > 1:
            await session.turn(again)
        if kind > 3:
            await session.turn([*again[:-1], {"role": "user", "content": "otherwise"}])
        if kind > 4:
            await session.turn(task.messages)
        if kind > 5:
            await session.turn([{"role": "user", "content": "in short"}])
        return session.episode(task)

class Slow(Branching):
    slow = "bd"
"""
DEFAULTS = {"steps": 3, "prompts_per_step": 3, "group_size": 3, "lr": 3e-3, "seed": 3, "max_grad_norm": 1e9}


@dataclass(frozen=True)
class OptimizerStep:
    """What torch's optimizer was about to do."""

    weights: list[Tensor]
    gradients: list[Tensor | None]
    rate: float


@dataclass(frozen=True)
class Branch:
    """A branch of a recorded rollout: all its ids, and its trained tokens with their recorded logprobs."""

    ids: list[int]
    places: list[int]
    recorded: Tensor


@dataclass(frozen=True)
class Rollout:
    """A recorded rollout that was trained on."""

    reward: float
    advantage: float
    branches: list[Branch]
    too_old: int
    """How many of its tokens are too old to be trained on."""

    @property
    def tokens(self) -> int:
        return sum(len(branch.places) for branch in self.branches)


@dataclass(frozen=True)
class Recording:
    """A run: its settings, the optimizer's steps, and the rollouts and numbers of each training step."""

    agent: dict[str, Any]
    temperature: float
    seen: list[OptimizerStep]
    rollouts: dict[int, list[Rollout]]
    numbers: dict[int, Mapping[str, Any]]


def branches_of(nodes: Sequence[Mapping[str, Any]], oldest: int) -> list[Branch]:
    """Every path to a leaf. A token is trained on in the first one that has it, unless it is older than `oldest`."""
    seen: set[int] = set()
    branches = []
    for leaf in range(1, len(nodes) + 1):
        if any(node["parent"] == leaf for node in nodes):
            continue
        path, parent = [leaf], nodes[leaf - 1]["parent"]
        while parent:
            path, parent = [parent, *path], nodes[parent - 1]["parent"]
        ids: list[int] = []
        places: list[int] = []
        recorded: list[float] = []
        for number in path:
            node = nodes[number - 1]
            for start, stop, version in node["spans"] if number not in seen else ():
                if version >= oldest:
                    places += range(len(ids) + start, len(ids) + stop)
                    recorded += node["logprobs"][start:stop]
            ids += node["ids"]
        seen.update(path)
        if places:
            branches.append(Branch(ids, places, torch.tensor(recorded)))
    return branches


def advantage_of(agent: Mapping[str, Any], reward: float, rewards: Sequence[float]) -> float:
    if agent["type"] == "rloo":
        return reward - (sum(rewards) - reward) / (len(rewards) - 1)
    if agent["type"] == "grpo":
        return (reward - fmean(rewards)) / (stdev(rewards) + 1e-6 if agent.get("std", True) else 1.0)
    return 0.0  # PPO credits each token


def read_rollouts(path: Path, agent: Mapping[str, Any], produce: Mapping[str, Any]) -> dict[int, list[Rollout]]:
    """The rollouts of each training step, in the order of their trials."""
    with closing(sqlite3.connect(path)) as database:
        rows = database.execute(
            "SELECT step, grp, data FROM groups JOIN trials USING (grp) JOIN payloads ON trial = number "
            "WHERE step IS NOT NULL AND kind = 'rollout' ORDER BY number"
        ).fetchall()
    scored = [(step, group, episode) for step, group, data in rows if (episode := orjson.loads(data))["reward"]]
    rollouts: dict[int, list[Rollout]] = {}
    for step, group, episode in scored:
        rewards = [other["reward"]["value"] for _, its_group, other in scored if its_group == group]
        oldest = step - 1 - produce["max_staleness"] if produce.get("staleness") == "token" else 0
        reward = episode["reward"]["value"]
        if branches := branches_of(episode["nodes"], oldest):
            spans = [span for node in episode["nodes"] for span in node["spans"]]
            too_old = sum(stop - start for start, stop, version in spans if version < oldest)
            advantage = advantage_of(agent, reward, rewards)
            rollouts.setdefault(step, []).append(Rollout(reward, advantage, branches, too_old))
    return rollouts


def record(
    directory: Path,
    agent: dict[str, Any],
    produce: dict[str, Any],
    temperature: float = 1.0,
    *,
    loop: str = "Branching",
    judge: str = "judge",
) -> Recording:
    """Train in this process."""
    (directory / "branching.py").write_text(LETTERS)
    run = {
        "name": "work",
        "agent": {**DEFAULTS, **agent},
        "engine": {"type": "transformers", "model": "tiny", "threads": 1},
        "rollout": {
            "tasks": {"type": "python", "function": "branching:tasks"},
            "loop": {
                "type": f"branching:{loop}",
                "sampling": {"max_tokens": MAX_TOKENS, "temperature": temperature},
            },
            "judger": {"type": "python", "function": f"branching:{judge}", "retries": 0},
            "produce": {"type": "sync", **produce},
        },
    }
    seen: list[OptimizerStep] = []

    def look(optimizer: Any, *_: Any) -> None:
        (group,) = optimizer.param_groups
        weights = [each.detach().clone() for each in group["params"]]
        gradients = [None if each.grad is None else each.grad.clone() for each in group["params"]]
        seen.append(OptimizerStep(weights, gradients, group["lr"]))

    hook = register_optimizer_step_pre_hook(look)
    try:
        scenario = {"name": "recomputed", "home": str(directory), "run": [run]}
        assert loopwright.run(scenario, directory / "out", progress=False).code == 0
    finally:
        hook.remove()
    path = directory / "out" / "work" / "ledger.db"
    with closing(Ledger.read(path)) as ledger:
        numbers = {step.step: step.numbers for step in steps(ledger, "train")}
    settings = {**DEFAULTS, **agent}
    return Recording(settings, temperature, seen, read_rollouts(path, settings, produce), numbers)


class Formulas:
    """The objectives of GRPO, RLOO and PPO, branch by branch."""

    def __init__(self, agent: Mapping[str, Any], temperature: float) -> None:
        self.agent, self.temperature = agent, temperature
        self.model: Any = tiny(0).float().eval()
        self.model.requires_grad_("lora" not in agent and "layers" not in agent)
        if lora := agent.get("lora"):
            names = {"target_modules": lora["targets"], "layers_to_transform": [1]}
            self.model = peft.get_peft_model(
                self.model, peft.LoraConfig(r=lora["r"], lora_alpha=lora["alpha"], **names)
            )
        for part in (self.model.model.layers[-1], self.model.model.norm) if "layers" in agent else ():
            part.requires_grad_(True)
        self.names = [name for name, each in self.model.named_parameters() if each.requires_grad]

    def tokens(self, weights: Sequence[Tensor], branch: Branch) -> tuple[Tensor, Tensor, Tensor]:
        """Logprob, entropy and value of each trained token of a branch."""
        named = dict(zip(self.names, weights, strict=False))
        arguments = {"input_ids": torch.tensor([branch.ids]), "output_hidden_states": True}
        output = functional_call(self.model, named, (), arguments)
        before = [place - 1 for place in branch.places]
        every = torch.log_softmax(output.logits[0, before] / self.temperature, -1)
        logprobs = every[range(len(before)), [branch.ids[place] for place in branch.places]]
        values = torch.zeros(len(before))
        if self.agent["type"] == "ppo":
            matrix, bias = weights[len(self.names) :]
            values = (output.hidden_states[-1][0, before] @ matrix.T + bias)[:, 0]
        return logprobs, -(every.exp() * every).sum(-1), values

    @torch.no_grad()
    def credit(self, rollouts: Sequence[Rollout], weights: Sequence[Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
        """The advantage of each token and the critic's target, by the id of the branch."""
        if self.agent["type"] != "ppo":
            return {id(b): (torch.tensor(r.advantage), torch.tensor(0.0)) for r in rollouts for b in r.branches}
        gamma, decay, raw = self.agent["gamma"], self.agent["gamma"] * self.agent["gae"], {}
        for rollout in rollouts:
            for branch in rollout.branches:
                values = self.tokens(weights, branch)[2]
                follows = torch.cat([gamma * values[1:], torch.tensor([rollout.reward])])
                errors, places = follows - values, range(len(values))
                own = torch.tensor([sum(decay ** (m - n) * errors[m] for m in places[n:]) for n in places])
                raw[id(branch)] = own, own + values
        every = torch.cat([advantages for advantages, _ in raw.values()])
        mean, spread = every.mean(), every.std(correction=0) + 1e-8
        return {key: ((advantages - mean) / spread, targets) for key, (advantages, targets) in raw.items()}

    def loss(self, branch: Branch, weights: Any, old: Any, initial: Any, credit: tuple[Tensor, Tensor]) -> Tensor:
        """The summed loss of a branch's trained tokens."""
        agent, (advantages, targets) = self.agent, credit
        logprobs, entropy, values = self.tokens(weights, branch)
        with torch.no_grad():
            before = self.tokens(old, branch)[0]
            reference = self.tokens(initial, branch)[0] if "kl" in agent else before
        ratio = torch.exp(logprobs - before)
        loss = -ratio * advantages
        if agent["type"] != "rloo":
            low = agent.get("clip", 0.2)
            clipped = torch.clamp(ratio, 1 - low, 1 + agent.get("clip_high", low))
            loss = -torch.min(ratio * advantages, clipped * advantages)
        if agent["type"] == "ppo":
            loss = loss + agent["value"] * (values - targets) ** 2
        if limit := agent.get("importance", 2.0):
            loss = loss * torch.exp(before - branch.recorded).clamp(max=limit)
        divergence = torch.exp(reference - logprobs) - (reference - logprobs) - 1
        return (loss + agent.get("kl", 0.0) * divergence - agent.get("entropy", 0.0) * entropy).sum()

    def gradient(self, part: Sequence[Rollout], now: Any, old: Any, initial: Any, credit: Any) -> list[Tensor]:
        """The gradient of the loss of a part of the batch, with each rollout weighed by its rule."""
        weights = [each.clone().requires_grad_() for each in now]
        length = {"rloo": "sum", "ppo": "token"}.get(self.agent["type"], self.agent.get("length", "episode"))
        tokens, total = sum(rollout.tokens for rollout in part), torch.zeros(())
        for rollout in part:
            divisors = {"episode": rollout.tokens * len(part), "token": tokens, "sum": len(part)}
            divisor = divisors.get(length, MAX_TOKENS * len(part))
            for branch in rollout.branches:
                total = total + self.loss(branch, weights, old, initial, credit[id(branch)]) / divisor
        gradient = torch.autograd.grad(total, weights, allow_unused=True, materialize_grads=True)
        norm = math.sqrt(sum(float(each.square().sum()) for each in gradient))
        return [each * min(1.0, self.agent["max_grad_norm"] / norm) for each in gradient]


def compare(recording: Recording) -> float:
    """The largest difference of a gradient's element from its formula, relative to the gradient's norm."""
    agent, formulas = recording.agent, Formulas(recording.agent, recording.temperature)
    seen, initial, worst = iter(recording.seen), recording.seen[0].weights, 0.0
    parts = agent.get("minibatches", 1)
    for step, rollouts in sorted(recording.rollouts.items()):
        old: Any = None
        for epoch in range(agent.get("epochs", 2 if agent["type"] == "ppo" else 1)):
            order = list(range(len(rollouts)))
            if parts > 1:
                Random(f"{agent['seed']}:{step}:{epoch}").shuffle(order)
            for index in range(parts):
                actual = next(seen)
                old = old or actual.weights
                credit = formulas.credit(rollouts, old)
                part = [rollouts[place] for place in order[index::parts]]
                expected = formulas.gradient(part, actual.weights, old, initial, credit)
                norm = math.sqrt(sum(float(each.square().sum()) for each in expected))
                for ours, theirs in zip(actual.gradients, expected, strict=True):
                    difference = theirs if ours is None else theirs - ours
                    worst = max(worst, float(difference.abs().max()) / norm)
    assert next(seen, None) is None, "no further optimizer step"
    return worst


GRPO, RLOO = {"type": "grpo"}, {"type": "rloo"}
PPO = {"type": "ppo", "gamma": 0.9, "gae": 0.8, "value": 0.3}
STALE = {"type": "async", "over_sample": 2.0, "max_staleness": 2}
LORA = {"r": 2, "alpha": 8, "targets": ["q_proj", "down_proj"], "layers": 1}
SEVERAL = {"epochs": 2, "minibatches": 2}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "episode": (GRPO, {}, 1.0),
    "token": ({**GRPO, "length": "token", "std": False, "micro_tokens": 40}, STALE, 1.0),
    "constant": ({**GRPO, **SEVERAL, "length": "constant", "clip": 0.01, "clip_high": 0.02, "lr": 0.02}, {}, 1.0),
    "importance": ({**GRPO, "importance": 0.9, "dynamic_sampling": True}, STALE, 1.0),
    "unweighted": ({**GRPO, "importance": 0.0, "max_grad_norm": 0.05}, STALE, 1.0),
    "kl and entropy": ({**GRPO, "kl": 0.3, "entropy": 0.05, "epochs": 2}, {}, 0.7),
    "lora": ({**GRPO, "kl": 0.3, "lora": LORA}, {}, 1.0),
    "layers": ({**GRPO, "kl": 0.3, "layers": 1}, STALE, 1.0),
    "rloo": ({**RLOO, **SEVERAL, "kl": 0.1, "entropy": 0.02}, STALE, 1.3),
    "ppo": ({**PPO, "kl": 0.1}, {}, 1.0),
    "ppo, groups of one": (
        {**PPO, "minibatches": 2, "entropy": 0.02, "clip": 0.01, "group_size": 1, "prompts_per_step": 8},
        STALE,
        0.8,
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_p01_each_step_of_a_run_has_the_gradient_of_its_formula(tmp_path, name):
    agent, produce, temperature = OPTIONS[name]
    only_advantages = agent["type"] != "ppo" and not {"kl", "entropy"} & agent.keys()
    recording = record(tmp_path, agent, produce, temperature)
    numbers = recording.numbers.values()
    counted = {
        step: sum(r.advantage != 0 or not only_advantages for r in each) for step, each in recording.rollouts.items()
    }
    assert {step: one["trained_episodes"] for step, one in recording.numbers.items()} == counted, "P05"
    assert any(len(rollout.branches) > 1 for rollouts in recording.rollouts.values() for rollout in rollouts)
    if produce:
        assert any(one["staleness"] for one in numbers)
    if "clip" in agent:
        assert any(one["clip_fraction"] > 0.1 for one in numbers)
    assert compare(recording) < 1e-6


def test_p01_the_numbers_of_a_step_are_those_of_its_trained_tokens(tmp_path):
    recording = record(tmp_path, {**GRPO, "kl": 0.3}, STALE)  # with `kl`, rollouts without an advantage count, too
    formulas, initial = Formulas(recording.agent, 1.0), recording.seen[0].weights
    for step, actual in enumerate(recording.seen, 1):
        branches = [branch for rollout in recording.rollouts[step] for branch in rollout.branches]
        with torch.no_grad():
            outputs = [formulas.tokens(actual.weights, branch) for branch in branches]
            reference = torch.cat([formulas.tokens(initial, branch)[0] for branch in branches])
        logprobs = torch.cat([each[0] for each in outputs])
        drift, away = (logprobs - torch.cat([branch.recorded for branch in branches])).double(), reference - logprobs
        expected = {
            "mismatch_kl": (torch.expm1(drift) - drift).mean(),
            "mismatch_max": drift.abs().max(),
            "importance": drift.exp().clamp(max=2.0).mean(),
            "kl": (away.exp() - away - 1).mean(),
            "entropy": torch.cat([each[1] for each in outputs]).mean(),
            "tokens": len(drift),
        }
        got = {name: recording.numbers[step][name] for name in expected}
        assert got == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-3, abs=1e-6)


def test_p01_lost_rollouts_are_neither_in_the_baseline_nor_in_the_gradient(tmp_path):
    recording = record(tmp_path, {**GRPO, "min_group": 2}, {}, judge="moody")
    assert any(one["fault_rate"] for one in recording.numbers.values())
    assert compare(recording) < 1e-6


def test_p01_tokens_that_are_too_old_are_context(tmp_path):
    produce = {**STALE, "max_staleness": 1, "staleness": "token"}
    recording = record(tmp_path, {**GRPO, "length": "token", "steps": 4}, produce, loop="Slow")
    assert any(rollout.too_old for rollouts in recording.rollouts.values() for rollout in rollouts)
    assert compare(recording) < 1e-6


def test_p01_weights_move_by_adamw_and_the_schedule(tmp_path):
    agent = {**GRPO, "steps": 5, "warmup": 2, "schedule": "cosine", "weight_decay": 0.1, "betas": [0.8, 0.95]}
    seen = record(tmp_path, agent, {}).seen
    assert [step.rate for step in seen] == pytest.approx([1.5e-3, 3e-3, 3e-3, 2.25e-3, 0.75e-3])
    for index, start in enumerate(seen[0].weights):
        weight, first, second = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
        for count, (step, after) in enumerate(pairwise(seen), 1):
            gradient = step.gradients[index]
            first, second = 0.8 * first + 0.2 * gradient, 0.95 * second + 0.05 * gradient**2
            change = first / (1 - 0.8**count) / (torch.sqrt(second / (1 - 0.95**count)) + 1e-8)
            weight = weight * (1 - step.rate * 0.1) - step.rate * change
            torch.testing.assert_close(after.weights[index], weight, rtol=1e-4, atol=1e-6)
