"""Writing quantised rows into the records of their panels; :mod:`..records` says how these are laid out.

All of it moves pairs of bytes: a scale is one, and so are two codes of int8, or four of the int4 kinds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...ops import GROUP_SIZE, Array
from ..records import PANEL
from .grouped import INT4, INT8
from .share import Share, inner, part

_LOW, _HIGH = np.uint16(0x0F0F), np.uint16(0xF0F0)  #: halves of two bytes
_FOUR = np.uint16(4)


def pack_of(kind: int) -> Callable[..., None]:
    """The kernel for a kind, a place in GROUP_KINDS."""

    def pack(records: Array, codes: Array, scales: Array, minima: Array, share: Share) -> None:
        """Records uint16 [P, G, bytes / 2] from scales and minima, float16 as uint16 [16 P, G], and codes.

        Codes are uint16 [16 P, G, n]: two to an element for int8, four, as in packed groups, for the int4 kinds. Of the kinds
        without minima these are not read.
        """
        first, last = part(len(records), share)
        for panel in range(first, last):
            row = panel * PANEL
            for group in range(codes.shape[1]):
                record = records[panel, group]
                _pack_halves(record, scales, row, group)
                if kind == INT8:
                    _pack_pairs(record[PANEL:], codes, row, group)
                elif kind == INT4:
                    _pack_halves(record[PANEL:], minima, row, group)
                    _pack_quads(record[2 * PANEL :], codes, row, group)
                else:
                    _pack_quads(record[PANEL:], codes, row, group)

    return pack


@inner
def _pack_halves(target: Array, halves: Array, row: int, group: int) -> None:
    for lane in range(PANEL):
        target[lane] = halves[row + lane, group]


@inner
def _pack_pairs(target: Array, codes: Array, row: int, group: int) -> None:
    for lane in range(PANEL):
        for pair in range(GROUP_SIZE // 2):
            target[pair * PANEL + lane] = codes[row + lane, group, pair]


@inner
def _pack_quads(target: Array, codes: Array, row: int, group: int) -> None:
    lanes, pairs = PANEL // 2, GROUP_SIZE // 4
    for lane in range(lanes):
        for pair in range(pairs):
            left, right = codes[row + lane, group, pair], codes[row + lanes + lane, group, pair]
            place = (pair // 2 * lanes + lane) * 2 + pair % 2
            target[place] = left & _LOW | (right & _LOW) << _FOUR
            target[place + PANEL * pairs // 2] = left >> _FOUR & _LOW | right & _HIGH
