"""RLOO: REINFORCE, with the mean reward of the prompt's other rollouts as the baseline.

sample    the producer rolls out `group_size` rollouts for each prompt
judge     each gets a reward, or none
advantage reward - mean reward of the others
loss      the policy gradient, unclipped, against the recorded logprobs
"""

from collections.abc import Mapping
from statistics import mean
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from loopwright.core.agent import AgentConfig
from loopwright.trainers.algorithm import Algorithm, PolicyOutput, TokenBatch
from loopwright.trainers.config import TrainConfig
from loopwright.trainers.trainer import Trainer

if TYPE_CHECKING:
    from torch import Tensor


class RlooConfig(TrainConfig):
    """REINFORCE leave-one-out."""

    compares_group: ClassVar[bool] = True
    type: Literal["rloo"] = "rloo"
    group_size: int = Field(default=8, ge=2)
    """Rollouts per prompt; the others are the baseline of each."""


class RlooAlgorithm(Algorithm):
    """Treats an episode as one action, whose logprob is the sum over its tokens."""

    length = "constant"
    constant = 1.0

    def advantages(self, rewards: Mapping[int, float], baseline: frozenset[int]) -> Mapping[int, float]:
        advantages = {}
        for trial, reward in rewards.items():
            others = [rewards[other] for other in sorted(baseline) if other != trial]
            if others:
                advantages[trial] = reward - mean(others)  # exact: equal rewards give an advantage of exactly 0
        return advantages

    def loss(self, policy: PolicyOutput, tokens: TokenBatch) -> "tuple[Tensor, dict[str, Tensor]]":
        # At a ratio of 1 the gradient is that of advantage × logprob.
        return -(policy.logprobs - tokens.old_logprobs).exp() * tokens.advantages, {}


class RlooTrainer(Trainer):
    """Trains a policy with RLOO."""

    Config: ClassVar[type[AgentConfig]] = RlooConfig
    algorithm: ClassVar[type[Algorithm]] = RlooAlgorithm
