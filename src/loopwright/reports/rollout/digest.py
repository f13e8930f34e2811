"""The digest of a rollout run: rewards, lengths, outcomes and phases, read without loading any episode."""

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import fsum, sqrt
from typing import Any, ClassVar

import orjson

from loopwright.core.outcome import Outcome
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import EVALUATED, KIND
from loopwright.reports.counted_digest import (
    CountedDigest,
    Failure,
    counted_basics,
    first_failures,
    rows_in_pages,
)
from loopwright.reports.formatting import counted, number
from loopwright.reports.search.digest import FailureGroup

WINDOW = 100
"""How many rollouts a mean is taken over."""
_DRAWN = 2000
_EXAMINED = 20_000
_UNUSED = ("expired", "filtered", "short", "failed")
"""The statuses of groups that no step was trained on."""
PHASES = ("queue", "generate", "tools", "other", "judge")
"""Where the time of a rollout goes; `other` is the time of its loop outside engine and tools."""


@dataclass
class RewardTally:
    """Statistics of some rollouts: how many, mean reward and spread, and the mean of each part."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    tokens: float = 0.0
    turns: float = 0.0
    ended: int = 0
    """How many ended, with or without a reward."""
    worst: tuple[float, int] | None = None
    """The lowest reward and the first trial that got it."""
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, trial: int, reward: float, parts: Mapping[str, float], tokens: float, turns: float) -> None:
        """Count one more rollout that has a reward."""
        self.count += 1
        if self.worst is None or reward < self.worst[0]:
            self.worst = reward, trial
        self.total += reward
        self.squares += reward * reward
        self.tokens += tokens
        self.turns += turns
        for name, value in parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + value

    @property
    def mean(self) -> float | None:
        """The mean reward; None if no rollout has one."""
        return self.total / self.count if self.count else None

    @property
    def spread(self) -> float | None:
        """The standard deviation."""
        if self.count < 2:
            return None
        return sqrt(max(0.0, self.squares - self.total * self.total / self.count) / (self.count - 1))

    @property
    def part_names(self) -> list[str]:
        """The parts of the reward, if there are several."""
        return list(self.parts) if len(self.parts) > 1 else []

    @property
    def part_means(self) -> dict[str, float]:
        """The contribution of each part to the mean reward."""
        return {name: value / self.count for name, value in self.parts.items()}


@dataclass(frozen=True)
class RolloutPoint:
    """One rollout to draw, with the mean of the hundred up to it."""

    number: int
    group: int
    task: str
    source: int
    reward: float
    mean: float


@dataclass
class RolloutStatistics:
    """Statistics over all rollouts of a run, except those of evaluations."""

    total: RewardTally = field(default_factory=RewardTally)
    sources: dict[str, RewardTally] = field(default_factory=dict)
    tasks: dict[tuple[str, str], RewardTally] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    rewards: "array[float]" = field(default_factory=lambda: array("d"))
    tokens: "array[float]" = field(default_factory=lambda: array("d"))
    turns: "array[float]" = field(default_factory=lambda: array("d"))
    phases: dict[str, "array[float]"] = field(default_factory=dict)
    points: list[RolloutPoint] = field(default_factory=list)
    scored_faults: int = 0
    """How many failed through the policy's own fault, and have a reward for it."""
    _latest: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _every: int = 1

    def add(self, row: Sequence[Any]) -> None:
        """Count one that has ended: number, group, action, fault, reward, its detail, metrics, usage."""
        trial, group, action, fault, reward, detail, metrics, usage = row
        prompt = orjson.loads(action)
        source, task = str(prompt.get("source", "")), str(prompt.get("task", ""))
        kinds = (
            self.total,
            self.sources.setdefault(source, RewardTally()),
            self.tasks.setdefault((source, task), RewardTally()),
        )
        if fault is not None:
            self.faults[fault] += 1
        for tally in kinds:
            tally.ended += 1
        self._add_phases(orjson.loads(usage) if usage else {})
        if reward is None:
            return
        self.scored_faults += fault is not None
        parts = orjson.loads(detail)["parts"] if detail else {}
        numbers = orjson.loads(metrics) if metrics else {}
        tokens, turns = float(numbers.get("tokens", 0.0)), float(numbers.get("turns", 0.0))
        for tally in kinds:
            tally.add(trial, reward, parts, tokens, turns)
        self.rewards.append(reward)
        self.tokens.append(tokens)
        self.turns.append(turns)
        self._latest.append(reward)
        if (self.total.count - 1) % self._every == 0:
            place = list(self.sources).index(source)
            mean = fsum(self._latest) / len(self._latest)
            self.points.append(RolloutPoint(trial, group, task, place, reward, mean))
            if len(self.points) >= 2 * _DRAWN:
                # Twice as sparse from now on: never more than this many, and always evenly spread.
                self.points, self._every = self.points[::2], 2 * self._every

    @property
    def source_rows(self) -> list[tuple[str, RewardTally]]:
        """The statistics of each task source, and of all together if there are several."""
        return [*self.sources.items(), *([("all", self.total)] if len(self.sources) > 1 else [])]

    @property
    def phase_rows(self) -> list[dict[str, Any]]:
        """Median, 95 % quantile, longest and total time of each phase, and its share of all."""
        phases = {name: self.phases[name] for name in PHASES if self.phases.get(name)}
        whole = fsum(fsum(values) for values in phases.values())
        return [
            {
                "name": name,
                "seconds": (quantile(values, 0.5), quantile(values, 0.95), max(values), fsum(values)),
                "share": fsum(values) / whole,
            }
            for name, values in phases.items()
            if whole
        ]

    @property
    def extreme_tasks(self) -> list[tuple[str, list[tuple[str, RewardTally]]]]:
        """The tasks with the lowest and the highest mean rewards."""
        scored = [(task, tally) for (_, task), tally in self.tasks.items() if tally.mean is not None]
        if len(scored) < 2:
            return []
        scored.sort(key=lambda item: (item[1].mean or 0.0, item[0]))
        count = min(8, len(scored) // 2)
        return [("Hardest tasks", scored[:count]), ("Easiest tasks", scored[::-1][:count])]

    @property
    def hardest_trials(self) -> list[int]:
        """The worst rollout of each of the hardest tasks."""
        hardest = self.extreme_tasks[0][1] if self.extreme_tasks else []
        return [tally.worst[1] for _, tally in hardest if tally.worst is not None]

    def _add_phases(self, usage: Mapping[str, float]) -> None:
        loop = usage.get("loop_s")
        seconds_by_phase = {name: usage.get(f"{name}_s") for name in PHASES}
        if loop is not None:
            busy = (seconds_by_phase["generate"] or 0.0) + (seconds_by_phase["tools"] or 0.0)
            seconds_by_phase["other"] = max(0.0, loop - busy)
        for name, seconds in seconds_by_phase.items():
            if seconds is not None:
                self.phases.setdefault(name, array("d")).append(seconds)


@dataclass(frozen=True)
class GroupRewards:
    """The groups: number, mean, worst and best reward of each, and how many have each status."""

    rows: Sequence[tuple[int, float, float, float]] = ()
    statuses: Mapping[str, int] = field(default_factory=dict)
    count: int = 0
    equal: int = 0
    """Groups of several rollouts that all got the same reward: there is nothing to learn from these."""
    several: int = 0
    rollouts: Mapping[str, int] = field(default_factory=dict)
    """Rollouts that ended, by the status of their group."""
    small: int = 0
    """Used groups with fewer judged rollouts than the group's size."""

    def notes(self, rollout: Mapping[str, Any]) -> list[str]:
        """What the reader must know about groups that are short, small or were made for nothing, if anything."""
        size, least = rollout.get("group_size", 1), rollout.get("min_group", 1)
        lines = []
        if short := self.statuses.get("short", 0):
            lines.append(f"{counted(short, 'group')} had fewer than {number(least)} judged rollouts: not used.")
        if self.small:
            lines.append(f"{counted(self.small, 'used group')} had fewer than {number(size)} judged rollouts.")
        wasted = {status: self.rollouts[status] for status in _UNUSED if self.rollouts.get(status)}
        if wasted:
            count, total = sum(wasted.values()), sum(self.rollouts.values())
            groups = ", ".join(f"{number(self.statuses[status])} {status}" for status in wasted)
            share = f"{100 * count / total:.0f} % of {number(total)}"
            lines.append(f"{counted(count, 'rollout')} ({share}) in groups that were not used: {groups}.")
        return lines


@dataclass(frozen=True)
class Retried:
    """Rollouts that took a second attempt: how many by the outcome of the first, and how many recovered."""

    examined: int = 0
    first: Mapping[str, int] = field(default_factory=dict)
    recovered: int = 0


@dataclass(frozen=True)
class RolloutDigest(CountedDigest):
    """A rollout run. Its episodes are too many to hold in memory, so the digest is made of statistics."""

    kind: ClassVar[str] = "rollout"

    rollouts: RolloutStatistics = field(default_factory=RolloutStatistics)
    groups: GroupRewards = field(default_factory=GroupRewards)
    retried: Retried = field(default_factory=Retried)

    @property
    def count(self) -> int:
        return sum(count for name, count in self.counts.items() if name != "cached")

    @property
    def succeeded(self) -> int:
        return self.rollouts.total.count

    @property
    def unscored(self) -> int:
        """How many ended without a reward."""
        return self.rollouts.total.ended - self.rollouts.total.count

    @property
    def labels(self) -> tuple[str, ...]:
        return ("reward",)

    @property
    def rollout(self) -> Mapping[str, Any]:
        """The run's `[run.rollout]` table."""
        return self.table("rollout")

    def part(self, name: str) -> Mapping[str, Any]:
        """A table of the rollout configuration, such as `loop`, or an empty one."""
        part = self.rollout.get(name)
        return part if isinstance(part, dict) else {}

    @property
    def skipped_count(self) -> int:
        """How many tasks of its sources were left out because they cannot be attempted."""
        return int(self.part("skipped").get("count", 0))

    @property
    def skipped_reasons(self) -> Mapping[str, str]:
        """Why, for the first of them, by their source and id."""
        return dict(self.part("skipped").get("reasons", {}))

    def skipped_notes(self) -> list[str]:
        """A line that counts and names them, if there are any."""
        if not self.skipped_count:
            return []
        more = ", …" if self.skipped_count > len(self.skipped_reasons) else ""
        return [f"{counted(self.skipped_count, 'task')} left out: {', '.join(self.skipped_reasons)}{more}"]

    @property
    def ended_outcomes(self) -> list[tuple[str, int]]:
        """How many rollouts ended in each way, the most common first."""
        return [(name, count) for name, count in self.outcomes.most_common() if name not in ("running", "aborted")]


def read_rollouts(ledger: Ledger) -> RolloutDigest:
    """The digest of a rollout run."""
    return RolloutDigest(**rollout_basics(ledger))


def rollout_basics(ledger: Ledger) -> dict[str, Any]:
    """The fields that the digest of every rollout run has; reads the table of trials once, in pages."""
    statistics = RolloutStatistics()
    columns = "number, grp, action, fault, reward, reward_detail, metrics, usage"
    ended = f"outcome IS NOT NULL AND outcome <> 'aborted' AND {EVALUATED} IS NULL"
    for row in rows_in_pages(ledger, columns, ended):
        statistics.add(row)
    return {
        **counted_basics(ledger),
        "failed_trials": failed_rollouts(ledger, f"{EVALUATED} IS NULL"),
        "rollouts": statistics,
        "groups": _groups(ledger),
        "retried": _retried(ledger),
    }


def failed_rollouts(ledger: Ledger, condition: str) -> list[Failure]:
    """The first rollouts that failed, among those that meet an SQL condition."""
    left_out = ", ".join(f"'{outcome}'" for outcome in (Outcome.ABORTED, Outcome.FILTERED, Outcome.EXPIRED))
    return first_failures(ledger, f"outcome NOT IN ({left_out}) AND {condition}")


def _groups(ledger: Ledger) -> GroupRewards:
    rows = ledger.transaction.rows
    rewards = rows(
        "SELECT grp, avg(reward), min(reward), max(reward), count(reward) FROM trials "
        f"WHERE reward IS NOT NULL AND {EVALUATED} IS NULL GROUP BY grp ORDER BY grp"
    )
    several = [row for row in rewards if row[4] > 1]
    has_groups = rows("SELECT 1 FROM sqlite_schema WHERE name = 'groups'")
    members = (
        "SELECT status, count(nullif(outcome, 'aborted')) AS ended, count(reward) AS judged "
        "FROM groups JOIN trials USING (grp) GROUP BY grp"
    )
    size = int(ledger.state("run", {}).get("rollout", {}).get("group_size", 1))
    by_status = (
        rows(
            "SELECT status, count(*), sum(ended), sum(status IN ('ready', 'taken', 'trained') AND judged < ?) "
            f"FROM ({members}) GROUP BY status",
            (size,),
        )
        if has_groups
        else []
    )
    return GroupRewards(
        rows=[row[:4] for row in rewards],
        statuses={row[0]: row[1] for row in by_status},
        rollouts={row[0]: row[2] for row in by_status},
        small=sum(row[3] for row in by_status),
        count=rows(f"SELECT count(DISTINCT grp) FROM trials WHERE {EVALUATED} IS NULL")[0][0],
        equal=sum(row[2] == row[3] for row in several),
        several=len(several),
    )


def _retried(ledger: Ledger) -> Retried:
    """Only episodes record attempts, so SQLite extracts them from the latest ones."""
    latest = (
        f"FROM (SELECT CAST(data AS TEXT) AS t FROM payloads WHERE kind = '{KIND}' ORDER BY trial DESC "
        f"LIMIT {_EXAMINED}) WHERE json_valid(t)"
    )
    rows = ledger.transaction.rows(
        "SELECT ifnull(json_extract(t, '$.attempts[0].outcome'), 'unknown'), count(*), "
        f"sum(ifnull(json_extract(t, '$.fault'), 'policy') IN ('policy', 'judge')) {latest} "
        "AND json_array_length(t, '$.attempts') > 1 GROUP BY 1"
    )
    ((most,),) = ledger.transaction.rows("SELECT count(*) FROM payloads WHERE kind = ?", (KIND,))
    return Retried(min(most, _EXAMINED), {name: count for name, count, _ in rows}, sum(row[2] for row in rows))


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which this share of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def describe_failures(failures: Iterable[FailureGroup]) -> Iterator[str]:
    """The three most frequent kinds of failures, with a count of each reason."""
    for failure in islice(failures, 3):
        reasons = failure.describe_reasons()
        ending = f": {reasons}" if reasons else ""
        yield f"{number(failure.count)} × {failure.outcome} (fault: {failure.fault}){ending}"


def rollout_result(digest: RolloutDigest) -> tuple[dict[str, Any], list[str]]:
    """The result of a run, as one JSON object and as lines of text."""
    total = digest.rollouts.total
    line = f"{counted(total.ended, 'rollout')} of {counted(digest.groups.count, 'prompt')}"
    if total.mean is not None:
        parts = ", ".join(f"{name} {number(value, 3)}" for name, value in total.part_means.items())
        line += f", mean reward {number(total.mean, 3)}" + (f" ({parts})" if len(total.parts) > 1 else "")
    line += f", {number(digest.unscored)} without a reward" if digest.unscored else ", 0 lost"
    lines = [line, *describe_failures(digest.failures()), *digest.groups.notes(digest.rollout), *digest.skipped_notes()]
    event = {
        "counts": dict(digest.counts),
        "rollouts": total.ended,
        "prompts": digest.groups.count,
        "groups": dict(digest.groups.statuses),
        "mean_reward": total.mean,
        "parts": total.part_means,
        "without_reward": digest.unscored,
        "skipped_tasks": digest.skipped_count,
    }
    return event, lines
