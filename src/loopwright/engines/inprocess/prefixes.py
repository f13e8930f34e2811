"""The prefix cache: keys and values of finished sequences, so that a session's next turn computes only new tokens."""

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.int64]
_MAX_ENTRIES = 256


def common(one: Ids, other: Ids) -> int:
    """The length of the common prefix of two sequences."""
    shortest = min(len(one), len(other))
    differ = np.flatnonzero(one[:shortest] != other[:shortest])
    return int(differ[0]) if len(differ) else shortest


class Prefixes:
    """Keys and values of finished sequences by their ids; the least recently used are dropped first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, tuple[Ids, Tensor]] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, ids: Ids, memory: Tensor) -> None:
        """Store a copy; a shorter sequence that this one continues is dropped."""
        size = memory.numel() * memory.element_size()
        if not len(ids) or size > self._max_bytes:
            return
        for key, (old, _) in list(self._entries.items()):
            if common(old, ids) == min(len(old), len(ids)):
                if len(old) >= len(ids):
                    self._entries.move_to_end(key)
                    return
                self._drop(key)
        self._entries[ids.tobytes()] = ids, memory.clone()
        self.size_bytes += size
        while self.size_bytes > self._max_bytes or len(self._entries) > _MAX_ENTRIES:
            self._drop(next(iter(self._entries)))

    def find(self, ids: Ids) -> tuple[int, Tensor | None]:
        """The longest cached prefix of these ids: its length, keys and values."""
        best, best_key = 0, None
        for key, (old, _) in self._entries.items():
            if (length := common(old, ids)) > best:
                best, best_key = length, key
        if best_key is None:
            return 0, None
        self._entries.move_to_end(best_key)
        return best, self._entries[best_key][1][:, :, :, :best]

    def clear(self) -> None:
        """Drop all entries, which new weights invalidate."""
        self._entries.clear()
        self.size_bytes = 0

    def _drop(self, key: bytes) -> None:
        _, memory = self._entries.pop(key)
        self.size_bytes -= memory.numel() * memory.element_size()
