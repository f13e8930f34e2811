"""The learner of a run: in this process, or distributed over Ray Train workers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loopwright.rollouts.env import PolicySource, RolloutEnv
from loopwright.trainers.algorithm import Algorithm
from loopwright.trainers.config import TrainConfig
from loopwright.trainers.export.policy_files import add_tokenizer
from loopwright.trainers.failure import TrainingFailed
from loopwright.trainers.learner import Learner, LearnerSettings
from loopwright.trainers.sample import Sample


class LocalLearner:
    """A learner in this process. Engines in this process get its weights directly, others as a directory."""

    def __init__(
        self, settings: LearnerSettings, directory: Path, *, in_process: bool, learner: Learner | None = None
    ) -> None:
        self.learner = learner or Learner(settings)
        self._settings, self._directory, self._in_process = settings, directory, in_process
        self._published = 0

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        """Train on these samples; returns metrics."""
        return self.learner.update(samples, step)

    def weights(self) -> Any:
        """All weights, in a form that the run's engines can load."""
        if self._in_process:
            return self.learner.policy.weights()
        # Alternate between two directories: an engine may still be reading the last one.
        self._published += 1
        directory = self._directory / "weights" / str(self._published % 2)
        self.save(directory)
        return str(directory)

    def write(self, directory: Path) -> None:
        """Write everything that training resumes from, and the tokenizer."""
        self.learner.write(directory)
        add_tokenizer(self._settings.model, self._settings.scenario_dir, directory)

    def read(self, directory: Path) -> None:
        """Resume from what `write` wrote."""
        self.learner.read(directory)

    def save(self, directory: Path) -> None:
        """Write the policy in transformers format."""
        self.learner.policy.save(directory)
        add_tokenizer(self._settings.model, self._settings.scenario_dir, directory)

    def close(self) -> None:
        """Nothing to release."""


def learner_settings(config: TrainConfig, algorithm: type[Algorithm], env: RolloutEnv) -> LearnerSettings:
    """The settings of a run's learner."""
    source = source_of(env)
    engine, sampling = source.engine, source.sampling
    model = config.model or engine.policy
    if model is None:
        raise TrainingFailed(f"the model of engine {engine.type!r} is unknown: set `model` of the agent.")
    engine_device: str = getattr(engine, "device", "cpu") if source.in_process else "cpu"
    return LearnerSettings(
        config=config,
        algorithm=algorithm,
        model=model,
        scenario_dir=source.scenario_dir,
        model_seed=getattr(engine, "seed", 0),
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        device=config.device or engine_device,
    )


def source_of(env: RolloutEnv) -> PolicySource:
    """The engine that samples for the run, and how."""
    if env.source is None:
        raise TrainingFailed("a trainer needs to know which engine samples: give its environment a `source`.")
    return env.source
