"""The collect agent: produces and records rollouts, without training."""

import logging
import math
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from loopwright.core.agent import Agent, AgentConfig
from loopwright.core.errors import ClusterError, sentence
from loopwright.core.runtime import run
from loopwright.rollouts.config import RolloutAgentConfig
from loopwright.rollouts.env import RolloutEnv
from loopwright.rollouts.pools.base import PoolDown
from loopwright.rollouts.producer import GroupProducer, ProductionFailed

log = logging.getLogger(__name__)


class CollectConfig(RolloutAgentConfig):
    """Collects rollouts to inspect, to judge again, or to train on elsewhere."""

    type: Literal["collect"] = "collect"
    trials: int = Field(ge=1)
    """How many rollouts are made, including replacements for lost ones."""
    batch: int | None = Field(default=None, ge=1)
    """How many groups are in a batch; without it, as many as fill the loop's concurrency."""

    @model_validator(mode="after")
    def _check_trials(self) -> Self:
        if self.trials < self.group_size:
            raise ValueError(f"`trials` ({self.trials}) must be at least `group_size` ({self.group_size})")
        return self


class Collect(Agent):
    """Takes one batch after another until the trial budget is exhausted."""

    Config: ClassVar[type[AgentConfig]] = CollectConfig
    env: RolloutEnv
    config: CollectConfig

    def run(self) -> int:
        """Collect rollouts; returns 1 if no group could be used, or if a pool is down."""
        if self.env.tasks.held_out():
            log.warning("[run.eval] has no effect here: agent 'collect' evaluates nothing. Trainers use it.")
        try:
            run(self.env.book.until_stopped(self._batches()))
        except (PoolDown, ClusterError, ProductionFailed) as error:
            log.error("%s Then continue with `loopwright resume`; no recorded rollout is lost.", sentence(error))
            self.env.book.ledger.set_state("failure", str(error))
            return 1
        return 0 if self.env.buffer.counts().get("trained") or self.env.book.stopping else 1

    async def _batches(self) -> None:
        size = self.config.batch or math.ceil(self.env.concurrency / self.config.group_size)
        async with self.env.running():
            producer = GroupProducer(
                self.env, self.env.produce, group_size=self.config.group_size, min_group=self.config.min_size
            )
            step = int(self.env.book.ledger.state("step", 0))
            try:
                producer.restore(step)
                while await producer.batch(size, step + 1):
                    step += 1
                    # Without training, a batch is finished when it is taken.
                    self.env.book.ledger.set_state("step", step)
                    self.env.buffer.settle(step)
            finally:
                await producer.pause(0)
