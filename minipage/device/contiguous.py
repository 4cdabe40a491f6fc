"""The traditional static cache, kept as the baseline that PagedAttention is compared with (paper, section 3.1)."""

from __future__ import annotations

from .base import Device
from .kv_cache import KVCache, KVShape


class ContiguousKVCache:
    """K and V reserved as (batch, heads, max length): each sequence gets a row as long as the longest could become.

    A row is one block of ``max_length`` tokens, so the same kernels read it: the block table of a sequence is its row. What
    such a cache wastes is what a row reserves beyond the tokens in it.
    """

    def __init__(self, device: Device, shape: KVShape, max_batch: int) -> None:
        """``shape.block_size`` is the maximum length; memory is taken for ``max_batch`` rows of it."""
        self.pages = KVCache(device, shape, max_batch)
        self._free_rows = list(range(max_batch - 1, -1, -1))
        self._lengths: dict[int, int] = {}

    @property
    def max_length(self) -> int:
        """Tokens that each row reserves."""
        return self.pages.shape.block_size

    @property
    def num_free_rows(self) -> int:
        """Sequences that could still be admitted."""
        return len(self._free_rows)

    def reserve(self) -> int | None:
        """A row for one more sequence, or None where all are taken."""
        if not self._free_rows:
            return None
        row = self._free_rows.pop()
        self._lengths[row] = 0
        return row

    def append(self, row: int, num_tokens: int) -> range:
        """Claim the next ``num_tokens`` slots of a row; ValueError past its maximum length or for a row not reserved."""
        if row not in self._lengths:
            raise ValueError(f"row {row} is not reserved")
        start = self._lengths[row]
        if start + num_tokens > self.max_length:
            raise ValueError(
                f"row {row} holds {start} tokens; {num_tokens} more pass its maximum length {self.max_length}"
            )
        self._lengths[row] = start + num_tokens
        return range(row * self.max_length + start, row * self.max_length + start + num_tokens)

    def release(self, row: int) -> None:
        """Give a row back; ValueError where it is not reserved."""
        if self._lengths.pop(row, None) is None:
            raise ValueError(f"row {row} is not reserved")
        self._free_rows.append(row)

    def useful_fraction(self) -> float:
        """Reserved slots that hold a token, of all reserved slots; 1.0 where nothing is reserved."""
        reserved = len(self._lengths) * self.max_length
        return sum(self._lengths.values()) / reserved if reserved else 1.0
