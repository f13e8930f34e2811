"""The learner: known solutions, adapters, and skipped steps."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from loopwright.engines.base import Sampling
from loopwright.engines.inprocess.engine import TransformersConfig
from loopwright.engines.inprocess.models import causal_model
from loopwright.rollouts.env import PolicySource
from loopwright.trainers.failure import TrainingFailed
from loopwright.trainers.grpo import GrpoAlgorithm, GrpoConfig
from loopwright.trainers.learner import Learner, Team
from loopwright.trainers.learners import learner_settings
from loopwright.trainers.model import Policy
from loopwright.trainers.sample import Sample
from tests.trainers.factories import learner_of, logprobs_of, samples

PROMPT = [10, 20, 30]
ARMS = 4
"""The token's remainder by this is the arm of the bandit that was pulled."""
PAYS = torch.tensor([0.0, 0.2, 0.5, 1.0])


def chances(learner):
    with torch.no_grad():
        return torch.softmax(learner.policy.model(input_ids=torch.tensor([PROMPT])).logits[0, -1].float(), -1)


def pulled(learner, rewards, count, random):
    """Single-token episodes, sampled by the policy; each is compared with the mean of all."""
    odds = chances(learner)
    exact = odds.double().numpy()
    tokens = random.choice(len(odds), size=count, p=exact / exact.sum())
    got = [float(rewards[token]) for token in tokens]
    batch = []
    for episode, (token, reward) in enumerate(zip(tokens, got, strict=True)):
        ids = np.array([*PROMPT, token], dtype=np.int64)
        recorded = np.zeros(4, dtype=np.float32)
        recorded[-1] = float(odds[token].log())
        mask = np.array([False, False, False, True])
        batch.append(Sample(ids, mask, recorded, reward - float(np.mean(got)), reward, 1.0, episode))
    return batch


def payoffs(learner):
    return PAYS[torch.arange(len(chances(learner))) % ARMS]


@pytest.mark.parametrize("kind", ["grpo", "rloo", "ppo"])
def test_a_bandit_is_solved(tmp_path, kind):
    """Known solution: the best arm pays 1, so a trained policy gets 1."""
    learner, random = learner_of(kind, tmp_path, lr=3e-3, max_grad_norm=1.0), np.random.default_rng(0)
    assert float((chances(learner) * payoffs(learner)).sum()) < 0.6
    for step in range(1, 61):
        learner.update(pulled(learner, payoffs(learner), 128, random), step)
    assert float((chances(learner) * payoffs(learner)).sum()) > 0.95


@pytest.mark.parametrize(("kind", "options"), [("grpo", {"std": False}), ("rloo", {})])
def test_with_an_entropy_bonus_the_optimum_is_the_closed_form(tmp_path, kind, options):
    """Known solution: reward plus τ × entropy is largest for softmax(reward / τ)."""
    tau = 0.5
    learner = learner_of(kind, tmp_path, lr=2e-3, entropy=tau, max_grad_norm=1.0, schedule="linear", **options)
    random, best = np.random.default_rng(0), torch.softmax(payoffs(learner) / tau, -1)
    for step in range(1, 101):
        learner.update(pulled(learner, payoffs(learner), 256, random), step)
    probabilities = chances(learner)
    by_arm = [
        torch.stack([p[torch.arange(len(p)) % ARMS == arm].sum() for arm in range(ARMS)]) for p in (probabilities, best)
    ]
    torch.testing.assert_close(by_arm[0], by_arm[1], atol=0.04, rtol=0)


def test_a_step_that_would_break_the_policy_is_skipped(tmp_path):
    learner, batch = learner_of("grpo", tmp_path), samples()
    before = {name: value.clone() for name, value in learner.policy.trainable().items()}
    batch[0].recorded[:] = np.nan
    numbers = learner.update(batch, 1)
    assert numbers["skipped"] == 1.0
    for name, value in learner.policy.trainable().items():
        assert torch.equal(value, before[name])
    batch[0].recorded[:] = -5.0
    assert learner.update(batch, 2)["skipped"] == 0.0


