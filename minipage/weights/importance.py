"""Which inputs of a layer its 4-bit weights should be most exact for: those that are large when the model reads.

Any text shows most of it, random tokens too: a few channels are large in all of them. And models leave on the first token of a
text, whatever it is, activations that are thousands of times larger than all others, where much attention goes (attention
sinks: Xiao et al. 2023, section 3.1; massive activations: Sun et al. 2024, sections 2 and 4).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..kernels.dtypes import to_float32
from ..models import ModelConfig, Parameter, Plan, calibration
from .source import Array, TensorSource

NUM_TOKENS = 64
CHUNK_BYTES = 2 << 20  #: of float32 rows that are read at once
LEAST = 0.05  #: importance of an input that is always 0


def input_importance(
    plan: Plan, source: TensorSource, kinds: Mapping[str, str], config: ModelConfig
) -> dict[str, Array]:
    """For matrices that are to be quantised to 4 bits, by the parameter's name: float32 [K] above 0 for each input.

    That is the mean square of the first token's inputs and that of the others', each at a mean of 1 over the inputs. Reads all
    weights once, and none where no matrix is quantised to 4 bits.
    """
    parameters = {parameter.name: parameter for parameter in plan.parameters}
    sought = [name for name, kind in kinds.items() if kind == "int4" and not _is_kept(parameters[name], source)]
    found: dict[str, Array] = {}
    if not sought:
        return found

    def vector(name: str) -> Array:
        return np.concatenate([to_float32(source.read(spec.name)) for spec in parameters[name].tensors])

    def linear(name: str, x: Array) -> Array:
        found[name] = _share(x[:1]) + _share(x[1:]) + np.float32(LEAST)
        parts = []
        step = max(1, CHUNK_BYTES // (4 * x.shape[1]))
        for tensor, (num_rows, _), _ in parameters[name].tensors:
            for start in range(0, num_rows, step):
                parts.append(x @ to_float32(source.read(tensor, start, min(start + step, num_rows))).T)
        out = np.concatenate(parts, axis=1)
        return out + vector(name + "_bias") if name + "_bias" in parameters else out

    embedding = parameters["embed"].tensors[0].name
    rows = [to_float32(source.read(embedding, token, token + 1)) for token in sample_tokens(config)]
    with np.errstate(over="ignore", invalid="ignore"):
        calibration.run(config, np.concatenate(rows), vector, linear)
    return {name: found[name] for name in sought}


def sample_tokens(config: ModelConfig) -> list[int]:
    """Random tokens, always the same, after BOS where there is one."""
    count = min(NUM_TOKENS, config.max_position_embeddings)
    tokens: list[int] = np.random.default_rng(0).integers(config.vocab_size, size=count).tolist()
    if config.bos_token_id is not None and config.bos_token_id < config.vocab_size:
        tokens[0] = config.bos_token_id
    return tokens


def _is_kept(parameter: Parameter, source: TensorSource) -> bool:
    """Whether all of a matrix is in 4 bits already."""
    return all(source.kind(spec.name) == "int4" for spec in parameter.tensors)


def _share(x: Array) -> Array:
    """The mean squares [K] of x [T, K], at a mean of 1; 0 where that is not finite."""
    squares = np.einsum("tk,tk->k", x, x)
    shares: Array = np.nan_to_num(squares / squares.mean(), nan=0.0, posinf=0.0)
    return shares
