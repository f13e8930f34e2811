"""What the ledger of a training run says: its steps, its evaluations, and whether the policy got better."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum, isfinite
from typing import Any, TypeGuard

from loopwright.core.confidence import bootstrap
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import EVALUATED
from loopwright.ledger.steps import Step, steps
from loopwright.reports.markup import number
from loopwright.reports.rollout.digest import RolloutDigest, bad_rollouts, rollout_basics
from loopwright.reports.search.digest import grouped_failures

_ENDS = 10
"""So many steps at either end are compared where nothing else tells how good the policy is."""
_FEWEST = 6
"""Below so many tasks no change is beyond chance: five coins fall alike more often than once in twenty throws."""
_DIGITS = {"kl": 6, "mismatch_kl": 6, "importance": 4}
"""Of what is made of differences of logprobs: the same sum in another order has other last digits."""
Interval = tuple[float, float, float]
"""A mean, and the bounds of its 95 % interval."""


@dataclass(frozen=True)
class Pair:
    """A held-out task, and how the policy did at it in the first evaluation and in the last."""

    before: int
    """The trial whose episode is shown; the first of the task."""
    after: int
    rewards: tuple[float, float]
    """The means over the attempts at it."""

    @property
    def change(self) -> float:
        """How much better the policy does now."""
        return self.rewards[1] - self.rewards[0]


@dataclass(frozen=True)
class TrainingDigest(RolloutDigest):
    """A run that trains a policy on its own rollouts."""

    train: Sequence[Step] = ()
    evals: Sequence[Step] = ()
    pairs: Sequence[Pair] = ()
    """The tasks that both evaluations have a reward for."""
    badly_examined: Sequence[tuple[int, str, str, str]] = ()
    """Rollouts of evaluations that ended badly: number, outcome, fault, reason."""

    @property
    def agent(self) -> Mapping[str, Any]:
        """The trainer's settings."""
        found = self.about.get("agent")
        return found if isinstance(found, dict) else {}

    @property
    def planned(self) -> int:
        """How many steps there are to be."""
        return int(self.agent.get("steps") or 0)

    @property
    def taken(self) -> int:
        """The last step that was taken."""
        return self.train[-1].step if self.train else 0

    @property
    def complete(self) -> bool:
        # Rollouts for a step that never came are aborted at the end, and nobody misses them.
        return bool(self.count) and self.finished and not self.failure

    @cached_property
    def measured(self) -> list[Step]:
        """The evaluations that came to a reward."""
        return _measured(self.evals)

    @property
    def ends(self) -> tuple[Step, Step] | None:
        """The first evaluation and the last, if they are two."""
        return (self.measured[0], self.measured[-1]) if len(self.measured) > 1 else None

    @cached_property
    def change(self) -> Interval | None:
        """How much better the policy does at a held-out task, over those that both evaluations have a reward for.

        None where they are too few to tell.
        """
        return bootstrap([pair.change for pair in self.pairs], "change") if len(self.pairs) >= _FEWEST else None

    @property
    def skipped(self) -> list[int]:
        """Steps that left the policy as it was, as a loss or gradient was no number."""
        return [step.step for step in self.train if step.numbers.get("skipped")]

    @property
    def empty(self) -> list[int]:
        """Steps that had nothing to learn from."""
        told = ((step.step, step.numbers) for step in self.train)
        return [n for n, one in told if "skipped" not in one or not (one["skipped"] or one.get("updates", 1))]

    @property
    def train_rewards(self) -> tuple[float, float] | None:
        """The mean reward of the first steps, and of the last."""
        rewards = [step.numbers["reward"] for step in self.train if is_number(step.numbers.get("reward"))]
        many = min(_ENDS, len(rewards) // 2)
        return (fsum(rewards[:many]) / many, fsum(rewards[-many:]) / many) if many else None


def is_number(value: Any) -> TypeGuard[float]:
    """Whether there is something to draw."""
    return isinstance(value, (int, float)) and isfinite(value)


def value_of(step: Step, name: str) -> float | None:
    """What was measured, if there is something to draw; without what is nothing but rounding."""
    value = step.numbers.get(name)
    if not is_number(value):
        return None
    return round(value, _DIGITS[name]) + 0.0 if name in _DIGITS else value  # no minus is left before a zero


def trains(about: Mapping[str, Any]) -> bool:
    """Whether a run trains a policy on its rollouts."""
    agent = about.get("agent")
    return bool(about.get("rollout")) and isinstance(agent, dict) and isinstance(agent.get("steps"), int)


def read_training(ledger: Ledger) -> TrainingDigest:
    """The digest of a training run."""
    evals = list(steps(ledger, "eval"))
    counted = f"SELECT ifnull(outcome, 'running'), count(*) FROM trials WHERE {EVALUATED} IS NULL GROUP BY 1"
    return TrainingDigest(
        **rollout_basics(ledger) | {"counted": dict(ledger.transaction.rows(counted))},
        train=list(steps(ledger, "train")),
        evals=evals,
        pairs=_pairs(ledger, _measured(evals)),
        badly_examined=bad_rollouts(ledger, f"{EVALUATED} IS NOT NULL"),
    )


def _measured(evals: Sequence[Step]) -> list[Step]:
    return [step for step in evals if is_number(step.numbers.get("reward"))]


def _pairs(ledger: Ledger, measured: Sequence[Step]) -> list[Pair]:
    if len(measured) < 2:
        return []
    first, last = (_by_task(ledger, measured[end].step) for end in (0, -1))
    return [Pair(first[task][0], last[task][0], (first[task][1], last[task][1])) for task in first if task in last]


def _by_task(ledger: Ledger, step: int) -> dict[tuple[str, int], tuple[int, float]]:
    """The first scored trial and the mean reward of each held-out task, after this step."""
    rows = ledger.transaction.rows(
        "SELECT json_extract(action, '$.source'), json_extract(action, '$.index'), min(number), avg(reward) "
        f"FROM trials WHERE {EVALUATED} = ? AND reward IS NOT NULL GROUP BY 1, 2 ORDER BY 3",
        (step,),
    )
    return {(source, index): (trial, mean) for source, index, trial, mean in rows}


# -- in words -------------------------------------------------------------------------------------------------------


def bounds(numbers: Mapping[str, Any], name: str) -> str:
    """The 95 % interval of something that was measured at held-out tasks."""
    low, high = numbers.get(f"{name}_low"), numbers.get(f"{name}_high")
    return f"{number(low, 3)} … {number(high, 3)}" if is_number(low) and is_number(high) else "unknown"


def passes(digest: TrainingDigest) -> list[str]:
    """`pass@1`, `pass@4` and so on, as far as both ends were measured."""
    found = [step.numbers for step in (digest.ends or digest.measured[:1])]
    names = (
        [name for name in found[0] if name.startswith("pass@") and name.partition("@")[2].isdigit()] if found else []
    )
    return [name for name in names if all(is_number(numbers.get(name)) for numbers in found)]


def signed(value: float) -> str:
    """A change, always with its sign."""
    return ("+" if value > 0 else "") + number(value, 3)


def judgement(digest: TrainingDigest) -> str:
    """What to think of the change, in a few words."""
    if digest.change is None:
        tasks = "1 task" if len(digest.pairs) == 1 else f"{number(len(digest.pairs))} tasks"
        return f"{tasks} that both have a reward for are too few to tell whether it got better"
    mean, low, high = digest.change
    told = f"a change of {signed(mean)} per task (95 %: {signed(low)} … {signed(high)})"
    if low > 0:
        return f"{told}: it got better"
    return f"{told}: it got worse" if high < 0 else f"{told}, which may be chance"


def verdict(digest: TrainingDigest) -> str:
    """Whether the policy got better, in a sentence."""
    many = "1 step" if digest.taken == 1 else f"{number(digest.taken)} steps"
    if digest.ends is not None:
        first, last = digest.ends
        tasks = number(last.numbers.get("tasks"))
        before = f"{number(first.numbers['reward'], 3)} (95 %: {bounds(first.numbers, 'reward')})"
        after = f"{number(last.numbers['reward'], 3)} ({bounds(last.numbers, 'reward')})"
        when = "before training" if first.step == 0 else f"after step {number(first.step)}"
        told = f"On {tasks} held-out tasks the mean reward was {before} {when} and {after} after step "
        return f"{told}{number(last.step)}: {judgement(digest)}."
    if digest.measured:
        (only,) = digest.measured
        told = f"{number(only.numbers['reward'], 3)} (95 %: {bounds(only.numbers, 'reward')})"
        return (
            f"On held-out tasks the mean reward was {told} after step {number(only.step)}; "
            "it has not been measured again yet."
        )
    why = "No evaluation has a reward" if digest.evals else "Nothing was measured on held-out tasks"
    if digest.train_rewards is None:
        return f"{why}, and no two steps have a reward yet."
    begun, ended = (number(reward, 3) for reward in digest.train_rewards)
    told = f"{why}; the mean reward of its training went from {begun} to {ended} in {many}"
    return f"{told}, which says little about other tasks." + ("" if digest.evals else " Add [run.eval] to know.")


def troubles(digest: TrainingDigest) -> list[str]:
    """What the reader must know about the steps, if anything."""
    found = []
    for which, why in (
        (digest.skipped, "left the policy as it was, as a loss or gradient was no finite number"),
        (digest.empty, "had nothing to learn from"),
    ):
        if which:
            first = ", ".join(map(number, which[:10])) + (", …" if len(which) > 10 else "")
            found.append(f"{number(len(which))} of {number(len(digest.train))} steps {why}: {first}.")
    for failure in grouped_failures([row for row in digest.badly_examined if row[2] != "policy"])[:2]:
        reason = f": {failure.reasons[0][0]}" if failure.reasons[0][0] else ""
        many = "1 rollout" if failure.count == 1 else f"{number(failure.count)} rollouts"
        found.append(f"{many} of evaluations ended {failure.outcome} (fault: {failure.fault}){reason}.")
    return found


def headline(digest: TrainingDigest) -> str:
    """The answer in a few words, for the list of runs."""
    if digest.ends is None:
        return f"step {number(digest.taken)} of {number(digest.planned)}"
    first, last = (step.numbers["reward"] for step in digest.ends)
    return f"held-out reward {number(first, 3)} → {number(last, 3)}"


def training_result(digest: TrainingDigest) -> tuple[dict[str, Any], list[str]]:
    """What came of a training, for scripts and as lines for people."""
    lines = [f"{number(digest.taken)} of {number(digest.planned)} steps. {verdict(digest)}"]
    if digest.ends is not None:
        first, last = (step.numbers for step in digest.ends)
        lines += [
            f"{name} {number(first[name], 3)} (95 %: {bounds(first, name)}) → "
            f"{number(last[name], 3)} ({bounds(last, name)})"
            for name in passes(digest)
        ]
    total = digest.rolled.total
    lost = f"{number(digest.unscored)} without a reward" if digest.unscored else "0 lost"
    lines.append(f"{number(total.ended)} rollouts of {number(digest.groups.count)} prompts to train on, {lost}")
    lines += troubles(digest)
    policy = digest.folder / "policy"
    kept = policy.is_dir()
    if kept:
        lines.append(f"policy: {policy}")
    event = {
        "counts": dict(digest.counted),
        "rollouts": total.ended,
        "prompts": digest.groups.count,
        "mean_reward": total.mean,
        "without_reward": digest.unscored,
        "steps": digest.taken,
        "planned_steps": digest.planned,
        "skipped_steps": digest.skipped,
        "held_out": [{"step": step.step, **step.numbers} for step in digest.ends or digest.measured[:1]],
        "change": None if digest.change is None else dict(zip(("mean", "low", "high"), digest.change, strict=True)),
        "policy": str(policy) if kept else None,
    }
    return event, lines
