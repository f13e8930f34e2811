"""RLOO: REINFORCE, with what the other rollouts of the same prompt got as the baseline.

sample    the producer rolls out `group_size` rollouts for each prompt
judge     each gets a reward, or none at all
advantage reward - mean reward of the others
loss      the policy gradient, unclipped, against the logprobs that were recorded
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
    """REINFORCE, leave one out."""

    type: Literal["rloo"] = "rloo"
    group_size: int = Field(default=8, ge=2)
    """How many rollouts attempt the same prompt; each has the others for its baseline."""


class RlooAlgorithm(Algorithm):
    """An episode is one action, and its logprob is the sum of its tokens'."""

    length = "constant"
    constant = 1.0

    def advantages(self, rewards: Mapping[int, float], counted: frozenset[int]) -> Mapping[int, float]:
        found = {}
        for trial, reward in rewards.items():
            others = [rewards[other] for other in sorted(counted) if other != trial]
            if others:
                found[trial] = reward - mean(others)  # exactly: equal rewards are no advantage, not a rounding error
        return found

    def loss(self, said: PolicyOutput, tokens: TokenBatch) -> "tuple[Tensor, dict[str, Tensor]]":
        # At a ratio of 1 the gradient is that of advantage × logprob.
        return -(said.logprobs - tokens.old).exp() * tokens.advantages, {}


class RlooTrainer(Trainer):
    """Learns by comparing each rollout with the others of its prompt."""

    Config: ClassVar[type[AgentConfig]] = RlooConfig
    algorithm: ClassVar[type[Algorithm]] = RlooAlgorithm
