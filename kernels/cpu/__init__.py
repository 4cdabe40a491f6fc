"""The op set for the CPU: Numba, and NumPy where an op only copies.

    linear, norm, attention, ...    the ops: each names its kernels and how its work may be cut, and calls them
    native                          the kernels: what is compiled
    kernel, compiler, code, isa     a kernel's signature and arguments; compiling it, keeping it; for which instructions
    team                            the threads, and steps that are recorded once and run as one native call
    weights, records                the layout of packed weights

Start with an op in :mod:`.norm` and its code in :mod:`.native.norm`. Under NUMBA_DISABLE_JIT=1 everything here runs as plain
Python, where a debugger can step through it.
"""

from __future__ import annotations

from ..pages import PAGE_STORAGE
from .attention import paged_attention
from .blocks import copy_blocks, swap_blocks
from .elementwise import add, gated_activation, gather_rows
from .linear import embed, linear
from .norm import add_rms_norm, layer_norm, rms_norm
from .rope import rope, rope_and_cache
from .weights import empty_weight, pack_groups, pack_rows, unpack_rows

KEY_AXES = (0, 1, 3, 2)
VALUE_AXES = (0, 1, 2, 3)
PAGE_KINDS = tuple(PAGE_STORAGE)
SAMPLES = False

__all__ = [
    "KEY_AXES",
    "PAGE_KINDS",
    "SAMPLES",
    "VALUE_AXES",
    "add",
    "add_rms_norm",
    "copy_blocks",
    "embed",
    "empty_weight",
    "gated_activation",
    "gather_rows",
    "layer_norm",
    "linear",
    "pack_groups",
    "pack_rows",
    "paged_attention",
    "rms_norm",
    "rope",
    "rope_and_cache",
    "swap_blocks",
    "unpack_rows",
]
