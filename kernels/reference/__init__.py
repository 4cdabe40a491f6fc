"""The op set in plain NumPy: slow, small, and meant to be obviously right. The truth that the others are tested against."""

from __future__ import annotations

from ..pages import PAGE_STORAGE
from .attention import paged_attention
from .blocks import copy_blocks, swap_blocks
from .elementwise import add, gated_activation, gather_rows
from .linear import embed, linear
from .norm import add_rms_norm, layer_norm, rms_norm
from .rope import rope, rope_and_cache
from .sampling import sample
from .weights import empty_weight, pack_groups, pack_rows, unpack_rows

KEY_AXES = (0, 1, 3, 2)
VALUE_AXES = (0, 1, 2, 3)
PAGE_KINDS = tuple(PAGE_STORAGE)
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
