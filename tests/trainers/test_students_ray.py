"""Several workers of Ray Train learn as one."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from loopwright.rollouts.resources import ResourcesError
from loopwright.trainers.failure import TrainingFailed
from loopwright.trainers.students import LocalStudent
from loopwright.trainers.students_ray import RayStudent
from tests.rollouts.rays import cluster as cluster
from tests.trainers.making import learner_of, samples

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray warns of itself
]


def setting_of(kind, home, **options):
    return learner_of(kind, home, **options).setting


@pytest.mark.usefixtures("cluster")
def test_two_workers_learn_what_one_learns(tmp_path):
    """Several steps on a batch, a critic, more workers than samples in a part: still one gradient.

    The optimizer remembers the gradients; steps are small, since Adam makes large ones of rounding errors.
    """
    setting = setting_of("ppo", tmp_path, epochs=2, minibatches=2, max_grad_norm=1.0, micro_tokens=16, lr=1e-8)
    alone = LocalStudent(setting, tmp_path, near=True)
    elsewhere = replace(setting, device="cuda:99")  # workers have a device of their own
    together = RayStudent(elsewhere, tmp_path, workers=2, cpus=0.5, gpus=0)
    try:
        for step, count in ((1, 7), (2, 2)):
            batch = samples(count, seed=step, weight=1.0)
            one, two = alone.update(batch, step), together.update(batch, step)
            assert two == pytest.approx(one, rel=1e-3, abs=1e-5)
        for student, place in ((alone, tmp_path / "one"), (together, tmp_path / "two")):
            place.mkdir()
            student.write(place)
        expected, found = (load_file(tmp_path / place / "trainer.safetensors") for place in ("one", "two"))
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-4)
        together.save(tmp_path / "policy")
        assert (tmp_path / "policy" / "model.safetensors").is_file()
        # Going on from the state of one.
        alone.update(samples(5, seed=9, weight=1.0), 3)
        alone.write(tmp_path / "one")
        together.read(tmp_path / "one")
        again, other = (
            alone.update(samples(5, seed=3, weight=1.0), 4),
            together.update(samples(5, seed=3, weight=1.0), 4),
        )
        assert other == pytest.approx(again, rel=1e-3, abs=1e-5)
    finally:
        together.close()


@pytest.mark.usefixtures("cluster")
def test_gpus_that_nobody_has_are_not_waited_for(tmp_path):
    with pytest.raises(ResourcesError, match="2 workers with 1 GPUs each, but the Ray cluster has 0 GPUs"):
        RayStudent(setting_of("grpo", tmp_path), tmp_path, workers=2, cpus=0.5, gpus=1)


@pytest.mark.usefixtures("cluster")
def test_workers_that_fail_are_said_and_end_nothing_else(tmp_path):
    setting = setting_of("grpo", tmp_path)
    together = RayStudent(setting, tmp_path, workers=1, cpus=0.5, gpus=0)
    try:
        with pytest.raises(TrainingFailed, match="workers of Ray Train are gone"):
            together.read(tmp_path / "nowhere")
    finally:
        together.close()
