"""Writing quantised rows into the records of their panels; :mod:`..records` says how these are laid out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...ops import GROUP_SIZE, Array
from ..records import PANEL, PER_GROUP
from .grouped import INT4, INT8
from .share import Share, inner, part


def pack_of(kind: int) -> Callable[..., None]:
    """The kernel for a kind, a place in GROUP_KINDS."""

    def pack(records: Array, codes: Array, scales: Array, minima: Array, share: Share) -> None:
        """records uint8 [P, G, bytes] from codes uint8 [16 P, G, 32], and scales and minima uint16 [16 P, G]: float16 bits.

        Of the kinds without minima these are not read.
        """
        first, last = part(len(records), share)
        for panel in range(first, last):
            row = panel * PANEL
            for group in range(codes.shape[1]):
                record = records[panel, group]
                _pack_halves(record, scales, row, group)
                if kind == INT8:
                    _pack_pairs(record[PER_GROUP:], codes, row, group)
                elif kind == INT4:
                    _pack_halves(record[PER_GROUP:], minima, row, group)
                    _pack_quads(record[2 * PER_GROUP :], codes, row, group)
                else:
                    _pack_quads(record[PER_GROUP:], codes, row, group)

    return pack


@inner
def _pack_halves(target: Array, halves: Array, row: int, group: int) -> None:
    for lane in range(PANEL):
        bits = halves[row + lane, group]
        target[2 * lane] = np.uint8(bits & 0xFF)
        target[2 * lane + 1] = np.uint8(bits >> 8)


@inner
def _pack_pairs(target: Array, codes: Array, row: int, group: int) -> None:
    for lane in range(PANEL):
        for i in range(GROUP_SIZE):
            target[i // 2 * 2 * PANEL + 2 * lane + i % 2] = codes[row + lane, group, i]


@inner
def _pack_quads(target: Array, codes: Array, row: int, group: int) -> None:
    half = PANEL // 2
    for lane in range(half):
        for i in range(GROUP_SIZE):
            low, high = codes[row + lane, group, i], codes[row + half + lane, group, i]
            target[i // 4 * 4 * half + 4 * lane + i % 4] = low | high << np.uint8(4)
