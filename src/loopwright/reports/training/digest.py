"""The digest of a training run: its steps, its evaluations, and whether the policy got better."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum, isfinite
from statistics import fmean
from typing import Any, ClassVar, TypeGuard

from loopwright.core.confidence import bootstrap
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import EVALUATED, REPEAT
from loopwright.ledger.steps import Step, steps
from loopwright.reports.counted_digest import Failure
from loopwright.reports.formatting import counted, number, percent
from loopwright.reports.rollout.digest import RolloutDigest, describe_failures, failed_rollouts, rollout_basics
from loopwright.reports.search.digest import grouped_failures

_ENDS = 10
"""How many steps at either end are compared if nothing was evaluated on held-out tasks."""
_FEWEST = 6
"""With fewer tasks no change is significant: five coins all fall the same way more than once in twenty times."""
_DIGITS = {"kl": 6, "mismatch_kl": 6, "mismatch_max": 4, "importance": 4}
"""Digits kept of sums of logprob differences: their last digits depend on the order of summation."""
_RECENT = 10
_TRUNCATED = "truncation_rate"
_LIMITS = {
    _TRUNCATED: (0.3, "{} of the rollouts were truncated"),
    "control_rate": (0.02, "{} of the sampled tokens are control tokens inside a turn"),
    "repetition": (0.5, "{} of the 4-grams within a turn are repetitions"),
    "length_reward": (0.8, "the correlation between length and reward is {}"),
}
"""From which mean of the last steps on each number is a sign of reward hacking."""
Interval = tuple[float, float, float]
"""A mean, and the bounds of its 95 % interval."""


@dataclass(frozen=True)
class Pair:
    """A held-out task, and how the policy did at it in the first evaluation and in the last."""

    before: int
    """The trial whose episode is shown: the first one of the task."""
    after: int
    rewards: tuple[float, float]
    """The mean rewards in the first and in the last evaluation."""

    @property
    def change(self) -> float:
        """How much better the policy does in the last evaluation."""
        return self.rewards[1] - self.rewards[0]


@dataclass(frozen=True)
class TrainingDigest(RolloutDigest):
    """A run that trains a policy on its own rollouts."""

    kind: ClassVar[str] = "training"

    train: Sequence[Step] = ()
    evals: Sequence[Step] = ()
    pairs: Sequence[Pair] = ()
    """The tasks that both evaluations have a reward for."""
    failed_evaluations: Sequence[Failure] = ()
    """Rollouts of evaluations that failed."""

    @property
    def agent(self) -> Mapping[str, Any]:
        """The trainer's settings."""
        return self.table("agent")

    @property
    def planned(self) -> int:
        """The configured number of steps."""
        return int(self.agent.get("steps") or 0)

    @property
    def last_step(self) -> int:
        """The number of the last step."""
        return self.train[-1].step if self.train else 0

    @property
    def complete(self) -> bool:
        # Rollouts for a step that never came are aborted at the end; they do not count as unfinished.
        return bool(self.count) and self.finished and not self.failure

    @cached_property
    def measured(self) -> list[Step]:
        """The evaluations that have a reward."""
        return _with_reward(self.evals)

    @property
    def ends(self) -> tuple[Step, Step] | None:
        """The first and the last evaluation, if there are two."""
        return (self.measured[0], self.measured[-1]) if len(self.measured) > 1 else None

    @cached_property
    def change(self) -> Interval | None:
        """The mean change per held-out task with a reward in both; None if there are too few to tell."""
        return bootstrap([pair.change for pair in self.pairs], "change") if len(self.pairs) >= _FEWEST else None

    @property
    def skipped(self) -> list[int]:
        """Steps that did not update the policy because a loss or gradient was not finite."""
        return [step.step for step in self.train if step.numbers.get("skipped")]

    @property
    def empty(self) -> list[int]:
        """Steps that had nothing to learn from."""
        numbers = ((step.step, step.numbers) for step in self.train)
        return [n for n, row in numbers if "skipped" not in row or not (row["skipped"] or row.get("updates", 1))]

    @cached_property
    def learned(self) -> list[Step]:
        """Steps that updated the policy."""
        empty = {*self.empty}
        return [step for step in self.train if step.step not in empty and step.numbers.get("updates", 1)]

    @property
    def trained_rollouts(self) -> int:
        """Rollouts that the policy was updated on."""
        return int(fsum(step.numbers.get("trained_episodes", 0) for step in self.learned))

    @property
    def train_rewards(self) -> tuple[float, float] | None:
        """The mean reward of the first steps, and of the last."""
        rewards = [step.numbers["reward"] for step in self.train if is_number(step.numbers.get("reward"))]
        count = min(_ENDS, len(rewards) // 2)
        return (fsum(rewards[:count]) / count, fsum(rewards[-count:]) / count) if count else None


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value can be drawn."""
    return isinstance(value, (int, float)) and isfinite(value)


def value_of(step: Step, name: str) -> float | None:
    """What a step measured, without digits that are only rounding; None if it cannot be drawn."""
    value = step.numbers.get(name)
    if not is_number(value):
        return None
    return round(value, _DIGITS[name]) + 0.0 if name in _DIGITS else value  # + 0.0 removes the sign of a negative zero


def read_training(ledger: Ledger) -> TrainingDigest:
    """The digest of a training run."""
    evals = list(steps(ledger, "eval"))
    pairs: list[Pair] = []
    if len(measured := _with_reward(evals)) > 1:
        first, last = (_by_task(ledger, measured[end]) for end in (0, -1))
        pairs = [Pair(first[task][0], last[task][0], (first[task][1], last[task][1])) for task in first if task in last]
    query = f"SELECT ifnull(outcome, 'running'), count(*) FROM trials WHERE {EVALUATED} IS NULL GROUP BY 1"
    return TrainingDigest(
        **rollout_basics(ledger) | {"counts": dict(ledger.transaction.rows(query))},
        train=list(steps(ledger, "train")),
        evals=evals,
        pairs=pairs,
        failed_evaluations=failed_rollouts(ledger, f"{EVALUATED} IS NOT NULL"),
    )


def _with_reward(evals: Sequence[Step]) -> list[Step]:
    return [step for step in evals if is_number(step.numbers.get("reward"))]


def _by_task(ledger: Ledger, step: Step) -> dict[tuple[str, int], tuple[int, float]]:
    """The first scored trial and the mean reward of each held-out task, after this step."""
    rows = ledger.transaction.rows(
        "SELECT json_extract(action, '$.source'), json_extract(action, '$.index'), min(number), avg(reward) "
        f"FROM trials WHERE {EVALUATED} = ? AND {REPEAT} = ? AND reward IS NOT NULL GROUP BY 1, 2 ORDER BY 3",
        (step.step, step.numbers.get("repeats", 0)),
    )
    return {(source, index): (trial, mean) for source, index, trial, mean in rows}


# -- in words -------------------------------------------------------------------------------------------------------


def bounds(numbers: Mapping[str, Any], name: str) -> str:
    """The 95 % interval of a number that was measured on held-out tasks."""
    low, high = numbers.get(f"{name}_low"), numbers.get(f"{name}_high")
    return f"{number(low, 3)} … {number(high, 3)}" if is_number(low) and is_number(high) else "unknown"


def _with_bounds(step: Step, name: str, label: str = "") -> str:
    """A number that an evaluation measured, with its interval and whether to rely on it."""
    doubt = ", unreliable" if step.numbers.get("unreliable") else ""
    return f"{number(step.numbers[name], 3)} ({label}{bounds(step.numbers, name)}{doubt})"


def passes(digest: TrainingDigest) -> list[str]:
    """`pass@1`, `pass@4` and so on, if they were measured in the first and in the last evaluation."""
    return _measured_names(digest, r"pass@\d+")


def kinds(digest: TrainingDigest) -> list[str]:
    """`reward[KIND]` of each source and kind of task in the first and the last evaluation, if there are several."""
    return _measured_names(digest, r"reward\[.*\]")


def _measured_names(digest: TrainingDigest, pattern: str) -> list[str]:
    ends = [step.numbers for step in (digest.ends or digest.measured[:1])]
    names = [name for name in ends[0] if re.fullmatch(pattern, name, re.DOTALL)] if ends else []
    return [name for name in names if all(is_number(numbers.get(name)) for numbers in ends)]


def _regressions(digest: TrainingDigest) -> list[str]:
    """A line for each source or kind of task whose intervals before and after do not overlap, downwards."""
    if digest.ends is None:
        return []
    (first, last), lines = digest.ends, []
    for name in kinds(digest):
        low, high = first.numbers.get(f"{name}_low"), last.numbers.get(f"{name}_high")
        is_few = min(step.numbers.get(f"{name}_tasks", _FEWEST) for step in (first, last)) < _FEWEST
        if is_number(low) and is_number(high) and high < low and not is_few:
            change = f"{_with_bounds(first, name)} → {_with_bounds(last, name)}"
            lines.append(f"The policy got worse at {name[7:-1]!r}: {change}.")
    return lines


def signed(value: float) -> str:
    """A change, always with its sign."""
    return ("+" if value > 0 else "") + number(value, 3)


def judgement(digest: TrainingDigest) -> str:
    """What to think of the change, in a few words."""
    if digest.change is None:
        tasks = counted(len(digest.pairs), "task")
        return f"{tasks} with a reward in both are too few to tell whether it got better"
    mean, low, high = digest.change
    change = f"a change of {signed(mean)} per task (95 %: {signed(low)} … {signed(high)})"
    if low > 0:
        return f"{change}: it got better"
    return f"{change}: it got worse" if high < 0 else f"{change}, which may be chance"


def verdict(digest: TrainingDigest) -> str:
    """Whether the policy got better, in a sentence."""
    if digest.ends is not None:
        first, last = digest.ends
        tasks = number(last.numbers.get("tasks"))
        when = "before training" if first.step == 0 else f"after step {number(first.step)}"
        before, after = _with_bounds(first, "reward", "95 %: "), _with_bounds(last, "reward")
        rewards = f"{before} {when} and {after} after step {number(last.step)}"
        return f"On {tasks} held-out tasks the mean reward was {rewards}: {judgement(digest)}."
    if digest.measured:
        (only,) = digest.measured
        reward = _with_bounds(only, "reward", "95 %: ")
        return (
            f"On held-out tasks the mean reward was {reward} after step {number(only.step)}; "
            "it has not been measured again yet."
        )
    why = "No evaluation has a reward" if digest.evals else "Nothing was measured on held-out tasks"
    if digest.train_rewards is None:
        return f"{why}, and no two steps have a reward yet."
    first_reward, last_reward = (number(reward, 3) for reward in digest.train_rewards)
    change = f"from {first_reward} to {last_reward} in {counted(digest.last_step, 'step')}"
    hint = "" if digest.evals else " Add [run.eval] to know."
    return f"{why}; the mean training reward went {change}, which says little about other tasks.{hint}"


def describe_cuts(numbers: Mapping[str, Any]) -> str:
    """How many rollouts of an evaluation were cut off or lost."""
    total = numbers.get("rollouts", 0) + numbers.get("faults", 0)
    return f"of {total} rollouts, {numbers.get('cuts', 0)} were cut off by their deadline and {numbers['faults']} lost"


def warnings(digest: TrainingDigest) -> list[str]:
    """What the reader must know about steps and evaluations, if anything."""
    lines = []
    for numbers, why in (
        (digest.skipped, "did not update the policy (non-finite loss or gradient)"),
        (digest.empty, "had nothing to learn from"),
    ):
        if numbers:
            more = f" and {number(len(numbers) - 10)} more" if len(numbers) > 10 else ""
            some = f"{'step' if len(numbers) == 1 else 'steps'} {', '.join(map(number, numbers[:10]))}{more}"
            lines.append(f"{number(len(numbers))} of {number(len(digest.train))} steps {why}: {some}.")
    for step in (each for each in digest.evals if each.numbers.get("unreliable")):
        has_weights = not step.step or (digest.folder / "checkpoints" / f"step-{step.step:06d}").is_dir()
        repeat = "; `loopwright resume` repeats it" if has_weights else ""
        cuts = describe_cuts(step.numbers)
        lines.append(f"The evaluation after step {number(step.step)} is unreliable: {cuts}{repeat}.")
    lines += [*_regressions(digest), *always_truncated(digest.train), *hacking_signs(digest.train)]
    for failure in grouped_failures([row for row in digest.failed_evaluations if row[2] != "policy"])[:2]:
        reasons = failure.describe_reasons()
        count = counted(failure.count, "rollout")
        ending = f": {reasons}." if reasons else "."
        lines.append(f"{count} of evaluations ended {failure.outcome} (fault: {failure.fault}){ending}")
    return lines


def headline(digest: TrainingDigest) -> str:
    """The answer in a few words, for the list of runs."""
    if digest.ends is None:
        return f"step {number(digest.last_step)} of {number(digest.planned)}"
    first, last = (step.numbers["reward"] for step in digest.ends)
    return f"held-out reward {number(first, 3)} → {number(last, 3)}"


def training_result(digest: TrainingDigest) -> tuple[dict[str, Any], list[str]]:
    """The result of a training, as one JSON object and as lines of text."""
    lines = [f"{number(digest.last_step)} of {number(digest.planned)} steps. {verdict(digest)}"]
    if digest.ends is not None:
        first, last = digest.ends
        lines += [
            f"{name} {_with_bounds(first, name, '95 %: ')} → {_with_bounds(last, name)}"
            for name in (*passes(digest), *kinds(digest))
        ]
    total = digest.rollouts.total
    losses = f"{number(digest.unscored)} without a reward" if digest.unscored else "0 lost"
    produced = f"{number(total.ended)} rollouts of {number(digest.groups.count)} prompts"
    lines.append(f"trained on {number(digest.trained_rollouts)} of {produced}, {losses}")
    lines += describe_failures(each for each in digest.failures() if each.fault != "policy")
    lines += [*digest.groups.notes(digest.rollout), *digest.skipped_notes(), *warnings(digest)]
    policy = digest.folder / "policy"
    is_saved = policy.is_dir()
    if is_saved:
        lines.append(f"policy: {policy}")
    event = {
        "counts": dict(digest.counts),
        "rollouts": total.ended,
        "trained_rollouts": digest.trained_rollouts,
        "prompts": digest.groups.count,
        "groups": dict(digest.groups.statuses),
        "mean_reward": total.mean,
        "without_reward": digest.unscored,
        "skipped_tasks": digest.skipped_count,
        "steps": digest.last_step,
        "planned_steps": digest.planned,
        "skipped_steps": digest.skipped,
        "held_out": [{"step": step.step, **step.numbers} for step in digest.ends or digest.measured[:1]],
        "change": None if digest.change is None else dict(zip(("mean", "low", "high"), digest.change, strict=True)),
        "policy": str(policy) if is_saved else None,
    }
    return event, lines


def hacking_signs(train: Sequence[Step]) -> list[str]:
    """A line for each number that is beyond its limit."""
    names = [name for name in _LIMITS if name != _TRUNCATED or not always_truncated(train)]
    return [
        f"Possible reward hacking: {excess}. Read some episodes: `loopwright episodes`."
        for excess in (_excess(name, train) for name in names)
        if excess
    ]


def always_truncated(train: Sequence[Step]) -> list[str]:
    """A line if rollouts were cut off from the beginning, which the policy cannot have learned."""
    excess = _excess(_TRUNCATED, train)
    early = _values(_TRUNCATED, train[: max(1, min(_RECENT, len(train) // 2))])
    if not excess or not early or fmean(early) < _LIMITS[_TRUNCATED][0]:
        return []
    hint = "If answers should end by themselves, raise the limits of the loop, such as `max_tokens`."
    return [f"As in the first steps, {excess}. {hint}"]


def _excess(name: str, train: Sequence[Step]) -> str:
    """What is beyond its limit in the last steps, if it is."""
    limit, meaning = _LIMITS[name]
    values = _values(name, train[-_RECENT:])
    mean = fmean(values) if values else 0.0
    if abs(mean) < limit:
        return ""
    figures = [percent(figure) if "of the" in meaning else f"{figure:.3g}" for figure in (mean, limit)]
    steps = counted(len(values), "step")
    return f"{meaning.format(figures[0])} (mean of the last {steps}; the limit is {figures[1]})"


def _values(name: str, train: Sequence[Step]) -> list[float]:
    return [step.numbers[name] for step in train if isinstance(step.numbers.get(name), (int, float))]
