"""Kernels: functions of ``native/``, compiled to machine code when they are first used, and called by address.

A call is a row of 64-bit words: for an array its address, shape and strides in bytes, for a number its value. So a call can
be kept and made again without Python, and a whole step becomes a table of (code, words); see :mod:`.team`.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .code import ENTRY, machine_code

#: Whether kernels run as plain Python, where a debugger can step through them.
JIT_IS_DISABLED = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")


class Parameter(NamedTuple):
    """An argument that a kernel takes, as its signature says."""

    dtype: str
    ndim: int  #: 0 for a number
    is_contiguous: bool

    @classmethod
    def parse(cls, text: str) -> Parameter:
        """From Numba's notation: ``int64``, ``float32[:, ::1]`` (contiguous) or ``float32[:, :]`` (any strides)."""
        found = re.fullmatch(r"(\w+)(?:\[([:1, ]+)\])?", text)
        assert found is not None, text
        axes = found[2].split(",") if found[2] else []
        return cls(found[1], len(axes), bool(axes) and axes[-1].strip() == "::1")

    def words(self, value: Any) -> list[int]:
        """A value of this parameter as 64-bit words. Raises TypeError for an array that does not fit."""
        if not self.ndim:
            return [_bits(value, self.dtype)]
        fits = isinstance(value, np.ndarray) and value.dtype == self.dtype and value.ndim == self.ndim
        if not fits or (self.is_contiguous and not value.flags.c_contiguous):
            found = f"{value.dtype} {value.shape} {value.strides}" if isinstance(value, np.ndarray) else repr(value)
            layout = ", contiguous" if self.is_contiguous else ""
            raise TypeError(f"an array of {self.dtype} with {self.ndim} axes{layout} is wanted, not {found}")
        return [value.__array_interface__["data"][0], *value.shape, *value.strides]


def _bits(value: float, dtype: str) -> int:
    code = {"int64": "q", "float32": "fxxxx", "float64": "d"}[dtype]
    word: int = struct.unpack("q", struct.pack(code, value))[0]
    return word


class Kernel:
    """A function of ``native/`` for one signature. Its last parameter is its :class:`.native.share.Share` of the work.

    One signature and not Numba's own dispatch, which would compile a function anew for every memory layout that it meets: a
    view of some columns counts as contiguous for one token and as strided for more.
    """

    def __init__(self, source: str, signature: str, *constants: int) -> None:
        """``source`` is "module:function" within ``native/``; it is imported only if it has to be compiled.

        With ``constants`` the function makes the one that is meant, for these numbers.
        """
        self.source = source
        self.signature = signature
        self.constants = constants
        self.parameters = tuple(map(Parameter.parse, re.findall(r"\w+(?:\[[^\]]*\])?", signature)))

    def words(self, args: tuple[Any, ...]) -> list[int]:
        """The words of a call."""
        return [word for kind, arg in zip(self.parameters, args, strict=True) for word in kind.words(arg)]

    @functools.cached_property
    def function(self) -> Callable[..., None]:
        """The function in Python."""
        module, name = self.source.split(":")
        found = getattr(importlib.import_module(f".native.{module}", __package__), name)
        function: Callable[..., None] = found(*self.constants) if self.constants else found
        return function

    @property
    def identity(self) -> tuple[str, str]:
        """Its name, and what tells it from others of that name."""
        return self.source.replace(":", "."), repr((self.signature, self.constants))

    @property
    def is_loaded(self) -> bool:
        """Whether its :attr:`address` has been asked for."""
        return "address" in vars(self)

    @functools.cached_property
    def address(self) -> int:
        """Where its machine code is: ``void (*)(int64 *words, int64 piece, int64 num_pieces, int64 thread)``."""
        return machine_code(*self.identity, self._compile)

    def _compile(self) -> bytes:
        from .compiler import compile_kernel

        code: bytes = compile_kernel(self.function, self.signature, ENTRY)
        return code
