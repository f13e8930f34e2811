"""How groups of rollouts are produced, as configuration."""

from typing import Literal

from pydantic import Field

from loopwright.core.config import Config


class ProduceConfig(Config):
    """How groups are produced."""

    type: Literal["sync", "async"] = "sync"
    """`sync`: a batch at a time; `async`: all the time, with more groups in flight than a batch needs."""
    over_sample: float = Field(default=0.25, ge=0)
    """Asynchronous only: how many more groups than a batch has are in flight, as a share of the batch."""
    max_staleness: int = Field(default=1, ge=0)
    """How many versions of the policy a group may be old when it is trained on; older ones are rolled again."""
    staleness: Literal["group", "token"] = "group"
    """`group`: a group with a token that is too old expires; `token`: only if nothing in it is young enough."""
    partial: bool = True
    """Whether a rollout goes on after a weight update, in the middle of a turn; otherwise it is begun again."""
    filter: Literal["none", "equal_rewards"] = "none"
    """`equal_rewards` leaves out groups from which nothing can be learned, since all did equally well."""
    drain_s: float = Field(default=30.0, ge=0)
    """Seconds that rollouts have to end before they are cancelled, when production is drained."""
