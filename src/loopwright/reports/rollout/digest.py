"""What the ledger of a rollout run says, read once: rewards, lengths, outcomes, phases; no episode is loaded for it."""

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import fsum, sqrt
from typing import Any

import orjson

from loopwright.core.outcome import Outcome
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import EVALUATED, KIND
from loopwright.reports.markup import number
from loopwright.reports.search.digest import Digest, Failure, basics, grouped_failures

WINDOW = 100
"""So many rollouts make a mean worth drawing."""
_DRAWN = 2000
_FAILURES = 10_000
_LOOKED_AT = 20_000
_LEFT_OUT = (Outcome.FILTERED, Outcome.EXPIRED)
PHASES = ("queue", "generate", "tools", "other", "judge")
"""Where the time of a rollout goes; `other` is what its loop took besides generating and tools."""


@dataclass
class Tally:
    """Rewards of one kind of rollout: how many, their mean and spread, and that of each part."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    tokens: float = 0.0
    turns: float = 0.0
    ended: int = 0
    """How many ended, also without a reward."""
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, reward: float, parts: Mapping[str, float], tokens: float, turns: float) -> None:
        """One more that has a reward."""
        self.count += 1
        self.total += reward
        self.squares += reward * reward
        self.tokens += tokens
        self.turns += turns
        for name, value in parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + value

    @property
    def mean(self) -> float | None:
        """The mean reward; None where nothing was scored."""
        return self.total / self.count if self.count else None

    @property
    def spread(self) -> float | None:
        """The standard deviation."""
        if self.count < 2:
            return None
        return sqrt(max(0.0, self.squares - self.total * self.total / self.count) / (self.count - 1))

    @property
    def part_means(self) -> dict[str, float]:
        """What each part adds to the mean; a part that a rollout lacks adds nothing to it."""
        return {name: value / self.count for name, value in self.parts.items()}


@dataclass(frozen=True)
class Point:
    """One rollout to draw, with the mean of the hundred up to it."""

    number: int
    group: int
    task: str
    source: int
    reward: float
    mean: float


@dataclass
class Rollouts:
    """All rollouts of a run but those of evaluations, told one by one."""

    total: Tally = field(default_factory=Tally)
    sources: dict[str, Tally] = field(default_factory=dict)
    tasks: dict[tuple[str, str], Tally] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    rewards: "array[float]" = field(default_factory=lambda: array("d"))
    tokens: "array[float]" = field(default_factory=lambda: array("d"))
    turns: "array[float]" = field(default_factory=lambda: array("d"))
    phases: dict[str, "array[float]"] = field(default_factory=dict)
    drawn: list[Point] = field(default_factory=list)
    scored_faults: int = 0
    """How many ended badly by the policy's own doing, and have a reward for it."""
    _latest: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _every: int = 1

    def add(self, row: Sequence[Any]) -> None:
        """One that has ended: number, group, action, fault, reward, its detail, metrics, usage."""
        trial, group, action, fault, reward, detail, metrics, usage = row
        prompt = orjson.loads(action)
        source, task = str(prompt.get("source", "")), str(prompt.get("task", ""))
        kinds = (
            self.total,
            self.sources.setdefault(source, Tally()),
            self.tasks.setdefault((source, task), Tally()),
        )
        if fault is not None:
            self.faults[fault] += 1
        for tally in kinds:
            tally.ended += 1
        self._time(orjson.loads(usage) if usage else {})
        if reward is None:
            return
        self.scored_faults += fault is not None
        parts = orjson.loads(detail)["parts"] if detail else {}
        told = orjson.loads(metrics) if metrics else {}
        tokens, turns = float(told.get("tokens", 0.0)), float(told.get("turns", 0.0))
        for tally in kinds:
            tally.add(reward, parts, tokens, turns)
        self.rewards.append(reward)
        self.tokens.append(tokens)
        self.turns.append(turns)
        self._latest.append(reward)
        if (self.total.count - 1) % self._every == 0:
            place = list(self.sources).index(source)
            mean = fsum(self._latest) / len(self._latest)
            self.drawn.append(Point(trial, group, task, place, reward, mean))
            if len(self.drawn) >= 2 * _DRAWN:
                # Twice as sparse from now on: never more than this many, and always evenly spread.
                self.drawn, self._every = self.drawn[::2], 2 * self._every

    def _time(self, usage: Mapping[str, float]) -> None:
        loop = usage.get("loop_s")
        spent = {name: usage.get(f"{name}_s") for name in PHASES}
        if loop is not None:
            spent["other"] = max(0.0, loop - (spent["generate"] or 0.0) - (spent["tools"] or 0.0))
        for name, seconds in spent.items():
            if seconds is not None:
                self.phases.setdefault(name, array("d")).append(seconds)


