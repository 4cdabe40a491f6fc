"""The arrays of a step's batch, allocated once and filled for each step, so that a recorded step finds them in place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..cache import BlockTable
from ..device.base import Device
from ..kernels.ops import Array
from ..models.batch import Batch
from .step import Scheduled


class BatchBuffers:
    """Room for T tokens of S sequences, on the host and on the device; they are the same where the device is the host."""

    def __init__(
        self,
        device: Device,
        *,
        max_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
    ) -> None:
        self._block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        self._token_ids = _Buffer(device, (max_tokens,), np.int32)
        self._positions = _Buffer(device, (max_tokens,), np.int32)
        self._query_start = _Buffer(device, (max_num_seqs + 1,), np.int32)
        self._context_lens = _Buffer(device, (max_num_seqs,), np.int32)
        self._slots = [_Buffer(device, (max_tokens,), np.int64) for _ in range(num_groups)]
        self._tables = [_TableBuffer(device, (max_num_seqs, max_blocks)) for _ in range(num_groups)]

    def fill(self, scheduled: Sequence[Scheduled]) -> tuple[int, int]:
        """Write the batch of a step; returns its numbers of tokens and sequences, T and S.

        Sequence s owns the tokens query_start[s] .. query_start[s+1]. The slot of position p is
        table[p // block_size] * block_size + p % block_size.
        """
        num_seqs = len(scheduled)
        counts = np.array([item.num_tokens for item in scheduled])
        starts = np.array([item.sequence.num_computed for item in scheduled])
        query_start = np.concatenate([[0], np.cumsum(counts)])
        num_tokens = int(query_start[-1])
        positions = np.arange(num_tokens) + np.repeat(starts - query_start[:-1], counts)
        sequences = np.repeat(np.arange(num_seqs), counts)
        self._token_ids.host[:num_tokens] = [token for item in scheduled for token in item.token_ids]
        self._positions.host[:num_tokens] = positions
        self._query_start.host[: num_seqs + 1] = query_start
        self._context_lens.host[:num_seqs] = starts + counts
        for group, (table, slots) in enumerate(zip(self._tables, self._slots, strict=True)):
            table.update([item.sequence.tables.tables[group] for item in scheduled])
            blocks_of_tokens = table.host[sequences, positions // self._block_size].astype(np.int64)
            slots.host[:num_tokens] = blocks_of_tokens * self._block_size + positions % self._block_size
        for buffer in (self._token_ids, self._positions, *self._slots):
            buffer.send(num_tokens)
        self._query_start.send(num_seqs + 1)
        self._context_lens.send(num_seqs)
        return num_tokens, num_seqs

    def slots(self, num_tokens: int) -> list[np.ndarray]:
        """The slots of the tokens on the host, a group each."""
        return [slots.host[:num_tokens] for slots in self._slots]

    def batch(self, num_tokens: int, num_seqs: int) -> Batch:
        """The batch of T tokens of S sequences: views of the buffers, whatever is in them."""
        return Batch(
            token_ids=self._token_ids.device[:num_tokens],
            positions=self._positions.device[:num_tokens],
            query_start=self._query_start.device[: num_seqs + 1],
            context_lens=self._context_lens.device[:num_seqs],
            slots=tuple(slots.device[:num_tokens] for slots in self._slots),
            block_tables=tuple(table.device[:num_seqs] for table in self._tables),
        )


class _Buffer:
    """An array on the device, and the one on the host that it is filled from."""

    def __init__(self, device: Device, shape: tuple[int, ...], dtype: type) -> None:
        self._array = device.array
        self.device: Array = device.empty(shape, dtype)
        self.host: np.ndarray = self.device if isinstance(self.device, np.ndarray) else np.empty(shape, dtype)

    def send(self, *used: int) -> None:
        """Copy the part that is used, so many of each axis, to the device."""
        if self.device is not self.host:
            part = tuple(map(slice, used))
            self.device[part] = self._array(self.host[part])


class _TableBuffer(_Buffer):
    """Block tables, a row a sequence. A row that has been told of its table gets the blocks that have come since, no others."""

    def __init__(self, device: Device, shape: tuple[int, int]) -> None:
        super().__init__(device, shape, np.int32)
        self._rows = [_Row() for _ in range(shape[0])]

    def update(self, tables: Sequence[BlockTable]) -> None:
        """Make the first rows these tables, and send them to the device where there is something new."""
        is_new, widest = False, 0
        for index, (row, table) in enumerate(zip(self._rows, tables, strict=False)):
            first, stop = row.follow(table), len(table.blocks)
            if first < stop:
                self.host[index, first:stop] = table.blocks[first:]
                is_new = True
            widest = max(widest, stop)
        if is_new:
            self.send(len(tables), widest)


class _Row:
    """What a row of the array was last told."""

    def __init__(self) -> None:
        self._table: BlockTable | None = None
        self._num_changes = self._num_blocks = 0

    def follow(self, table: BlockTable) -> int:
        """The first entry in which the row differs from ``table``, which it is about to become."""
        is_longer = table is self._table and table.num_changes == self._num_changes
        first = self._num_blocks if is_longer else 0
        self._table, self._num_changes, self._num_blocks = table, table.num_changes, len(table.blocks)
        return first
