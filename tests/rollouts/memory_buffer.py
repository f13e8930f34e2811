"""A model of the groups between production and training, in memory, to compare those in the ledger with."""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Sequence
from itertools import islice

from loopwright.core.trial import Trial


class MemoryBuffer:
    """There are few versions at a time, so each has its own queue."""

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
