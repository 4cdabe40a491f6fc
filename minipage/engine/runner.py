"""Turns what the scheduler decided into one flat batch of arrays, and runs the model on it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..cache import BlockCopy, Swap, copy_launches
from ..device.base import Device, StepShape
from ..device.kv_cache import KVCache
from ..models.decoder import Decoder
from .batch_buffers import BatchBuffers, Contents, Mirror, array_bytes
from .preemption import PreemptionCost
from .step import Step

_RECORDINGS = 64  #: of the latest shapes of steps that are kept; one takes some hundred kilobytes


class Work(NamedTuple):
    """What is done in a step, in this order, as plain data: swaps, copies, and the computing of a batch."""

    swaps_out: Sequence[Swap]
    swaps_in: Sequence[Swap]
    copies: Sequence[BlockCopy]
    batch: Contents


class Runner:
    """Runs steps of a model over a KV cache. Each step replaces the hidden states of the one before.

    The ops of a step are recorded when its shape, as the device pads it, is met first, and then only repeated.
    """

    def __init__(
        self,
        device: Device,
        model: Decoder,
        kv: KVCache,
        cost: PreemptionCost,
        *,
        max_num_seqs: int,
        max_model_len: int,
        rows_of: Callable[[list[int]], list[int]] = list,
    ) -> None:
        """``cost`` is told how long swaps and steps take; ``rows_of`` is for :class:`.batch_buffers.BatchBuffers`."""
        self._device = device
        self._cost = cost
        self._model = model
        self.kv = kv
        self._batch = BatchBuffers(
            device,
            max_tokens=model.max_tokens,
            max_num_seqs=min(max_num_seqs, model.max_tokens),
            max_model_len=max_model_len,
            block_size=kv.shape.block_size,
            num_groups=kv.num_groups,
            rows_of=rows_of,
        )
        rows = (model.max_logit_rows,), np.int32
        self._rows_mirror = Mirror(device, array_bytes(*rows))
        self._host_rows, self._rows = self._rows_mirror.array(*rows)
        self._started, self._num_tokens = 0.0, 0  #: of a step whose results nobody has waited for yet
        self._forward = functools.lru_cache(_RECORDINGS)(self._record_forward)
        self._logits = functools.lru_cache(_RECORDINGS)(self._record_logits)

    @property
    def max_logit_rows(self) -> int:
        """The most rows that one call of :meth:`logits` takes."""
        return self._model.max_logit_rows

    def execute(self, step: Step) -> None:
        """Make the step's swaps and copies, then compute its tokens: K and V go to their slots, hidden states are kept."""
        self.compute(Work(step.swaps_out, step.swaps_in, step.copies, self._batch.describe(step.scheduled)))

    def compute(self, work: Work) -> None:
        """Do the work of a step."""
        used = work.batch.shape
        with self._device.compute():
            self._swap(work)
            if self._num_tokens:
                self._device.synchronize()  # the last batch may still be on its way to the device
            self._started, self._num_tokens = time.perf_counter(), used.num_tokens
            for launch in copy_launches(work.copies):
                self.kv.copy(launch)
            self._batch.write(work.batch)
            padded = self._padded(used)
            self._batch.send(used, padded or used)
            self.kv.expect_writes(self._batch.slots(used.num_tokens))
            if padded is None:
                self._model.forward(self._batch.batch(used), self.kv)
            else:
                self._forward(padded)()

    def _padded(self, used: StepShape) -> StepShape | None:
        """The shape to record a step for; None where it is not to be recorded."""
        return self._device.recorded_shape(used, self._batch.most)

    def _swap(self, work: Work) -> None:
        num_blocks = len(work.swaps_out) + len(work.swaps_in)
        if num_blocks:
            start = time.perf_counter()
            self.kv.swap_out(work.swaps_out)
            self.kv.swap_in(work.swaps_in)
            self._device.synchronize()
            self._cost.swapped(num_blocks, time.perf_counter() - start)

    def logits(self, rows: list[int]) -> np.ndarray:
        """Logits [n, V] float32 on the host of rows (token indices) of the last step, n <= max_logit_rows.

        Valid until the next call.
        """
        with self._device.compute():
            num_rows = self._device.recorded_rows(len(rows), len(self._rows))
            padded = num_rows or len(rows)
            self._host_rows[:padded] = 0  # any row of the step, where there are fewer
            self._host_rows[: len(rows)] = rows
            self._rows_mirror.send(4 * padded)
            if num_rows is None:
                self._model.compute_logits(self._rows[:padded])
            else:
                self._logits(num_rows)()
            logits = self._device.host(self._model.logits[: len(rows)])
        self._note_time()
        return logits

    def close(self) -> None:
        """Give back what the device holds. Nothing can be run afterwards."""
        self._device.close()

    def _note_time(self) -> None:
        """The first results of a step that were waited for tell how long it took."""
        if self._num_tokens:
            self._cost.computed(self._num_tokens, time.perf_counter() - self._started)
            self._num_tokens = 0

    def _record_forward(self, shape: StepShape) -> Callable[[], None]:
        batch = self._batch.batch(shape)
        return self._device.record(lambda: self._model.forward(batch, self.kv))

    def _record_logits(self, num_rows: int) -> Callable[[], None]:
        rows = self._rows[:num_rows]
        return self._device.record(lambda: self._model.compute_logits(rows))
