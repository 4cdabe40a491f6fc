"""Compiles a kernel without a GPU, and reads from its machine code what a GPU would pay for it.

Numba turns a kernel into PTX by NVVM, which needs no driver; ptxas turns that into machine code and reports registers, spills
and stack; nvdisasm prints the machine code. They come with the packages nvidia-nvvm, nvidia-cuda-nvcc and
nvidia-cuda-nvdisasm, or with a CUDA toolkit.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

from minipage.kernels.cuda.target import SIMULATED

from .specimens import Specimen

Capability = tuple[int, int]
_PARAMETERS = {"u64": "q", "f32": "f"}  #: by their types in PTX
CAPABILITIES: tuple[Capability, ...] = ((8, 0), (9, 0))


class KernelCode(NamedTuple):
    """What a kernel became for GPUs of a compute capability."""

    registers: int  #: a thread
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int  #: a block
    float64_instructions: int
    wide_loads: int  #: instructions that read 16 bytes of global memory
    tensor_core_instructions: int
    parameters: str  #: a character each: "q" for 64 bits, "f" for a float32


def missing() -> str | None:
    """What compiling lacks on this machine, or None."""
    if SIMULATED:
        return "Numba without its simulator: unset NUMBA_ENABLE_CUDASIM"
    try:
        from numba.cuda.cudadrv import nvvm

        with _without_driver(CAPABILITIES[0]):
            nvvm.NVVM()
            nvvm.LibDevice()
    except Exception as error:  # each version of numba-cuda raises its own
        return f"NVVM (package nvidia-nvvm, or a CUDA toolkit): {error}"
    packages = {"ptxas": "nvidia-cuda-nvcc", "nvdisasm": "nvidia-cuda-nvdisasm"}
    lacking = [
        f"{tool} (package {package}, or a CUDA toolkit)" for tool, package in packages.items() if not _tool(tool)
    ]
    return ", ".join(lacking) or None


def compile_kernel(specimen: Specimen, capability: Capability) -> KernelCode:
    """Compile for a GPU of that compute capability; RuntimeError with the tool's words where it refuses."""
    from numba import cuda

    with _without_driver(capability):
        bounds = specimen.kernel.targetoptions.get("launch_bounds")
        ptx, _ = cuda.compile_ptx(specimen.kernel.py_func, specimen.signature, cc=capability, launch_bounds=bounds)
    report, assembly = _assemble(ptx.strip("\0 \n") + "\n", f"sm_{capability[0]}{capability[1]}")

    def reported(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, report))

    def instructions(pattern: str) -> int:
        return len(re.findall(pattern, assembly))

    return KernelCode(
        registers=reported(r"Used (\d+) registers"),
        spill_bytes=reported(r"(\d+) bytes spill"),
        stack_bytes=reported(r"(\d+) bytes stack"),
        shared_bytes=reported(r"(\d+) bytes smem"),
        float64_instructions=instructions(r"\b(?:DADD|DMUL|DFMA|DSETP|DMMA|F2F\S*\.F64\S*|I2F\.F64|MUFU\S*64H)\b"),
        wide_loads=instructions(r"\bLDG\S*\.128\b"),
        tensor_core_instructions=instructions(r"\bHMMA\b"),
        parameters="".join(_PARAMETERS[kind] for kind in re.findall(r"\.param \.(\w+) \S+_param_\d+", ptx)),
    )


def _assemble(ptx: str, arch: str) -> tuple[str, str]:
    """What ptxas says of a kernel, and its machine code as text."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        report = _run("ptxas", "-v", "-arch", arch, str(source), "-o", str(binary))
        return report, _run("nvdisasm", "-c", str(binary))


def _run(tool: str, *arguments: str) -> str:
    result = subprocess.run([str(_tool(tool)), *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{tool}: {result.stdout}{result.stderr}")
    return result.stdout + result.stderr


def _tool(name: str) -> str | None:
    """A program of the installed packages, as NVVM is looked for there first; else that of a toolkit."""
    for folder in sys.path:
        for path in sorted(Path(folder).glob(f"nvidia/*/bin/{name}")):
            return str(path)
    toolkit = Path("/usr/local/cuda/bin", name)
    return shutil.which(name) or (str(toolkit) if toolkit.exists() else None)


@contextmanager
def _without_driver(capability: Capability) -> Iterator[None]:
    """Answers for the GPU that Numba asks about, and for NVRTC, which it only asks for the names of architectures."""
    from numba.cuda import cuda_paths, dispatcher
    from numba.cuda.cudadrv import nvrtc

    device = SimpleNamespace(compute_capability=capability)
    architecture = f"compute_{capability[0]}{capability[1]}"
    with (
        mock.patch.object(dispatcher, "get_current_device", lambda: device),
        mock.patch.object(nvrtc, "get_arch_option", lambda *_: architecture),
        mock.patch.object(cuda_paths, "_get_nvrtc_path", lambda: None),
    ):
        yield
