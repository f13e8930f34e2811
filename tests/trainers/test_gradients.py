"""The gradient of each loss equals that of the published formula, computed token by token."""

import pytest
import torch

from tests.trainers.factories import gradients, learner_of, logprobs_of, samples

CLIP = 0.2


def naive_grpo(new, old, recorded, sample, config):
    """GRPO with the truncated importance weight of the recorded policy, one token after another."""
    total = 0.0
    for n, o, r in zip(new, old, recorded, strict=True):
        ratio = torch.exp(n - o.detach())
        high = config.clip_high or config.clip
        clipped = torch.clamp(ratio, 1 - config.clip, 1 + high)
        surrogate = torch.min(ratio * sample.advantage, clipped * sample.advantage)
        total = total - surrogate * min(float(torch.exp(o.detach() - r)), config.importance)
    return total


def naive_rloo(new, old, recorded, sample, config):
    total = 0.0
    for n, o, r in zip(new, old, recorded, strict=True):
        weight = min(float(torch.exp(o.detach() - r)), config.importance) * float(torch.exp(n.detach() - o.detach()))
        total = total - weight * sample.advantage * n
    return total


def recorded_of(sample):
    return [float(value) for value in sample.recorded[sample.mask]]


def compare(learner, loss, got):
    expected = torch.autograd.grad(loss, learner.policy.parameters(), allow_unused=True)
    for ours, theirs in zip(got, expected, strict=True):
        if theirs is None:
            assert ours is None or not ours.any()
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"importance": 0.5}, {"micro_tokens": 12}, {"entropy": 0.05}])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_grpo_has_the_gradient_of_its_formula(tmp_path, options, temperature):
    learner, batch = learner_of("grpo", tmp_path, temperature=temperature, **options), samples()
    got = gradients(learner, batch)
    loss = 0.0
    for sample in batch:
        new, entropy = logprobs_of(learner.policy.model, sample, temperature)
        loss = loss + naive_grpo(new, new, recorded_of(sample), sample, learner.config) / sample.tokens
        loss = loss - learner.config.entropy * entropy.mean()
    compare(learner, loss / len(batch), got)


def test_rloo_has_the_gradient_of_its_formula(tmp_path):
    learner, batch = learner_of("rloo", tmp_path), samples(weight=1.0)
    got = gradients(learner, batch)
    loss = sum(
        naive_rloo(new, new, recorded_of(sample), sample, learner.config)
        for sample in batch
        for new, _ in [logprobs_of(learner.policy.model, sample)]
    )
    compare(learner, loss / len(batch), got)


@pytest.mark.parametrize(("length", "divide"), [("token", None), ("constant", 8)])
def test_the_published_variants_weigh_tokens_as_published(tmp_path, length, divide):
    learner, batch = learner_of("grpo", tmp_path, length=length, std=False), samples(weight=1.0)
    got = gradients(learner, batch)
    loss = sum(
        naive_grpo(new, new, recorded_of(sample), sample, learner.config)
        for sample in batch
        for new, _ in [logprobs_of(learner.policy.model, sample)]
    )
    compare(learner, loss / (len(batch) * divide if divide else sum(s.tokens for s in batch)), got)


def test_a_second_step_on_a_batch_is_clipped_against_the_policy_at_the_start_of_the_update(tmp_path):
    learner, batch = learner_of("grpo", tmp_path, epochs=2, lr=0.05, clip_high=0.3), samples()
    with torch.no_grad():
        before = [logprobs_of(learner.policy.model, sample)[0] for sample in batch]
    real, gradients_seen = learner.optimizer.step, []

    def step():
        gradients_seen.append([p.grad.clone() for p in learner.policy.parameters()])
        if len(gradients_seen) == 1:
            real()

    learner.optimizer.step = step
    numbers = learner.update(batch, 1)
    loss = sum(
        naive_grpo(new, old, recorded_of(sample), sample, learner.config) / sample.tokens
        for sample, old in zip(batch, before, strict=True)
        for new, _ in [logprobs_of(learner.policy.model, sample)]
    )
    compare(learner, loss / len(batch), gradients_seen[1])
    assert numbers["clip_fraction"] > 0  # the effect of the first step


