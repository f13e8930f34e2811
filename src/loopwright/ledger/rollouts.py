"""Stored rollouts: trials with their episodes, read from the ledger a few at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import orjson

from loopwright.core.episode import Episode
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.trial import Reward
from loopwright.ledger.ledger import Ledger

KIND = "rollout"
"""The payload that holds an episode."""
REJUDGED = "rejudged:"
"""The payload `rejudged:<id>` holds a later verdict; the first reward and earlier verdicts are never changed."""
EVALUATED = "json_extract(action, '$.evaluated')"
REPEAT = "ifnull(json_extract(action, '$.repeat'), 0)"
"""How often an evaluation had been repeated."""
"""In a query of trials: the training step before an evaluation; NULL for all other trials."""
_PAGE = 32


@dataclass(frozen=True)
class Rollout:
    """A trial and its episode, whose outcome includes the later fate of its group (`filtered`, `expired`)."""

    number: int
    episode: Episode
    evaluated: int | None = None
    """The training step after which it measured the policy; None for training rollouts."""

    @classmethod
    def of(cls, number: int, data: bytes, outcome: str | None, evaluated: int | None = None) -> Self:
        """From a row of the ledger. An expired rollout is too old to train on."""
        episode = Episode.from_bytes(data)
        if outcome in (Outcome.FILTERED, Outcome.EXPIRED):
            trainable = episode.trainable and outcome != Outcome.EXPIRED
            episode = replace(episode, outcome=Outcome(outcome), trainable=trainable)
        return cls(number, episode, evaluated)

    @property
    def judgeable(self) -> bool:
        """Whether there is something to judge: the policy did it, and at most the judger failed."""
        return self.episode.fault in (None, Fault.POLICY, Fault.JUDGE)

    def as_json(self) -> dict[str, Any]:
        """A line of JSONL."""
        evaluated = {} if self.evaluated is None else {"evaluated": self.evaluated}
        return {"trial": self.number, **evaluated, **self.episode.as_json()}


@dataclass(frozen=True)
class Rejudgement:
    """A later judger's verdict on an episode: a reward, or the reason for its absence."""

    id: str
    reward: Reward | None
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        reward = None if self.reward is None else {"value": self.reward.value, "parts": self.reward.parts}
        return {"id": self.id, "reward": reward, "reason": self.reason}


def has_rollouts(ledger: Ledger) -> bool:
    """Whether a run makes rollouts."""
    about = ledger.state("run", {})
    return isinstance(about, dict) and isinstance(about.get("rollout"), dict)


@dataclass(frozen=True)
class Selection:
    """Which trials are meant: those of a group, of a task, or of both; all without either."""

    group: int | None = None
    task: str | None = None

    @property
    def condition(self) -> tuple[str, tuple[Any, ...]]:
        """In a query of trials: a condition that begins with AND, and its values."""
        by_group = (" AND grp = ?", (self.group,)) if self.group is not None else ("", ())
        by_task = (" AND json_extract(action, '$.task') = ?", (self.task,)) if self.task is not None else ("", ())
        return by_group[0] + by_task[0], (*by_group[1], *by_task[1])

    def __str__(self) -> str:
        parts = [f"group {self.group}"] if self.group is not None else []
        return " and ".join([*parts, *([f"task {self.task!r}"] if self.task is not None else [])])


ALL = Selection()


def rollouts(ledger: Ledger, numbers: Sequence[int] | None = None, which: Selection = ALL) -> Iterator[Rollout]:
    """All finished rollouts by number, or those that are meant; a few at a time are in memory."""
    if numbers is not None:
        yield from (stored for number in numbers if (stored := rollout(ledger, number)) is not None)
        return
    after, (condition, values) = 0, which.condition
    query = (
        f"SELECT trial, data, outcome, {EVALUATED} FROM payloads JOIN trials ON number = trial "
        f"WHERE kind = '{KIND}' AND trial > ?{condition} ORDER BY trial LIMIT {_PAGE}"
    )
    while rows := ledger.transaction.rows(query, (after, *values)):
        yield from (Rollout.of(*row) for row in rows)
        after = rows[-1][0]


def rollout(ledger: Ledger, number: int) -> Rollout | None:
    """One rollout; None if the trial has no episode yet, or does not exist."""
    data = ledger.payload(number, KIND)
    if data is None:
        return None
    query = f"SELECT outcome, {EVALUATED} FROM trials WHERE number = ?"
    return Rollout.of(number, data, *ledger.transaction.rows(query, (number,))[0])


def groups_of(ledger: Ledger) -> Iterator[list[Rollout]]:
    """The rollouts of one group after another."""
    after = 0
    query = "SELECT min(grp) FROM trials WHERE grp > ?"
    members = (
        f"SELECT trial, data, outcome, {EVALUATED} FROM payloads JOIN trials ON number = trial AND kind = '{KIND}' "
        "WHERE grp = ? ORDER BY number"
    )
    while (group := ledger.transaction.rows(query, (after,))[0][0]) is not None:
        if stored := [Rollout.of(*row) for row in ledger.transaction.rows(members, (group,))]:
            yield stored
        after = group


def rejudgements(ledger: Ledger, number: int) -> list[Rejudgement]:
    """The later verdicts on an episode, oldest first."""
    query = "SELECT data FROM payloads WHERE trial = ? AND substr(kind, 1, ?) = ? ORDER BY rowid"
    verdicts = [orjson.loads(data) for (data,) in ledger.transaction.rows(query, (number, len(REJUDGED), REJUDGED))]
    return [
        Rejudgement(
            one["id"],
            None if one["reward"] is None else Reward(one["reward"]["value"], one["reward"]["parts"]),
            one["reason"],
        )
        for one in verdicts
    ]


def add_rejudgements(ledger: Ledger, verdicts: Sequence[tuple[int, Rejudgement]]) -> None:
    """Append verdicts to the earlier ones."""
    with ledger.transaction:
        for number, verdict in verdicts:
            ledger.chain.put_payload(number, f"{REJUDGED}{verdict.id}", orjson.dumps(verdict.as_json()))