@dataclass(frozen=True)
class GroupRewards:
    """What the groups came to: each one's number, mean, worst and best reward."""

    rows: Sequence[tuple[int, float, float, float]] = ()
    statuses: Mapping[str, int] = field(default_factory=dict)
    count: int = 0
    level: int = 0
    """Groups of several rollouts that all got the same reward: there is nothing to learn from these."""
    several: int = 0


@dataclass(frozen=True)
class Retried:
    """Rollouts that took a second attempt: how many by the outcome of the first, and how many came right."""

    looked_at: int = 0
    first: Mapping[str, int] = field(default_factory=dict)
    came_right: int = 0


@dataclass(frozen=True)
class RolloutDigest(Digest):
    """A rollout run: its trials are episodes, too many to hold; what counts is how they were judged."""

    counted: Mapping[str, int] = field(default_factory=dict)
    bad: Sequence[tuple[int, str, str, str]] = ()
    """The first that ended badly: number, outcome, fault, reason."""
    rolled: Rollouts = field(default_factory=Rollouts)
    groups: GroupRewards = field(default_factory=GroupRewards)
    retried: Retried = field(default_factory=Retried)
    span_s: float | None = None

    @property
    def count(self) -> int:
        return sum(count for name, count in self.counted.items() if name != "cached")

    @property
    def succeeded(self) -> int:
        return self.rolled.total.count

    @property
    def unscored(self) -> int:
        """How many ended without a reward."""
        return self.rolled.total.ended - self.rolled.total.count

    @cached_property
    def outcomes(self) -> Counter[str]:
        return Counter({name: count for name, count in self.counted.items() if name != "cached"})

    @property
    def labels(self) -> tuple[str, ...]:
        return ("reward",)

    @property
    def wall_s(self) -> float | None:
        return self.span_s

    @property
    def rollout(self) -> Mapping[str, Any]:
        """What was configured."""
        found = self.about.get("rollout")
        return found if isinstance(found, dict) else {}

    def failures(self) -> list[Failure]:
        return grouped_failures(self.bad)


def read_rollouts(ledger: Ledger) -> RolloutDigest:
    """The digest of a rollout run."""
    return RolloutDigest(**rollout_basics(ledger))


def rollout_basics(ledger: Ledger) -> dict[str, Any]:
    """What the digest of every rollout run has; reads the table of trials once, in pages."""
    rolled = Rollouts()
    for row in _ended(ledger):
        rolled.add(row)
    ends = ledger.transaction.rows("SELECT min(reserved_at), max(finished_at) FROM trials")[0]
    return {
        **basics(ledger),
        "trials": (),
        "trouble": "",
        "counted": ledger.counts(),
        "bad": bad_rollouts(ledger, f"{EVALUATED} IS NULL"),
        "rolled": rolled,
        "groups": _groups(ledger),
        "retried": _retried(ledger),
        "span_s": None if None in ends else max(0.0, ends[1] - ends[0]),
    }


