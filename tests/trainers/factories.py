"""Samples and learners for tests: a tiny model, and rows like those of episodes."""

import numpy as np
import torch

from loopwright.trainers.grpo import GrpoAlgorithm, GrpoConfig
from loopwright.trainers.learner import Learner, LearnerSettings
from loopwright.trainers.ppo import PpoAlgorithm, PpoTrainConfig
from loopwright.trainers.rloo import RlooAlgorithm, RlooConfig
from loopwright.trainers.sample import Sample

ALGORITHMS = {
    "grpo": (GrpoConfig, GrpoAlgorithm),
    "rloo": (RlooConfig, RlooAlgorithm),
    "ppo": (PpoTrainConfig, PpoAlgorithm),
}


def learner_of(kind, directory, *, model_name="tiny", temperature=1.0, max_tokens=8, team=None, **options):
    config_class, algorithm = ALGORITHMS[kind]
    config = config_class(**{"steps": 100, "lr": 1e-3, "max_grad_norm": 1e9, **options})
    return Learner(
        LearnerSettings(config, algorithm, model_name, directory, temperature=temperature, max_tokens=max_tokens), team
    )


def samples(count=6, *, seed=0, rows=1, weight=None):
    """Random rows: a prompt, sampled tokens with an inserted one among them, and logprobs near the true ones."""
    random = np.random.default_rng(seed)
    batch = []
    for episode in range(count):
        advantage, reward = float(random.normal()), float(random.random())
        for _ in range(rows):
            prompt_length, response_length = int(random.integers(2, 6)), int(random.integers(2, 7))
            ids = random.integers(1, 250, prompt_length + response_length)
            mask = np.zeros(prompt_length + response_length, dtype=np.bool_)
            mask[prompt_length:] = True
            mask[prompt_length + response_length // 2] = response_length < 3  # an inserted token between sampled ones
            if not mask.any():
                mask[-1] = True
            batch.append(
                Sample(
                    ids=ids.astype(np.int64),
                    mask=mask,
                    recorded=np.where(mask, random.normal(-5.5, 0.3, len(ids)), 0).astype(np.float32),
                    advantage=advantage,
                    reward=reward,
                    weight=1.0 / (int(mask.sum()) * rows) if weight is None else weight,
                    episode=episode,
                )
            )
    return batch


def logprobs_of(model, sample, temperature=1.0):
    """The logprobs of a sample's sampled tokens by the model's own forward pass, one sample at a time."""
    logits = model(input_ids=torch.from_numpy(sample.ids)[None]).logits[0].float() / temperature
    every = torch.log_softmax(logits, -1)
    places = [place for place in range(len(sample.ids)) if sample.mask[place]]
    return torch.stack([every[place - 1, int(sample.ids[place])] for place in places]), torch.stack(
        [-(every[place - 1].exp() * every[place - 1]).sum() for place in places]
    )
