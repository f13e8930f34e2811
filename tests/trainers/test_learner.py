"""The learner: known answers, adapters, and steps that must not be taken."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from loopwright.engines.models import causal_model
from loopwright.trainers.learner import Alone
from loopwright.trainers.sample import Sample
from tests.trainers.making import learner_of, samples

PROMPT = [10, 20, 30]
ARMS = 4
"""The token's remainder by this is the arm of the bandit that was pulled."""
PAYS = torch.tensor([0.0, 0.2, 0.5, 1.0])


def chances(learner):
    with torch.no_grad():
        return torch.softmax(learner.policy.hub(input_ids=torch.tensor([PROMPT])).logits[0, -1].float(), -1)


def pulled(learner, rewards, count, random):
    """Single-token episodes, sampled by the policy; each is compared with the mean of all."""
    odds = chances(learner)
    exact = odds.double().numpy()
    tokens = random.choice(len(odds), size=count, p=exact / exact.sum())
    got = [float(rewards[token]) for token in tokens]
    found = []
    for episode, (token, reward) in enumerate(zip(tokens, got, strict=True)):
        ids = np.array([*PROMPT, token], dtype=np.int64)
        recorded = np.zeros(4, dtype=np.float32)
        recorded[-1] = float(odds[token].log())
        mask = np.array([False, False, False, True])
        found.append(Sample(ids, mask, recorded, reward - float(np.mean(got)), reward, 1.0, episode))
    return found


def payoffs(learner):
    return PAYS[torch.arange(len(chances(learner))) % ARMS]


@pytest.mark.parametrize("kind", ["grpo", "rloo", "ppo"])
def test_a_bandit_is_solved(tmp_path, kind):
    """Known answer: the best arm pays 1, so a policy that has learned gets 1."""
    learner, random = learner_of(kind, tmp_path, lr=3e-3, max_grad_norm=1.0), np.random.default_rng(0)
    assert float((chances(learner) * payoffs(learner)).sum()) < 0.6
    for step in range(1, 61):
        learner.update(pulled(learner, payoffs(learner), 128, random), step)
    assert float((chances(learner) * payoffs(learner)).sum()) > 0.95


@pytest.mark.parametrize(("kind", "options"), [("grpo", {"std": False}), ("rloo", {})])
def test_with_a_price_on_certainty_the_optimum_is_the_closed_form(tmp_path, kind, options):
    """Known answer: reward plus τ × entropy is largest for softmax(reward / τ)."""
    tau = 0.5
    learner = learner_of(kind, tmp_path, lr=2e-3, entropy=tau, max_grad_norm=1.0, schedule="linear", **options)
    random, best = np.random.default_rng(0), torch.softmax(payoffs(learner) / tau, -1)
    for step in range(1, 101):
        learner.update(pulled(learner, payoffs(learner), 256, random), step)
    found = chances(learner)
    by_arm = [torch.stack([p[torch.arange(len(p)) % ARMS == arm].sum() for arm in range(ARMS)]) for p in (found, best)]
    torch.testing.assert_close(by_arm[0], by_arm[1], atol=0.04, rtol=0)


def test_a_step_that_would_break_the_policy_is_skipped(tmp_path):
    learner, batch = learner_of("grpo", tmp_path), samples()
    before = {name: value.clone() for name, value in learner.policy.learned().items()}
    batch[0].recorded[:] = np.nan
    told = learner.update(batch, 1)
    assert told["skipped"] == 1.0
    for name, value in learner.policy.learned().items():
        assert torch.equal(value, before[name])
    batch[0].recorded[:] = -5.0
    assert learner.update(batch, 2)["skipped"] == 0.0


