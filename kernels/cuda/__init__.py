"""The op set as Numba CUDA kernels, on CuPy arrays, or on NumPy arrays in Numba's simulator.

Each module says how the threads of its kernels share the work; ``scripts/kernel_report.py`` holds them to registers, shared
memory and wide loads with which a GPU is kept busy. ``NUMBA_ENABLE_CUDASIM=1``, set before Numba is first imported, chooses
the simulator (:mod:`.simulator`).
"""

from ..dtypes import STORAGE
from .attention import paged_attention
from .blocks import copy_blocks, swap_blocks
from .elementwise import add, gated_activation, gather_rows
from .embedding import embed
from .linear import linear
from .norm import add_rms_norm, layer_norm, rms_norm
from .rope import rope, rope_and_cache
from .sampling import sample
from .weights import empty_weight, pack_groups, pack_rows, unpack_rows

#: Pages of K and V are [nb, KVH, B, D]: neighbouring threads read neighbouring dims of a token, 16 bytes each.
KEY_AXES = (0, 1, 2, 3)
VALUE_AXES = (0, 1, 2, 3)
PAGE_KINDS = tuple(STORAGE)  # there are no kernels for int8 pages
SAMPLES = True

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
    "sample",
    "swap_blocks",
    "unpack_rows",
]
