"""What one step of the engine hands to a model: a flat batch of T tokens of S sequences."""

from __future__ import annotations

from typing import Any, NamedTuple

Array = Any


class Batch(NamedTuple):
    """Device arrays of one step. Sequence s owns the tokens query_start[s] .. query_start[s+1], the last of its context."""

    token_ids: Array  #: [T] int32
    positions: Array  #: [T] int32, position in the sequence, from 0
    query_start: Array  #: [S+1] int32
    context_lens: Array  #: [S] int32, tokens in the cache once this step's are written
    slots: tuple[Array, ...]  #: for each group of layers [T] int64, block * block_size + offset
    block_tables: tuple[Array, ...]  #: for each group of layers [S, max_blocks] int32
