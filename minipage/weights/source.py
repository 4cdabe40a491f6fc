"""What the loader reads tensors from, whatever the file format."""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt

Array = npt.NDArray[Any]


class TensorSource(Protocol):
    """Tensors by their Hugging Face names, read by ranges of rows. Opening one reads headers only.

    A source keeps its files open until :meth:`close`. Files that cannot be read raise ModelLoadError.
    """

    path: str  #: the folder or file that the user named
    readable: tuple[str, ...]  #: the dtypes that :meth:`read` understands, as the file format calls them

    def names(self) -> list[str]:
        """All tensors that there are."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """The dtype as the file calls it: "BF16", "Q4_K"."""
        ...

    def file(self, name: str) -> str:
        """The file that holds the tensor, for messages."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Rows start..stop of the first axis in a fresh array: float32, float16, or uint16 for the bits of bfloat16."""
        ...

    def close(self) -> None: ...
