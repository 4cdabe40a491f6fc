"""The arrays of a step's batch, allocated once and filled anew for each step, so that a recorded step finds them in place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
        self._tables = [_Buffer(device, (max_num_seqs, max_blocks), np.int32) for _ in range(num_groups)]

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
        widest = 0
        for group, (table, slots) in enumerate(zip(self._tables, self._slots, strict=True)):
            for row, item in zip(table.host, scheduled, strict=False):
                blocks = item.sequence.tables.tables[group].blocks
                row[: len(blocks)] = blocks
                widest = max(widest, len(blocks))
            blocks_of_tokens = table.host[sequences, positions // self._block_size].astype(np.int64)
            slots.host[:num_tokens] = blocks_of_tokens * self._block_size + positions % self._block_size
        self._send(num_tokens, num_seqs, widest)
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

    def _send(self, num_tokens: int, num_seqs: int, widest: int) -> None:
        for buffer in (self._token_ids, self._positions, *self._slots):
            buffer.send(num_tokens)
        self._query_start.send(num_seqs + 1)
        self._context_lens.send(num_seqs)
        for table in self._tables:
            table.send(num_seqs, widest)


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
