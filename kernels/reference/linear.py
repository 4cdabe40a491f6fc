"""Linear layers and the embedding."""

from __future__ import annotations

from ..ops import Array, PackedWeight
from .weights import select_rows, unpack_rows


def embed(out: Array, weight: PackedWeight, token_ids: Array) -> None:
    """out [T, H] = rows ``token_ids`` of ``weight`` (V, H)."""
    out[:] = select_rows(weight, token_ids)


def linear(out: Array, x: Array, weight: PackedWeight, bias: Array | None) -> None:
    """out [T, N] = x [T, K] @ weight.T + bias."""
    rows = unpack_rows(weight, 0, weight.shape[0])
    # One matrix-vector product a token: a library may sum a matrix product in another order for another T.
    for token in range(len(x)):
        out[token] = rows @ x[token]
        if bias is not None:
            out[token] += bias
