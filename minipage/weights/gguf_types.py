"""Types of tensors in GGUF files.

The gguf package knows them all, but takes as long to import as this project itself. So the types that need nothing else of
it are written down here, and it is asked for the others.
"""

from __future__ import annotations

from typing import NamedTuple


class TensorType(NamedTuple):
    """How rows are stored: ``block_bytes`` bytes for each ``block`` numbers."""

    number: int  #: that stands for it in files
    name: str
    block: int
    block_bytes: int


#: The float types, and those whose codes are kept as they are.
KNOWN_TYPES = (
    TensorType(0, "F32", 1, 4),
    TensorType(1, "F16", 1, 2),
    TensorType(2, "Q4_0", 32, 18),
    TensorType(3, "Q4_1", 32, 20),
    TensorType(6, "Q5_0", 32, 22),
    TensorType(8, "Q8_0", 32, 34),
    TensorType(12, "Q4_K", 256, 144),
    TensorType(30, "BF16", 1, 2),
)
_BY_NUMBER = {type.number: type for type in KNOWN_TYPES}


def tensor_type(number: int) -> TensorType:
    """The type that a number in a file stands for; ValueError where there is none."""
    known = _BY_NUMBER.get(number)
    if known is None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        type = GGMLQuantizationType(number)
        known = _BY_NUMBER[number] = TensorType(number, type.name, *GGML_QUANT_SIZES[type])
    return known
