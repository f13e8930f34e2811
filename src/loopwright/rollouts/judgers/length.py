"""The length judger: how many tokens were sampled; with a negative weight, the price of being wordy."""

from typing import ClassVar, Literal

from loopwright.core.reward import Reward
from loopwright.rollouts.judgers.base import Judger, JudgerConfig, Payload


class LengthJudgerConfig(JudgerConfig):
    """The number of tokens that the policy sampled, for penalties: `weight = -0.01`."""

    type: Literal["length"] = "length"


class LengthJudger(Judger):
    """Counts tokens."""

    Config: ClassVar[type[JudgerConfig]] = LengthJudgerConfig
    needs = ("tokens",)

    async def judge(self, payload: Payload) -> Reward:
        return Reward(float(payload.tokens))
