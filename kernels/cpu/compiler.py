"""From a Python function to an object file, by Numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, registry, sigutils, types
from numba.core.compiler_lock import global_compiler_lock
from numba.np.arrayobj import populate_array

from .native.share import OPTIONS

_WORD = ir.IntType(64)
_SHARE = types.UniTuple(types.int64, 3)  # type: ignore[attr-defined]


@global_compiler_lock  # type: ignore[untyped-decorator]
def compile_kernel(function: Callable[..., None], signature: str, entry: str) -> bytes:
    """An object file with one function, named ``entry``, that reads the arguments of ``function`` from words and calls it."""
    kinds = (*sigutils.normalize_signature(f"void({signature})")[0], _SHARE)
    dispatcher = numba.njit(**OPTIONS)(function)
    dispatcher.compile(kinds)
    compiled = dispatcher.overloads[kinds]
    context = registry.cpu_target.target_context
    codegen = context.codegen()
    library = codegen.create_library(entry)
    module = library.create_ir_module(entry)
    _add_entry(context, module, entry, compiled.fndesc, kinds)
    library.add_ir_module(module)
    library.add_linking_library(compiled.library)
    library.finalize()
    code: bytes = codegen._tm.emit_object(library._final_module)
    return code


def _add_entry(context: Any, module: Any, entry: str, description: Any, kinds: tuple[Any, ...]) -> None:
    parameters = [_WORD.as_pointer(), _WORD, _WORD, _WORD]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), parameters), entry)
    builder = ir.IRBuilder(function.append_basic_block())
    words, *share = function.args
    reader = _Words(context, builder, words)
    values = [reader.value(kind) for kind in kinds[:-1]]
    values.append(cgutils.pack_array(builder, share))
    callee = context.declare_function(module, description)
    context.call_conv.call_function(builder, callee, types.none, kinds, values)
    builder.ret_void()


class _Words:
    """Reads arguments from the words of a call, in order."""

    def __init__(self, context: Any, builder: Any, words: Any) -> None:
        self._context, self._builder, self._words, self._next = context, builder, words, 0

    def value(self, kind: Any) -> Any:
        """The next argument, of a Numba type."""
        builder = self._builder
        if isinstance(kind, types.Array):
            array = self._context.make_array(kind)(self._context, builder)
            data = builder.inttoptr(self._word(), array.data.type)
            shape = [self._word() for _ in range(kind.ndim)]
            strides = [self._word() for _ in range(kind.ndim)]
            item = self._context.get_constant(types.intp, kind.dtype.bitwidth // 8)
            populate_array(array, data, shape, strides, item, None)
            return array._getvalue()
        word = self._word()
        if kind == types.float64:
            return builder.bitcast(word, ir.DoubleType())
        if kind == types.float32:
            return builder.bitcast(builder.trunc(word, ir.IntType(32)), ir.FloatType())
        return word

    def _word(self) -> Any:
        address = self._builder.gep(self._words, [ir.Constant(_WORD, self._next)])
        self._next += 1
        return self._builder.load(address)