def test_a_batch_without_signal_leaves_the_policy_unchanged(tmp_path):
    """Neither momentum nor decay moves it."""
    learner = learner_of("grpo", tmp_path, weight_decay=0.1)
    learner.update(samples(), 1)
    before = {name: value.clone() for name, value in learner.policy.trainable().items()}
    numbers = learner.update([replace(sample, advantage=0.0) for sample in samples(seed=2)], 2)
    assert (numbers["updates"], numbers["skipped"], numbers["trained_episodes"], numbers["tokens"]) == (0, 0, 0, 0)
    for name, value in learner.policy.trainable().items():
        assert torch.equal(value, before[name])
    batch = [replace(sample, advantage=0.0) if sample.episode < 2 else sample for sample in samples(seed=2)]
    numbers = learner.update(batch, 3)
    assert (numbers["trained_episodes"], numbers["tokens"]) == (4, sum(sample.tokens for sample in batch[2:]))


def test_dropout_is_off_in_training_as_in_sampling(tmp_path):
    model = causal_model("tiny", tmp_path)
    model.config.attention_dropout = 0.5
    model.save_pretrained(tmp_path / "base")
    learner, batch = learner_of("grpo", tmp_path, model_name=str(tmp_path / "base")), samples(2)
    expected = torch.cat([logprobs_of(model.eval(), sample)[0] for sample in batch])
    logprobs = torch.cat([learner._evaluate([sample]).logprobs for sample in batch])
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kl", [0.0, 0.5])
def test_kl_to_the_sampler_and_to_the_reference_are_separate_metrics(tmp_path, kl):
    """From what the sampler sampled, exp(d) - d - 1 with d = learner - sampler is the KL of the two without bias."""
    learner, batch = learner_of("grpo", tmp_path, kl=kl), samples()
    with torch.no_grad():
        drift = torch.cat(
            [logprobs_of(learner.policy.model, s)[0] - torch.from_numpy(s.recorded[s.mask]) for s in batch]
        )
    numbers = learner.update(batch, 1)
    assert numbers["mismatch_kl"] == pytest.approx(float((drift.exp() - drift - 1).mean()), rel=1e-3)
    assert ("kl" in numbers) == bool(kl)


@pytest.mark.parametrize("options", [{"kl": 0.1}, {"kl": 0.1, "lora": {"r": 2}}])
def test_policy_critic_and_reference_are_on_the_device(tmp_path, options):
    config = learner_of("ppo", tmp_path, **options).config
    policy = Policy(config, "tiny", tmp_path, critic=True, device="meta")
    weights = [*policy.module.parameters(), *(policy._initial or {}).values()]
    assert {weight.device.type for weight in weights} == {"meta"}


def test_a_missing_device_is_reported_with_the_next_step(tmp_path):
    setting = replace(learner_of("grpo", tmp_path).settings, device="cuda:99")
    with pytest.raises(TrainingFailed, match=r"cannot train on device 'cuda:99': .* Set `device` to an available one"):
        Learner(setting)


@pytest.mark.parametrize(
    ("own", "engine", "in_process", "device"),
    [(None, "cuda", True, "cuda"), (None, "cuda", False, "cpu"), ("cuda:1", "cpu", True, "cuda:1")],
)
def test_the_default_device_is_that_of_the_in_process_engine(tmp_path, own, engine, in_process, device):
    source = PolicySource(TransformersConfig(model="tiny", device=engine), Sampling(), tmp_path, in_process=in_process)
    config = GrpoConfig(steps=1, device=own)
    assert learner_settings(config, GrpoAlgorithm, SimpleNamespace(source=source)).device == device


