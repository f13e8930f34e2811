"""What the ledger of a live run says: its episodes, read once, in memory that does not grow with their number."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import fsum, inf
from pathlib import Path
from typing import Any

from loopwright.core.canonical import key_of
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Regime
from loopwright.ledger.ledger import Ledger
from loopwright.reports.rollout.digest import read_rollouts
from loopwright.reports.search.digest import Digest, Failure, basics, grouped_failures, read
from loopwright.reports.training.digest import read_training, trains

WINDOW = 100
"""So many episodes make a mean worth saying."""
_DRAWN = 2000
_REGIMES = 1000
_FAILURES = 10_000


@dataclass(frozen=True)
class Episode:
    """One episode, and the means over the hundred up to it."""

    number: int
    first: int
    last: int
    reward: float
    length: int
    regime: int | None
    mean_reward: float
    mean_length: float


@dataclass
class Tally:
    """Episodes of one kind: how many, the latest hundred returns, and the extremes."""

    count: int = 0
    length: int = 0
    best: float = float("-inf")
    worst: float = float("inf")
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, reward: float, length: int) -> None:
        """One more."""
        self.count, self.length = self.count + 1, self.length + length
        self.best, self.worst = max(self.best, reward), min(self.worst, reward)
        self.latest.append(reward)

    @property
    def mean(self) -> float:
        """The mean return of the latest hundred."""
        return fsum(self.latest) / len(self.latest)


@dataclass
class Episodes:
    """All episodes of a run, told one by one: totals, those of each regime, and an even share to draw.

    One that a failed step ended has no return: what it would have come to is not known, so it is only counted.
    """

    total: Tally = field(default_factory=Tally)
    first: list[float] = field(default_factory=list)
    regimes: dict[str, tuple[Regime, Tally]] = field(default_factory=dict)
    drawn: list[Episode] = field(default_factory=list)
    record: tuple[int, int] = (0, 0)
    """First and last trial of the best episode."""
    truncated: int = 0
    failed: int = 0
    """How many were ended by a failed step."""
    _every: int = 1
    _lengths: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @classmethod
    def of(cls, told: Iterable[Mapping[str, Any]], failed: Iterable[int] = ()) -> "Episodes":
        """As the ledger tells them, and the numbers of the failed trials; both in order."""
        found, bad = cls(), iter(failed)
        number: float = next(bad, inf)
        for facts in told:
            while number < facts["last"]:
                number = next(bad, inf)
            if number == facts["last"]:
                found.failed += 1
            else:
                found._add(facts)
        return found

    def _add(self, facts: Mapping[str, Any]) -> None:
        reward, length, ends = float(facts["return"]), int(facts["length"]), (int(facts["first"]), int(facts["last"]))
        if reward > self.total.best:
            self.record = ends
        self.total.add(reward, length)
        self.truncated += bool(facts.get("truncated"))
        self._lengths.append(length)
        if len(self.first) < WINDOW:
            self.first.append(reward)
        place = self._placed(facts.get("regime") or {}, reward, length)
        if (self.total.count - 1) % self._every == 0:
            means = self.total.mean, fsum(self._lengths) / len(self._lengths)
            self.drawn.append(Episode(self.total.count + self.failed, *ends, reward, length, place, *means))
            if len(self.drawn) >= 2 * _DRAWN:
                # Twice as sparse from now on: never more than this many, and always evenly spread.
                self.drawn, self._every = self.drawn[::2], 2 * self._every

    def _placed(self, regime: Regime, reward: float, length: int) -> int | None:
        if not regime:
            return None
        key = key_of(regime)
        if key not in self.regimes:
            if len(self.regimes) >= _REGIMES:
                return None
            self.regimes[key] = (regime, Tally())
        self.regimes[key][1].add(reward, length)
        return list(self.regimes).index(key) if len(self.regimes) <= WINDOW else None

    @property
    def window(self) -> int:
        """How many episodes the first are compared with the last by: a hundred, or half of what is there."""
        return max(1, min(WINDOW, self.total.count // 2))

    @property
    def before(self) -> float:
        """The mean return of the first ones."""
        return fsum(self.first[: self.window]) / self.window

    @property
    def after(self) -> float:
        """The mean return of the last ones."""
        return fsum(list(self.total.latest)[-self.window :]) / self.window

    @property
    def latest_length(self) -> float:
        """The mean length of the last ones."""
        return fsum(list(self._lengths)[-self.window :]) / self.window


@dataclass(frozen=True)
class LiveDigest(Digest):
    """A live run: its trials are steps, too many to hold; what counts are its episodes."""

    steps: int = 0
    counted: Mapping[str, int] = field(default_factory=dict)
    bad: Sequence[tuple[int, str, str, str]] = ()
    """The first failed steps: number, outcome, fault, reason."""
    episodes: Episodes = field(default_factory=Episodes)
    span_s: float | None = None

    @property
    def count(self) -> int:
        return self.steps

    @property
    def succeeded(self) -> int:
        return self.steps - self.failed

    @property
    def failed(self) -> int:
        """How many steps ended badly."""
        return sum(count for name, count in self.counted.items() if name not in (Outcome.OK, "cached", "running"))

    @cached_property
    def outcomes(self) -> Counter[str]:
        return Counter({name: count for name, count in self.counted.items() if name != "cached"})

    @property
    def labels(self) -> tuple[str, ...]:
        return ("return", "length")

    @property
    def wall_s(self) -> float | None:
        return self.span_s

    @cached_property
    def regimes(self) -> list[Regime]:
        """The regimes that were met, in the order of their values."""
        return sorted((regime for regime, _ in self.episodes.regimes.values()), key=self.order)

    def tally(self, regime: Regime) -> Tally:
        """What came of the episodes under a regime."""
        return self.episodes.regimes[key_of(regime)][1]

    def failures(self) -> list[Failure]:
        return grouped_failures(self.bad)


def read_run(folder: Path) -> Digest:
    """The digest of `<folder>/ledger.db`; raises LedgerError where there is nothing to read."""
    with Ledger.read(folder / "ledger.db") as ledger:
        about = basics(ledger)["about"]
        if about.get("rollout"):
            return read_training(ledger) if trains(about) else read_rollouts(ledger)
        return read_live(ledger) if about.get("live") is True else read(ledger)


def read_live(ledger: Ledger) -> LiveDigest:
    """The digest of a live run; no step is made into a trial on the way."""
    rows = ledger._rows  # a question of the report's own; the ledger answers it under its lock
    bad = rows(
        "SELECT number, outcome, ifnull(fault, 'unknown'), reason FROM trials "
        f"WHERE outcome IS NOT NULL AND outcome <> 'ok' ORDER BY number LIMIT {_FAILURES}"
    )
    ends = rows(
        "SELECT (SELECT reserved_at FROM trials ORDER BY number LIMIT 1), "
        "(SELECT finished_at FROM trials ORDER BY number DESC LIMIT 1)"
    )[0]
    return LiveDigest(
        **basics(ledger),
        trials=(),
        trouble="",
        steps=rows("SELECT ifnull(max(number), 0) FROM trials")[0][0],
        counted=ledger.counts(),
        bad=bad,
        episodes=Episodes.of(ledger.episodes(), _failed(ledger)),
        span_s=None if None in ends else max(0.0, ends[1] - ends[0]),
    )


def _failed(ledger: Ledger) -> Iterator[int]:
    """The numbers of the failed steps, in order; a few at a time, for it may be all of them."""
    after = 0
    query = "SELECT number FROM trials WHERE number > ? AND outcome <> 'ok' ORDER BY number LIMIT 5000"
    while rows := ledger._rows(query, (after,)):
        yield from (number for (number,) in rows)
        after = rows[-1][0]
