"""Telling models apart by what they compute."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..kernels.ops import Ops, PackedWeight
from ..models import ModelConfig

RUNS = 16  #: of rows that are looked at, of a large matrix
RUN_BYTES = 1 << 16  #: of a run as float32

#: What a config says and no K or V depends on.
IRRELEVANT = ("max_position_embeddings", "dtype", "bos_token_id", "eos_token_ids")


class Device(Protocol):
    """What this needs of a device: its ops, and its arrays on the host."""

    @property
    def ops(self) -> Ops: ...

    def host(self, array: Any) -> npt.NDArray[Any]: ...


def fingerprint(config: ModelConfig, params: Mapping[str, Any], device: Device) -> str:
    """SHA-256, in hex, over what decides the K and V of a token; the same on every device.

    That is the config, but for IRRELEVANT fields, and of each parameter, by name: its kind, its shape, and its values as
    float32: all of them up to 1 MiB, and of larger matrices 16 runs of rows of 64 KiB, evenly spaced from the first row to
    the last. Models that differ in no more than a few rows between these runs are taken for the same.
    """
    fields = {name: value for name, value in asdict(config).items() if name not in IRRELEVANT}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for name, parameter in sorted(params.items()):
        is_matrix = isinstance(parameter, PackedWeight)
        about = [name, parameter.kind if is_matrix else "vector", *parameter.shape]
        digest.update(json.dumps(about).encode())
        for values in rows(parameter, device.ops) if is_matrix else [device.host(parameter)]:
            digest.update(np.ascontiguousarray(values, dtype="<f4").data)
    return digest.hexdigest()


def rows(weight: PackedWeight, ops: Ops) -> Iterator[npt.NDArray[Any]]:
    """The rows of a matrix that are looked at, as float32 [n, K] a run."""
    num_rows, columns = weight.shape
    run = max(1, RUN_BYTES // (4 * columns))
    starts = np.linspace(0, num_rows - run, RUNS).astype(int).tolist() if num_rows > RUNS * run else [0]
    for start in starts:
        yield ops.unpack_rows(weight, start, start + run if len(starts) > 1 else num_rows)
