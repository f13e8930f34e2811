"""The groups of a rollout run, in the ledger: which prompt each attempts, and its status.

    open ──► ready ──► taken ──► trained
      │        └─► expired     (too old; its prompt is rolled again in another group)
      └─► filtered, short, failed

A group is opened in the transaction that reserves its trials, so a crash loses no prompt. Which groups were trained on
is decided by the step of the trainer's checkpoint, so none is trained on twice.
"""

from collections.abc import Collection, Sequence
from typing import Any

from loopwright.core.outcome import Outcome
from loopwright.core.trial import Trial
from loopwright.ledger.events import KEEP_RESULTS, KINDS, RESULT, returning
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.sqlite import link

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS groups (grp INTEGER PRIMARY KEY, source TEXT NOT NULL, again INTEGER, "
    "status TEXT NOT NULL, version INTEGER, step INTEGER) STRICT",
    "CREATE INDEX IF NOT EXISTS trials_by_group ON trials (grp)",
    "CREATE INDEX IF NOT EXISTS groups_open ON groups (grp) WHERE status = 'open'",
    "CREATE INDEX IF NOT EXISTS groups_ready ON groups (version, grp) WHERE status = 'ready'",
    "CREATE INDEX IF NOT EXISTS groups_taken ON groups (step, grp) WHERE status = 'taken'",
)
_RETURNING = returning("grp, ''", KINDS["group"].columns)


