"""The arrays of a batch: written where something changed, and always what they would be if they were made from nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.scheduling import BLOCK, Memory, World
from hypothesis import given, settings
from hypothesis import strategies as st

from minipage.cache import BlockManager, Group
from minipage.device import open_device
from minipage.device.base import StepShape
from minipage.engine.batch_buffers import BatchBuffers
from minipage.engine.request import Status
from minipage.engine.step import Step
from minipage.kernels.draws import DRAW, as_words

MAX_MODEL_LEN = 40


class RemoteArray:
    """An array that is not the host's: it has what was sent to it."""

    def __init__(self, contents: np.ndarray) -> None:
        self.contents = contents

    def __getitem__(self, part: Any) -> Any:
        return RemoteArray(self.contents[part])

    def view(self, dtype: Any) -> RemoteArray:
        return RemoteArray(self.contents.view(dtype))

    def reshape(self, shape: tuple[int, ...]) -> RemoteArray:
        return RemoteArray(self.contents.reshape(shape))

    def tolist(self) -> Any:
        return self.contents.tolist()


class RemoteDevice:
    """A device with memory of its own, as far as a batch needs one."""

    xp = np

    def __init__(self) -> None:
        self.sent: list[int] = []  #: bytes of each copy
        self._copy: Callable[[], None] = lambda: None

    def empty(self, shape: tuple[int, ...], dtype: type) -> RemoteArray:
        return RemoteArray(np.full(shape, 99, dtype))

    def staging(self, num_bytes: int) -> np.ndarray:
        return np.full(num_bytes, 77, np.uint8)

    def send(self, to: RemoteArray, source: np.ndarray) -> Callable[[], None]:
        """The copy is made at the latest moment that is allowed."""
        self.wait()
        self.sent.append(source.nbytes)
        self._copy = lambda: to.contents.__setitem__(..., source)
        return self.wait

    def wait(self) -> None:
        """Make the copy that is due: before the host's bytes change, or something on the device looks at its own."""
        self._copy()
        self._copy = lambda: None


def make_buffers(device: Any, world: World) -> BatchBuffers:
    return BatchBuffers(
        device,
        max_tokens=world.budget,
        max_num_seqs=world.max_seqs,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK,
        num_groups=len(world.blocks.groups),
        max_logit_rows=world.max_seqs,
    )


class FillingMemory(Memory):
    """Before a step is computed, its batch is filled."""

    def __init__(self, blocks: BlockManager, buffers: BatchBuffers) -> None:
        super().__init__(blocks)
        self.buffers = buffers

    def move(self, step: Step) -> None:
        super().move(step)
        if step.scheduled:
            contents = self.buffers.describe(step.scheduled)
            self.buffers.write(contents)
            self.used = contents.shape
            self.padded = self.pad(self.used)
            self.buffers.send(self.used, self.padded)

    def pad(self, used: StepShape) -> StepShape:
        """Some more tokens and sequences, where there is room; tables as wide as can be."""
        most = self.buffers.most
        num_seqs = min(used.num_seqs + used.num_tokens % 3, most.num_seqs)
        return StepShape(min(used.num_tokens + 2, most.num_tokens), num_seqs, most.num_blocks)


