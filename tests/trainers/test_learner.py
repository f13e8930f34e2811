"""The learner: known answers, adapters, and steps that must not be taken."""

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
from loopwright.trainers.learner import Alone, Learner
from loopwright.trainers.learners import learner_settings
from loopwright.trainers.model import Policy
from loopwright.trainers.sample import Sample
from tests.trainers.making import learner_of, logprobs_of, samples

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
    before = {name: value.clone() for name, value in learner.policy.trainable().items()}
    batch[0].recorded[:] = np.nan
    told = learner.update(batch, 1)
    assert told["skipped"] == 1.0
    for name, value in learner.policy.trainable().items():
        assert torch.equal(value, before[name])
    batch[0].recorded[:] = -5.0
    assert learner.update(batch, 2)["skipped"] == 0.0


def test_a_batch_that_teaches_nothing_leaves_the_policy_as_it_is(tmp_path):
    """Neither momentum nor decay moves it."""
    learner = learner_of("grpo", tmp_path, weight_decay=0.1)
    learner.update(samples(), 1)
    before = {name: value.clone() for name, value in learner.policy.trainable().items()}
    told = learner.update([replace(sample, advantage=0.0) for sample in samples(seed=2)], 2)
    assert (told["updates"], told["skipped"]) == (0.0, 0.0)
    for name, value in learner.policy.trainable().items():
        assert torch.equal(value, before[name])


def test_a_model_with_dropout_is_trained_as_it_was_sampled_from(tmp_path):
    model = causal_model("tiny", tmp_path)
    model.config.attention_dropout = 0.5
    model.save_pretrained(tmp_path / "base")
    learner, batch = learner_of("grpo", tmp_path, model_name=str(tmp_path / "base")), samples(2)
    expected = torch.cat([logprobs_of(model.eval(), sample)[0] for sample in batch])
    found = torch.cat([learner._evaluate([sample]).logprobs for sample in batch])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kl", [0.0, 0.5])
def test_distance_to_the_sampler_and_to_the_reference_have_names_of_their_own(tmp_path, kl):
    """From what the sampler sampled, exp(d) - d - 1 with d = learner - sampler is the KL of the two without bias."""
    learner, batch = learner_of("grpo", tmp_path, kl=kl), samples()
    with torch.no_grad():
        drift = torch.cat(
            [logprobs_of(learner.policy.model, s)[0] - torch.from_numpy(s.recorded[s.mask]) for s in batch]
        )
    told = learner.update(batch, 1)
    assert told["mismatch_kl"] == pytest.approx(float((drift.exp() - drift - 1).mean()), rel=1e-3)
    assert ("kl" in told) == bool(kl)


@pytest.mark.parametrize("options", [{"kl": 0.1}, {"kl": 0.1, "lora": {"r": 2}}])
def test_policy_critic_and_reference_are_on_the_device(tmp_path, options):
    config = learner_of("ppo", tmp_path, **options).config
    policy = Policy(config, "tiny", tmp_path, critic=True, device="meta")
    weights = [*policy.module.parameters(), *(policy._initial or {}).values()]
    assert {weight.device.type for weight in weights} == {"meta"}


def test_a_device_that_is_not_here_is_said_with_the_next_move(tmp_path):
    setting = replace(learner_of("grpo", tmp_path).settings, device="cuda:99")
    with pytest.raises(TrainingFailed, match=r"cannot train on device 'cuda:99': .* Set `device` to an available one"):
        Learner(setting)


@pytest.mark.parametrize(
    ("own", "engine", "in_process", "device"),
    [(None, "cuda", True, "cuda"), (None, "cuda", False, "cpu"), ("cuda:1", "cpu", True, "cuda:1")],
)
def test_training_is_where_it_is_said_or_where_the_engine_of_this_process_is(tmp_path, own, engine, in_process, device):
    source = PolicySource(TransformersConfig(model="tiny", device=engine), Sampling(), tmp_path, in_process=in_process)
    config = GrpoConfig(steps=1, device=own)
    assert learner_settings(config, GrpoAlgorithm, SimpleNamespace(source=source)).device == device


@pytest.mark.parametrize("options", [{}, {"lora": {"r": 2}}, {"layers": 1}])
def test_what_is_saved_is_what_was_learned(tmp_path, options):
    """By our weights and by transformers' own loading."""
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


def test_adapters_start_from_the_policy_as_it_is(tmp_path):
    learner = learner_of("grpo", tmp_path, lora={"r": 4}, kl=0.1)
    ids = torch.tensor([[5, 6, 7, 8]])
    plain = causal_model("tiny", tmp_path)(input_ids=ids).logits
    torch.testing.assert_close(learner.policy.model(input_ids=ids).logits, plain, atol=1e-5, rtol=1e-5)
    learner.update(samples(), 1)
    assert (learner.policy.model(input_ids=ids).logits - plain).abs().max() > 1e-6
    with learner.policy.initial_weights():
        torch.testing.assert_close(learner.policy.model(input_ids=ids).logits, plain, atol=1e-5, rtol=1e-5)


def test_an_adapter_for_a_matrix_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    with pytest.raises(TrainingFailed, match=r"no matrix 'c_attn'; choose among: .*q_proj"):
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


def test_for_want_of_a_sample_a_worker_breaks_nothing_however_sure_the_policy_is(tmp_path):
    learner = learner_of("grpo", tmp_path, team=Second(), kl=0.1)
    with torch.no_grad():
        learner.policy.model.get_output_embeddings().weight.mul_(1e5)
    assert learner.update(samples(1), 1)["skipped"] == 0.0


def test_what_a_worker_computes_for_want_of_a_sample_is_not_counted(tmp_path):
    told = learner_of("grpo", tmp_path, team=Second(), epochs=2, kl=0.1).update(samples(1), 1)
    assert not told.keys() & {"entropy", "kl"}
    assert told["loss"] == 0.0


def test_half_precision_computes_so_and_keeps_its_weights_whole(tmp_path):
    batch, told = samples(6), {}
    for dtype in ("float32", "bfloat16"):
        learner = learner_of("grpo", tmp_path, dtype=dtype)
        told[dtype] = learner.update(batch, 1)
        assert {parameter.dtype for parameter in learner.policy.parameters()} == {torch.float32}
    assert told["bfloat16"]["grad_norm"] != told["float32"]["grad_norm"]
    assert told["bfloat16"]["grad_norm"] == pytest.approx(told["float32"]["grad_norm"], rel=0.05)
