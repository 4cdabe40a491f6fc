"""The layout of quantised weights: panels of 16 outputs side by side, so that a vector lane is an output.

A panel is one stream of memory: a record of bytes for each group of 32 inputs,

    int8              16 scales             | 16 pairs of inputs x 16 outputs x 2
    int4              16 scales | 16 minima |  8 quads of inputs x  8 pairs of outputs x 4
    int4_symmetric    16 scales             |  as int4

Scales and minima are float16. The codes of neighbouring inputs lie together, since instructions multiply pairs of int16, or
quads of bytes, and add them. A byte of the int4 kinds has output o in its low bits and output o + 8 in its high bits.
"""

from __future__ import annotations

import numpy as np

from ..ops import GROUP_SIZE, Array, Groups
from ..quantization import code_dtype

PANEL = 16  #: outputs of a panel
PER_GROUP = PANEL * 2  #: bytes of the scales of a record, or of its minima
RECORD_BYTES = {"int8": PER_GROUP + 512, "int4": 2 * PER_GROUP + 256, "int4_symmetric": PER_GROUP + 256}


def unpack_panel(kind: str, records: Array) -> Groups:
    """The 16 P rows of the records uint8 [P, G, bytes] of P panels."""
    count, num_groups = records.shape[:2]
    parts = []
    for i in range(2 if kind == "int4" else 1):
        halves = records[..., i * PER_GROUP : (i + 1) * PER_GROUP].view(np.float16)
        parts.append(halves.transpose(0, 2, 1).reshape(count * PANEL, num_groups))
    stored = records[..., len(parts) * PER_GROUP :]
    if kind == "int8":
        codes = stored.reshape(count, num_groups, 16, PANEL, 2).transpose(0, 3, 1, 2, 4)
    else:
        bytes_ = stored.reshape(count, num_groups, 8, PANEL // 2, 4).transpose(0, 3, 1, 2, 4)
        codes = np.concatenate([bytes_ & 15, bytes_ >> 4], axis=1)
    plain = np.ascontiguousarray(codes).reshape(count * PANEL, num_groups, GROUP_SIZE).view(code_dtype(kind))
    return Groups(plain, parts[0], parts[1] if kind == "int4" else None)
