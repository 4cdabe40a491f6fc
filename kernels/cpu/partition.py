"""How attention cuts its work; the op needs to know it as well as the code, for the memory that they share."""

from __future__ import annotations

_PART = 256  #: tokens of a part, about
_ROWS = 24  #: rows of a task, about


def part_size(block_size: int) -> int:
    """Tokens of a part of a context: whole blocks."""
    return max(1, _PART // block_size) * block_size


def run_length(group: int) -> int:
    """Queries of a task, each with the ``group`` heads that share a kv head."""
    return max(1, _ROWS // group)