def bad_rollouts(ledger: Ledger, which: str) -> list[tuple[int, str, str, str]]:
    """The first of these that ended badly: number, outcome, fault, reason."""
    left_out = ", ".join(f"'{outcome}'" for outcome in (Outcome.OK, Outcome.ABORTED, *_LEFT_OUT))
    return ledger.transaction.rows(
        "SELECT number, outcome, ifnull(fault, 'unknown'), reason FROM trials "
        f"WHERE outcome NOT IN ({left_out}) AND {which} ORDER BY number LIMIT {_FAILURES}"
    )


def _ended(ledger: Ledger) -> Iterator[Sequence[Any]]:
    after = 0
    query = (
        "SELECT number, grp, action, fault, reward, reward_detail, metrics, usage FROM trials "
        f"WHERE number > ? AND outcome IS NOT NULL AND outcome <> 'aborted' AND {EVALUATED} IS NULL "
        "ORDER BY number LIMIT 5000"
    )
    while found := ledger.transaction.rows(query, (after,)):
        yield from found
        after = found[-1][0]


def _groups(ledger: Ledger) -> GroupRewards:
    rows = ledger.transaction.rows
    found = rows(
        "SELECT grp, avg(reward), min(reward), max(reward), count(reward) FROM trials "
        f"WHERE reward IS NOT NULL AND {EVALUATED} IS NULL GROUP BY grp ORDER BY grp"
    )
    several = [row for row in found if row[4] > 1]
    known = rows("SELECT 1 FROM sqlite_schema WHERE name = 'groups'")
    return GroupRewards(
        rows=[row[:4] for row in found],
        statuses=dict(rows("SELECT status, count(*) FROM groups GROUP BY status")) if known else {},
        count=rows(f"SELECT count(DISTINCT grp) FROM trials WHERE {EVALUATED} IS NULL")[0][0],
        level=sum(row[2] == row[3] for row in several),
        several=len(several),
    )


def _retried(ledger: Ledger) -> Retried:
    """Attempts are told by the episodes alone: of the latest, SQLite reads just these."""
    latest = (
        f"FROM (SELECT CAST(data AS TEXT) AS t FROM payloads WHERE kind = '{KIND}' ORDER BY trial DESC "
        f"LIMIT {_LOOKED_AT}) WHERE json_valid(t)"
    )
    rows = ledger.transaction.rows(
        "SELECT ifnull(json_extract(t, '$.attempts[0].outcome'), 'unknown'), count(*), "
        f"sum(ifnull(json_extract(t, '$.fault'), 'policy') IN ('policy', 'judge')) {latest} "
        "AND json_array_length(t, '$.attempts') > 1 GROUP BY 1"
    )
    ((most,),) = ledger.transaction.rows("SELECT count(*) FROM payloads WHERE kind = ?", (KIND,))
    return Retried(min(most, _LOOKED_AT), {name: count for name, count, _ in rows}, sum(row[2] for row in rows))


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which this share of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def rollout_result(digest: RolloutDigest) -> tuple[dict[str, Any], list[str]]:
    """What came of a run, for scripts and as lines for people."""
    total = digest.rolled.total
    many = "1 rollout" if total.ended == 1 else f"{number(total.ended)} rollouts"
    prompts = "1 prompt" if digest.groups.count == 1 else f"{number(digest.groups.count)} prompts"
    line = f"{many} of {prompts}"
    if total.mean is not None:
        parts = ", ".join(f"{name} {number(value, 3)}" for name, value in total.part_means.items())
        line += f", mean reward {number(total.mean, 3)}" + (f" ({parts})" if len(total.parts) > 1 else "")
    line += f", {number(digest.unscored)} without a reward" if digest.unscored else ", 0 lost"
    lines = [line]
    for failure in digest.failures()[:3]:
        reason = f": {failure.reasons[0][0]}" if failure.reasons[0][0] else ""
        lines.append(f"{number(failure.count)} × {failure.outcome} (fault: {failure.fault}){reason}")
    event = {
        "counts": dict(digest.counted),
        "rollouts": total.ended,
        "prompts": digest.groups.count,
        "mean_reward": total.mean,
        "parts": total.part_means,
        "without_reward": digest.unscored,
    }
    return event, lines
