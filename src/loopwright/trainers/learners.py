"""The learner of a run, in this process or shared out over the workers of Ray Train."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from loopwright.engines.named_tokenizer import BYTE_TOKENIZER_FILE, model_location
from loopwright.engines.tokenizer import ByteTokenizer
from loopwright.rollouts.env import PolicySource, RolloutEnv
from loopwright.trainers.algorithm import Algorithm
from loopwright.trainers.config import TrainConfig
from loopwright.trainers.failure import TrainingFailed
from loopwright.trainers.learner import Learner, LearnerSettings
from loopwright.trainers.sample import Sample

_TOKENIZER = ("*token*.json", "chat_template*", "vocab.*", "merges.txt", "*.model")
"""The files of a tokenizer, of whatever kind."""


class RunLearner(Protocol):
    """Whoever learns."""

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        """Improve the policy by these samples."""
        ...

    def weights(self) -> Any:
        """All weights, in a form that the run's engines take."""
        ...

    def write(self, directory: Path) -> None:
        """All that learning goes on from."""
        ...

    def read(self, directory: Path) -> None:
        """Go on from there."""
        ...

    def save(self, directory: Path) -> None:
        """The policy as transformers loads it."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class LocalLearner:
    """A learner in this process. Engines here are handed its weights; engines elsewhere, a directory with them."""

    def __init__(
        self, setting: LearnerSettings, directory: Path, *, near: bool, learner: Learner | None = None
    ) -> None:
        self.learner = learner or Learner(setting)
        self._setting, self._directory, self._near = setting, directory, near
        self._published = 0

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        return self.learner.update(samples, step)

    def weights(self) -> Any:
        if self._near:
            return self.learner.policy.weights()
        # In turns, so that an engine that still reads the one before is not disturbed.
        self._published += 1
        directory = self._directory / "weights" / str(self._published % 2)
        self.save(directory)
        return str(directory)

    def write(self, directory: Path) -> None:
        self.learner.write(directory)
        add_tokenizer(self._setting, directory)

    def read(self, directory: Path) -> None:
        self.learner.read(directory)

    def save(self, directory: Path) -> None:
        self.learner.policy.save(directory)
        add_tokenizer(self._setting, directory)

    def close(self) -> None:
        """Nothing is held that does not go by itself."""


def build_learner(config: TrainConfig, algorithm: type[Algorithm], env: RolloutEnv) -> RunLearner:
    """The learner of a run."""
    setting = learner_settings(config, algorithm, env)
    if config.workers:
        from loopwright.trainers.learners_ray import RayLearner

        directory = env.book.directory.absolute()
        return RayLearner(setting, directory, workers=config.workers, cpus=config.cpus, gpus=config.gpus)
    return LocalLearner(setting, env.book.directory, near=source_of(env).near)


def learner_settings(config: TrainConfig, algorithm: type[Algorithm], env: RolloutEnv) -> LearnerSettings:
    """What the learner of a run is made of."""
    source = source_of(env)
    engine, sampling = source.engine, source.sampling
    model = config.model or engine.policy
    if model is None:
        raise TrainingFailed(f"engine {engine.type!r} does not say which model it has: set `model` of the agent.")
    here: str = getattr(engine, "device", "cpu") if source.near else "cpu"
    return LearnerSettings(
        config=config,
        algorithm=algorithm,
        model=model,
        home=source.home,
        model_seed=getattr(engine, "seed", 0),
        temperature=sampling.temperature,
        longest=sampling.max_tokens,
        device=config.device or here,
    )


def source_of(env: RolloutEnv) -> PolicySource:
    """Where the run's tokens come from."""
    if env.source is None:
        raise TrainingFailed("a trainer needs to know which engine samples: give its environment a `source`.")
    return env.source


def add_tokenizer(setting: LearnerSettings, directory: Path) -> None:
    """A model is of use only with its tokenizer."""
    if setting.model == "tiny" or (setting.home / setting.model / BYTE_TOKENIZER_FILE).is_file():
        (directory / BYTE_TOKENIZER_FILE).write_text(f"{ByteTokenizer.size}\n")
        return
    source = Path(model_location(setting.model, setting.home))
    if not source.is_dir():  # a name on the hub, which transformers has fetched
        from transformers import AutoTokenizer

        if not (directory / "tokenizer_config.json").is_file():
            AutoTokenizer.from_pretrained(setting.model).save_pretrained(directory)
        return
    for file in (file for pattern in _TOKENIZER for file in source.glob(pattern)):
        (directory / file.name).write_bytes(file.read_bytes())