class Groups:
    """Each change of status is one small, indexed write, however many groups there are."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        with ledger.transaction as connection:
            for statement in _SCHEMA:
                connection.execute(statement)
        self._ready = int(self._rows("SELECT count(*) FROM groups WHERE status = 'ready'")[0][0])

    def _rows(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        return self._ledger.transaction.rows(query, values)

    def open(
        self, group: int, source: str, trials: Sequence[Trial], *, again: int | None = None, hold: bool = False
    ) -> None:
        """Write a new group with its trials; `again` is the expired group whose prompt it repeats.

        With `hold` it is on disk only after the next `flush`, or with the next write.
        """
        self._ledger.reserve(trials, hold=True)
        with self._ledger.transaction.held if hold else self._ledger.transaction:
            self._ledger.chain.update(
                "group",
                f"INSERT INTO groups (grp, source, again, status) VALUES (?, ?, ?, 'open') {_RETURNING}",
                (group, source, again),
            )

    def ready(self, group: int, version: int) -> None:
        """Mark a group ready to train on; `version` is the oldest policy version that sampled any of it."""
        self._move(group, "open", "ready", version)
        self._ready += 1

    def close(self, group: int, status: str) -> None:
        """Mark a group `filtered`, `short` (too few judged rollouts) or `failed` (none)."""
        self._move(group, "open", status, None)

    def _move(self, group: int, before: str, after: str, version: int | None) -> None:
        with self._ledger.transaction.held:
            if not self._update("status = ?, version = ? WHERE grp = ? AND status = ?", after, version, group, before):
                raise ValueError(f"group {group} is not {before}")
            if after in (Outcome.FILTERED, "short"):
                self._mark_unused([group], Outcome.FILTERED)

    def _update(self, change: str, *values: Any) -> list[int]:
        """Change some groups; gives their numbers in order."""
        statement = f"UPDATE groups SET {change} {_RETURNING}"
        return self._ledger.chain.update("group", statement, values)

    def _mark_unused(self, groups: Sequence[int], outcome: Outcome) -> None:
        """Change the outcome of these groups' scored trials, which are not trained on; their rewards stay."""
        scored = "grp = ? AND outcome IN ('ok', 'truncated', 'invalid')"
        chain = self._ledger.chain
        for group in groups:
            chain.connection.execute(f"{KEEP_RESULTS} AND {scored}", (group,))
            statement = f"UPDATE trials SET outcome = ? WHERE {scored} {returning('number', RESULT)}"
            for number, *row in chain.connection.execute(statement, (outcome, group)).fetchall():
                chain.last = link(chain.last, "result", number, "", row)
                chain.connection.execute(
                    "UPDATE trials SET result_seq = ?, result_hash = ? WHERE number = ?", (*chain.last, number)
                )

    def take(self, most: int, step: int, sources: Collection[str] | None = None) -> list[int]:
        """Up to `most` ready groups, of these sources only, oldest version first, for this step of training."""
        among, names = _among(sources)
        with self._ledger.transaction:
            groups = self._update(
                "status = 'taken', step = ? WHERE grp IN "
                f"(SELECT grp FROM groups WHERE status = 'ready'{among} ORDER BY version, grp LIMIT ?)",
                step,
                *names,
                most,
            )
        self._ready -= len(groups)
        return groups

    def expire(self, before: int, sources: Collection[str] | None = None) -> list[int]:
        """Expire the ready groups, of these sources only, with any token older than version `before`."""
        if before <= 0 or not self._ready:  # versions start at 0
            return []
        among, names = _among(sources)
        with self._ledger.transaction.held:
            expired = self._update(
                "status = 'expired' WHERE grp IN "
                f"(SELECT grp FROM groups WHERE status = 'ready' AND version < ?{among})",
                before,
                *names,
            )
            self._mark_unused(expired, Outcome.EXPIRED)
        self._ready -= len(expired)
        return expired

    def groups_of_step(self, step: int) -> list[int]:
        """The groups that were taken for this step, trained on or not."""
        query = "SELECT grp FROM groups WHERE status IN ('taken', 'trained') AND step = ? ORDER BY grp"
        rows = self._rows(query, (step,))
        return [group for (group,) in rows]

    def settle(self, step: int) -> None:
        """Mark as trained what was taken up to this step, whose checkpoint is written."""
        with self._ledger.transaction:
            self._update("status = 'trained' WHERE status = 'taken' AND step <= ?", step)

    def restore(self, step: int) -> None:
        """Continue after this step: what was taken up to it is trained, the rest is ready again."""
        self.settle(step)
        with self._ledger.transaction:
            self._ready += len(self._update("status = 'ready', step = NULL WHERE status = 'taken'"))

    def unfinished(self) -> list[int]:
        """The groups that were in production when the run stopped."""
        return [group for (group,) in self._rows("SELECT grp FROM groups WHERE status = 'open' ORDER BY grp")]

    def expired(self) -> list[int]:
        """The expired groups whose prompts were not repeated yet."""
        rows = self._rows(
            "SELECT grp FROM groups WHERE status = 'expired' "
            "AND grp NOT IN (SELECT again FROM groups WHERE again IS NOT NULL) ORDER BY grp"
        )
        return [group for (group,) in rows]

    @property
    def waiting(self) -> int:
        """How many groups are ready."""
        return self._ready

    def waiting_of(self, sources: Collection[str] | None) -> int:
        """How many groups of these sources are ready; of all without any."""
        if sources is None:
            return self._ready
        among, names = _among(sources)
        return int(self._rows(f"SELECT count(*) FROM groups WHERE status = 'ready'{among}", names)[0][0])

    def draws(self) -> dict[str, int]:
        """How many prompts were drawn from each source, for a sampler that continues."""
        return dict(self._rows("SELECT source, count(*) FROM groups WHERE again IS NULL GROUP BY source"))

    def uses(self) -> dict[str, int]:
        """How many groups were taken from each source, trained on or not."""
        query = "SELECT source, count(*) FROM groups WHERE status IN ('taken', 'trained') GROUP BY source"
        return dict(self._rows(query))

    def counts(self) -> dict[str, int]:
        """How many groups there are of each status."""
        return dict(self._rows("SELECT status, count(*) FROM groups GROUP BY status"))


def _among(sources: Collection[str] | None) -> tuple[str, tuple[str, ...]]:
    """A condition that a group is of one of these sources, and its values."""
    if sources is None:
        return "", ()
    return f" AND source IN ({', '.join('?' * len(sources))})", tuple(sources)
