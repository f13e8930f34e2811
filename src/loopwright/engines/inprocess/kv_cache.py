"""The KV cache: keys and values of several sequences, one row per sequence.

All rows are in one tensor, so that joining, leaving and copying a prefix are one assignment each. Sequences may differ
in length; positions beyond a row's length are masked. A transformers model uses the rows as its cache, and `attend` as
its attention, which does not repeat keys for the heads that share them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

ATTENTION = "loopwright"
_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a model's keys and values per token."""

    layers: int
    heads: int
    width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Memory per token."""
        return 2 * self.layers * self.heads * self.width * self.dtype.itemsize


def register() -> None:
    """Register our attention with transformers; masks come from `Rows`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def attend(
    module: torch.nn.Module,  # noqa: ARG001  part of the attention interface
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,  # noqa: ARG001
) -> tuple[Tensor, None]:
    """Attention with the queries of heads that share keys stacked, as if they were more tokens."""
    rows, heads, tokens, width = query.shape
    shared = heads // key.shape[1]
    folded = query.reshape(rows, key.shape[1], shared * tokens, width)
    if attention_mask is None and tokens > 1:  # a forward pass without rows: causal
        attention_mask = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()[None, None]
    if attention_mask is not None and shared > 1:
        attention_mask = attention_mask.repeat(1, 1, shared, 1) if tokens > 1 else attention_mask
    output = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(rows, heads, tokens, width).transpose(1, 2).contiguous(), None


class Rows:
    """The keys and values of several sequences, and the forward pass that extends them."""

    def __init__(self, model: Any, shape: Shape) -> None:
        self._model, self._shape = model, shape
        self._store = torch.zeros(0)
        self._capacity = 0
        self.lengths: list[int] = []
        self._row_of = self._columns = torch.zeros(0)
        self._width = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def add(self, memory: Tensor | None = None) -> int:
        """Add a row that starts with the keys and values of a prefix; returns its index."""
        length = 0 if memory is None else memory.shape[3]
        self.reserve(len(self) + 1, length)
        if memory is not None:
            self._store[:, :, len(self), :, :length] = memory
        self.lengths.append(length)
        return len(self) - 1

    def reserve(self, rows: int, length: int) -> None:
        """Make space for this many rows of this length; grows by at least a quarter, so that growth is rare."""
        have = self._store.shape[2] if self._store.dim() > 1 else 0
        if rows <= have and length <= self._capacity:
            return
        if rows > have:
            rows = max(rows, have + have // 4)
        if length > self._capacity:
            self._capacity = -(-max(length, self._capacity + self._capacity // 4) // _BLOCK) * _BLOCK
        shape = self._shape
        # Zeros, because masked values are still multiplied. One extra column receives the padding.
        size = shape.layers, 2, max(rows, have), shape.heads, self._capacity + 1, shape.width
        grown = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        for row in range(len(self)):
            grown[:, :, row, :, : self.lengths[row]] = self.memory(row)
        self._store = grown

    def memory(self, row: int, length: int | None = None) -> Tensor:
        """The keys and values of a row, or of its first tokens: a view of (layer, key or value, head, token, width)."""
        return self._store[:, :, row, :, : self.lengths[row] if length is None else length]

    def remove(self, row: int) -> None:
        """Remove a row. The last row takes its index."""
        last = len(self) - 1
        if row != last:
            self._store[:, :, row, :, : self.lengths[last]] = self.memory(last)
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        if not self.lengths:
            self._store, self._capacity = torch.zeros(0), 0

    def forward(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Process the next tokens of each row; returns the logits after the last token of each."""
        device, count = self._shape.device, max(map(len, ids))
        self._width = max(map(int.__add__, self.lengths, map(len, ids)))
        self.reserve(len(self), self._width)
        # Padded at the left, so that every row ends in the last column; padding is written to the extra column.
        padded = torch.tensor([[0] * (count - len(row)) + list(row) for row in ids], device=device)
        ends = torch.tensor([length + len(row) for length, row in zip(self.lengths, ids, strict=True)], device=device)
        positions = ends[:, None] + torch.arange(-count, 0, device=device)
        starts = torch.tensor(self.lengths, device=device)[:, None]
        self._columns = torch.where(positions < starts, self._capacity, positions)
        self._row_of = torch.arange(len(self), device=device)[:, None]
        position_ids = positions.clamp(min=0)
        # Causal: a token attends to everything up to its own position.
        mask = torch.zeros(*positions.shape, self._width, dtype=self._shape.dtype, device=device)
        mask.masked_fill_(torch.arange(self._width, device=device) > position_ids[:, :, None], -torch.inf)
        logits: Tensor = self._model(
            input_ids=padded,
            position_ids=position_ids,
            attention_mask=mask[:, None],
            past_key_values=self,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        self.lengths = ends.tolist()
        return logits[:, -1]

    # -- the cache interface of transformers ------------------------------------------------------------------------

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new tokens; returns all of them."""
        keys, values = self._store[layer]
        keys[self._row_of, :, self._columns] = key.transpose(1, 2)
        values[self._row_of, :, self._columns] = value.transpose(1, 2)
        return keys[: len(self), :, : self._width], values[: len(self), :, : self._width]

    def get_seq_length(self, layer: int = 0) -> int:
        """The length of the longest row."""
        return max(self.lengths, default=0)
