"""The arrays of a step's batch, allocated once and filled for each step, so that a recorded step finds them in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
        token_ids: list[int] = []
        positions: list[int] = []
        query_start = [0]
        context_lens = []
        for item in scheduled:
            first = item.sequence.num_computed
            token_ids += item.token_ids
            positions += range(first, first + item.num_tokens)
            query_start.append(len(positions))
            context_lens.append(first + item.num_tokens)
        self._token_ids.fill(token_ids)
        self._positions.fill(positions)
        self._query_start.fill(query_start)
        self._context_lens.fill(context_lens)
        for group, (buffer, slots) in enumerate(zip(self._tables, self._slots, strict=True)):
            tables = [item.sequence.tables.tables[group] for item in scheduled]
            buffer.update(tables)
            slots.fill(
                [
                    slot
                    for item, table in zip(scheduled, tables, strict=True)
                    for slot in self._slots_of(table.blocks, item.sequence.num_computed, item.num_tokens)
                ]
            )
        return len(positions), len(scheduled)

    def _slots_of(self, blocks: Sequence[int], first: int, count: int) -> Iterator[int]:
        """The slots of ``count`` positions from ``first`` on: block by block, those that follow each other in it."""
        size = self._block_size
        while count:
            inside = min(count, size - first % size)
            start = blocks[first // size] * size + first % size
            yield from range(start, start + inside)
            first, count = first + inside, count - inside

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

    def fill(self, values: list[int]) -> None:
        """Begin with these values, on the host and on the device."""
        self.host[: len(values)] = values
        self.send(len(values))

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
