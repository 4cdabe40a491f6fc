"""The arrays of a batch: written where something changed, and always what they would be if they were made from nothing."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from helpers.scheduling import BLOCK, Memory, World
from hypothesis import given, settings
from hypothesis import strategies as st

from minipage.cache import BlockManager, Group
from minipage.device import open_device
from minipage.engine.batch_buffers import BatchBuffers
from minipage.engine.request import Status
from minipage.engine.step import Step

MAX_MODEL_LEN = 40


class RemoteArray:
    """An array that is not the host's: it has what was sent to it."""

    def __init__(self, shape: tuple[int, ...], dtype: type) -> None:
        self.contents = np.full(shape, 99, dtype)
        self.num_sent = 0

    def __getitem__(self, part: Any) -> Any:
        return self.contents[part]

    def __setitem__(self, part: Any, values: Any) -> None:
        self.contents[part] = values
        self.num_sent += 1


class RemoteDevice:
    """A device with memory of its own, as far as a batch needs one."""

    def __init__(self) -> None:
        self.arrays: list[RemoteArray] = []

    def empty(self, shape: tuple[int, ...], dtype: type) -> RemoteArray:
        self.arrays.append(RemoteArray(shape, dtype))
        return self.arrays[-1]

    def array(self, values: np.ndarray) -> np.ndarray:
        return values.copy()


def make_buffers(device: Any, world: World) -> BatchBuffers:
    return BatchBuffers(
        device,
        max_tokens=world.budget,
        max_num_seqs=world.max_seqs,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK,
        num_groups=len(world.blocks.groups),
    )


class FillingMemory(Memory):
    """Before a step is computed, its batch is filled."""

    def __init__(self, blocks: BlockManager, buffers: BatchBuffers) -> None:
        super().__init__(blocks)
        self.buffers = buffers

    def move(self, step: Step) -> None:
        super().move(step)
        if step.scheduled:
            self.buffers.fill(step.scheduled)


class CheckingMemory(FillingMemory):
    """It is then compared with what the step says, item by item."""

    def move(self, step: Step) -> None:
        super().move(step)
        if step.scheduled:
            self._check(step)

    def _check(self, step: Step) -> None:
        num_tokens, num_seqs = step.num_tokens, len(step.scheduled)
        batch = self.buffers.batch(num_tokens, num_seqs)
        starts = [0, *itertools.accumulate(item.num_tokens for item in step.scheduled)]
        assert batch.query_start.tolist() == starts
        for row, item in enumerate(step.scheduled):
            part = slice(starts[row], starts[row + 1])
            first = item.sequence.num_computed
            positions = range(first, first + item.num_tokens)
            assert batch.token_ids[part].tolist() == item.token_ids
            assert batch.positions[part].tolist() == list(positions)
            assert batch.context_lens[row] == first + item.num_tokens
            for group, table in enumerate(item.sequence.tables.tables):
                slots = [table.blocks[position // BLOCK] * BLOCK + position % BLOCK for position in positions]
                assert batch.block_tables[group][row, : len(table.blocks)].tolist() == table.blocks
                assert batch.slots[group][part].tolist() == slots
                assert self.buffers.slots(num_tokens)[group][part].tolist() == slots


ADD = st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=18), st.integers(1, 4))
STEPS = st.integers(1, 6)
ABORT = st.sampled_from(["first", "last"])


@pytest.mark.parametrize("is_remote", [False, True], ids=["host", "device"])
@given(
    num_blocks=st.integers(2, 14),
    caching=st.booleans(),
    budget=st.sampled_from([3, 6, 64]),
    groups=st.sampled_from([(Group(),), (Group(5),), (Group(), Group(7)), (Group(4, 3), Group(4, 3), Group())]),
    host_blocks=st.sampled_from([0, 4, 20]),
    guesses=st.sampled_from([0, 4]),
    operations=st.lists(st.one_of(ADD, STEPS, STEPS, ABORT), min_size=3, max_size=25),
    tokens=st.lists(st.integers(0, 8), min_size=5, max_size=17),
)
@settings(max_examples=150, deadline=None)
def test_arrays_equal_those_made_from_nothing(
    is_remote: bool,
    num_blocks: int,
    caching: bool,
    budget: int,
    groups: tuple[Group, ...],
    host_blocks: int,
    guesses: int,
    operations: list[Any],
    tokens: list[int],
) -> None:
    """Whatever came before: growth, copies on write, windows, drafts, ends, aborts, preemption by recompute and by swap."""
    world = World(num_blocks * len(groups), 6, budget, caching, groups, host_blocks, guesses)
    device = RemoteDevice() if is_remote else open_device("reference")
    world.memory = CheckingMemory(world.blocks, make_buffers(device, world))
    pick, names = itertools.cycle([*tokens, 1, 2, 3]), itertools.count()
    for operation in operations:
        unfinished = [request for request in world.requests if request.status is not Status.FINISHED]
        if isinstance(operation, int):
            for _ in range(operation):
                world.step(pick)
        elif isinstance(operation, tuple):
            world.add(next(names), *operation)
        elif unfinished:
            world.scheduler.abort(unfinished[0 if operation == "first" else -1])


def test_only_what_is_new_is_written() -> None:
    """What a row has been told stays untouched while its table only grows, and is written anew where another one moves in."""
    world = World(32, 4, 64, caching=False)
    buffers = make_buffers(open_device("reference"), world)
    world.memory = FillingMemory(world.blocks, buffers)
    tables = buffers.batch(2, 2).block_tables[0]
    pick = itertools.cycle([1])
    first, second = world.add(0, [1] * 7, 1), world.add(1, [2] * 7, 1)
    assert first is not None and second is not None
    world.step(pick)
    tables[:, 0] = 77
    for _ in range(3):
        world.step(pick)
    assert tables[:, 0].tolist() == [77, 77]
    assert tables[0, 1:3].tolist() == first.sequences[0].tables.blocks[1:]
    world.scheduler.abort(first)
    world.step(pick)
    assert tables[0, :3].tolist() == second.sequences[0].tables.blocks


def test_tables_are_sent_where_there_is_something_new() -> None:
    """A step in which no table got a block sends none to the device; one in which a block came does."""
    world = World(32, 4, 64, caching=False)
    device = RemoteDevice()
    world.memory = CheckingMemory(world.blocks, make_buffers(device, world))
    tables = device.arrays[-1]
    world.add(0, [1] * BLOCK, 1)
    sent = []
    for _ in range(BLOCK + 2):
        world.step(itertools.cycle([1]))
        sent.append(tables.num_sent)
    assert sent == [1, *[2] * BLOCK, 3]