def test_ppo_has_the_gradient_of_its_formula(tmp_path):
    learner, batch = learner_of("ppo", tmp_path, epochs=1, importance=0.0, gamma=0.9, gae=0.8), samples(weight=1.0)
    torch.manual_seed(0)
    torch.nn.init.normal_(learner.policy.module.critic.weight, std=0.1)
    hub, critic = learner.policy.model, learner.policy.module.critic

    def values_of(sample):
        hidden = hub.base_model(input_ids=torch.from_numpy(sample.ids)[None]).last_hidden_state[0]
        return torch.stack([critic(hidden[p - 1])[0] for p in range(len(sample.ids)) if sample.mask[p]])

    with torch.no_grad():
        old = [logprobs_of(hub, sample)[0] for sample in batch]
        guessed = [values_of(sample) for sample in batch]
    advantages = []
    for sample, values in zip(batch, guessed, strict=True):
        own = []
        for start in range(len(values)):  # the sum over all later steps, as in the paper
            total = 0.0
            for later in range(start, len(values)):
                follows = float(values[later + 1]) if later + 1 < len(values) else 0.0
                reward = sample.reward if later == len(values) - 1 else 0.0
                total += (0.9 * 0.8) ** (later - start) * (reward + 0.9 * follows - float(values[later]))
            own.append(total)
        advantages.append(torch.tensor(own))
    every = torch.cat(advantages)
    normal = [(own - every.mean()) / (every.std(correction=0) + 1e-8) for own in advantages]
    got = gradients(learner, batch)
    loss = 0.0
    for sample, before, own, values, scaled in zip(batch, old, advantages, guessed, normal, strict=True):
        ratio = torch.exp(logprobs_of(hub, sample)[0] - before)
        clipped = torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
        loss = loss - torch.min(ratio * scaled, clipped * scaled).sum()
        loss = loss + 0.5 * (values_of(sample) - (own + values)).square().sum()
    compare(learner, loss / sum(sample.tokens for sample in batch), got)


def test_the_reference_penalty_has_the_gradient_of_its_formula(tmp_path):
    learner, batch = learner_of("grpo", tmp_path, kl=0.5), samples()
    with torch.no_grad():
        reference = [logprobs_of(learner.policy.model, sample)[0] for sample in batch]
        for parameter in learner.policy.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    got = gradients(learner, batch)
    loss = 0.0
    for sample, first in zip(batch, reference, strict=True):
        new, _ = logprobs_of(learner.policy.model, sample)
        own = naive_grpo(new, new, recorded_of(sample), sample, learner.config)
        loss = loss + (own + 0.5 * (torch.exp(first - new) - (first - new) - 1).sum()) / sample.tokens
    compare(learner, loss / len(batch), got)


def test_branches_of_one_rollout_share_its_weight(tmp_path):
    """Two rows with half the weight each move the policy as one row of all their tokens would."""
    learner, batch = learner_of("grpo", tmp_path), samples(4, rows=2)
    for episode in range(4):
        own = [sample for sample in batch if sample.episode == episode]
        total = sum(sample.tokens for sample in own)
        for sample in own:
            object.__setattr__(sample, "weight", 1.0 / total)
    got = gradients(learner, batch)
    loss = 0.0
    for episode in range(4):
        own = [sample for sample in batch if sample.episode == episode]
        total = sum(sample.tokens for sample in own)
        for sample in own:
            new, _ = logprobs_of(learner.policy.model, sample)
            loss = loss + naive_grpo(new, new, recorded_of(sample), sample, learner.config) / total
    compare(learner, loss / 4, got)
