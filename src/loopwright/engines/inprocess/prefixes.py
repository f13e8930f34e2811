"""What is remembered of sequences that have ended, so that the next turn of a session computes only what is new."""

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.int64]
_MOST = 256


def common(one: Ids, other: Ids) -> int:
    """How many ids two sequences begin with in common."""
    shortest = min(len(one), len(other))
    differ = np.flatnonzero(one[:shortest] != other[:shortest])
    return int(differ[0]) if len(differ) else shortest


class Prefixes:
    """The keys and values of ended sequences by their ids; those that were used longest ago go first."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[bytes, tuple[Ids, Tensor]] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, ids: Ids, memory: Tensor) -> None:
        """Keep a copy; a sequence that this one goes on from is no longer needed."""
        size = memory.numel() * memory.element_size()
        if not len(ids) or size > self._most_bytes:
            return
        for key, (old, _) in list(self._kept.items()):
            if common(old, ids) == min(len(old), len(ids)):
                if len(old) >= len(ids):
                    self._kept.move_to_end(key)
                    return
                self._drop(key)
        self._kept[ids.tobytes()] = ids, memory.clone()
        self.size_bytes += size
        while self.size_bytes > self._most_bytes or len(self._kept) > _MOST:
            self._drop(next(iter(self._kept)))

    def find(self, ids: Ids) -> tuple[int, Tensor | None]:
        """The longest beginning of these ids that is remembered, and what is."""
        best, found = 0, None
        for key, (old, _) in self._kept.items():
            if (length := common(old, ids)) > best:
                best, found = length, key
        if found is None:
            return 0, None
        self._kept.move_to_end(found)
        return best, self._kept[found][1][:, :, :, :best]

    def clear(self) -> None:
        """Forget everything, as new weights ask for."""
        self._kept.clear()
        self.size_bytes = 0

    def _drop(self, key: bytes) -> None:
        _, memory = self._kept.pop(key)
        self.size_bytes -= memory.numel() * memory.element_size()
