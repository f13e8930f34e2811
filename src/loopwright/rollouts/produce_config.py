"""How groups of rollouts are produced: the `produce` table of a run or of one of its task sources."""

from typing import Literal

from pydantic import Field

from loopwright.core.config import Config


class ProduceConfig(Config):
    """How groups of rollouts are produced."""

    type: Literal["sync", "async"] = "sync"
    """`sync`: one batch at a time; `async`: continuously, with more groups in flight than a batch needs."""
    over_sample: float = Field(default=0.25, ge=0)
    """Asynchronous only: how many more groups than a batch has are in flight, as a share of the batch."""
    max_staleness: int = Field(default=1, ge=0)
    """How many versions old a group may be when it is trained on; older prompts are attempted again."""
    staleness: Literal["group", "token"] = "group"
    """`group`: a group with one token that is too old expires; `token`: only if all its tokens are too old."""
    partial: bool = True
    """Whether a rollout continues after a weight update, in the middle of a turn; otherwise it starts again."""
    filter: Literal["none", "equal_rewards"] = "none"
    """`equal_rewards` leaves out groups whose rewards are all equal, since nothing can be learned from them."""
    drain_s: float = Field(default=30.0, ge=0)
    """Seconds that running rollouts get to finish before they are cancelled, when production is drained."""
