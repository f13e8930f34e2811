"""PPO: a critic learns what is to be expected, and a token is as good as things turned out better after it.

sample    the producer rolls out `group_size` rollouts for each prompt, one is enough
judge     each gets a reward, or none at all, with its last token
advantage generalised advantage estimation over the sampled tokens
loss      the clipped policy gradient, and the critic's squared error
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from loopwright.core.agent import AgentConfig
from loopwright.trainers.algorithm import Algorithm, PolicyOutput, TokenBatch
from loopwright.trainers.config import TrainConfig
from loopwright.trainers.grpo import clipped
from loopwright.trainers.trainer import Trainer

if TYPE_CHECKING:
    from torch import Tensor


class PpoTrainConfig(TrainConfig):
    """Proximal policy optimisation of a language model, in a run with [run.rollout]."""

    type: Literal["ppo"] = "ppo"
    group_size: int = Field(default=1, ge=1)
    """How many rollouts attempt the same prompt; the critic is the baseline, so one is enough."""
    clip: float = Field(default=0.2, gt=0)
    """How far the policy may move in one update, as a ratio."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """What a reward is worth one token earlier."""
    gae: float = Field(default=0.95, ge=0, le=1)
    """How far rewards are trusted against the critic: 1 not at all the critic, 0 only the critic."""
    value: float = Field(default=0.5, ge=0)
    """What the critic's error counts for."""
    epochs: int = Field(default=2, ge=1)
    """How often a batch is gone through."""


class PpoAlgorithm(Algorithm):
    """Credits each token with what came after it."""

    critic = True
    length = "token"
    config: PpoTrainConfig

    def advantages(self, rewards: Mapping[int, float], counted: frozenset[int]) -> Mapping[int, float]:
        return rewards  # what was to be expected, the critic knows

    def credit(self, advantages: "Tensor", reward: float, values: "Tensor | None") -> "tuple[Tensor, Tensor | None]":
        assert values is not None  # noqa: S101  there is a critic
        gamma, decay, after, ahead = self.config.gamma, self.config.gamma * self.config.gae, 0.0, 0.0
        found = advantages.clone()
        for place in reversed(range(len(values))):
            gained = reward if place == len(values) - 1 else 0.0
            value = float(values[place])
            ahead = gained + gamma * after - value + decay * ahead
            found[place], after = ahead, value
        return found, found + values

    def loss(self, said: PolicyOutput, tokens: TokenBatch) -> "tuple[Tensor, dict[str, Tensor]]":
        assert said.values is not None and tokens.returns is not None  # noqa: S101, PT018  there is a critic
        loss, numbers = clipped(said, tokens, self.config.clip, self.config.clip)
        error = (said.values - tokens.returns).square()
        return loss + self.config.value * error, {**numbers, "value_error": error.detach()}


class PpoTrainer(Trainer):
    """Learns with a critic, which shares the policy's layers."""

    Config: ClassVar[type[AgentConfig]] = PpoTrainConfig
    algorithm: ClassVar[type[Algorithm]] = PpoAlgorithm
