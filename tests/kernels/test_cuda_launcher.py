"""Launches on a GPU, with a stand-in for the driver: what it is given, and when kernels are compiled."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.kernels import IMPLEMENTATIONS

if not any(impl.name.startswith("cuda") for impl in IMPLEMENTATIONS):
    pytest.skip("numba-cuda and greenlet are not installed", allow_module_level=True)

from minipage.kernels.cuda import launcher, target

REPOSITORY = Path(__file__).parents[2]
STREAM = 0x5000


class Driver:
    """Notes what it is asked to load and to launch, with the 8 bytes that each parameter begins with."""

    def __init__(self) -> None:
        self.images: list[bytes] = []
        self.launches: list[tuple[Any, ...]] = []
        self.parameters = np.empty(0, np.int64)

    def moduleLoadData(self, image: bytes) -> int:
        self.images.append(image)
        return len(self.images)

    def moduleGetFunction(self, module: int, name: str) -> tuple[int, str]:
        return module, name

    def launchKernel(self, function: Any, *numbers: int) -> None:
        *shape, parameters, extra = numbers
        count = len(launcher.layout(self.kinds))
        addresses = (ctypes.c_void_p * count).from_address(parameters)
        self.parameters = np.array([ctypes.c_int64.from_address(address).value for address in addresses if address])
        self.launches.append((function, *shape, extra))

    kinds: launcher.Kinds = ()


class OnGpu:
    """An array as CuPy has it."""

    def __init__(self, a: np.ndarray, address: int) -> None:
        self.dtype, self.ndim, self.shape, self.strides = a.dtype, a.ndim, a.shape, a.strides
        self.size, self.itemsize, self.flags = a.size, a.itemsize, a.flags
        self.data = SimpleNamespace(ptr=address)


class Kernel:
    """A kernel as Numba has it, whose machine code is the text of its argument types."""

    targetoptions: dict[str, Any] = {"launch_bounds": (128, 8)}  # noqa: RUF012

    def __init__(self, size: int) -> None:
        def some_kernel() -> int:
            return size

        self.py_func, self.compiled = some_kernel, 0

    def compile(self, types: tuple[Any, ...]) -> Any:
        self.compiled += 1
        code = SimpleNamespace(code=f"{self.py_func()} {types!r}".encode())
        return SimpleNamespace(entry_name="entry", library=SimpleNamespace(get_cubin=lambda: code))


@pytest.fixture
def capability() -> SimpleNamespace:
    """That of the GPU."""
    return SimpleNamespace(compute_capability="90")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: SimpleNamespace) -> Iterator[Driver]:
    """A machine with a GPU, on which nothing was compiled yet."""
    found, cupy = Driver(), ModuleType("cupy")
    cuda: Any = ModuleType("cupy.cuda")
    cuda.get_device_id, cuda.Device = (lambda: 0), (lambda: capability)
    cuda.get_current_stream = lambda: SimpleNamespace(ptr=STREAM)
    cuda.runtime = SimpleNamespace(driverGetVersion=lambda: 13000)
    cupy.cuda = cuda  # type: ignore[attr-defined]
    api = SimpleNamespace(driver=found)
    packages = {name: ModuleType(name) for name in ("cupy_backends", "cupy_backends.cuda")}
    for name, module in {"cupy": cupy, "cupy.cuda": cuda, "cupy_backends.cuda.api": api, **packages}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("MINIPAGE_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(launcher, "_loaded", {})
    yield found


ARRAYS = (
    OnGpu(np.zeros((4, 6), np.float32), 0x1000),
    OnGpu(np.zeros((4, 6), np.float16)[:, :3], 0x2000),
    OnGpu(np.zeros(4, np.uint16), 0x3000),
)
KINDS = (("f", 2, True), ("e", 2, False), ("H", 1, True), "q", "f", "q")


def test_what_a_launch_is_given(driver: Driver) -> None:
    """An array is two zeros, size, bytes of an element, address, shape and strides; a grid has three sizes."""
    driver.kinds = KINDS
    for _ in range(2):
        launcher.launch_compiled(Kernel(1), (7, 2), 64, (*ARRAYS, -5, np.float32(1.5), 9))
    first, second = driver.launches
    assert first == ((1, "entry"), 7, 2, 1, 64, 1, 1, 0, STREAM, 0)
    assert second[1:] == first[1:]
    expected = [0, 0, 24, 4, 0x1000, 4, 6, 24, 4, 0, 0, 12, 2, 0x2000, 4, 3, 12, 2, 0, 0, 4, 2, 0x3000, 4, 2, -5]
    assert driver.parameters.tolist() == [*expected, int(np.float32(1.5).view(np.int32)), 9]


def test_kernels_are_compiled_once_on_a_machine(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, capability: SimpleNamespace
) -> None:
    """For each kind of arguments, each GPU's capability and each kernel; a later process loads what was compiled."""
    kernel, other = Kernel(1), Kernel(2)
    for args in ((1,), (2,), (np.float32(1),), (1,)):
        driver.kinds = ("q",)
        launcher.launch_compiled(kernel, (1,), 32, args)
    assert kernel.compiled == len(driver.images) == 2
    launcher.launch_compiled(other, (1,), 32, (1,))
    assert other.compiled == 1
    images = set(driver.images)
    assert len(images) == 3

    monkeypatch.setattr(launcher, "_loaded", {})  # as in another process
    for each in (kernel, other):
        launcher.launch_compiled(each, (1,), 32, (1,))
    assert (kernel.compiled, other.compiled) == (2, 1)
    assert set(driver.images[3:]) < images

    capability.compute_capability = "80"
    monkeypatch.setattr(launcher, "_loaded", {})
    launcher.launch_compiled(kernel, (1,), 32, (1,))
    assert kernel.compiled == 3


