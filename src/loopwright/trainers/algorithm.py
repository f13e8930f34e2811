"""The base of all training algorithms: advantages of a group, and the loss of each token. The learner does the rest."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from torch import Tensor

Length = Literal["episode", "token", "constant"]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The sampled tokens of a few samples, concatenated, as one-dimensional tensors."""

    old_logprobs: "Tensor"
    """Their logprobs under the policy at the start of the update."""
    advantages: "Tensor"
    returns: "Tensor | None" = None
    """The targets of the critic, if there is one."""


@dataclass(frozen=True, slots=True)
class PolicyOutput:
    """The current policy's output for the same tokens."""

    logprobs: "Tensor"
    entropy: "Tensor"
    values: "Tensor | None" = None


class Algorithm(ABC):
    """How a policy learns from the rewards of a group.

    class Reinforce(Algorithm):
        def advantages(self, rewards, baseline):
            return rewards

        def loss(self, policy, tokens):
            return -tokens.advantages * policy.logprobs, {}
    """

    critic: ClassVar[bool] = False
    """Whether a critic learns the value of each token."""
    length: Length = "episode"
    """How tokens are weighted; see `build_samples`."""
    constant: float | None = None
    """The divisor with `length = "constant"`; the longest turn by default."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def advantages(self, rewards: Mapping[int, float], baseline: frozenset[int]) -> Mapping[int, float]:
        """The advantage of each trial of a group; only the trials in `baseline` count for the expected reward."""

    @abstractmethod
    def loss(self, policy: PolicyOutput, tokens: TokenBatch) -> "tuple[Tensor, dict[str, Tensor]]":
        """The loss of each token, before weighting, and metrics per token."""

    def credit(self, advantages: "Tensor", reward: float, values: "Tensor | None") -> "tuple[Tensor, Tensor | None]":
        """The advantage of each token of one sample, and the critic's targets."""
        return advantages, None
