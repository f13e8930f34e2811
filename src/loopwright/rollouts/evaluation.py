"""Evaluation: how the policy does at tasks that it is not trained on, with intervals that say how sure that is."""

from collections.abc import Sequence
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import Field

from loopwright.core.confidence import interval
from loopwright.core.config import Config
from loopwright.core.errors import Problem
from loopwright.engines.base import Sampling
from loopwright.rollouts.tasks.sources import Sources, source_problems


class EvalConfig(Config):
    """Tasks that the policy is measured at, and never trained on."""

    tasks: Sources = Field(examples=['{ type = "jsonl", path = "held-out.jsonl" }'])
    """Where they come from, one source or a list, each chosen by `type`."""
    every: int = Field(default=10, ge=1)
    """Steps of training between two evaluations; there is one before the first and one after the last, too."""
    samples: int = Field(default=1, ge=1)
    """How many rollouts attempt each task; pass@k is told for k up to this."""
    sampling: Sampling | None = None
    """How the policy is sampled; what is not said here is as in training."""
    solved: float = 1.0
    """The reward from which on a task counts as solved."""

    def problems(self, home: Path) -> list[Problem]:
        """What is wrong with it; found before anything starts."""
        return source_problems(self.tasks, home)

    def due(self, step: int, last: int) -> bool:
        """Whether there is an evaluation after this step."""
        return step % self.every == 0 or step == last


def summary(by_task: Sequence[Sequence[float]], config: EvalConfig, *, seed: str) -> dict[str, Any]:
    """Mean reward and pass@k over tasks, from the rewards at each, with the bounds of their 95 % intervals."""
    scored = [rewards for rewards in by_task if rewards]
    told: dict[str, Any] = {
        "tasks": len(by_task),
        "rollouts": sum(map(len, scored)),
        "faults": len(by_task) * config.samples - sum(map(len, scored)),
    }
    if not scored:
        return told
    told["reward"], told["reward_low"], told["reward_high"] = interval([fmean(rewards) for rewards in scored], seed)
    for k in dict.fromkeys((1, *(2**n for n in range(1, 16) if 2**n < config.samples), config.samples)):
        chances = [_pass(rewards, k, config.solved) for rewards in scored if len(rewards) >= k]
        if chances:
            told[f"pass@{k}"], told[f"pass@{k}_low"], told[f"pass@{k}_high"] = interval(chances, seed)
    return told


def _pass(rewards: Sequence[float], k: int, solved: float) -> float:
    """The chance that one of k rollouts solves the task, without bias, from all that there are."""
    wrong = sum(reward < solved for reward in rewards)
    return 1.0 - comb(wrong, k) / comb(len(rewards), k)
