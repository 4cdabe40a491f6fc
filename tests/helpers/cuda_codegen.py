"""Compiles the CUDA kernels without a GPU, and reads from the machine code what a GPU would pay for them.

Run as a program it compiles all of them and prints one JSON object a line:

    python tests/helpers/cuda_codegen.py

Numba turns a kernel into PTX by NVVM, which needs no driver; ptxas turns that into machine code and reports registers,
spills and stack. Both come with a CUDA toolkit, or with the packages nvidia-nvvm and nvidia-cuda-nvcc.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

MODULES = ("attention", "blocks", "elementwise", "linear", "norm", "rope")
CAPABILITIES = ((8, 0), (9, 0))


class KernelCode(NamedTuple):
    """What a kernel became."""

    name: str
    capability: str
    registers: int  #: a thread
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int  #: a block
    float64_instructions: int


class Specimen(NamedTuple):
    """A kernel and the argument types that it is compiled for."""

    name: str
    kernel: Any
    signature: tuple[Any, ...]


def missing() -> str | None:
    """What compiling lacks on this machine, or None."""
    try:
        from numba.cuda.cudadrv import nvvm

        with _without_driver((8, 0)):
            nvvm.NVVM()
            nvvm.LibDevice()
    except Exception as error:  # each version of numba-cuda raises its own
        return f"NVVM (package nvidia-nvvm, or a CUDA toolkit): {error}"
    return None if _ptxas() else "ptxas (package nvidia-cuda-nvcc, or a CUDA toolkit)"


def specimens() -> Iterator[Specimen]:
    """Every kernel of the op set, for every storage that it takes."""
    from numba.cuda import types

    modules = {name: importlib.import_module(f"minipage.kernels.cuda.{name}") for name in MODULES}
    f32, f16, bf16 = types.float32, types.float16, types.uint16
    int32, int64 = types.Array(types.int32, 1, "C"), types.Array(types.int64, 1, "C")

    def array(dtype: Any, ndim: int, layout: str = "C") -> Any:
        return types.Array(dtype, ndim, layout)

    vector, rows, heads = array(f32, 1), array(f32, 2), array(f32, 3, "A")
    norm, elementwise, linear = modules["norm"], modules["elementwise"], modules["linear"]
    yield Specimen("rms_norm", norm.rms_norm_kernel, (rows, rows, vector, f32))
    yield Specimen("add_rms_norm", norm.add_rms_norm_kernel, (rows, rows, rows, vector, f32))
    yield Specimen("layer_norm", norm.layer_norm_kernel, (rows, rows, vector, vector, f32))
    yield Specimen("add", elementwise.add_kernel, (rows, rows, rows))
    yield Specimen("gather_rows", elementwise.gather_rows_kernel, (rows, rows, int32))
    yield Specimen("rope", modules["rope"].rope_kernel, (heads, heads, rows, rows, int32, types.int64))
    for activation, kernel in elementwise.gated_activation_kernels.items():
        yield Specimen(f"gated_activation {activation}", kernel, (rows, rows))

    codes = {"float32": f32, "float16": f16, "bfloat16": bf16, "int8": types.int8}
    codes |= {"int4": types.uint8, "int4_symmetric": types.uint8}
    for kind, dtype in codes.items():
        weight, halves = array(dtype, 2), array(f16, 2)
        packed = (weight, halves, halves) if kind.startswith("int") else (weight, weight, weight)
        yield Specimen(f"linear {kind}", linear.linear_kernels[kind], (rows, rows, *packed, vector, types.int64))
        yield Specimen(f"embed {kind}", linear.embed_kernels[kind], (rows, *packed, int32))

    for kind, dtype in (("float32", f32), ("float16", f16), ("bfloat16", bf16)):
        pages, pool = array(dtype, 4), array(dtype, 3)
        rope, attention = modules["rope"].rope_and_cache_kernel, modules["attention"].paged_attention_kernel
        yield Specimen(f"rope_and_cache {kind}", rope, (heads, heads, heads, rows, rows, int32, pages, pages, int64))
        sequences = (array(types.int32, 2), int32, int32)
        yield Specimen(
            f"paged_attention {kind}",
            attention,
            (array(f32, 3), heads, pages, pages, *sequences, f32, types.int64, f32, types.int64, heads),
        )
        blocks = modules["blocks"]
        yield Specimen(f"copy_blocks {kind}", blocks.copy_blocks_kernel, (pool, pool, int64, int64))
        yield Specimen(f"swap_blocks {kind}", blocks.swap_blocks_kernel, (pool, pool, int64, int64))


def all_kernels() -> set[str]:
    """The names of all kernels that the modules define, those made by factories among them."""
    names = set()
    for module in MODULES:
        for value in vars(importlib.import_module(f"minipage.kernels.cuda.{module}")).values():
            for kernel in value.values() if isinstance(value, dict) else (value,):
                if hasattr(kernel, "py_func") and not kernel.targetoptions.get("device"):
                    names.add(kernel.py_func.__name__)
    return names


def compile_kernel(specimen: Specimen, capability: tuple[int, int]) -> KernelCode:
    """Compile for a GPU of that compute capability; RuntimeError with the assembler's words where it refuses."""
    from numba import cuda

    with _without_driver(capability):
        ptx, _ = cuda.compile_ptx(specimen.kernel.py_func, specimen.signature, cc=capability)
    arch = f"sm_{capability[0]}{capability[1]}"
    report = _assemble(ptx.strip("\0 \n") + "\n", arch)

    def number(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, report))

    return KernelCode(
        specimen.name,
        arch,
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill"),
        stack_bytes=number(r"(\d+) bytes stack"),
        shared_bytes=number(r"(\d+) bytes smem"),
        float64_instructions=len(re.findall(r"\.f64\b", ptx)),
    )


def _assemble(ptx: str, arch: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [str(_ptxas()), "-v", "-arch", arch, str(source), "-o", str(Path(folder, "kernel.cubin"))]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"ptxas: {result.stdout}{result.stderr}")
    return result.stderr


def _ptxas() -> str | None:
    """The assembler of the installed packages, as NVVM is looked for there first; else that of a toolkit."""
    for folder in sys.path:
        for path in sorted(Path(folder).glob("nvidia/*/bin/ptxas")):
            return str(path)
    toolkit = Path("/usr/local/cuda/bin/ptxas")
    return shutil.which("ptxas") or (str(toolkit) if toolkit.exists() else None)


@contextmanager
def _without_driver(capability: tuple[int, int]) -> Iterator[None]:
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


def main() -> None:
    """Print what is missing, or all kernels' names and then each kernel's code."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    if reason := missing():
        print(json.dumps({"missing": reason}))
        return
    print(json.dumps({"kernels": sorted(all_kernels())}))
    for specimen in specimens():
        for capability in CAPABILITIES:
            code = compile_kernel(specimen, capability)
            print(json.dumps({"function": specimen.kernel.py_func.__name__, **code._asdict()}), flush=True)


if __name__ == "__main__":
    main()
