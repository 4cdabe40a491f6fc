"""Which inputs of a layer its 4-bit weights should be most exact for, told by the weights themselves."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..kernels.dtypes import to_float32
from ..models import ModelConfig, Parameter, Plan
from ..models.first_token import first_token_inputs
from .source import Array, TensorSource

ROWS_AT_ONCE = 1024  #: of a weight that are read as float32


def input_importance(
    plan: Plan, source: TensorSource, kinds: Mapping[str, str], config: ModelConfig
) -> dict[str, Array]:
    """For matrices that are to be quantised to 4 bits, by the parameter's name: float32 [K] of at least 1 for each input.

    That is 1 for what all tokens bring, and the square of what the first token of a text brings, at a mean of 1. Reads all
    weights once, and none where no matrix is quantised to 4 bits.
    """
    parameters = {parameter.name: parameter for parameter in plan.parameters}
    sought = [name for name, kind in kinds.items() if kind == "int4" and not _is_kept(parameters[name], source)]
    if not sought:
        return {}

    def vector(name: str) -> Array:
        return np.concatenate([to_float32(source.read(spec.name)) for spec in parameters[name].tensors])

    def linear(name: str, x: Array) -> Array:
        parts = []
        for spec in parameters[name].tensors:
            for start in range(0, spec.shape[0], ROWS_AT_ONCE):
                rows = source.read(spec.name, start, min(start + ROWS_AT_ONCE, spec.shape[0]))
                parts.append(to_float32(rows) @ x)
        out = np.concatenate(parts)
        return out + vector(name + "_bias") if name + "_bias" in parameters else out

    token = config.bos_token_id or 0
    token = token if token < config.vocab_size else 0
    embedding = to_float32(source.read(parameters["embed"].tensors[0].name, token, token + 1))[0]
    with np.errstate(over="ignore", invalid="ignore"):
        inputs = first_token_inputs(config, embedding, vector, linear)
        return {name: _importance(inputs[name]) for name in sought}


def _is_kept(parameter: Parameter, source: TensorSource) -> bool:
    """Whether all of a matrix is in 4 bits already."""
    return all(source.kind(spec.name) == "int4" for spec in parameter.tensors)


def _importance(x: Array) -> Array:
    """1 + x^2 / mean(x^2); 1 where that is not finite."""
    squares = x * x
    shares: Array = np.nan_to_num(squares / squares.mean(), nan=0.0, posinf=0.0)
    return shares + 1
