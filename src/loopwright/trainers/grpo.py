"""GRPO: a rollout is as good as it did better than the others at its prompt.

    sample    the producer rolls out `group_size` rollouts for each prompt
    judge     each gets a reward, or none at all
    advantage (reward - mean of its group) / standard deviation of its group
    loss      the clipped policy gradient, against the logprobs that were recorded

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

    type: Literal["grpo"] = "grpo"
    group_size: int = Field(default=8, ge=2)
    """How many rollouts attempt the same prompt, and are compared with one another."""
    clip: float = Field(default=0.2, gt=0)
    """How far the policy may move in one update, as a ratio."""
    clip_high: float | None = Field(default=None, gt=0)
    """The same upwards; larger than `clip` lets unlikely tokens become likely (DAPO)."""
    std: bool = True
    """Whether advantages are divided by the group's standard deviation; without, easy prompts count less (Dr. GRPO)."""
    length: Length = "episode"
    """What a token counts for: each `episode` the same, each `token` the same (DAPO), or divided by a `constant`
    (Dr. GRPO: no bias by length)."""
    dynamic_sampling: bool = False
    """Leave out prompts that all rollouts did equally well at, and roll out others instead (DAPO)."""


class GrpoAlgorithm(Algorithm):
    """Compares the rollouts of a prompt."""

    config: GrpoConfig

    def __init__(self, config: GrpoConfig) -> None:
        super().__init__(config)
        self.length = config.length

    def advantages(self, rewards: Mapping[int, float], counted: frozenset[int]) -> Mapping[int, float]:
        group = [rewards[trial] for trial in sorted(counted)]
        if len(group) < 2:
            return {}  # nobody to compare with
        expected = mean(group)  # exactly: equal rewards are no advantage, not a rounding error
        spread = stdev(group) + _SMALL if self.config.std else 1.0
        return {trial: (reward - expected) / spread for trial, reward in rewards.items()}

    def loss(self, said: PolicyOutput, tokens: TokenBatch) -> "tuple[Tensor, dict[str, Tensor]]":
        return clipped(said, tokens, self.config.clip, self.config.clip_high or self.config.clip)


def clipped(said: PolicyOutput, tokens: TokenBatch, low: float, high: float) -> "tuple[Tensor, dict[str, Tensor]]":
    """The clipped policy gradient: moving on is worth nothing once the ratio has left [1 - low, 1 + high]."""
    ratio = (said.logprobs - tokens.old).exp()
    free = ratio * tokens.advantages
    bound = ratio.clamp(1 - low, 1 + high) * tokens.advantages
    return -free.minimum(bound), {"clip_fraction": (bound < free).float()}


class GrpoTrainer(Trainer):
    """Learns by comparing rollouts of the same prompt."""

    Config: ClassVar[type[AgentConfig]] = GrpoConfig
    algorithm: ClassVar[type[Algorithm]] = GrpoAlgorithm
