"""Tensors to parameters: every name, shape and dtype is checked first, then weights are streamed a few megabytes at a time,
so that loading needs little more memory than the loaded model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import ModelLoadError
from ..kernels.dtypes import to_float32
from ..kernels.ops import Ops, PackedWeight
from ..models import Parameter, Plan, TensorSpec
from .source import TensorSource

CHUNK_BYTES = 2 << 20  #: of float32 rows, read and packed at once; conversions take a few times that
NAMES_SHOWN = 5


class Device(Protocol):
    """What loading needs of a device: its ops, its array module, and arrays made from the host's."""

    @property
    def ops(self) -> Ops: ...

    @property
    def xp(self) -> Any: ...

    def array(self, host: npt.NDArray[Any]) -> Any: ...


def load_parameters(
    plan: Plan, source: TensorSource, kind: str, device: Device, embed_kind: str | None = None
) -> dict[str, Any]:
    """All parameters of ``plan`` by name: PackedWeight of ``kind`` for linear roles, float32 device arrays for vectors.

    ``embed_kind`` is the kind of the embedding (and of the output head that is tied to it), where that differs.
    Raises ModelLoadError, before anything is allocated, where tensors are missing, unknown, misshapen or of a dtype
    that cannot be read; and where a value does not fit a float16 weight.
    """
    check(plan, source)
    loaded: dict[str, Any] = {}
    for parameter in plan.parameters:
        if parameter.role == "vector":
            loaded[parameter.name] = load_vector(parameter, source, device)
        else:
            own_kind = embed_kind or kind if parameter.name == "embed" else kind
            loaded[parameter.name] = load_linear(parameter, source, own_kind, device)
    return loaded


def load_vector(parameter: Parameter, source: TensorSource, device: Device) -> Any:
    """The stacked tensors as one float32 device array [N]."""
    return device.array(np.concatenate([to_float32(source.read(spec.name)) for spec in parameter.tensors]))


def load_linear(parameter: Parameter, source: TensorSource, kind: str, device: Device) -> PackedWeight:
    """The stacked tensors packed row by row; no more than one chunk of rows is in memory beside the weight."""
    columns = parameter.tensors[0].shape[1]
    rows_at_once = max(1, CHUNK_BYTES // (4 * columns))
    weight = device.ops.empty_weight((sum(spec.shape[0] for spec in parameter.tensors), columns), kind, device.xp)
    first = 0
    for spec in parameter.tensors:
        for start in range(0, spec.shape[0], rows_at_once):
            rows = source.read(spec.name, start, min(start + rows_at_once, spec.shape[0]))
            try:
                device.ops.pack_rows(weight, first + start, rows)
            except ValueError as error:
                raise ModelLoadError(f"{source.file(spec.name)}: tensor {spec.name}: {error}") from error
        first += spec.shape[0]
    return weight


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