@pytest.mark.parametrize("options", [{}, {"lora": {"r": 2}}, {"layers": 1}])
def test_the_saved_weights_are_the_trained_weights(tmp_path, options):
    """Checked on the weights and by loading with transformers."""
    learner = learner_of("grpo", tmp_path, lr=0.01, **options)
    first = causal_model("tiny", tmp_path).state_dict()
    for step in range(1, 4):
        learner.update(samples(seed=step), step)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = learner.policy.model(input_ids=ids).logits
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
def test_resuming_from_a_state_equals_an_uninterrupted_run(tmp_path, kind, options):
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
    for name, value in whole.policy.trainable().items():
        assert torch.equal(value, again.policy.trainable()[name]), name


def test_transformers_loads_a_checkpoint_of_adapters(tmp_path):
    from transformers import AutoModelForCausalLM

    causal_model("tiny", tmp_path).save_pretrained(tmp_path / "base")
    learner = learner_of("grpo", tmp_path, model_name=str(tmp_path / "base"), lora={"r": 2}, lr=0.05)
    learner.update(samples(), 1)
    (tmp_path / "step").mkdir()
    learner.write(tmp_path / "step")
    ids = torch.tensor([[5, 6, 7, 8]])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "step")
    torch.testing.assert_close(again(input_ids=ids).logits, learner.policy.model(input_ids=ids).logits)


def test_adapters_start_as_the_unchanged_policy(tmp_path):
    learner = learner_of("grpo", tmp_path, lora={"r": 4}, kl=0.1)
    ids = torch.tensor([[5, 6, 7, 8]])
    plain = causal_model("tiny", tmp_path)(input_ids=ids).logits
    torch.testing.assert_close(learner.policy.model(input_ids=ids).logits, plain, atol=1e-5, rtol=1e-5)
    learner.update(samples(), 1)
    assert (learner.policy.model(input_ids=ids).logits - plain).abs().max() > 1e-6
    with learner.policy.initial_weights():
        torch.testing.assert_close(learner.policy.model(input_ids=ids).logits, plain, atol=1e-5, rtol=1e-5)


def test_an_adapter_for_an_unknown_matrix_is_refused_with_the_known_names(tmp_path):
    with pytest.raises(TrainingFailed, match=r"no matrix 'c_attn'; choose among: .*q_proj"):
        learner_of("grpo", tmp_path, lora={"targets": ["c_attn"]})


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [0.5, 1, 1, 1]), ("linear", [0.5, 1, 1, 2 / 3]), ("cosine", [0.5, 1, 1, 0.75])],
)
def test_the_learning_rate_warms_up_and_decays(tmp_path, schedule, expected):
    learner = learner_of("grpo", tmp_path, lr=1.0, steps=5, warmup=2, schedule=schedule)
    assert [learner._rate(step) for step in (1, 2, 3, 4)] == pytest.approx(expected)


class Second(Team):
    """The second worker of two; the first contributes nothing."""

    rank, size = 1, 2


def test_a_worker_without_samples_is_harmless_even_for_a_certain_policy(tmp_path):
    learner = learner_of("grpo", tmp_path, team=Second(), kl=0.1)
    with torch.no_grad():
        learner.policy.model.get_output_embeddings().weight.mul_(1e5)
    assert learner.update(samples(1), 1)["skipped"] == 0.0


def test_padding_samples_of_a_worker_are_not_counted(tmp_path):
    numbers = learner_of("grpo", tmp_path, team=Second(), epochs=2, kl=0.1).update(samples(1), 1)
    assert not numbers.keys() & {"entropy", "kl"}
    assert numbers["loss"] == 0.0


def test_half_precision_computes_in_half_and_stores_full_weights(tmp_path):
    batch, numbers = samples(6), {}
    for dtype in ("float32", "bfloat16"):
        learner = learner_of("grpo", tmp_path, dtype=dtype)
        numbers[dtype] = learner.update(batch, 1)
        assert {parameter.dtype for parameter in learner.policy.parameters()} == {torch.float32}
    assert numbers["bfloat16"]["grad_norm"] != numbers["float32"]["grad_norm"]
    assert numbers["bfloat16"]["grad_norm"] == pytest.approx(numbers["float32"]["grad_norm"], rel=0.05)
