"""The replay buffer: groups between production and training, oldest policy version first."""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Protocol

from loopwright.core.trial import Trial


class Buffer(Protocol):
    """What the producer needs of a buffer. `ledger.groups.Groups` is one in the ledger, which survives a crash."""

    @property
    def waiting(self) -> int:
        """How many groups are ready."""
        ...

    def waiting_of(self, sources: Collection[str] | None) -> int:
        """How many groups of these sources are ready; of all without any."""
        ...

    def open(self, group: int, source: str, trials: Sequence[Trial], *, again: int | None = None) -> None:
        """Add a group that goes into production; `again` is the expired group whose prompt it attempts again."""
        ...

    def ready(self, group: int, version: int) -> None:
        """The group can be trained on; `version` is the oldest policy version that sampled any of it."""
        ...

    def close(self, group: int, status: str) -> None:
        """The group is `filtered`, `short` or `failed`, and is not used."""
        ...

    def take(self, most: int, step: int, sources: Collection[str] | None = None) -> list[int]:
        """Up to `most` ready groups, of these sources only, oldest version first, for this step of training."""
        ...

    def expire(self, before: int, sources: Collection[str] | None = None) -> list[int]:
        """Remove and return the ready groups, of these sources only, whose version is older than `before`."""
        ...

    def groups_of_step(self, step: int) -> list[int]:
        """The groups that were taken for this step, trained on or not, to replay it."""
        ...

    def settle(self, step: int) -> None:
        """Mark what was taken for this step or an earlier one as trained."""
        ...

    def restore(self, step: int) -> None:
        """Training continues after this step: what was taken for later ones is ready again."""
        ...

    def unfinished(self) -> list[int]:
        """The groups in production."""
        ...

    def expired(self) -> list[int]:
        """The groups that expired and whose prompts were not attempted again yet."""
        ...

    def draws(self) -> dict[str, int]:
        """How many prompts were drawn from each source."""
        ...

    def uses(self) -> dict[str, int]:
        """How many groups were taken from each source, trained on or not."""
        ...

    def counts(self) -> dict[str, int]:
        """The number of groups by status."""
        ...


class MemoryBuffer:
    """A buffer in memory. There are few versions at a time, so each has its own queue."""

    def __init__(self) -> None:
        self._open: dict[int, None] = {}
        self._ready: defaultdict[int, deque[int]] = defaultdict(deque)
        self._waiting = 0
        self._taken: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._trained: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._expired: list[int] = []
        self._draws: Counter[str] = Counter()
        self._sources: dict[int, str] = {}
        self._closed: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        return self._waiting

    def waiting_of(self, sources: Collection[str] | None) -> int:
        return sum(self._is_of(group, sources) for queue in self._ready.values() for group in queue)

    def _is_of(self, group: int, sources: Collection[str] | None) -> bool:
        return sources is None or self._sources[group] in sources

    def open(self, group: int, source: str, trials: Sequence[Trial], *, again: int | None = None) -> None:
        self._open[group], self._sources[group] = None, source
        if again is None:
            self._draws[source] += 1
        else:
            self._expired.remove(again)

    def ready(self, group: int, version: int) -> None:
        self._close(group)
        self._put(group, version)

    def close(self, group: int, status: str) -> None:
        self._close(group)
        self._closed[status] += 1

    def _close(self, group: int) -> None:
        if group not in self._open:
            raise ValueError(f"group {group} is not open")
        del self._open[group]

    def take(self, most: int, step: int, sources: Collection[str] | None = None) -> list[int]:
        ready = ((version, group) for version in sorted(self._ready) for group in self._ready[version])
        groups = list(islice((each for each in ready if self._is_of(each[1], sources)), most))
        for version, group in groups:
            self._remove(version, group)
        self._taken[step] += groups
        return sorted(group for _, group in groups)

    def _put(self, group: int, version: int) -> None:
        self._ready[version].append(group)
        self._waiting += 1

    def _remove(self, version: int, group: int) -> None:
        self._ready[version].remove(group)
        if not self._ready[version]:
            del self._ready[version]
        self._waiting -= 1

    def expire(self, before: int, sources: Collection[str] | None = None) -> list[int]:
        old = [(version, group) for version, queue in self._ready.items() if version < before for group in queue]
        expired = [(version, group) for version, group in old if self._is_of(group, sources)]
        for version, group in expired:
            self._remove(version, group)
        self._closed["expired"] += len(expired)
        self._expired += [group for _, group in expired]
        return sorted(group for _, group in expired)

    def groups_of_step(self, step: int) -> list[int]:
        return sorted(group for _, group in (*self._taken.get(step, ()), *self._trained.get(step, ())))

    def settle(self, step: int) -> None:
        for earlier in [taken_step for taken_step in self._taken if taken_step <= step]:
            self._trained[earlier] += self._taken.pop(earlier)

    def restore(self, step: int) -> None:
        self.settle(step)
        for groups in self._taken.values():
            for version, group in groups:
                self._put(group, version)
        self._taken.clear()

    def unfinished(self) -> list[int]:
        return sorted(self._open)

    def expired(self) -> list[int]:
        return sorted(self._expired)

    def draws(self) -> dict[str, int]:
        return dict(self._draws)

    def uses(self) -> dict[str, int]:
        groups = [group for taken in (*self._taken.values(), *self._trained.values()) for _, group in taken]
        return dict(Counter(self._sources[group] for group in groups))

    def counts(self) -> dict[str, int]:
        counts = {
            "open": len(self._open),
            "ready": self._waiting,
            "taken": sum(map(len, self._taken.values())),
            "trained": sum(map(len, self._trained.values())),
            **self._closed,
        }
        return {status: count for status, count in counts.items() if count}
