"""Conversions inside CUDA kernels: the LLVM code that a GPU gets, run on the CPU, and what the simulator uses instead."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir

from minipage.device import open_device
from minipage.kernels.dtypes import STORAGE, convert, to_float32

pytest.importorskip("numba_cuda")
pytest.importorskip("greenlet")
open_device("cuda-sim")  # turns the simulator on, before Numba's CUDA target is first imported
formats = importlib.import_module("minipage.kernels.cuda.formats")

KINDS = ["float16", "bfloat16"]
BITS = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def emitted(emit: Callable[[Any, Any], Any], narrows: bool) -> Callable[[np.ndarray], np.ndarray]:
    """The conversion as a function of arrays of bits, compiled from its LLVM code for this CPU."""
    pointers = formats.BITS32.as_pointer() if narrows else formats.BITS16.as_pointer()
    results = formats.BITS16.as_pointer() if narrows else formats.BITS32.as_pointer()
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [results, pointers]), "convert")
    builder = ir.IRBuilder(function.append_basic_block())
    out, source = function.args
    value = builder.load(source)
    result = emit(builder, builder.bitcast(value, formats.SINGLE) if narrows else value)
    builder.store(result if narrows else builder.bitcast(result, formats.BITS32), out)
    builder.ret_void()
    engine = compile_for_cpu(module)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(engine.get_function_address("convert"))

    def convert_all(bits: np.ndarray) -> np.ndarray:
        converted = np.empty(len(bits), np.uint16 if narrows else np.uint32)
        for i in range(len(bits)):
            call(converted[i:].ctypes.data, bits[i:].ctypes.data)
        return converted

    convert_all.engine = engine  # type: ignore[attr-defined]  # owns the machine code
    return convert_all


def compile_for_cpu(module: ir.Module) -> Any:
    """An execution engine with the module's machine code, for the instructions that this CPU has."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple().create_target_machine(cpu=llvm.get_host_cpu_name(), features=features)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), target)
    engine.finalize_object()
    return engine


def same_floats(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two float arrays have the same bits, NaN standing for NaN."""
    nan = np.isnan(a)
    return np.array_equal(nan, np.isnan(b)) and np.array_equal(a[~nan].view(np.uint32), b[~nan].view(np.uint32))


def hard_to_round() -> np.ndarray:
    """float32 of all magnitudes, the ties of both 16-bit formats, the largest ones, infinities and NaN."""
    rng = np.random.default_rng(0)
    anything = rng.integers(0, 1 << 32, 4000, dtype=np.uint32)
    near_half = (rng.standard_normal(4000) * 10.0 ** rng.uniform(-9, 6, 4000)).astype(np.float32).view(np.uint32)
    ties = [(near_half & ~np.uint32(mask)) | np.uint32((mask + 1) >> 1) for mask in (0xFFFF, 0x1FFF)]
    special = np.array(
        [0, 1, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x477FE000, 0x477FEFFF, 0x477FF000], np.uint32
    )
    return np.concatenate([anything, near_half, *ties, special, special | 0x80000000])


@pytest.mark.parametrize("kind", KINDS)
def test_emitted_widening_is_exact(kind: str) -> None:
    """Every one of the 65,536 bit patterns becomes the float32 that it stands for."""
    widened = emitted(formats.WIDENING["float16" if kind == "float16" else "uint16"], narrows=False)(BITS)
    assert same_floats(widened.view(np.float32), to_float32(BITS.view(STORAGE[kind])))


@pytest.mark.parametrize("kind", KINDS)
def test_emitted_narrowing_rounds_to_nearest_even(kind: str) -> None:
    """Ties go to even, overflow to infinity, NaN to NaN, as NumPy and the reference do it."""
    bits = hard_to_round()
    narrowed = emitted(formats.NARROWING["float16" if kind == "float16" else "uint16"], narrows=True)(bits)
    assert same_floats(to_float32(narrowed.view(STORAGE[kind])), to_float32(narrow_by_numpy(bits, kind)))


@pytest.mark.parametrize("kind", ["float32", *KINDS])
def test_the_simulator_converts_alike(kind: str) -> None:
    """What kernels call in the simulator gives the same numbers, both ways."""
    bits = hard_to_round()[::7]
    storage = np.empty(1, STORAGE[kind])
    with np.errstate(over="ignore"):  # as within a launch
        narrowed = np.array([formats.narrow(storage, x) for x in bits.view(np.float32)], STORAGE[kind])
    assert same_floats(to_float32(narrowed), to_float32(narrow_by_numpy(bits, kind)))
    widened = np.array([formats.widen(x) for x in narrowed])
    assert widened.dtype == np.float32
    assert same_floats(widened, to_float32(narrowed))


def narrow_by_numpy(bits: np.ndarray, kind: str) -> np.ndarray:
    x = bits.view(np.float32)
    if kind != "float16":
        return convert(x, kind)
    with np.errstate(over="ignore"):
        return x.astype(np.float16)