@pytest.mark.parametrize("options", [{}, {"lora": {"r": 2}}, {"layers": 1}])
def test_what_is_saved_is_what_was_learned(tmp_path, options):
    """By our weights and by transformers' own loading."""
    learner = learner_of("grpo", tmp_path, lr=0.01, **options)
    first = causal_model("tiny", tmp_path).state_dict()
    for step in range(1, 4):
        learner.update(samples(seed=step), step)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = learner.policy.hub(input_ids=ids).logits
        assert (causal_model("tiny", tmp_path)(input_ids=ids).logits - expected).abs().max() > 1e-3
    learner.policy.save(tmp_path / "policy")
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    torch.testing.assert_close(again(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
    engine = causal_model("tiny", tmp_path)
    engine.load_state_dict(learner.policy.weights())
    torch.testing.assert_close(engine(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
    changed = {
        name
        for name, value in load_file(tmp_path / "policy" / "model.safetensors").items()
        if not value.equal(first[name])
    }
    assert changed
    if options.get("layers"):
        assert all("layers.1." in name or name == "model.norm.weight" for name in changed)
    if options.get("lora"):
        assert all("_proj" in name for name in changed)


@pytest.mark.parametrize("options", [{}, {"lora": {"r": 2, "layers": 1}}])
@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_going_on_from_a_state_is_as_if_never_stopped(tmp_path, kind, options):
    whole, parts = learner_of(kind, tmp_path, **options), learner_of(kind, tmp_path, **options)
    for step in (1, 2):
        whole.update(samples(seed=step), step)
        parts.update(samples(seed=step), step)
    parts.write(tmp_path)
    again = learner_of(kind, tmp_path, **options)
    again.read(tmp_path)
    for step in (3, 4):
        whole.update(samples(seed=step), step)
        again.update(samples(seed=step), step)
    for name, value in whole.policy.learned().items():
        assert torch.equal(value, again.policy.learned()[name]), name


def test_transformers_loads_a_checkpoint_of_adapters(tmp_path):
    from transformers import AutoModelForCausalLM

    causal_model("tiny", tmp_path).save_pretrained(tmp_path / "base")
    learner = learner_of("grpo", tmp_path, model_name=str(tmp_path / "base"), lora={"r": 2}, lr=0.05)
    learner.update(samples(), 1)
    (tmp_path / "step").mkdir()
    learner.write(tmp_path / "step")
    ids = torch.tensor([[5, 6, 7, 8]])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "step")
    torch.testing.assert_close(again(input_ids=ids).logits, learner.policy.hub(input_ids=ids).logits)


def test_adapters_start_from_the_policy_as_it_is(tmp_path):
    learner = learner_of("grpo", tmp_path, lora={"r": 4}, kl=0.1)
    ids = torch.tensor([[5, 6, 7, 8]])
    plain = causal_model("tiny", tmp_path)(input_ids=ids).logits
    torch.testing.assert_close(learner.policy.hub(input_ids=ids).logits, plain, atol=1e-5, rtol=1e-5)
    learner.update(samples(), 1)
    assert (learner.policy.hub(input_ids=ids).logits - plain).abs().max() > 1e-6
    with learner.policy.beginning():
        torch.testing.assert_close(learner.policy.hub(input_ids=ids).logits, plain, atol=1e-5, rtol=1e-5)


def test_an_adapter_for_a_matrix_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    with pytest.raises(ValueError, match=r"no matrix 'c_attn'; it has .*q_proj"):
        learner_of("grpo", tmp_path, lora={"targets": ["c_attn"]})


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [0.5, 1, 1, 1]), ("linear", [0.5, 1, 1, 2 / 3]), ("cosine", [0.5, 1, 1, 0.75])],
)
def test_the_step_size_rises_and_falls(tmp_path, schedule, expected):
    learner = learner_of("grpo", tmp_path, lr=1.0, steps=5, warmup=2, schedule=schedule)
    assert [learner._rate(step) for step in (1, 2, 3, 4)] == pytest.approx(expected)


class Second(Alone):
    """The second of a team of two, of which the first one says nothing."""

    rank, size = 1, 2


def test_what_a_worker_computes_for_want_of_a_sample_is_not_counted(tmp_path):
    told = learner_of("grpo", tmp_path, team=Second(), epochs=2, kl=0.1).update(samples(1), 1)
    assert not told.keys() & {"entropy", "kl"}
    assert told["loss"] == 0.0
