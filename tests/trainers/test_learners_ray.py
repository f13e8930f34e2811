"""Several Ray Train workers learn as one."""

import gc
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from loopwright.rollouts.pools.resources import ResourcesError
from loopwright.trainers.failure import TrainingFailed
from loopwright.trainers.learner import Learner
from loopwright.trainers.learners import LocalLearner
from loopwright.trainers.learners_ray import RayLearner
from loopwright.trainers.ppo import PpoAlgorithm
from tests.rollouts.pools.ray_cluster import cluster as cluster
from tests.trainers.factories import learner_of, samples

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray's own
]


def learner_settings(kind, directory, **options):
    return learner_of(kind, directory, **options).settings


class Weighing(PpoAlgorithm):
    """Reports how many sharded weights a worker holds."""

    def loss(self, output, tokens):
        cost, numbers = super().loss(output, tokens)
        parts = [one for one in gc.get_objects() if type(one) is DTensor and isinstance(one, torch.nn.Parameter)]
        local_size = sum(one.to_local().numel() for one in parts)
        return cost, {**numbers, "held": torch.full_like(output.logprobs.detach(), local_size)}


def close(actual, expected):
    """Equal by name, up to rounding."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, atol=1e-6, rtol=1e-4)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("what", "shard"),
    [({}, False), ({}, True), ({"layers": 1}, True), ({"lora": {"r": 4}}, True)],
    ids=["whole", "shards", "shards-layers", "shards-lora"],
)
def test_two_workers_learn_what_one_learns(tmp_path, what, shard):
    """Several steps on a batch, a critic, more workers than samples in a part: still one gradient.

    The optimizer remembers the gradients; steps are small, since Adam makes large ones of rounding errors.
    """
    options = dict(epochs=2, minibatches=2, max_grad_norm=1.0, micro_tokens=16, lr=1e-8, kl=0.1, **what)
    setting = learner_settings("ppo", tmp_path, **options)
    alone = LocalLearner(setting, tmp_path, in_process=True)
    config = setting.config.model_copy(update={"workers": 2, "shard": shard})
    elsewhere = replace(setting, config=config, device="cuda:99")  # each worker has its own device
    together = RayLearner(elsewhere, tmp_path, workers=2, cpus=0.5, gpus=0)
    try:
        for step, count in ((1, 7), (2, 2)):
            batch = samples(count, seed=step, weight=1.0)
            one, two = alone.update(batch, step), together.update(batch, step)
            assert two == pytest.approx(one, rel=1e-3, abs=1e-5)
        for learner, place in ((alone, tmp_path / "one"), (together, tmp_path / "two")):
            place.mkdir()
            learner.write(place)
        names = {file.name for file in (tmp_path / "one").iterdir()}
        assert {file.name for file in (tmp_path / "two").iterdir()} == names
        for name in names:
            if name.endswith(".safetensors"):
                close(load_file(tmp_path / "two" / name), load_file(tmp_path / "one" / name))
        # Resume from the state of one worker, far from the start.
        random = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in alone.learner.policy.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=random), alpha=0.05)
        alone.write(tmp_path / "one")
        together.read(tmp_path / "one")
        together.save(tmp_path / "policy")
        close(load_file(tmp_path / "policy" / "model.safetensors"), alone.learner.policy.weights())
        batch = samples(5, seed=3, weight=1.0)
        one, two = alone.update(batch, 3), together.update(batch, 3)
        assert one["kl"] > 0.01
        assert two == pytest.approx(one, rel=1e-3, abs=1e-5)
        # Resume from the state of two workers, with one or two.
        for learner in (alone, together):
            learner.read(tmp_path / "two")
        batch = samples(5, seed=4, weight=1.0)
        assert together.update(batch, 4) == pytest.approx(alone.update(batch, 4), rel=1e-3, abs=1e-5)
    finally:
        together.close()


@pytest.mark.usefixtures("cluster")
def test_each_worker_holds_its_own_shards(tmp_path):
    setting = replace(learner_settings("ppo", tmp_path, workers=2), algorithm=Weighing)
    every = sum(parameter.numel() for parameter in Learner(setting).policy.module.parameters())
    setting = replace(setting, config=setting.config.model_copy(update={"shard": True}))
    together = RayLearner(setting, tmp_path, workers=2, cpus=0.5, gpus=0)
    try:
        assert together.update(samples(4), 1)["held"] == pytest.approx(every / 2, rel=1e-3)
    finally:
        together.close()


@pytest.mark.usefixtures("cluster")
def test_missing_gpus_fail_at_once(tmp_path):
    with pytest.raises(ResourcesError, match=r"2 workers with 1 GPUs each .* cluster has 0 GPUs"):
        RayLearner(learner_settings("grpo", tmp_path), tmp_path, workers=2, cpus=0.5, gpus=1)


@pytest.mark.usefixtures("cluster")
def test_failing_workers_are_reported_and_end_only_the_training(tmp_path):
    setting = learner_settings("grpo", tmp_path)
    together = RayLearner(setting, tmp_path, workers=1, cpus=0.5, gpus=0)
    try:
        with pytest.raises(TrainingFailed, match="the Ray Train workers are gone"):
            together.read(tmp_path / "nowhere")
    finally:
        together.close()
