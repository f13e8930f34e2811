"""Evaluation: the policy's performance on held-out tasks, with confidence intervals."""

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
from loopwright.rollouts.group import Group
from loopwright.rollouts.judgers.base import AnyJudger
from loopwright.rollouts.tasks.sources import Sources, source_problems


class EvalConfig(Config):
    """Held-out tasks, on which the policy is evaluated and never trained."""

    tasks: Sources = Field(examples=['{ type = "jsonl", path = "held-out.jsonl" }'])
    """Where the tasks come from, one source or a list, each chosen by `type`."""
    every: int = Field(default=10, ge=1)
    """Training steps between two evaluations; there is also one before the first step and one after the last."""
    samples: int = Field(default=1, ge=1)
    """How many rollouts attempt each task; pass@k is reported for k up to this."""
    sampling: Sampling | None = None
    """How the policy is sampled; settings that are missing here are as in training."""
    judger: AnyJudger | None = None
    """How these episodes are judged, chosen by `type`; without it, as in training."""
    solved: float = 1.0
    """The smallest reward with which a task counts as solved."""
    max_cuts: float = Field(default=0.1, ge=0, le=1)
    """The largest share of rollouts that may be lost or cut off by their deadline; with more of them, the evaluation
    is unreliable, and `loopwright resume` repeats it if its weights are kept."""

    def problems(self, scenario_dir: Path) -> list[Problem]:
        """What is wrong with this config; checked before anything starts."""
        problems = source_problems(self.tasks, scenario_dir)
        if self.judger is not None:
            problems += [Problem(f"judger.{p.key}", p.message) for p in self.judger.problems(scenario_dir)]
        message = "has no meaning here: what is held out is never trained on; remove it."
        produced = [source.label() for source in self.tasks if source.produce is not None]
        return problems + [Problem(f"tasks, {name}, produce", message) for name in produced]

    def due(self, step: int, last: int) -> bool:
        """Whether there is an evaluation after this step."""
        return step % self.every == 0 or step == last


def summary(by_task: Sequence[Sequence[float]], config: EvalConfig, *, seed: str, cuts: int = 0) -> dict[str, Any]:
    """Mean reward and pass@k over tasks, from the rewards of each task, with the bounds of their 95 % intervals.

    `cuts` is how many of these rollouts their deadline ended.
    """
    scored = [rewards for rewards in by_task if rewards]
    results: dict[str, Any] = {
        "tasks": len(by_task),
        "rollouts": sum(map(len, scored)),
        "faults": len(by_task) * config.samples - sum(map(len, scored)),
        "cuts": cuts,
    }
    if results["faults"] + cuts > config.max_cuts * len(by_task) * config.samples:
        results["unreliable"] = 1
    if not scored:
        return results
    results["reward"], results["reward_low"], results["reward_high"] = interval(
        [fmean(rewards) for rewards in scored], seed
    )
    counts = [(sum(reward < config.solved for reward in rewards), len(rewards)) for rewards in scored]
    for k in dict.fromkeys((1, *(2**n for n in range(1, 16) if 2**n < config.samples), config.samples)):
        # Unbiased estimates of the probability that one of k rollouts solves the task.
        estimates = [1.0 - comb(failed, k) / comb(count, k) for failed, count in counts if count >= k]
        if estimates:
            results[f"pass@{k}"], results[f"pass@{k}_low"], results[f"pass@{k}_high"] = interval(estimates, seed)
    return results


def rewards_by_kind(groups: Sequence[Group], *, seed: str) -> dict[str, float]:
    """Mean reward and 95 % interval of each source and of each kind of task (`data_source`), where there are several.

    The names are `reward[KIND]`, `reward[KIND]_low` and `reward[KIND]_high`; `reward[KIND]_tasks` is how many tasks.
    """
    rewards = {g: [e.reward.value for e in group.episodes.values() if e.reward] for g, group in enumerate(groups)}
    means = {g: fmean(values) for g, values in rewards.items() if values}
    sources = {g: groups[g].prompt.source.removeprefix("eval:") for g in means}
    kinds: dict[str, dict[int, float]] = {}
    for names in (sources, {g: groups[g].prompt.task.data_source for g in means}):
        for g, name in names.items() if len({*names.values()}) > 1 else ():
            # A source and a kind of the same name are one: a task that names no kind has that of its source.
            kinds.setdefault(name, {})[g] = means[g]
    results: dict[str, float] = {}
    for kind, values in kinds.items():
        bounds = interval([*values.values()], f"{seed}:{kind}")
        results |= {f"reward[{kind}]{end}": value for end, value in zip(("", "_low", "_high"), bounds, strict=True)}
        results[f"reward[{kind}]_tasks"] = len(values)
    return results
