"""The arrays of a step's batch, allocated once and filled for each step, so that a recorded step finds them in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from ..cache import BlockTable
from ..device.base import Device, StepShape
from ..kernels.draws import DRAW_WORDS, as_words
from ..kernels.ops import Array
from ..models.batch import Batch
from .step import Scheduled

_ALIGNMENT = 16  #: bytes, at whose multiples arrays begin


class Mirror:
    """Bytes on the host and their copy on the device, which are the same bytes where the device is the host."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._send = device.send
        self._wait: Callable[[], None] | None = None  # for the latest copy
        self._device: Array = device.empty((num_bytes,), np.uint8)
        in_host_memory = isinstance(self._device, np.ndarray)
        self._host: np.ndarray = self._device if in_host_memory else device.staging(num_bytes)
        self._used = 0

    def array(self, shape: tuple[int, ...], dtype: type) -> tuple[np.ndarray, Array]:
        """The next array of the mirror: on the host, and on the device."""
        first, num_bytes = self._used, array_bytes(shape, dtype)
        self._used += num_bytes
        part = slice(first, first + prod(shape) * np.dtype(dtype).itemsize)
        return self._host[part].view(dtype).reshape(shape), self._device[part].view(dtype).reshape(shape)

    def send(self, first: int, stop: int) -> None:
        """Copy bytes to the device, which need not have arrived on return but do before anything runs there."""
        if self._device is not self._host:
            self._wait = self._send(self._device[first:stop], self._host[first:stop])

    def wait(self) -> None:
        """Wait until the host's bytes may change: those that were sent last have been read."""
        if self._wait is not None:
            self._wait()


