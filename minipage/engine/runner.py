"""Turns what the scheduler decided into one flat batch of arrays, and runs the model on it."""

from __future__ import annotations

import time

import numpy as np

from ..cache import copy_launches
from ..device.base import Device
from ..device.kv_cache import KVCache
from ..models.batch import Batch
from ..models.decoder import Decoder
from .preemption import PreemptionCost
from .scheduler import Scheduled, Step


class Runner:
    """Runs steps of a model over a KV cache. Each step replaces the hidden states of the one before."""

    def __init__(self, device: Device, model: Decoder, kv: KVCache, cost: PreemptionCost) -> None:
        """``cost`` is told how long swaps and steps take."""
        self._device = device
        self._cost = cost
        self._model = model
        self.kv = kv

    @property
    def max_logit_rows(self) -> int:
        """The most rows that one call of :meth:`logits` takes."""
        return self._model.max_logit_rows

    def execute(self, step: Step) -> None:
        """Make the step's swaps and copies, then compute its tokens: K and V go to their slots, hidden states are kept."""
        with self._device.compute():
            self._swap(step)
            start = time.perf_counter()
            for launch in copy_launches(step.copies):
                self.kv.copy(launch)
            self._model.forward(self._batch(step.scheduled), self.kv)
            self._cost.computed(step.num_tokens, time.perf_counter() - start)

    def _swap(self, step: Step) -> None:
        num_blocks = len(step.swaps_out) + len(step.swaps_in)
        if num_blocks:
            start = time.perf_counter()
            self.kv.swap_out(step.swaps_out)
            self.kv.swap_in(step.swaps_in)
            self._device.synchronize()
            self._cost.swapped(num_blocks, time.perf_counter() - start)

    def logits(self, rows: list[int]) -> np.ndarray:
        """Logits [n, V] float32 on the host of rows (token indices) of the last step, n <= max_logit_rows.

        Valid until the next call.
        """
        with self._device.compute():
            return self._device.host(self._model.logits(self._device.array(np.array(rows, dtype=np.int32))))

    def _batch(self, scheduled: list[Scheduled]) -> Batch:
        """T tokens of S sequences; sequence s owns the tokens query_start[s] .. query_start[s+1].

        The slot of position p is table[p // block_size] * block_size + p % block_size.
        """
        size = self.kv.shape.block_size
        counts = np.array([item.num_tokens for item in scheduled])
        starts = np.array([item.sequence.num_computed for item in scheduled])
        token_ids: list[int] = []
        for item in scheduled:
            token_ids += item.token_ids
        query_start = np.concatenate([[0], np.cumsum(counts)])
        positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], counts)
        sequences = np.repeat(np.arange(len(scheduled)), counts)
        tables = [
            self._block_tables([item.sequence.tables.tables[group].blocks for item in scheduled])
            for group in range(self.kv.num_groups)
        ]
        blocks = [table[sequences, positions // size].astype(np.int64) for table in tables]
        slots = [block * size + positions % size for block in blocks]
        self.kv.expect_writes(slots)
        array = self._device.array
        return Batch(
            token_ids=array(np.array(token_ids, dtype=np.int32)),
            positions=array(positions.astype(np.int32)),
            query_start=array(query_start.astype(np.int32)),
            context_lens=array((starts + counts).astype(np.int32)),
            slots=tuple(map(array, slots)),
            block_tables=tuple(array(table) for table in tables),
        )

    @staticmethod
    def _block_tables(tables: list[list[int]]) -> np.ndarray:
        """Block tables side by side, [S, longest] int32, padded with -1."""
        padded = np.full((len(tables), max(map(len, tables))), -1, dtype=np.int32)
        for row, blocks in zip(padded, tables, strict=True):
            row[: len(blocks)] = blocks
        return padded
