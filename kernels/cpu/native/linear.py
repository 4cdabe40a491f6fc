"""Linear layers and the embedding. A piece of work is some panels of 16 outputs, for all tokens."""

from __future__ import annotations

from collections.abc import Callable

from ...ops import GROUP_SIZE, Array
from ..records import PANEL
from .grouped import decode, multiply_groups
from .microkernel import multiply
from .share import Share, inner, part
from .stack import floats
from .storage import widen_element

_AHEAD = 1024  #: bytes that are fetched ahead of those in use


@inner
def _write(out: Array, tile: Array, bias: Array, p: int) -> None:
    """Write a tile to the columns of panel ``p``, the last of which may have fewer than 16, with the bias added."""
    first = p * PANEL
    count = min(PANEL, out.shape[1] - first)
    for t in range(len(tile)):
        if len(bias) > 0:
            for i in range(count):
                tile[t, i] += bias[first + i]
        if count == PANEL:
            for i in range(PANEL):
                out[t, first + i] = tile[t, i]
        else:
            for i in range(count):
                out[t, first + i] = tile[t, i]


# ---- float weights -----------------------------------------------------------------------------------------------------


def linear(out: Array, x: Array, panels: Array, bias: Array, share: Share) -> None:
    """out [T, N] = x [T, K] @ weights + bias; panels [P, K, 16] in a float storage, bias [N] or [0]."""
    first, last = part(len(panels), share)
    for p in range(first, last):
        t = 0
        while t + 6 <= len(x) and t + 8 != len(x):  # as many rows as fill the registers, then fewer; 8 are twice 4
            _six_rows(out[t:], x[t:], panels[p], bias, p)
            t += 6
        while t + 4 <= len(x):
            _four_rows(out[t:], x[t:], panels[p], bias, p)
            t += 4
        if t + 2 <= len(x):
            _two_rows(out[t:], x[t:], panels[p], bias, p)
            t += 2
        if t < len(x):
            _one_row(out[t:], x[t:], panels[p], bias, p)


def _rows_of_floats(rows: int) -> Callable[..., None]:
    @inner
    def run(out: Array, x: Array, panel: Array, bias: Array, p: int) -> None:
        tile = floats(rows, PANEL)
        multiply(rows, PANEL, PANEL, False, x, panel, tile, _AHEAD)
        _write(out, tile, bias, p)

    return run


_six_rows, _four_rows, _two_rows, _one_row = map(_rows_of_floats, (6, 4, 2, 1))


def embed(out: Array, panels: Array, token_ids: Array, share: Share) -> None:
    """out [T, K] = rows ``token_ids`` of the weights."""
    first, last = part(len(token_ids), share)
    for t in range(first, last):
        panel, lane = token_ids[t] // PANEL, token_ids[t] % PANEL
        for k in range(out.shape[1]):
            out[t, k] = widen_element(panels[panel, k, lane])


# ---- quantised weights -------------------------------------------------------------------------------------------------


def linear_of(kind: int) -> Callable[..., None]:
    """The kernel for a kind, a place in GROUP_KINDS."""
    four_rows, two_rows, one_row = _rows_of_codes(kind, 4), _rows_of_codes(kind, 2), _rows_of_codes(kind, 1)

    def linear_quantized(
        out: Array, codes: Array, scales: Array, sums: Array, records: Array, bias: Array, share: Share
    ) -> None:
        """out [T, N] = x @ weights + bias; x as :mod:`.activations` quantises it, records uint8 [P, G, bytes]."""
        first, last = part(len(records), share)
        for p in range(first, last):
            t = 0
            while t + 4 <= len(out):
                four_rows(out[t:], codes[t:], scales[t:], sums[t:], records[p], bias, p)
                t += 4
            if t + 2 <= len(out):
                two_rows(out[t:], codes[t:], scales[t:], sums[t:], records[p], bias, p)
                t += 2
            if t < len(out):
                one_row(out[t:], codes[t:], scales[t:], sums[t:], records[p], bias, p)

    return linear_quantized


def _rows_of_codes(kind: int, rows: int) -> Callable[..., None]:
    @inner
    def run(out: Array, codes: Array, scales: Array, sums: Array, records: Array, bias: Array, p: int) -> None:
        tile = floats(rows, PANEL)
        multiply_groups(kind, rows, codes, scales, sums, records, tile)
        _write(out, tile, bias, p)

    return run


def embed_of(kind: int) -> Callable[..., None]:
    """The kernel for a kind, a place in GROUP_KINDS."""

    def embed_quantized(out: Array, records: Array, token_ids: Array, share: Share) -> None:
        """out [T, K] = rows ``token_ids`` of the weights."""
        first, last = part(len(token_ids), share)
        for t in range(first, last):
            panel, lane = token_ids[t] // PANEL, token_ids[t] % PANEL
            for k in range(out.shape[1]):
                out[t, k] = decode(kind, records[panel, k // GROUP_SIZE], lane, k % GROUP_SIZE)

    return embed_quantized