def test_arrays_of_any_strides_have_a_kernel_of_their_own(driver: Driver) -> None:
    """One that is not contiguous is not read as if it were."""
    driver.kinds = (("f", 2, True),)
    kernel, wide = Kernel(1), np.zeros((4, 6), np.float32)
    for array in (wide, wide[:, :3], wide[:2], wide.T):
        launcher.launch_compiled(kernel, (1,), 32, (OnGpu(array, 4096),))
    assert [b"'A'" in image for image in driver.images] == [False, True]


@pytest.mark.parametrize("arg", [1.5, np.float64(1), np.bool_(True), None])
def test_arguments_that_no_launch_takes(driver: Driver, arg: Any) -> None:
    """Neither a GPU nor the simulator: on a GPU a float would be another kernel, with float64 arithmetic."""
    message = r"some_kernel was given .*; allowed: arrays on the device, integers and NumPy float32"
    with pytest.raises(TypeError, match=message):
        launcher.launch_compiled(Kernel(1), (1,), 32, (1, arg))
    with pytest.raises(TypeError, match=message):
        target.launch(Kernel(1), (1,), 32, 1, arg)
    assert not driver.launches


def test_types_of_arguments() -> None:
    """They are those that Numba finds by itself."""
    assert [repr(launcher._numba_type(kind)) for kind in KINDS] == [
        "Array(float32, 2, 'C', False, aligned=True)",
        "Array(float16, 2, 'A', False, aligned=True)",
        "Array(uint16, 1, 'C', False, aligned=True)",
        "int64",
        "float32",
        "int64",
    ]


FINGERPRINTS = """
import sys
sys.path.insert(0, "scripts")
from kernel_code import attention, linear, sampling, small
from minipage.kernels.cuda.launcher import fingerprint
found = {}
for source in (attention, linear, sampling, small):
    for specimen in source.specimens():
        found.setdefault(fingerprint(specimen.kernel), set()).add(id(specimen.kernel))
assert all(len(same) == 1 for same in found.values())
print(sorted(found))
"""


def test_kernels_are_told_apart_in_the_same_way_by_all_processes() -> None:
    """No two have the same fingerprint, and a kernel's does not depend on the process."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}

    def found(seed: str) -> str:
        command = [sys.executable, "-c", FINGERPRINTS]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            cwd=REPOSITORY,
            env=environment | {"PYTHONHASHSEED": seed},
        ).stdout

    assert found("1") == found("2")


def closing_over(value: Any) -> Callable[[], Any]:
    """A function that closes over something."""
    return lambda: value


def test_fingerprints_see_what_functions_close_over() -> None:
    """Numbers, and functions with what they close over in turn; nothing that has no lasting name."""
    texts = [
        launcher.fingerprint(closing_over(value))
        for value in (1, 2, (1, 2), closing_over(1), closing_over(2), np.uint32)
    ]
    assert len(set(texts)) == len(texts)
    with pytest.raises(TypeError, match="has another name in each process"):
        launcher.fingerprint(closing_over(object()))
