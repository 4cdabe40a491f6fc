"""What the loader reads tensors from, whatever the file format."""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt

from ..kernels.ops import Groups

Array = npt.NDArray[Any]


class TensorReader(Protocol):
    """Tensors by their Hugging Face names, read by ranges of rows. Several threads may read at once.

    Files that cannot be read raise ModelLoadError.
    """

    def kind(self, name: str) -> str | None:
        """The weight kind that keeps the tensor as the file has it, or as nearly as any; None: the config's dtype says."""
        ...

    def file(self, name: str) -> str:
        """The file that holds the tensor, for messages."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Rows start..stop of the first axis in a fresh array: float32, float16, or uint16 for the bits of bfloat16."""
        ...

    def read_groups(self, name: str, start: int = 0, stop: int | None = None) -> Groups:
        """Rows start..stop of a matrix whose :meth:`kind` is a quantised one, in that kind."""
        ...


class TensorSource(TensorReader, Protocol):
    """The tensors of a checkpoint. Opening one reads headers only; it keeps its files open until :meth:`close`."""

    path: str  #: the folder or file that the user named

    @property
    def readable(self) -> tuple[str, ...]:
        """The dtypes that :meth:`read` understands, as the file format calls them."""
        ...

    def names(self) -> list[str]:
        """All tensors that there are."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """The dtype as the file calls it: "BF16", "Q4_K"."""
        ...

    def close(self) -> None: ...
