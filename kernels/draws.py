"""What ``sample`` is told of each row of logits: records that the host fills and that kernels read as words."""

from __future__ import annotations

import numpy as np

#: How a token is drawn from a row.
DRAW = np.dtype(
    [
        ("temperature", "<f4"),  # what logits are divided by; 0: take the largest, of equal ones that of the lowest id
        ("top_k", "<u4"),  # how many of the largest logits are left, of equal ones those of the lowest ids; 0: all
        ("min_p", "<f4"),  # how likely a token must be, compared with the most likely one; 0: however unlikely
        ("top_p", "<u8"),  # what part of the probability is left, in units of 2**-64; 0: all
        ("seed", "<u8"),  # of the random number, with child and position: see kernels.philox
        ("child", "<u4"),
        ("position", "<u4"),
    ]
)
DRAW_WORDS = DRAW.itemsize // 4  #: of 32 bits


def as_words(draws: np.ndarray) -> np.ndarray:
    """Records [R] of DRAW as the array [R, DRAW_WORDS] uint32 that ``sample`` takes."""
    return draws.view(np.uint32).reshape(len(draws), DRAW_WORDS)
