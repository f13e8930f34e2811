"""GRPO: the advantage of a rollout is its reward relative to the others of its prompt.

    sample    the producer rolls out `group_size` rollouts for each prompt
    judge     each gets a reward, or none
    advantage (reward - mean of its group) / standard deviation of its group
    loss      the clipped policy gradient, against the recorded logprobs

The published variants are options: Dr. GRPO is `std = false, length = "constant"`; DAPO is `clip_high = 0.28,
length = "token", dynamic_sampling = true`.
"""

from collections.abc import Mapping
from statistics import mean, stdev
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from loopwright.core.agent import AgentConfig
from loopwright.trainers.algorithm import Algorithm, Length, PolicyOutput, TokenBatch
from loopwright.trainers.config import TrainConfig
from loopwright.trainers.trainer import Trainer

if TYPE_CHECKING:
    from torch import Tensor

_SMALL = 1e-6


class GrpoConfig(TrainConfig):
    """Group-relative policy optimisation."""

    compares_group: ClassVar[bool] = True
    type: Literal["grpo"] = "grpo"
    group_size: int = Field(default=8, ge=2)
    """Rollouts per prompt, which are compared with one another."""
    clip: float = Field(default=0.2, gt=0)
    """The largest change of a token's probability ratio in one update."""
    clip_high: float | None = Field(default=None, gt=0)
    """The limit upwards; a value above `clip` lets unlikely tokens become likely (DAPO)."""
    std: bool = True
    """Whether advantages are divided by the group's standard deviation; `false` is Dr. GRPO."""
    length: Length = "episode"
    """How tokens are weighted: each `episode` the same, each `token` the same (DAPO), or divided by a `constant`
    (Dr. GRPO: no length bias)."""
    dynamic_sampling: bool = False
    """Replace prompts whose rollouts all have the same reward by other prompts (DAPO)."""


class GrpoAlgorithm(Algorithm):
    """Compares the rollouts of a prompt."""

    config: GrpoConfig

    def __init__(self, config: GrpoConfig) -> None:
        super().__init__(config)
        self.length = config.length

    def advantages(self, rewards: Mapping[int, float], baseline: frozenset[int]) -> Mapping[int, float]:
        group = [rewards[trial] for trial in sorted(baseline)]
        if len(group) < 2:
            return {}  # nothing to compare with
        expected = mean(group)  # exact: equal rewards give an advantage of exactly 0
        spread = stdev(group) + _SMALL if self.config.std else 1.0
        return {trial: (reward - expected) / spread for trial, reward in rewards.items()}

    def loss(self, policy: PolicyOutput, tokens: TokenBatch) -> "tuple[Tensor, dict[str, Tensor]]":
        return clipped_loss(policy, tokens, self.config.clip, self.config.clip_high or self.config.clip)


def clipped_loss(
    policy: PolicyOutput, tokens: TokenBatch, low: float, high: float
) -> "tuple[Tensor, dict[str, Tensor]]":
    """The clipped policy gradient: no gain beyond a ratio of [1 - low, 1 + high]."""
    ratio = (policy.logprobs - tokens.old_logprobs).exp()
    unclipped = ratio * tokens.advantages
    bounded = ratio.clamp(1 - low, 1 + high) * tokens.advantages
    return -unclipped.minimum(bounded), {"clip_fraction": (bounded < unclipped).float()}


class GrpoTrainer(Trainer):
    """Trains a policy with GRPO."""

    Config: ClassVar[type[AgentConfig]] = GrpoConfig
    algorithm: ClassVar[type[Algorithm]] = GrpoAlgorithm
