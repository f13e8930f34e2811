"""P01 for PPO: its gradient on rollouts with branches, recomputed from what the ledger recorded."""

from typing import Any

import torch

from loopwright.core.episode import Episode
from loopwright.trainers.sample import build_samples
from tests.contracts.test_learning import recorded as recorded
from tests.trainers.conftest import _one_thread  # noqa: F401  a fixture
from tests.trainers.factories import gradients, learner_of


def branches_of(episode: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """The branches of a recorded episode: all ids, and the places of sampled tokens that no earlier branch has."""
    nodes, seen, branches = episode["nodes"], set(), []
    for leaf in range(1, len(nodes) + 1):
        if any(node["parent"] == leaf for node in nodes):
            continue
        path, parent = [leaf], nodes[leaf - 1]["parent"]
        while parent:
            path, parent = [parent, *path], nodes[parent - 1]["parent"]
        ids, places = [], []
        for number in path:
            spans = [] if number in seen else nodes[number - 1]["spans"]
            places += [len(ids) + place for start, stop, _ in spans for place in range(start, stop)]
            ids += nodes[number - 1]["ids"]
        seen.update(path)
        branches.append((ids, places))
    return branches


def test_p01_ppo_credits_each_branch_on_its_own_and_weighs_every_token_the_same(tmp_path, recorded):
    learner = learner_of("ppo", tmp_path, epochs=1, importance=0.0, gamma=0.9, gae=0.8)
    model, critic = learner.policy.model, learner.policy.module.critic
    torch.manual_seed(0)
    torch.nn.init.normal_(critic.weight, std=0.1)
    terms = []  # logprobs, values and advantages of each branch
    for episode in recorded:
        for ids, places in branches_of(episode):
            before = [place - 1 for place in places]
            every = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].float(), -1)
            hidden = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
            values = critic(hidden[before])[:, 0]
            fixed, reward = [*values.tolist(), 0.0], episode["reward"]["value"]
            errors = [
                0.9 * fixed[n + 1] - fixed[n] + (reward if n + 1 == len(places) else 0.0) for n in range(len(places))
            ]
            own = [sum((0.9 * 0.8) ** (m - n) * errors[m] for m in range(n, len(errors))) for n in range(len(errors))]
            terms.append((every[before, [ids[place] for place in places]], values, torch.tensor(own)))
    advantages = torch.cat([own for _, _, own in terms])
    mean, spread = advantages.mean(), advantages.std(correction=0) + 1e-8
    loss = torch.zeros(())
    for logprobs, values, own in terms:  # the ratio is 1
        loss = loss - (torch.exp(logprobs - logprobs.detach()) * (own - mean) / spread).sum()
        loss = loss + 0.5 * (values - (own + values.detach())).square().sum()
    expected = torch.autograd.grad(loss / len(advantages), learner.policy.parameters(), allow_unused=True)
    episodes = {number: Episode.from_json(data) for number, data in enumerate(recorded, 1)}
    rewards = learner.algorithm.advantages({n: e.reward.value for n, e in episodes.items()}, frozenset(episodes))
    batch = build_samples([episodes], [rewards], version=0, oldest=None, length=learner.algorithm.length)
    assert len(batch) == len(terms) > len(episodes)
    for ours, theirs in zip(gradients(learner, batch), expected, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
