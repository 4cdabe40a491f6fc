"""Linear layers and the embedding. A piece of work is some panels of 16 outputs, for all tokens."""

from __future__ import annotations

from collections.abc import Callable

from ...ops import GROUP_SIZE, Array
from ..records import PANEL
from .grouped import decode, multiply_groups
from .microkernel import Ahead, multiply_panel
from .share import Share, inner, part
from .stack import floats
from .storage import widen_element

_STREAM = 1024  #: bytes between what is used and what is fetched for one token, which leaves no time for a whole panel


@inner
def _pace(num_bytes: int, rows: int, total: int) -> int:
    """Of each ``num_bytes`` of the next panel, those that a tile of ``rows`` of ``total`` tokens fetches."""
    return (num_bytes * rows + total - 1) // max(total, 1)


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
    total, steps, row_bytes = len(x), panels.shape[1], PANEL * panels.itemsize
    six, four = _pace(row_bytes, 6, total), _pace(row_bytes, 4, total)
    two, one = _pace(row_bytes, 2, total), _pace(row_bytes, 1, total)
    for p in range(first, last):
        t, start = 0, steps * row_bytes if total > 1 else _STREAM
        # As many rows as fill the registers, then fewer; 8 are twice 4. Few tokens wait for memory more than for arithmetic.
        while t + 6 <= total and t + 8 != total and total >= 12:
            _six_rows(out[t:], x[t:], panels[p], bias, p, Ahead(start, six))
            t, start = t + 6, start + steps * six
        while t + 4 <= total:
            _four_rows(out[t:], x[t:], panels[p], bias, p, Ahead(start, four))
            t, start = t + 4, start + steps * four
        if t + 2 <= total:
            _two_rows(out[t:], x[t:], panels[p], bias, p, Ahead(start, two))
            t, start = t + 2, start + steps * two
        if t < total:
            _one_row(out[t:], x[t:], panels[p], bias, p, Ahead(start, one))


def _rows_of_floats(rows: int) -> Callable[..., None]:
    @inner
    def run(out: Array, x: Array, panel: Array, bias: Array, p: int, ahead: Ahead) -> None:
        tile = floats(rows, PANEL)
        multiply_panel(rows, x, panel, tile, ahead)
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
        total, steps, record_bytes = len(out), records.shape[1], records.shape[2]
        four, two = _pace(record_bytes, 4, total), _pace(record_bytes, 2, total)
        one = _pace(record_bytes, 1, total)
        for p in range(first, last):
            t, start = 0, steps * record_bytes if total > 1 else _STREAM
            while t + 4 <= total:
                four_rows(out[t:], codes[t:], scales[t:], sums[t:], records[p], bias, p, Ahead(start, four))
                t, start = t + 4, start + steps * four
            if t + 2 <= total:
                two_rows(out[t:], codes[t:], scales[t:], sums[t:], records[p], bias, p, Ahead(start, two))
                t, start = t + 2, start + steps * two
            if t < total:
                one_row(out[t:], codes[t:], scales[t:], sums[t:], records[p], bias, p, Ahead(start, one))

    return linear_quantized


def _rows_of_codes(kind: int, rows: int) -> Callable[..., None]:
    @inner
    def run(
        out: Array, codes: Array, scales: Array, sums: Array, records: Array, bias: Array, p: int, ahead: Ahead
    ) -> None:
        tile = floats(rows, PANEL)
        multiply_groups(kind, rows, codes, scales, sums, records, tile, ahead)
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
