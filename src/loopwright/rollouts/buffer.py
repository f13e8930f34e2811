"""The replay buffer: groups between production and training, oldest version first."""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Protocol

from loopwright.core.trial import Trial


class Buffer(Protocol):
    """What production needs of a buffer; `core.groups.Groups` keeps one in the ledger, where it survives a crash."""

    @property
    def waiting(self) -> int:
        """How many groups are ready."""
        ...

    def open(self, group: int, source: str, trials: Sequence[Trial], *, again: int | None = None) -> None:
        """A new group goes into production; `again` is the expired one whose prompt it tries once more."""
        ...

    def ready(self, group: int, version: int) -> None:
        """The group can be trained on; `version` is the oldest that sampled any of it."""
        ...

    def close(self, group: int, status: str) -> None:
        """The group is `filtered` or `failed`."""
        ...

    def take(self, most: int, step: int) -> list[int]:
        """Up to `most` ready groups, oldest version first, for this step of training."""
        ...

    def expire(self, before: int) -> list[int]:
        """End the ready groups of which something is older than version `before`."""
        ...

    def taken(self, step: int) -> list[int]:
        """What was taken for this step, trained on or not: what its replay is made from."""
        ...

    def settle(self, step: int) -> None:
        """What was taken for this step or an earlier one counts as trained."""
        ...

    def restore(self, step: int) -> None:
        """Training goes on after this step: what was taken for later ones is ready again."""
        ...

    def unfinished(self) -> list[int]:
        """The groups in production."""
        ...

    def owed(self) -> list[int]:
        """The groups that expired and whose prompts were not tried again yet."""
        ...

    def drawn(self) -> dict[str, int]:
        """How many prompts were drawn from each source."""
        ...

    def counts(self) -> dict[str, int]:
        """How many groups there are of each status."""
        ...


class MemoryBuffer:
    """A buffer that ends with its process. There are few versions at a time, so each has a queue of its own."""

    def __init__(self) -> None:
        self._open: dict[int, None] = {}
        self._ready: defaultdict[int, deque[int]] = defaultdict(deque)
        self._waiting = 0
        self._taken: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._trained: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._owed: list[int] = []
        self._drawn: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        return self._waiting

    def open(self, group: int, source: str, trials: Sequence[Trial], *, again: int | None = None) -> None:
        self._open[group] = None
        if again is None:
            self._drawn[source] += 1
        else:
            self._owed.remove(again)

    def ready(self, group: int, version: int) -> None:
        self._end(group)
        self._put(group, version)

    def close(self, group: int, status: str) -> None:
        self._end(group)
        self._ended[status] += 1

    def _end(self, group: int) -> None:
        if group not in self._open:
            raise ValueError(f"group {group} is not open")
        del self._open[group]

    def take(self, most: int, step: int) -> list[int]:
        taken = [self._oldest() for _ in range(min(most, self._waiting))]
        self._taken[step] += taken
        return sorted(group for _, group in taken)

    def _put(self, group: int, version: int) -> None:
        self._ready[version].append(group)
        self._waiting += 1

    def _oldest(self) -> tuple[int, int]:
        version = min(self._ready)
        group = self._ready[version].popleft()
        if not self._ready[version]:
            del self._ready[version]
        self._waiting -= 1
        return version, group

    def expire(self, before: int) -> list[int]:
        expired: list[int] = []
        for version in [version for version in self._ready if version < before]:
            expired += self._ready.pop(version)
        self._waiting -= len(expired)
        self._ended["expired"] += len(expired)
        self._owed += expired
        return sorted(expired)

    def taken(self, step: int) -> list[int]:
        return sorted(group for _, group in (*self._taken.get(step, ()), *self._trained.get(step, ())))

    def settle(self, step: int) -> None:
        for done in [taken for taken in self._taken if taken <= step]:
            self._trained[done] += self._taken.pop(done)

    def restore(self, step: int) -> None:
        self.settle(step)
        for groups in self._taken.values():
            for version, group in groups:
                self._put(group, version)
        self._taken.clear()

    def unfinished(self) -> list[int]:
        return sorted(self._open)

    def owed(self) -> list[int]:
        return sorted(self._owed)

    def drawn(self) -> dict[str, int]:
        return dict(self._drawn)

    def counts(self) -> dict[str, int]:
        taken, trained = (sum(map(len, groups.values())) for groups in (self._taken, self._trained))
        now = {"open": len(self._open), "ready": self._waiting, "taken": taken, "trained": trained, **self._ended}
        return {status: count for status, count in now.items() if count}