def array_bytes(shape: tuple[int, ...], dtype: type) -> int:
    """Bytes that an array takes of a mirror."""
    return -(-prod(shape) * np.dtype(dtype).itemsize // _ALIGNMENT) * _ALIGNMENT


class Entries(NamedTuple):
    """Blocks of a block table that are new to an array of tables: they go to row ``row``, from column ``first`` on."""

    row: int
    first: int
    blocks: list[int]


class Contents(NamedTuple):
    """The batch of a step as plain data, which other processes can be sent; see :class:`~minipage.models.batch.Batch`."""

    shape: StepShape
    token_ids: list[int]
    positions: list[int]
    query_start: list[int]
    context_lens: list[int]
    slots: list[list[int]]  #: a group each
    tables: list[list[Entries]]  #: what is new, a group each


class BatchBuffers:
    """Room for T tokens of S sequences, on the host and on the device; they are the same where the device is the host.

    Everything lies in one piece of memory, so that one copy takes a step's batch to the device: first what is wanted of it, the
    rows whose logits are to be computed and how tokens are drawn from them, then the batch, block tables last.
    """

    def __init__(
        self,
        device: Device,
        *,
        max_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        max_logit_rows: int,
        rows_of: Callable[[list[int]], list[int]] = list,
    ) -> None:
        """``rows_of`` tells the rows of tokens in the embedding, where they are not the tokens' ids."""
        self._xp = device.xp
        self._block_size = block_size
        self._rows_of = rows_of
        self.most = StepShape(max_tokens, max_num_seqs, -(-max_model_len // block_size))
        wanted = [((max_logit_rows,), np.int32), ((max_logit_rows, DRAW_WORDS), np.uint32)]
        slots, tokens, lengths = (num_groups, max_tokens), (max_tokens,), (max_num_seqs + 1,)
        layout = [(slots, np.int64), (tokens, np.int32), (tokens, np.int32), (lengths, np.int32), (lengths, np.int32)]
        tables = (max_num_seqs, num_groups, self.most.num_blocks)
        self._table_row_bytes = num_groups * self.most.num_blocks * np.dtype(np.int32).itemsize
        self._row_bytes, self._wanted_bytes = array_bytes(*wanted[0]), sum(array_bytes(*array) for array in wanted)
        self._bytes_before_tables = self._wanted_bytes + sum(array_bytes(*array) for array in layout)
        self._mirror = Mirror(device, self._bytes_before_tables + array_bytes(tables, np.int32))
        (self._host_rows, self.rows), (self._host_draws, self.draws) = (self._mirror.array(*array) for array in wanted)
        pairs = [self._mirror.array(*array) for array in layout]
        self._host, self._device = (_Arrays(*arrays) for arrays in zip(*pairs, strict=True))
        host, self._device_tables = self._mirror.array(tables, np.int32)
        self._tables = [_Tables(host[:, group]) for group in range(num_groups)]

    def describe(self, scheduled: Sequence[Scheduled]) -> Contents:
        """The batch of a step, which is to be written next: of tables it has what is new since the one before.

        Sequence s owns the tokens query_start[s] .. query_start[s+1]. The slot of position p is
        table[p // block_size] * block_size + p % block_size.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        query_start = [0]
        context_lens = []
        for item in scheduled:
            first = item.sequence.num_computed
            token_ids += item.token_ids or [0] * item.num_tokens  # known, or drawn on the device, see set_tokens
            positions += range(first, first + item.num_tokens)
            query_start.append(len(positions))
            context_lens.append(first + item.num_tokens)
        news, all_slots, widest = [], [], 0
        for group, rows in enumerate(self._tables):
            tables = [item.sequence.tables.tables[group] for item in scheduled]
            news.append(rows.news(tables))
            widest = max(widest, *(len(table.blocks) for table in tables))
            all_slots.append(
                [
                    slot
                    for item, table in zip(scheduled, tables, strict=True)
                    for slot in self._slots_of(table.blocks, item.sequence.num_computed, item.num_tokens)
                ]
            )
        shape = StepShape(len(positions), len(scheduled), widest)
        return Contents(shape, token_ids, positions, query_start, context_lens, all_slots, news)

    def write(self, contents: Contents) -> None:
        """Write the batch of a step on the host; :meth:`send` is to follow."""
        num_tokens, num_seqs, _ = contents.shape
        self._mirror.wait()
        host = self._host
        host.token_ids[:num_tokens] = self._rows_of(contents.token_ids)
        host.positions[:num_tokens] = contents.positions
        host.query_start[: num_seqs + 1] = contents.query_start
        host.context_lens[:num_seqs] = contents.context_lens
        for rows, entries in zip(self._tables, contents.tables, strict=True):
            rows.write(entries)
        for group, slots in enumerate(contents.slots):
            host.slots[group, :num_tokens] = slots

    def forget(self) -> None:
        """Let all of the next step's tables be new: one that was described may not have been written."""
        for rows in self._tables:
            rows.forget()

    def _slots_of(self, blocks: Sequence[int], first: int, count: int) -> Iterator[int]:
        """The slots of ``count`` positions from ``first`` on: block by block, those that follow each other in it."""
        size = self._block_size
        while count:
            inside = min(count, size - first % size)
            start = blocks[first // size] * size + first % size
            yield from range(start, start + inside)
            first, count = first + inside, count - inside

    def send(self, used: StepShape, padded: StepShape, *, with_wanted: bool = False) -> None:
        """Take the batch that was written to the device, padded with tokens that no sequence owns and no slot takes.

        Tables are sent where there is something new in them, and what is wanted of the batch where it was written before.
        """
        host, tokens = self._host, slice(used.num_tokens, padded.num_tokens)
        host.slots[:, tokens] = -1
        host.token_ids[tokens] = host.positions[tokens] = 0
        host.query_start[used.num_seqs + 1 : padded.num_seqs + 1] = used.num_tokens
        host.context_lens[used.num_seqs : padded.num_seqs] = 0
        has_news = [rows.take_news() for rows in self._tables]
        num_rows = used.num_seqs if any(has_news) else 0
        first = 0 if with_wanted else self._wanted_bytes
        self._mirror.send(first, self._bytes_before_tables + num_rows * self._table_row_bytes)

    def write_wanted(self, rows: Sequence[int], draws: np.ndarray | None, padded: int) -> None:
        """Write the rows whose logits are wanted, padded with any of the batch, and the records of ``draws`` for the first."""
        self._mirror.wait()
        self._host_rows[: len(rows)] = rows
        self._host_rows[len(rows) : padded] = 0
        if draws is not None:
            self._host_draws[: len(draws)] = as_words(draws)
            self._host_draws[len(draws) : padded] = 0  # the largest logit, which is found soonest

    def send_wanted(self, padded: int, with_draws: bool) -> None:
        """Take them to the device."""
        draw_bytes = padded * self._host_draws.strides[0]
        self._mirror.send(0, self._row_bytes + draw_bytes if with_draws else padded * self._host_rows.itemsize)

    def set_tokens(self, token_ids: Array) -> None:
        """Let the first tokens of the batch that was sent be these, [n] int32 on the device; any, where none was drawn (-1)."""
        self._xp.maximum(token_ids, 0, out=self._device.token_ids[: len(token_ids)])

    def slots(self, num_tokens: int) -> list[np.ndarray]:
        """The slots of the tokens on the host, a group each."""
        return list(self._host.slots[:, :num_tokens])

    def batch(self, shape: StepShape) -> Batch:
        """The batch of T tokens of S sequences: views of the buffers, whatever is in them."""
        num_tokens, num_seqs, num_blocks = shape
        device, groups = self._device, range(len(self._tables))
        return Batch(
            token_ids=device.token_ids[:num_tokens],
            positions=device.positions[:num_tokens],
            query_start=device.query_start[: num_seqs + 1],
            context_lens=device.context_lens[:num_seqs],
            slots=tuple(device.slots[group, :num_tokens] for group in groups),
            block_tables=tuple(self._device_tables[:num_seqs, group, :num_blocks] for group in groups),
        )


class _Arrays(NamedTuple):
    """All arrays of a batch but its tables, on the host or on the device."""

    slots: Array
    token_ids: Array
    positions: Array
    query_start: Array
    context_lens: Array


class _Tables:
    """Block tables on the host, a row a sequence. A row that has been told of its table gets the blocks that have come since,
    no others."""

    def __init__(self, host: np.ndarray) -> None:
        self._host = host  #: [max_num_seqs, max_blocks]
        self._rows = [_Row() for _ in range(len(host))]
        self._has_news = False

    def news(self, tables: Sequence[BlockTable]) -> list[Entries]:
        """What to write for the first rows to become these tables."""
        found = []
        for index, (row, table) in enumerate(zip(self._rows, tables, strict=False)):
            first = row.follow(table)
            if first < len(table.blocks):
                found.append(Entries(index, first, table.blocks[first:]))
        return found

    def write(self, entries: Sequence[Entries]) -> None:
        """Write what is new."""
        for row, first, blocks in entries:
            self._host[row, first : first + len(blocks)] = blocks
        self._has_news = self._has_news or bool(entries)

    def forget(self) -> None:
        """No row has been told of any table."""
        self._rows = [_Row() for _ in self._rows]

    def take_news(self) -> bool:
        """Whether something was written since this was asked last."""
        has_news, self._has_news = self._has_news, False
        return has_news


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
