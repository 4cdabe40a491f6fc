"""Machine code of the CPU's kernels, from the folder where it is kept to an address in memory.

Loading needs llvmlite alone: what took Numba half a minute to compile is there in milliseconds, without importing Numba.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from ..code_folder import CodeFolder
from . import isa

ENTRY = "minipage_entry"  #: the name of a kernel's function in its object file
_lock = threading.Lock()
_engines: list[Any] = []  # what owns the code; never given back, since addresses of it are everywhere


def _versions() -> tuple[str, ...]:
    return llvmlite.__version__, llvm.get_default_triple(), *isa.target()


folder = CodeFolder(Path(__file__).parent, _versions, ".o")  #: of these sources for this machine's instructions


def machine_code(name: str, variant: str, compile: Callable[[], bytes]) -> int:
    """The address of a kernel's code, which is compiled unless it is in the folder.

    ``name`` and ``variant`` say which kernel it is; ``compile`` makes an object file that has it as ENTRY.
    """
    code = folder.code(name, variant, compile)
    with _lock:
        return _load(code)


def _load(code: bytes) -> int:
    _initialize()
    nothing = llvm.parse_assembly("")
    engine = llvm.create_mcjit_compiler(nothing, _target_machine())
    engine.remove_module(nothing)  # to compile it would take three times as long as the rest
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return int(engine.get_function_address(ENTRY))


@cache
def _initialize() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def _target_machine() -> Any:
    return llvm.Target.from_default_triple().create_target_machine(jit=True)
