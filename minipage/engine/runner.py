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
from .batch_buffers import BatchBuffers, Contents
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
            max_logit_rows=model.max_logit_rows,
            rows_of=rows_of,
        )
        self._token_ids = device.empty((model.max_logit_rows,), np.int32)
        self._all_rows = device.array(np.arange(model.max_logit_rows, dtype=np.int32))
        #: First rows of the last step whose logits were computed along with it, and are there still.
        self._rows_there = 0
        self._started, self._num_tokens = 0.0, 0  #: of a step whose results nobody has waited for yet
        self._forward = functools.lru_cache(_RECORDINGS)(self._record_forward)
        self._logits = functools.lru_cache(_RECORDINGS)(self._record_logits)
        self._next = functools.lru_cache(_RECORDINGS)(self._record_next)

    @property
    def max_logit_rows(self) -> int:
        """The most rows that one call of :meth:`compute_logits` takes."""
        return self._model.max_logit_rows

    @property
    def samples(self) -> bool:
        """Whether the device draws tokens."""
        return self._device.ops.SAMPLES

    @property
    def runs_ahead(self) -> bool:
        """Whether a step is worth launching before the tokens of the last one are here."""
        return self._device.runs_ahead

    def execute(self, step: Step) -> None:
        """Make the step's swaps and copies, then compute its tokens: K and V go to their slots, hidden states are kept."""
        self.compute(Work(step.swaps_out, step.swaps_in, step.copies, self._batch.describe(step.scheduled)))

    def compute(self, work: Work) -> None:
        """Do the work of a step."""
        used = work.batch.shape
        with self._device.compute():
            self._swap(work)
            self._begin(work.copies, work.batch)
            padded = self._padded(used)
            shape = padded or used
            self._batch.send(used, shape)
            self._rows_there = 0  # also if what follows fails
            if padded is None:
                self._compute_step(shape)
            else:
                self._forward(padded)()
            self._rows_there = self._rows_along(shape)

    def execute_next(self, step: Step, draws: np.ndarray) -> Callable[[], list[int]]:
        """Compute a step of decodes, one of each sequence in the order in which their last tokens were drawn on the device,
        with these tokens; and draw the next. Once recorded, it is one copy to the device and one launch.

        ``draws`` and what is returned are those of :meth:`compute_logits`.
        """
        contents = self._batch.describe(step.scheduled)
        used, num_rows = contents.shape, len(draws)
        with self._device.compute():
            self._begin(step.copies, contents)
            padded = self._padded(used)
            shape = padded or used
            self._batch.write_wanted(range(num_rows), draws, shape.num_seqs)
            self._batch.send(used, shape, with_wanted=True)
            if padded is None:
                self._compute_next(shape)
            else:
                self._next(padded)()
            return functools.partial(self._read_tokens, self._device.fetch(self._token_ids[:num_rows]))

    def _begin(self, copies: Sequence[BlockCopy], contents: Contents) -> None:
        """Copy blocks, and write the batch on the host."""
        self._started, self._num_tokens = time.perf_counter(), contents.shape.num_tokens
        for launch in copy_launches(copies):
            self.kv.copy(launch)
        self._batch.write(contents)
        self.kv.expect_writes(self._batch.slots(contents.shape.num_tokens))

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

    def compute_logits(self, rows: list[int], draws: np.ndarray | None = None) -> Callable[[], list[int]]:
        """Compute the logits of n rows (token indices) of the last step, n <= max_logit_rows, and keep them on the device.

        What is returned waits for the tokens that the device draws from the first of them, one for each record of ``draws``
        (:data:`minipage.kernels.draws.DRAW` says how); -1 where a row has none. Only devices that draw may be given some.
        """
        num_draws = 0 if draws is None else len(draws)
        if len(rows) <= self._rows_there and rows == list(range(len(rows))):
            return list
        self._rows_there = 0
        with self._device.compute():
            num_rows = self._device.recorded_rows(len(rows), self.max_logit_rows)
            padded = num_rows or len(rows)
            self._batch.write_wanted(rows, draws, padded)
            self._batch.send_wanted(padded, draws is not None)
            if num_rows is None:
                self._compute_logits(padded, num_draws > 0)
            else:
                self._logits(num_rows, num_draws > 0)()
            if draws is None:
                return list
            return functools.partial(self._read_tokens, self._device.fetch(self._token_ids[:num_draws]))

    def _read_tokens(self, fetched: Callable[[], np.ndarray]) -> list[int]:
        token_ids: list[int] = fetched().tolist()
        self._note_time()
        return token_ids

    def read_logits(self, start: int, stop: int) -> np.ndarray:
        """Logits [stop - start, V] float32 of the rows that were computed last, on the host until others are computed."""
        with self._device.compute():
            logits = self._device.host(self._model.logits[start:stop])
        self._note_time()
        return logits

    def logits(self, rows: list[int]) -> np.ndarray:
        """Compute and read the logits [n, V] of n rows of the last step, n <= max_logit_rows."""
        self.compute_logits(rows)
        return self.read_logits(0, len(rows))

    def close(self) -> None:
        """Give back what the device holds. Nothing can be run afterwards."""
        self._device.close()

    def _note_time(self) -> None:
        """The first results of a step that were waited for tell how long it took."""
        if self._num_tokens:
            self._cost.computed(self._num_tokens, time.perf_counter() - self._started)
            self._num_tokens = 0

    def _record_forward(self, shape: StepShape) -> Callable[[], None]:
        return self._device.record(functools.partial(self._compute_step, shape))

    def _compute_step(self, shape: StepShape) -> None:
        """The hidden states of a step, and the logits of decodes."""
        self._model.forward(self._batch.batch(shape), self.kv)
        if num_rows := self._rows_along(shape):
            self._model.compute_logits(self._all_rows[:num_rows])

    def _rows_along(self, shape: StepShape) -> int:
        """How many rows of logits to compute along with a step: those of all decodes, for they will be asked for. Not where the
        device draws from them, which is asked for together.
        """
        are_decodes = shape.num_tokens == shape.num_seqs <= self.max_logit_rows
        return shape.num_seqs if are_decodes and not self.samples else 0

    def _record_logits(self, num_rows: int, draws: bool) -> Callable[[], None]:
        return self._device.record(functools.partial(self._compute_logits, num_rows, draws))

    def _compute_logits(self, num_rows: int, draws: bool) -> None:
        """The logits of the first rows that are asked for, and with ``draws`` a token for each."""
        self._model.compute_logits(self._batch.rows[:num_rows])
        if draws:
            logits, records = self._model.logits[:num_rows], self._batch.draws[:num_rows]
            self._device.ops.sample(self._token_ids[:num_rows], logits, records)

    def _record_next(self, shape: StepShape) -> Callable[[], None]:
        # A device may run the ops when it records them. They replace the tokens that they begin with, so these are put back.
        token_ids = self._token_ids[: shape.num_tokens]
        drawn = token_ids.copy()
        run = self._device.record(functools.partial(self._compute_next, shape))
        token_ids[...] = drawn
        return run

    def _compute_next(self, shape: StepShape) -> None:
        """From drawn tokens to drawn tokens."""
        self._batch.set_tokens(self._token_ids[: shape.num_tokens])
        self._model.forward(self._batch.batch(shape), self.kv)
        self._compute_logits(shape.num_tokens, draws=True)
