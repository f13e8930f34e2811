"""The base of all algorithms: who gets the credit, and what each token costs. The learner does the rest."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from torch import Tensor

Length = Literal["episode", "token", "constant"]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The sampled tokens of a few samples, one after another, as tensors of one dimension."""

    old: "Tensor"
    """Their logprobs under the policy that the update began with."""
    advantages: "Tensor"
    returns: "Tensor | None" = None
    """What is still to come of the reward after each, where there is a critic."""


@dataclass(frozen=True, slots=True)
class PolicyOutput:
    """What the policy that is being trained says of the same tokens."""

    logprobs: "Tensor"
    entropy: "Tensor"
    values: "Tensor | None" = None


class Algorithm(ABC):
    """An algorithm.

    class Reinforce(Algorithm):
        def advantages(self, rewards, counted):
            return rewards

        def loss(self, said, tokens):
            return -tokens.advantages * said.logprobs, {}
    """

    critic: ClassVar[bool] = False
    """Whether it learns what to expect, token by token."""
    length: Length = "episode"
    """What a token counts for."""
    constant: float | None = None
    """What is divided by where that is a `constant`; the longest turn by default."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def advantages(self, rewards: Mapping[int, float], counted: frozenset[int]) -> Mapping[int, float]:
        """How much better each trial of a group did than was to be expected; `counted` make up the baseline."""

    @abstractmethod
    def loss(self, said: PolicyOutput, tokens: TokenBatch) -> "tuple[Tensor, dict[str, Tensor]]":
        """What each token costs, before it is weighed, and numbers worth a curve."""

    def credit(self, advantages: "Tensor", reward: float, values: "Tensor | None") -> "tuple[Tensor, Tensor | None]":
        """Token by token, for one sample: the advantage, and what the critic should have expected."""
        return advantages, None
