"""Opening CUDA devices: what is missing is said before anything else happens. None of it needs a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipage.device import cuda, open_device
from minipage.device.base import StepShape
from minipage.errors import InvalidArgumentError, OutOfMemoryError

REPOSITORY = Path(__file__).parents[2]


def run_python(program: str, **environment: str) -> str:
    """What a program prints in a process of its own, the simulator off unless ``environment`` turns it on."""
    clean = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    command = [sys.executable, "-c", program]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env=clean | environment, cwd=REPOSITORY
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def opening(device: str, after: str = "") -> str:
    """A program that runs ``after``, opens a device and prints its name or the error."""
    return (
        f"{after}\nfrom minipage.device import open_device\n"
        f"try: print(open_device({device!r}).name)\nexcept ValueError as error: print(error)\n"
    )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that makes packages look installed or not, and the simulator off."""

    def install(cupy: Any = None, numba_cuda: bool = True) -> None:
        there = {"cupy": cupy is not None, "numba_cuda": numba_cuda, "greenlet": True}
        monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: there[name] or None)
        monkeypatch.setattr(cuda, "_simulator_is_on", lambda: False)
        monkeypatch.setitem(sys.modules, "cupy", cupy)

    return install


def fake_cupy(
    device_count: Callable[[], int] = lambda: 1, built: int = 12090, driver: int = 13000, capability: str = "90"
) -> Any:
    """CuPy as far as it is asked before anything runs; versions as CUDA writes them."""
    runtime = SimpleNamespace(
        getDeviceCount=device_count, runtimeGetVersion=lambda: built, driverGetVersion=lambda: driver
    )
    return SimpleNamespace(
        cuda=SimpleNamespace(runtime=runtime, Device=lambda: SimpleNamespace(compute_capability=capability))
    )


def test_cuda_without_cupy_names_the_extras(installed: Callable[..., None]) -> None:
    """Without CuPy the error says which extras bring it, and "auto" means the CPU."""
    installed(cupy=None)
    with pytest.raises(InvalidArgumentError, match=r"needs CuPy.*minipage\[cuda12\] or minipage\[cuda13\]"):
        open_device("cuda")
    assert not cuda.cuda_is_available()


def test_cuda_without_numba_cuda_names_the_extras(installed: Callable[..., None]) -> None:
    """Numba's own old CUDA target is not enough."""
    installed(cupy=fake_cupy(lambda: 1), numba_cuda=False)
    with pytest.raises(InvalidArgumentError, match=r"needs numba-cuda.*minipage\[cuda12\]"):
        open_device("cuda")


def test_cuda_without_a_driver_says_what_cupy_says(installed: Callable[..., None]) -> None:
    """CuPy installed on a machine without a driver, or without a GPU, is one error, and "auto" means the CPU."""

    def no_driver() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver")

    installed(cupy=fake_cupy(no_driver))
    with pytest.raises(InvalidArgumentError, match=r"no usable NVIDIA driver or GPU .*cudaErrorInsufficientDriver"):
        open_device("cuda")
    installed(cupy=fake_cupy(lambda: 0))
    with pytest.raises(InvalidArgumentError, match="shows no GPU"):
        open_device("cuda")
    assert not cuda.cuda_is_available()


def test_more_ranks_than_gpus(installed: Callable[..., None]) -> None:
    """A rank whose GPU is not there says how many there are."""
    installed(cupy=fake_cupy(lambda: 2))
    with pytest.raises(InvalidArgumentError, match="each rank needs a GPU of its own, and this machine has 2"):
        open_device("cuda", gpu=2)


def test_cupy_for_a_later_cuda_than_the_driver_names_the_right_extra(installed: Callable[..., None]) -> None:
    """CUDA 13 in Python on a driver for CUDA 12; an older CuPy on a newer driver is fine."""
    installed(cupy=fake_cupy(built=13000, driver=12080))
    with pytest.raises(InvalidArgumentError, match=r"CuPy is installed for CUDA 13.*driver is for CUDA 12.*\[cuda12\]"):
        open_device("cuda")
    installed(cupy=fake_cupy(built=12090, driver=13000))
    assert cuda.cuda_is_available()


def test_a_gpu_that_is_too_old_is_refused(installed: Callable[..., None]) -> None:
    """Compute capability 7.5 lacks the instructions; 8.0 and 12.0 have them."""
    installed(cupy=fake_cupy(capability="75"))
    with pytest.raises(InvalidArgumentError, match=r"compute capability 7\.5; allowed: 8\.0"):
        open_device("cuda")
    for capability in ("80", "120"):
        installed(cupy=fake_cupy(capability=capability))
        assert cuda.cuda_is_available()


def test_an_unknown_device_names_the_known_ones() -> None:
    """A device that is none is refused with the list of those that are."""
    with pytest.raises(InvalidArgumentError, match="device='tpu' is not allowed; allowed: auto, cpu, cuda, cuda-sim"):
        open_device("tpu")


