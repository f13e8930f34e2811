"""Lanes: the sources of a run that are produced in the same way, and their share of each batch."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from loopwright.core.config import overridden
from loopwright.rollouts.env import RolloutEnv
from loopwright.rollouts.group import DiscardedGroups, Group
from loopwright.rollouts.produce_config import ProduceConfig
from loopwright.rollouts.tasks.mix import next_share

_MAX_DISCARDED_FACTOR = 10
"""How many groups may be discarded for a batch, as a multiple of its size."""


@dataclass
class Lane:
    """What is produced in one way. A run whose sources do not differ in this has one lane, with all of them."""

    name: str
    """Its sources, for messages."""
    config: ProduceConfig
    weight: int
    share: Fraction
    """Its part of each batch, on average."""
    sources: frozenset[str] | None = None
    """None for all sources."""
    open: set[int] = field(default_factory=set)
    """The groups in production."""
    expired: list[Group] = field(default_factory=list)
    """Too old to train on; their prompts are attempted again."""
    discarded: DiscardedGroups = field(default_factory=DiscardedGroups)
    """The groups that were produced for the next batch and are not in it."""
    quota: int = 0
    """How many groups of the next batch it provides."""
    max_open: int = 0
    is_paused: bool = False

    @property
    def is_async(self) -> bool:
        """Whether it continues while the learner works."""
        return self.config.type == "async"

    @property
    def is_hopeless(self) -> bool:
        """Whether so many groups were discarded that no more are produced for the next batch."""
        return self.discarded.groups.total() >= _MAX_DISCARDED_FACTOR * self.quota

    @property
    def of_sources(self) -> str:
        """Its sources, in messages about groups; empty if it has all of them."""
        return "" if self.sources is None else f" of {self.name}"


class Lanes:
    """The lanes of a run, which share each batch by the weights of their sources, to within one group."""

    def __init__(self, env: RolloutEnv, config: ProduceConfig) -> None:
        weights, self.all = env.tasks.weights, list[Lane]()
        self._by_source: dict[str, Lane] = {}
        sources: list[tuple[ProduceConfig, list[str]]] = []
        for source in weights:
            own = overridden(config, env.runner(source).produce)
            names = next((names for other, names in sources if other == own), None)
            if names is None:
                sources.append((own, [source]))
            else:
                names.append(source)
        total = sum(weights.values())
        for own, names in sources:
            weight = sum(weights[name] for name in names)
            among = frozenset(names) if len(sources) > 1 else None
            lane = Lane(", ".join(names), own, weight, Fraction(weight, total), among)
            self._by_source |= dict.fromkeys(names, lane)
            self.all.append(lane)
        self._uses: Counter[str] = Counter()
        """How many groups were used of each lane."""

    def restore(self, uses: Mapping[str, int]) -> None:
        """Continue after this many groups of each source were used."""
        self._uses = Counter()
        for source, count in uses.items():
            if source in self._by_source:
                self._uses[self._by_source[source].name] += count

    def of(self, source: str) -> Lane:
        """The lane of a source."""
        return self._by_source[source]

    def plan(self, groups: int) -> Counter[str]:
        """How many of the next groups each lane provides, by its name."""
        if len(self.all) == 1:
            return Counter({self.all[0].name: groups})
        weights, counts = {lane.name: lane.weight for lane in self.all}, self._uses.copy()
        for _ in range(groups):
            counts[next_share(weights, counts)] += 1
        return counts - self._uses

    def aim(self, size: int) -> None:
        """Set how many groups of a batch each lane provides, and how many it has open: more if asynchronous."""
        plan = self.plan(size)
        for lane in self.all:
            lane.quota = plan[lane.name]
            ahead = math.ceil(size * lane.share * (1 + Fraction(lane.config.over_sample)))
            lane.max_open = ahead if lane.is_async else lane.quota

    def usable(self, lane: Lane, size: int, updates: int, left: float) -> int:
        """How many groups, open or ready, the next batches can use before one that is opened now is too old.

        `updates` is how many times the policy is updated before the first of these batches, of which `left` follow.
        """
        if not lane.is_async:
            return lane.quota
        batches = min(lane.config.max_staleness + 1 - updates, left)
        return self.plan(size * max(0, int(batches)))[lane.name]

    def furthest_behind(self, lanes: Sequence[Lane], waiting: Mapping[str, int]) -> Lane:
        """Which of these lanes opens a group next, given how many are ready of each."""
        if len(lanes) == 1:
            return lanes[0]
        counts = {lane.name: self._uses[lane.name] + len(lane.open) + waiting[lane.name] for lane in lanes}
        name = next_share({lane.name: lane.weight for lane in lanes}, counts)
        return next(lane for lane in lanes if lane.name == name)

    def use(self, lane: Lane, groups: int) -> None:
        """Count groups that were taken."""
        self._uses[lane.name] += groups
