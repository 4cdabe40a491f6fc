"""Storages of K and V pages: those of floats, and int8 with a scale for each token and kv head.

A token's x [D] of a kv head is stored as codes int8 and a scale float32: scale = max|x| / 127, code = x * (127 / max|x|) to
nearest, ties to even; zeros where max|x| is at most 1e-30, and a scale of NaN where x has a NaN or an infinity. The scales lie
in the block, so that copying bytes copies them: to whatever moves pages, these just have D + 4 dims instead of D.
:class:`minipage.kernels.ops.Ops` says where.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .dtypes import STORAGE

SCALE_BYTES = 4  #: of the float32 of a token and kv head in int8 pages

#: NumPy dtype that stores each kind of pages.
PAGE_STORAGE: dict[str, np.dtype[Any]] = {**STORAGE, "int8": np.dtype(np.int8)}


def page_dim(head_dim: int, kind: str) -> int:
    """Elements that pages of a kind have for each K or V of ``head_dim`` numbers: D, or in int8 D + 4."""
    return head_dim + SCALE_BYTES if kind == "int8" else head_dim
