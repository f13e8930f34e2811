"""Trainers: agents that train a policy on its own rollouts. Torch is imported only where it computes."""

from typing import TYPE_CHECKING

from loopwright.core.imports import lazy_exports

if TYPE_CHECKING:
    from loopwright.trainers.algorithm import Algorithm, PolicyOutput, TokenBatch
    from loopwright.trainers.config import LoraConfig, TrainConfig
    from loopwright.trainers.failure import TrainingFailed
    from loopwright.trainers.grpo import GrpoConfig, GrpoTrainer
    from loopwright.trainers.ppo import PpoTrainConfig, PpoTrainer
    from loopwright.trainers.rloo import RlooConfig, RlooTrainer
    from loopwright.trainers.trainer import Trainer

__all__ = [
    "Algorithm",
    "GrpoConfig",
    "GrpoTrainer",
    "LoraConfig",
    "PolicyOutput",
    "PpoTrainConfig",
    "PpoTrainer",
    "RlooConfig",
    "RlooTrainer",
    "TokenBatch",
    "TrainConfig",
    "Trainer",
    "TrainingFailed",
]

__getattr__ = lazy_exports(__name__)
