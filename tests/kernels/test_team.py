"""The threads that run the CPU kernels: what they compute, that they rest, and that they end."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers.kernels import assert_same_bits, normal

from minipage.device import open_device
from minipage.kernels import cpu
from minipage.kernels.cpu.kernel import JIT_IS_DISABLED
from minipage.kernels.cpu.team import Team, current

Array = Any

pytestmark = pytest.mark.skipif(JIT_IS_DISABLED, reason="without compiled code there are no threads")


@pytest.fixture
def team() -> Iterator[Team]:
    """Three threads."""
    team = Team(3)
    yield team
    team.close()


class Layers:
    """Some layers, one after the other, whose result shows whether each has seen all of the one before."""

    def __init__(self, seed: int, depth: int = 20) -> None:
        self.x, self.y = normal(seed, 5, 96), np.zeros((5, 96), np.float32)
        self.start = self.x.copy()
        self.weights = [cpu.empty_weight((96, 96), kind, np) for kind in ("float32", "int8", "int4") * depth]
        for i, weight in enumerate(self.weights):
            cpu.pack_rows(weight, 0, normal(1000 * seed + i, 96, 96) / 8)

    def run(self) -> None:
        """All ops, in place."""
        for weight in self.weights:
            cpu.linear(self.y, self.x, weight, None)
            cpu.add_rms_norm(self.x, self.y, self.x, np.ones(96, np.float32), 1e-5)

    def expected(self) -> Array:
        """The result on the calling thread alone."""
        self.x[:] = self.start
        self.run()
        return self.x.copy()

    def result(self, run: Callable[[], None]) -> Array:
        """The result of running a program of the layers."""
        self.x[:] = self.start
        run()
        return self.x.copy()


def recorded(team: Team, layers: Layers) -> Callable[[], None]:
    """A program of all ops."""
    with team.record() as program:
        layers.run()
    return lambda: team.run(program)


def num_threads() -> int:
    """Threads of all teams of this process."""
    return sum(thread.name.startswith("minipage-") for thread in threading.enumerate())


def test_a_program_is_its_ops_in_order(team: Team) -> None:
    """Recorded and repeated, ops give what they give one by one, time after time; recording itself computes nothing."""
    layers = Layers(1)
    expected = layers.expected()
    layers.x[:] = layers.start
    run = recorded(team, layers)
    assert_same_bits(layers.x, layers.start)
    for _ in range(50):
        assert_same_bits(layers.result(run), expected)
    with team:
        assert_same_bits(layers.result(layers.run), expected)


def test_threads_start_with_the_first_program_and_end_with_close() -> None:
    """A team that has computed nothing has no threads; a closed one has none any more, and may start again."""
    before = num_threads()
    team, layers = Team(4), Layers(2, depth=1)
    assert num_threads() == before
    expected, run = layers.expected(), recorded(team, layers)
    for _ in range(3):
        assert_same_bits(layers.result(run), expected)
        assert num_threads() == before + 3
        team.close()
        assert num_threads() == before
    team.close()


def test_threads_end_with_their_team() -> None:
    """A team that nobody refers to any more takes its threads with it."""
    before = num_threads()
    layers = Layers(3, depth=1)
    recorded(Team(3), layers)()
    gc.collect()
    assert num_threads() == before


def test_an_idle_team_sleeps(team: Team) -> None:
    """Between programs the threads use no processor time to speak of."""
    recorded(team, Layers(4, depth=1))()
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


def test_two_teams_and_many_callers() -> None:
    """Several threads call in, to one team and to another, and each gets its own result."""
    teams = [Team(2), Team(3)]
    errors: list[BaseException] = []

    def call(index: int) -> None:
        try:
            layers = Layers(10 + index, depth=3)
            expected, run = layers.expected(), recorded(teams[index % 2], layers)
            for _ in range(20):
                assert_same_bits(layers.result(run), expected)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for team in teams:
        team.close()
    assert not errors and not any(thread.is_alive() for thread in threads)


def _run_in_child(run: Callable[[], Array], results: Any) -> None:
    results.put(run())


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system does not fork")
def test_a_forked_process_has_threads_of_its_own(team: Team) -> None:
    """Programs run in the child, on threads that it starts, and go on in the parent."""
    layers = Layers(5)
    expected, run = layers.expected(), recorded(team, layers)
    run()
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_run_in_child, args=(lambda: layers.result(run), results))
    child.start()
    assert_same_bits(results.get(timeout=60), expected)
    child.join(60)
    assert child.exitcode == 0
    assert_same_bits(layers.result(run), expected)


def test_more_threads_than_cores(team: Team) -> None:
    """A team that is larger than the machine is slower, and right."""
    crowd = Team(16)
    layers = Layers(6, depth=2)
    expected, run = layers.expected(), recorded(crowd, layers)
    for _ in range(5):
        assert_same_bits(layers.result(run), expected)
    crowd.close()


def test_scratch_of_a_program_is_its_own(team: Team) -> None:
    """Memory that ops work in may grow for later programs; earlier ones go on with what they have."""
    layers = Layers(7, depth=1)
    expected, run = layers.expected(), recorded(team, layers)
    with team:
        team.scratch(((1 << 16,), np.float64))[0][:] = np.nan
    assert_same_bits(layers.result(run), expected)


def test_ops_outside_of_a_team_run_on_the_calling_thread() -> None:
    """Without a team there is one of this thread alone; inside another it is that one."""
    alone = current()
    assert alone.num_threads == 1
    with Team(2) as team:
        assert current() is team
        with Team(3) as inner:
            assert current() is inner
        assert current() is team
    assert current() is alone


def test_python_between_kernels(team: Team) -> None:
    """A function that is called while a step is recorded runs in its place, each time; without a recording, at once."""
    x, y, seen = np.ones((4, 8), np.float32), np.full((4, 8), 2, np.float32), []
    with team.record() as program:
        cpu.add(x, x, y)
        team.call_python(lambda: seen.append(float(x[0, 0])))
        team.call_python(lambda: x.__imul__(np.float32(10)))
        cpu.add(x, x, y)
    assert seen == []
    team.run(program)
    assert seen == [3] and np.all(x == 32)
    team.run(program)
    assert seen == [3, 34] and np.all(x == 342)
    team.call_python(lambda: seen.append(0.0))
    assert seen[-1] == 0


def test_an_error_while_recording_leaves_the_team_as_it_was(team: Team) -> None:
    """An op that refuses its arguments ends the recording, and the next one is whole."""
    layers = Layers(8, depth=1)
    with pytest.raises(TypeError), team.record():
        cpu.add(layers.x, layers.y, np.zeros((5, 96)))
    expected = layers.expected()
    assert_same_bits(layers.result(recorded(team, layers)), expected)


def test_a_device_closes_its_team() -> None:
    """An engine's threads end with its device."""
    before = num_threads()
    device = open_device("cpu", num_threads=3)
    with device.compute():
        cpu.add(*(np.zeros((1, 8), np.float32) for _ in range(3)))
    assert num_threads() == before + 2
    device.close()
    assert num_threads() == before