def test_the_simulator_turns_itself_on_after_the_cpu_kernels() -> None:
    """cuda-sim works in a process that has used Numba already, as long as that was not its CUDA target."""
    pytest.importorskip("numba_cuda")
    assert run_python(opening("cuda-sim", after="import numba")) == "cuda-sim\n"


def test_the_simulator_cannot_be_turned_on_too_late() -> None:
    """Where numba.cuda was imported without the simulator, the error says how to set it."""
    pytest.importorskip("numba_cuda")
    assert "set NUMBA_ENABLE_CUDASIM=1" in run_python(opening("cuda-sim", after="import numba.cuda"))


@pytest.mark.parametrize("after", ["", "import numba"])
def test_cuda_is_refused_while_the_simulator_is_on(after: str) -> None:
    """device="cuda" never runs in the simulator by accident."""
    assert "unset NUMBA_ENABLE_CUDASIM" in run_python(opening("cuda", after), NUMBA_ENABLE_CUDASIM="1")


def test_the_simulated_device_runs_ops_on_numpy_arrays() -> None:
    """Arrays of cuda-sim are host arrays, and its ops write into them."""
    pytest.importorskip("numba_cuda")
    device = open_device("cuda-sim")
    out = device.empty((2, 3), np.float32)
    with device.compute():
        device.ops.add(out, device.array(np.ones((2, 3), np.float32)), device.array(np.full((2, 3), 2, np.float32)))
    device.synchronize()
    assert np.array_equal(device.host(out), np.full((2, 3), 3))
    assert device.free_memory() > 0


# ---- what needs no GPU to be wrong -----------------------------------------------------------------------------------


@given(st.integers(1, 2100), st.integers(1, 300), st.integers(1, 5000), st.data())
def test_recorded_shapes_hold_the_step(tokens: int, most_seqs: int, most_blocks: int, data: st.DataObject) -> None:
    """Decode steps of up to 256 sequences are padded to a few shapes within the limits; all others are not recorded."""
    seqs = data.draw(st.sampled_from([tokens, max(tokens // 2, 1)]).filter(lambda n: n <= most_seqs))
    shape = StepShape(tokens, seqs, data.draw(st.integers(1, most_blocks)))
    most = StepShape(2100, most_seqs, most_blocks)
    recorded = cuda.PaddedDevice.recorded_shape(SimpleNamespace(recorded_rows=_recorded_rows), shape, most)
    assert (recorded is not None) == (tokens == seqs <= 256)
    if recorded is not None:
        assert recorded.num_tokens == recorded.num_seqs
        assert all(used <= padded <= limit for used, padded, limit in zip(shape, recorded, most, strict=True))
        is_next_power = recorded.num_blocks.bit_count() == 1 and recorded.num_blocks < 2 * shape.num_blocks
        assert recorded.num_blocks == most_blocks or is_next_power


def _recorded_rows(num_rows: int, most: int) -> int | None:
    return cuda.PaddedDevice.recorded_rows(SimpleNamespace(), num_rows, most)


def test_few_sizes_serve_all_batches() -> None:
    """A batch of up to 256 is recorded in one of 20 sizes, with at most 7 rows of padding up to 64."""
    sizes = {_recorded_rows(rows, 4096) for rows in range(1, 257)}
    assert len(sizes) <= 20 and None not in sizes
    assert all((_recorded_rows(rows, 4096) or 0) < rows + (8 if rows <= 64 else 32) for rows in range(1, 257))


def unopened_device(xp: Any) -> Any:
    """A CUDA device on a stand-in for CuPy."""
    device = object.__new__(cuda.CudaDevice)
    device.xp = xp
    return device


def fake_memory(free: int, total: int, pooled: int = 0) -> Any:
    """CuPy on a GPU with so much memory, of which its pool holds ``pooled`` more that nobody uses."""
    runtime = SimpleNamespace(memGetInfo=lambda: (free, total))
    memory = SimpleNamespace(OutOfMemoryError=MemoryError)
    pool = SimpleNamespace(free_bytes=lambda: pooled, used_bytes=lambda: 3 << 20)
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, memory=memory), get_default_memory_pool=lambda: pool)


def test_the_cache_takes_what_the_utilization_leaves() -> None:
    """Nine tenths of the memory less what is in use, by others too; nothing where they use more than that."""
    device = unopened_device(fake_memory(free=400, total=1000, pooled=200))
    assert device.memory_for_cache(None) == 500
    assert device.memory_for_cache(0.5) == 100
    assert device.memory_for_cache(0.3) == 0


def test_too_little_memory_says_what_is_there() -> None:
    """CuPy's own error names one allocation only."""
    device = unopened_device(fake_memory(free=2 << 20, total=8 << 20))
    with (
        pytest.raises(
            OutOfMemoryError, match=r"2\.0 MiB of 8\.0 MiB are free, this process holds 3\.0 MiB.*quantization"
        ),
        device.allocating(),
    ):
        raise MemoryError("allocating 4 MiB")
