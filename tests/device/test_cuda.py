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

from minipage.device import cuda, open_device
from minipage.errors import InvalidArgumentError

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


def fake_cupy(device_count: Callable[[], int]) -> Any:
    return SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=device_count)))


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
    assert 0 < device.free_memory() <= device.total_memory()


TYPE_OF_A_GPU_ARRAY = """
import numpy as np
from numba.cuda.typing.typeof import Purpose, typeof
from minipage.kernels.cuda import target

class OnGpu:
    def __init__(self, a):
        strides = None if a.flags.c_contiguous else a.strides
        self.__cuda_array_interface__ = dict(
            shape=a.shape, typestr=a.dtype.str, data=(4096, False), version=3, strides=strides, stream=7)

for array in (np.zeros((4, 6), np.float32), np.zeros((4, 6), np.float16)[:, :3], np.zeros(4, np.uint16)):
    argument = target._argument(OnGpu(array))
    print(typeof(argument, Purpose.argument), argument.__cuda_array_interface__["stream"])
"""


def test_gpu_arrays_reach_kernels_without_a_synchronisation() -> None:
    """What a launch passes on for a CuPy array is typed as that array, and names no stream that Numba would wait for."""
    pytest.importorskip("numba_cuda")
    assert run_python(TYPE_OF_A_GPU_ARRAY).splitlines() == [
        "array(float32, 2d, C) None",
        "array(float16, 2d, A) None",
        "array(uint16, 1d, C) None",
    ]
