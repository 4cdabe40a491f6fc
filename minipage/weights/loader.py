"""Tensors to parameters: every name, shape and dtype is checked first, then weights are streamed a few megabytes at a time,
by several threads, so that loading needs little more memory than the loaded model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import ModelLoadError
from ..kernels.dtypes import to_float32
from ..kernels.ops import Ops, PackedWeight
from ..kernels.quantization import GROUP_KINDS, quantize
from ..models import Parameter, Plan, TensorSpec
from .source import Array, TensorReader, TensorSource

#: Of rows that are read and packed at once: four bytes a weight, or one where they stay quantised.
CHUNK_BYTES = 2 << 20
ROW_MULTIPLE = 64  #: rows of a weight at whose multiples chunks begin: no two threads write to one panel of a layout
MAX_THREADS = 8  #: that load at once; reading is what limits more, and each takes memory for a chunk
NAMES_SHOWN = 5


class Device(Protocol):
    """What loading needs of a device: its ops, memory for weights, arrays made from the host's, and a thread's right to them."""

    @property
    def ops(self) -> Ops: ...

    def weight_memory(self) -> Any: ...
    def array(self, host: npt.NDArray[Any]) -> Any: ...
    def begin_thread(self) -> None: ...


class Piece(NamedTuple):
    """Rows start..stop of a tensor, which become rows ``first``.. of ``weight``."""

    tensor: str
    start: int
    stop: int
    weight: PackedWeight
    first: int
    importance: Array | None  #: of the inputs, for weights that are quantised to 4 bits


def load_parameters(
    plan: Plan,
    source: TensorReader,
    kinds: Mapping[str, str],
    device: Device,
    importance: Mapping[str, Array],
    num_threads: int = 1,
) -> dict[str, Any]:
    """All parameters of ``plan`` by name: a PackedWeight for linear roles, float32 device arrays for vectors.

    The tensors have to fit the plan, as :func:`check` sees to. ``kinds`` has the kind of each weight, ``importance`` that of the
    inputs of those that are quantised to 4 bits (:mod:`.importance`), both by the parameter's name. Raises ModelLoadError where
    a value does not fit its kind.
    """
    loaded: dict[str, Any] = {}
    chunks: list[list[Piece]] = []
    memory = device.weight_memory()
    for parameter in plan.parameters:
        if parameter.role == "vector":
            loaded[parameter.name] = load_vector(parameter, source, device)
        else:
            shape = (sum(spec.shape[0] for spec in parameter.tensors), parameter.tensors[0].shape[1])
            weight = device.ops.empty_weight(shape, kinds[parameter.name], memory)
            loaded[parameter.name] = weight
            is_kept = all(stays_as_it_is(spec.name, weight, source) for spec in parameter.tensors)
            chunks += chunks_of(parameter, weight, importance.get(parameter.name), 1 if is_kept else 4)
    threads = ThreadPoolExecutor(min(num_threads, MAX_THREADS), "minipage-load", device.begin_thread)
    try:
        for _ in threads.map(lambda chunk: load_chunk(chunk, source, device.ops), chunks):
            pass
    finally:
        threads.shutdown(cancel_futures=True)
    return loaded


def load_vector(parameter: Parameter, source: TensorReader, device: Device) -> Any:
    """The stacked tensors as one float32 device array [N]."""
    return device.array(np.concatenate([to_float32(source.read(spec.name)) for spec in parameter.tensors]))


def stays_as_it_is(tensor: str, weight: PackedWeight, source: TensorReader) -> bool:
    """Whether a tensor is quantised as its weight is, so that codes and scales are only put in another place."""
    return weight.kind in GROUP_KINDS and source.kind(tensor) == weight.kind


def chunks_of(
    parameter: Parameter, weight: PackedWeight, importance: Array | None, bytes_each: int
) -> Iterator[list[Piece]]:
    """The rows of a weight in chunks for one thread each, and of every chunk the pieces of tensors that are stacked there."""
    num_rows, columns = weight.shape
    rows_at_once = max(1, CHUNK_BYTES // (bytes_each * columns * ROW_MULTIPLE)) * ROW_MULTIPLE
    for start in range(0, num_rows, rows_at_once):
        pieces, first = [], 0
        for spec in parameter.tensors:
            low, high = max(start, first), min(start + rows_at_once, first + spec.shape[0])
            if low < high:
                pieces.append(Piece(spec.name, low - first, high - first, weight, low, importance))
            first += spec.shape[0]
        yield pieces


def load_chunk(pieces: Sequence[Piece], source: TensorReader, ops: Ops) -> None:
    """Read and pack: rows that are quantised as the weight is stay as they are."""
    for tensor, start, stop, weight, first, importance in pieces:
        if stays_as_it_is(tensor, weight, source):
            ops.pack_groups(weight, first, source.read_groups(tensor, start, stop))
            continue
        rows = source.read(tensor, start, stop)
        try:
            if weight.kind in GROUP_KINDS:
                ops.pack_groups(weight, first, quantize(to_float32(rows), weight.kind, importance))
            else:
                ops.pack_rows(weight, first, rows)
        except ValueError as error:
            raise ModelLoadError(f"{source.file(tensor)}: tensor {tensor}: {error}") from error


# ---- checking ------------------------------------------------------------------------------------------------------


def check(plan: Plan, source: TensorSource) -> None:
    """Compare what the plan wants with what the source has; one ModelLoadError with all that is wrong."""
    present = dict.fromkeys(source.names())
    specs = {spec.name: spec for parameter in plan.parameters for spec in parameter.tensors}
    missing = [name for name in specs if name not in present]
    ignored = re.compile("|".join(plan.ignored) or r"(?!)")
    known = {*specs, *plan.superseded}
    unknown = [name for name in present if name not in known and not ignored.fullmatch(name)]
    problems = [
        *shortened(f"{source.path}: missing tensors: ", missing),
        *shortened(f"{source.path}: unknown tensors: ", unknown),
        *shortened("", list(misfits([specs[name] for name in present if name in specs], source)), "; "),
    ]
    if problems:
        raise ModelLoadError("; ".join(problems))
    for name in plan.superseded:
        if name in present:
            warnings.warn(f"{source.file(name)}: {name} is not used; the config ties it to the embedding", stacklevel=3)


def misfits(specs: Sequence[TensorSpec], source: TensorSource) -> Iterator[str]:
    """A sentence for each tensor whose shape or dtype is not what is wanted."""
    for spec in specs:
        shape, dtype, file = source.shape(spec.name), source.dtype(spec.name), source.file(spec.name)
        padded = spec.padded and shape[1:] == spec.shape[1:] and shape[:1] >= spec.shape[:1]
        if shape != spec.shape and not padded:
            wanted = f"{list(spec.shape)}{', or more rows' if spec.padded else ''}"
            yield f"{file}: tensor {spec.name} has shape {list(shape)}, wanted {wanted}"
        if dtype not in source.readable:
            yield f"{file}: tensor {spec.name} has dtype {dtype}, allowed: {', '.join(source.readable)}"


def shortened(prefix: str, items: Sequence[str], separator: str = ", ") -> list[str]:
    """[] without items, else one text with the first few and the number of the others."""
    if not items:
        return []
    more = f" and {len(items) - NAMES_SHOWN} more" if len(items) > NAMES_SHOWN else ""
    return [prefix + separator.join(items[:NAMES_SHOWN]) + more]
