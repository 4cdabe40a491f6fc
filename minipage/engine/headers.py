"""What a model's headers tell, as the keywords of ``LLM`` change it; no weight is read for it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..config import EngineConfig
from ..errors import InvalidArgumentError, ModelLoadError
from ..kernels.ops import MAX_HEAD_DIM
from ..models.config import ModelConfig
from ..models.plan import Plan
from ..models.registry import parameters
from ..weights.checkpoint import Checkpoint
from ..weights.kinds import weight_kinds
from ..weights.loader import check
from ..weights.shards import check_shards

_MOST_POSITIONS = 1 << 24  #: that rotary tables are made for, whatever a config claims
_MOST_ROLLING = 1 << 20  #: the same where windows allow more than it claims; 512 MiB of tables at a head size of 128


class Headers(NamedTuple):
    """A model, checked."""

    config: ModelConfig
    max_model_len: int
    plan: Plan
    kinds: dict[str, str]  #: of the matrices, by the parameter's name


def read_headers(checkpoint: Checkpoint, config: EngineConfig) -> Headers:
    """Raises ModelLoadError for a checkpoint that cannot be served, InvalidArgumentError for keywords that do not fit it."""
    model_config = with_windows(checkpoint.model_config(), config)
    if model_config.head_dim > MAX_HEAD_DIM:
        raise ModelLoadError(
            f"{checkpoint.config_file}: head_dim={model_config.head_dim}; allowed: up to {MAX_HEAD_DIM}"
        )
    max_model_len = _max_model_len(model_config, config)
    plan = parameters(model_config)
    check(plan, checkpoint.source)
    kinds = weight_kinds(plan, checkpoint.source, model_config.dtype, config.dtype, config.quantization)
    check_shards(model_config, plan, kinds, config.tensor_parallel_size)
    return Headers(model_config, max_model_len, plan, kinds)


def with_windows(model_config: ModelConfig, config: EngineConfig) -> ModelConfig:
    """The model with the windows and sinks that were asked for."""
    if config.sliding_window is not None:
        model_config = replace(model_config, windows=(config.sliding_window,) * model_config.num_layers)
    sinks, rope = config.attention_sinks, model_config.rope
    if sinks and not all(model_config.windows):
        raise InvalidArgumentError(
            f"attention_sinks={sinks} is not allowed: not all layers of this model have a window; give sliding_window too"
        )
    if sinks and rope.kind == "dynamic":
        # The kind looks at how long the sequence is, which with sinks is what the cache holds.
        longest = sinks + max(model_config.windows)
        if longest > rope.original_max_position:
            raise InvalidArgumentError(
                f"attention_sinks={sinks} and a window of {longest - sinks} are not allowed: with this model's rope_type "
                f"dynamic they must be at most {rope.original_max_position} together"
            )
        rope = replace(rope, kind="default")
    return replace(model_config, attention_sinks=sinks, rope=rope)


def _max_model_len(model_config: ModelConfig, config: EngineConfig) -> int:
    longest = trained = min(model_config.max_position_embeddings, _MOST_POSITIONS)
    seen = max(model_config.windows) + model_config.attention_sinks
    if all(model_config.windows) and seen <= trained:
        longest = max(longest, _MOST_ROLLING)  # distances stay as trained
    if config.max_model_len is not None and config.max_model_len > longest:
        raise InvalidArgumentError(
            f"max_model_len={config.max_model_len} is not allowed; this model takes at most {longest}"
            + ("" if longest > trained else ", and more where all layers have a window of less (sliding_window)")
        )
    return config.max_model_len or trained
