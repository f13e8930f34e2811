"""PPO: a critic learns the expected reward, and each token is credited with what exceeds it.

sample    the producer rolls out `group_size` rollouts for each prompt; one is enough
judge     each gets a reward, or none, at its last token
advantage generalised advantage estimation over the sampled tokens
loss      the clipped policy gradient, and the critic's squared error
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from loopwright.core.agent import AgentConfig
from loopwright.trainers.algorithm import Algorithm, PolicyOutput, TokenBatch
from loopwright.trainers.config import TrainConfig
from loopwright.trainers.grpo import clipped_loss
from loopwright.trainers.trainer import Trainer

if TYPE_CHECKING:
    from torch import Tensor


class PpoTrainConfig(TrainConfig):
    """Proximal policy optimisation of a language model, in a run with [run.rollout]."""

    type: Literal["ppo"] = "ppo"
    group_size: int = Field(default=1, ge=1)
    """Rollouts per prompt; the critic is the baseline, so one is enough."""
    clip: float = Field(default=0.2, gt=0)
    """The largest change of a token's probability ratio in one update."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """The discount per token."""
    gae: float = Field(default=0.95, ge=0, le=1)
    """The lambda of generalised advantage estimation: 1 trusts only rewards, 0 only the critic."""
    value: float = Field(default=0.5, ge=0)
    """The weight of the critic's error."""
    epochs: int = Field(default=2, ge=1)
    """Passes over a batch."""


class PpoAlgorithm(Algorithm):
    """Credits each token by generalised advantage estimation."""

    critic = True
    length = "token"
    config: PpoTrainConfig

    def advantages(self, rewards: Mapping[int, float], baseline: frozenset[int]) -> Mapping[int, float]:
        return rewards  # the critic supplies the baseline

    def credit(self, advantages: "Tensor", reward: float, values: "Tensor | None") -> "tuple[Tensor, Tensor | None]":
        assert values is not None  # noqa: S101  there is a critic
        gamma, decay, next_value, advantage = self.config.gamma, self.config.gamma * self.config.gae, 0.0, 0.0
        credited = advantages.clone()
        for index in reversed(range(len(values))):
            token_reward = reward if index == len(values) - 1 else 0.0
            value = float(values[index])
            advantage = token_reward + gamma * next_value - value + decay * advantage
            credited[index], next_value = advantage, value
        return credited, credited + values

    def loss(self, policy: PolicyOutput, tokens: TokenBatch) -> "tuple[Tensor, dict[str, Tensor]]":
        assert policy.values is not None and tokens.returns is not None  # noqa: S101, PT018  there is a critic
        loss, metrics = clipped_loss(policy, tokens, self.config.clip, self.config.clip)
        error = (policy.values - tokens.returns).square()
        return loss + self.config.value * error, {**metrics, "value_error": error.detach()}


class PpoTrainer(Trainer):
    """Trains a policy with PPO and a critic that shares the policy's layers."""

    Config: ClassVar[type[AgentConfig]] = PpoTrainConfig
    algorithm: ClassVar[type[Algorithm]] = PpoAlgorithm
