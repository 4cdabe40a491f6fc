"""What a kernel is compiled for and held to, and the types of its arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

from numba.cuda import types

from minipage.kernels.cuda.launcher import INTEGER, SINGLE, layout

F32, F16, BF16, I8, U8 = types.float32, types.float16, types.uint16, types.int8, types.uint8
I32, I64, U32, U64 = types.int32, types.int64, types.uint32, types.uint64

#: Storage dtypes of the float kinds, by name.
FLOATS = {"float32": F32, "float16": F16, "bfloat16": BF16}


class Launch(NamedTuple):
    """A launch at a shape that shows the kernel at work: what it covers, and what it must at least read and write."""

    shape: str
    blocks: int  #: of the grid
    num_bytes: int


class Specimen(NamedTuple):
    """A kernel with the argument types that it is compiled for, and its budget beyond what holds for all."""

    name: str
    kernel: Any
    signature: tuple[Any, ...]
    threads: int  #: of a block
    launch: Launch
    wide_loads: bool = False  #: must read global memory 16 bytes at a time
    tensor_cores: bool = False  #: must multiply on tensor cores
    fills_gpu: bool = False  #: its launch must have a block for each multiprocessor

    @property
    def parameters(self) -> str:
        """What a launch passes, as :func:`minipage.kernels.cuda.launcher.layout` has it."""
        return layout(tuple(map(_kind, self.signature)))


def _kind(argument: Any) -> Any:
    """The kind of an argument at a launch; of an array's, dimensions are what matters here."""
    if isinstance(argument, types.Array):
        return "", argument.ndim, True
    return SINGLE if argument == F32 else INTEGER


def array(dtype: Any, ndim: int, layout: str = "C") -> Any:
    """The type of an array; layout "A" is one of any strides."""
    return types.Array(dtype, ndim, layout)


ROWS, VECTOR = array(F32, 2), array(F32, 1)
IDS, SLOTS = array(I32, 1), array(I64, 1)
