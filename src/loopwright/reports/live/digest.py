"""The digest of a live run: its episodes, read once, in memory that does not grow with their number."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from math import fsum, inf
from typing import Any, ClassVar

from loopwright.core.outcome import Outcome
from loopwright.core.trial import Regime, key_of
from loopwright.ledger.ledger import Ledger
from loopwright.reports.counted_digest import CountedDigest, counted_basics, first_failures, rows_in_pages
from loopwright.reports.live.evaluations import Evaluations
from loopwright.reports.live.statistics import Difference, stratified_difference

WINDOW = 100
"""How many episodes a mean is taken over."""
_DRAWN = 2000
_REGIMES = 1000


@dataclass(frozen=True)
class EpisodePoint:
    """One episode to draw, and the means over the window that ends with it; None before the first full window."""

    number: int
    first: int
    last: int
    reward: float
    length: int
    regime: int | None
    mean_reward: float | None
    mean_length: float | None


@dataclass
class EpisodeTally:
    """Statistics of some episodes: how many, the latest hundred returns, and the extremes."""

    count: int = 0
    length: int = 0
    best: float = float("-inf")
    worst: float = float("inf")
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, reward: float, length: int) -> None:
        """Count one more episode."""
        self.count, self.length = self.count + 1, self.length + length
        self.best, self.worst = max(self.best, reward), min(self.worst, reward)
        self.latest.append(reward)

    @property
    def mean(self) -> float:
        """The mean return of the latest hundred."""
        return fsum(self.latest) / len(self.latest)


@dataclass
class Episodes:
    """All episodes of a run: totals, statistics by regime, and an even share to draw.

    Only complete episodes have a return. One that ended with a failed step, or that the end of the budget, a stop or a
    crash cut short, is only counted.
    """

    total: EpisodeTally = field(default_factory=EpisodeTally)
    first: list[float] = field(default_factory=list)
    regimes: dict[str, tuple[Regime, EpisodeTally]] = field(default_factory=dict)
    points: list[EpisodePoint] = field(default_factory=list)
    record: tuple[int, int] = (0, 0)
    """First and last trial of the best episode."""
    truncated: int = 0
    failed: int = 0
    """How many ended with a failed step."""
    cut: int = 0
    """How many did not reach their end: the budget was used up, or the run was stopped."""
    smoothing: int = WINDOW
    """How many episodes each mean of the curve is taken over."""
    seed_trials: int = 0
    """With several seeds, the steps of each. Means and comparisons are over the episodes of one, so far the last."""
    _seed: int = 0
    _seed_count: int = 0
    _every: int = 1
    _lengths: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @classmethod
    def of(
        cls,
        records: Iterable[Mapping[str, Any]],
        failed_steps: Iterable[int] = (),
        count: int | None = None,
        seed_trials: int = 0,
    ) -> "Episodes":
        """From the ledger's records of episodes, how many there are, and the numbers of the failed steps, in order."""
        # A tenth of the episodes: a window as long as the run would be a mean over everything.
        smoothing = WINDOW if count is None else min(WINDOW, max(1, count // 10))
        episodes, failures = cls(smoothing=smoothing, seed_trials=seed_trials), iter(failed_steps)
        number: float = next(failures, inf)
        for record in records:
            while number < record["last"]:
                number = next(failures, inf)
            if number == record["last"]:
                episodes.failed += 1
            elif not record.get("complete", True):
                episodes.cut += 1
            else:
                episodes._add(record)
        return episodes

    def _add(self, record: Mapping[str, Any]) -> None:
        reward, length = float(record["return"]), int(record["length"])
        ends = int(record["first"]), int(record["last"])
        seed = (ends[1] - 1) // self.seed_trials if self.seed_trials else 0
        if seed != self._seed:  # another policy, which knows nothing yet
            self._seed, self._seed_count, self.first = seed, 0, []
            self.total.latest.clear()
            self._lengths.clear()
        self._seed_count += 1
        if reward > self.total.best:
            self.record = ends
        self.total.add(reward, length)
        self.truncated += bool(record.get("truncated"))
        self._lengths.append(length)
        if len(self.first) < WINDOW:
            self.first.append(reward)
        place = self._add_to_regime(record.get("regime") or {}, reward, length)
        if (self.total.count - 1) % self._every == 0:
            means: tuple[float | None, float | None] = (None, None)
            if self._seed_count >= self.smoothing:
                means = _mean_of_last(self.total.latest, self.smoothing), _mean_of_last(self._lengths, self.smoothing)
            self.points.append(
                EpisodePoint(self.total.count + self.failed + self.cut, *ends, reward, length, place, *means)
            )
            if len(self.points) >= 2 * _DRAWN:
                # Twice as sparse from now on: never more than this many, and always evenly spread.
                self.points, self._every = self.points[::2], 2 * self._every

    def _add_to_regime(self, regime: Regime, reward: float, length: int) -> int | None:
        if not regime:
            return None
        key = key_of(regime)
        if key not in self.regimes:
            if len(self.regimes) >= _REGIMES:
                return None
            self.regimes[key] = (regime, EpisodeTally())
        self.regimes[key][1].add(reward, length)
        return list(self.regimes).index(key) if len(self.regimes) <= WINDOW else None

    @property
    def window(self) -> int:
        """How many of the first and the last episodes are compared: a hundred, or half of all."""
        return max(1, min(WINDOW, self._seed_count // 2))

    @property
    def before(self) -> float:
        """The mean return of the first episodes."""
        return fsum(self.first[: self.window]) / self.window

    @property
    def after(self) -> float:
        """The mean return of the last episodes."""
        return fsum(list(self.total.latest)[-self.window :]) / self.window

    @property
    def change(self) -> Difference | None:
        """How the last episodes differ from the first, with the interval; None if there are too few to tell."""
        first, last = self.first[: self.window], list(self.total.latest)[-self.window :]
        return stratified_difference([(last, first)]) if self._seed_count >= 2 * self.window > 2 else None

    @property
    def latest_length(self) -> float:
        """The mean length of the last episodes."""
        return fsum(list(self._lengths)[-self.window :]) / self.window


def _mean_of_last(values: deque[Any], count: int) -> float:
    return fsum(islice(reversed(values), count)) / count


@dataclass(frozen=True)
class LiveDigest(CountedDigest):
    """A live run. Its trials are steps, too many to hold in memory, so the digest is made of episodes."""

    kind: ClassVar[str] = "live"

    steps: int = 0
    episodes: Episodes = field(default_factory=Episodes)

    @property
    def count(self) -> int:
        return self.steps

    @property
    def succeeded(self) -> int:
        return self.steps - self.failed

    @property
    def failed(self) -> int:
        """How many steps failed."""
        return sum(count for name, count in self.counts.items() if name not in (Outcome.OK, "cached", "running"))

    @property
    def labels(self) -> tuple[str, ...]:
        return ("return", "length")

    @cached_property
    def regimes(self) -> list[Regime]:
        """The regimes that were met, in the order of their values."""
        return sorted((regime for regime, _ in self.episodes.regimes.values()), key=self.order)

    def tally(self, regime: Regime) -> EpisodeTally:
        """The statistics of the episodes under a regime."""
        return self.episodes.regimes[key_of(regime)][1]


def read_live(ledger: Ledger) -> LiveDigest:
    """The digest of a live run; its steps are never made into Trial objects."""
    rows = ledger.transaction.rows
    ((count,),) = rows("SELECT count(*) FROM payloads WHERE kind = 'episode'")
    agent = ledger.state("run", {}).get("agent") or {}
    seeds = agent.get("seeds") or ()
    return LiveDigest(
        **counted_basics(ledger),
        steps=rows("SELECT ifnull(max(number), 0) FROM trials")[0][0],
        failed_trials=first_failures(ledger, "outcome IS NOT NULL"),
        evaluations=Evaluations.read(ledger),
        episodes=Episodes.of(
            ledger.episodes(),
            (number for (number,) in rows_in_pages(ledger, "number", "outcome <> 'ok'")),
            count // max(1, len(seeds)),
            agent["trials"] if len(seeds) > 1 else 0,
        ),
    )