class CheckingMemory(FillingMemory):
    """It is then compared with what the step says, item by item, once ``settle`` has let it arrive."""

    def __init__(self, blocks: BlockManager, device: Any, world: World) -> None:
        super().__init__(blocks, make_buffers(device, world))
        self.settle = device.wait if isinstance(device, RemoteDevice) else device.synchronize

    def move(self, step: Step) -> None:
        super().move(step)
        if step.scheduled:
            self.settle()
            self._check(step)

    def _check(self, step: Step) -> None:
        num_tokens, num_seqs = step.num_tokens, len(step.scheduled)
        widest = max(len(table.blocks) for item in step.scheduled for table in item.sequence.tables.tables)
        assert self.used == (num_tokens, num_seqs, widest)
        batch = self.buffers.batch(self.padded)
        starts = [0, *itertools.accumulate(item.num_tokens for item in step.scheduled)]
        more_tokens, more_seqs = self.padded.num_tokens - num_tokens, self.padded.num_seqs - num_seqs
        assert batch.query_start.tolist() == starts + [num_tokens] * more_seqs
        assert batch.context_lens[num_seqs:].tolist() == [0] * more_seqs
        for array, padding in ((batch.token_ids, 0), (batch.positions, 0), *((slots, -1) for slots in batch.slots)):
            assert array[num_tokens:].tolist() == [padding] * more_tokens
        for row, item in enumerate(step.scheduled):
            part = slice(starts[row], starts[row + 1])
            first = item.sequence.num_computed
            positions = range(first, first + item.num_tokens)
            assert batch.token_ids[part].tolist() == item.token_ids
            assert batch.positions[part].tolist() == list(positions)
            assert batch.context_lens[row].tolist() == first + item.num_tokens
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
    world.memory = CheckingMemory(world.blocks, device, world)
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
    tables = buffers.batch(StepShape(2, 2, buffers.most.num_blocks)).block_tables[0]
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
    """A step is one copy. Where no table got a block it has no tables; else those of all its sequences."""
    world = World(32, 4, 64, caching=False)
    device = RemoteDevice()
    world.memory = CheckingMemory(world.blocks, device, world)
    for name in range(2):
        world.add(name, [1] * BLOCK, 1)
    for _ in range(BLOCK + 2):
        world.step(itertools.cycle([1]))
    without = min(device.sent)
    with_tables = without + 2 * 4 * -(-MAX_MODEL_LEN // BLOCK)
    assert device.sent == [with_tables, with_tables, *[without] * (BLOCK - 1), with_tables]


def test_what_was_described_and_not_written_comes_again() -> None:
    """After a step that failed, its tables are written anew."""
    world = World(32, 4, 64, caching=False)
    buffers = make_buffers(open_device("reference"), world)
    world.memory = FillingMemory(world.blocks, buffers)
    world.add(0, [1] * 7, 1)
    step = world.scheduler.schedule()
    lost = buffers.describe(step.scheduled)
    assert buffers.describe(step.scheduled).tables == [[]]
    buffers.forget()
    assert buffers.describe(step.scheduled) == lost


def test_rows_of_an_embedding_that_has_some_tokens() -> None:
    """Token ids are turned into rows when they are written; what is described has them as they are."""
    world = World(32, 4, 64, caching=False)
    device = open_device("reference")
    sizes = {
        "max_tokens": 8,
        "max_num_seqs": 1,
        "max_model_len": 8,
        "block_size": BLOCK,
        "num_groups": 1,
        "max_logit_rows": 1,
    }
    buffers = BatchBuffers(device, **sizes, rows_of=lambda ids: [100 - token for token in ids])
    world.add(0, [1, 2, 3], 1)
    contents = buffers.describe(world.scheduler.schedule().scheduled)
    assert contents.token_ids == [1, 2, 3]
    buffers.write(contents)
    assert buffers.batch(contents.shape).token_ids.tolist() == [99, 98, 97]


def test_a_batch_on_its_way_is_not_overwritten() -> None:
    """The host's arrays are those of the next step only once those of the last have been read."""
    world = World(32, 4, 64, caching=False)
    device = RemoteDevice()
    buffers = make_buffers(device, world)
    world.memory = FillingMemory(world.blocks, buffers)
    world.add(0, [1] * 3, 1)
    pick = itertools.cycle([1])
    world.step(pick)
    batch = buffers.batch(StepShape(3, 1, 1))
    world.step(pick)  # its own copy is still to be made
    assert batch.positions.tolist() == [0, 1, 2] and batch.context_lens.tolist() == [3]
    device.wait()
    assert batch.positions[:1].tolist() == [3] and batch.context_lens.tolist() == [4]


def some_draws(count: int) -> np.ndarray:
    """Records that differ from each other and from what is there at first."""
    return np.array([(0.5, 10 + i, 0.25, 2**63 + i, 2**40 + i, i, 7 * i) for i in range(1, count + 1)], DRAW)


def test_what_is_wanted_goes_with_a_batch_or_after_it() -> None:
    """With it, all is one copy; rows and records are padded with the first row, and with greedy draws."""
    world = World(32, 4, 64, caching=False)
    device = RemoteDevice()
    buffers = make_buffers(device, world)
    world.add(0, [1, 2, 3], 1)
    contents = buffers.describe(world.scheduler.schedule().scheduled)
    buffers.write(contents)
    buffers.write_wanted([2, 1], some_draws(2), 4)
    buffers.send(contents.shape, contents.shape, with_wanted=True)
    assert len(device.sent) == 1
    device.wait()
    assert buffers.batch(contents.shape).token_ids.tolist() == [1, 2, 3]
    assert buffers.rows.tolist() == [2, 1, 0, 0]
    assert buffers.draws.tolist() == as_words(np.append(some_draws(2), np.zeros(2, DRAW))).tolist()
    buffers.write_wanted([1], some_draws(3)[2:], 2)
    buffers.send_wanted(2, True)
    device.wait()
    assert buffers.rows.tolist()[:2] == [1, 0]
    assert buffers.draws.tolist()[:2] == as_words(np.append(some_draws(3)[2:], np.zeros(1, DRAW))).tolist()
    buffers.write_wanted([2, 2, 2], None, 3)
    buffers.send_wanted(3, False)
    device.wait()
    assert buffers.rows.tolist()[:3] == [2, 2, 2]
    assert device.sent[2] < device.sent[1] < device.sent[0]


def test_what_is_wanted_is_not_overwritten_on_its_way() -> None:
    """As the batch is not."""
    device = RemoteDevice()
    buffers = make_buffers(device, World(32, 4, 64, caching=False))
    buffers.write_wanted([3], some_draws(1), 1)
    buffers.send_wanted(1, True)
    buffers.write_wanted([2], some_draws(2)[1:], 1)  # its own copy is not made yet
    assert buffers.rows.tolist()[0] == 3
    assert buffers.draws.tolist()[0] == as_words(some_draws(1))[0].tolist()
