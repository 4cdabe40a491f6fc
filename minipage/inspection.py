"""What a model is and what it takes, told from its config and the headers of its files: no weight is read."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .config import DTYPES, QUANTIZATIONS, EngineConfig
from .device.kv_cache import KVShape
from .engine.cache_setup import group_layers, kv_dtype, kv_shape
from .engine.headers import with_windows
from .engine.loading import bytes_by_kind, open_device_for
from .errors import InvalidArgumentError
from .kernels.ops import Ops
from .models import ModelConfig, Plan, parameters
from .weights.checkpoint import open_checkpoint
from .weights.hub import resolve_model
from .weights.kinds import weight_kinds
from .weights.loader import check
from .weights.source import TensorSource

#: Mean lengths, in tokens, of prompt and output in ShareGPT conversations (PagedAttention, section 6.1).
SHAREGPT_MEAN_LENGTHS = (161, 338)


@dataclass(frozen=True)
class Capacity:
    """Requests of one length in a KV cache: in pages, and in a static cache that reserves ``max_model_len`` tokens for each.

    Waste is the share of what the requests reserve that holds no token which is still seen.
    """

    memory: int  #: bytes
    length: int  #: tokens of a request, prompt and output
    max_model_len: int
    num_blocks: int
    num_tokens: int
    paged_requests: int
    paged_waste: float
    static_requests: int
    static_waste: float


@dataclass(frozen=True)
class ModelReport:
    """A model in numbers; sizes are in bytes."""

    path: str
    config: ModelConfig
    num_parameters: int
    file_bytes: int  #: of the files that hold its tensors
    file_dtypes: dict[str, int]  #: number of parameters by dtype, as the files call it, most first
    weight_kinds: dict[str, int]  #: what the loaded weights take, by their kind, most first
    #: what they would take in all with each ``dtype`` or ``quantization`` that can be asked for
    weight_bytes: dict[str, int]
    kv_shape: KVShape  #: of what a block holds: a token's K and V in one group of layers that see alike
    windows: tuple[int, ...]  #: the window of each group of layers; 0: they see all tokens

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        return self.kv_shape.bytes_per_token * len(self.windows)

    def capacity(self, memory: int, length: int, max_model_len: int | None = None) -> Capacity:
        """What a KV cache of ``memory`` bytes holds, as an engine with that ``kv_cache_memory`` sizes it."""
        model_len = self.config.max_position_embeddings
        longest = max_model_len or model_len
        if not 1 <= length <= longest <= model_len:
            raise InvalidArgumentError(
                f"length={length} with max_model_len={longest} is not allowed; they must be 1 <= length <= max_model_len <= "
                f"{model_len}, the most that this model takes"
            )
        size, groups = self.kv_shape.block_size, len(self.windows)
        num_blocks = memory // self.kv_shape.bytes_per_block
        blocks_each = sum(self._blocks_held(length, window) for window in self.windows)
        seen = sum(min(length, window or length) for window in self.windows)
        return Capacity(
            memory=memory,
            length=length,
            max_model_len=longest,
            num_blocks=num_blocks,
            num_tokens=num_blocks // groups * size,
            paged_requests=num_blocks // blocks_each,
            paged_waste=1 - seen / (blocks_each * size),
            static_requests=memory // (longest * self.kv_bytes_per_token),
            static_waste=1 - seen / (longest * groups),
        )

    def _blocks_held(self, length: int, window: int) -> int:
        """Blocks of a group that a sequence of ``length`` tokens holds between steps: those before its window are freed."""
        size = self.kv_shape.block_size
        whole = -(-length // size)
        return min(whole, -(-window // size) + 1) if window else whole


def locate_model(model: str | None = None) -> str:
    """The local path of a model, fetched first where that is needed; None is the demo model."""
    return resolve_model(model)


def inspect_model(model: str | None = None, **engine_keywords: Any) -> ModelReport:
    """Report on a model as ``LLM(model, **engine_keywords)`` would load it.

    Raises the same errors, among them ModelLoadError where a tensor is missing, misshapen or unknown.
    """
    options = EngineConfig(**engine_keywords)
    checkpoint = open_checkpoint(resolve_model(model))
    try:
        config = with_windows(checkpoint.model_config(), options)
        plan, source = parameters(config), checkpoint.source
        check(plan, source)
        specs = [spec for parameter in plan.parameters for spec in parameter.tensors]
        file_dtypes: Counter[str] = Counter()
        for spec in specs:
            file_dtypes[source.dtype(spec.name)] += math.prod(spec.shape)
        loaded, sizes = loaded_bytes(plan, source, config, options)
        files = {source.file(spec.name) for spec in specs}
    finally:
        checkpoint.close()
    groups, layer_groups = group_layers(config.windows)
    return ModelReport(
        path=checkpoint.path,
        config=config,
        num_parameters=file_dtypes.total(),
        file_bytes=sum(map(os.path.getsize, files)),
        file_dtypes=dict(file_dtypes.most_common()),
        weight_kinds=loaded,
        weight_bytes=sizes,
        kv_shape=kv_shape(config, options.block_size, kv_dtype(config, options), layer_groups.count(0)),
        windows=tuple(group.window for group in groups),
    )


def loaded_bytes(
    plan: Plan, source: TensorSource, config: ModelConfig, options: EngineConfig
) -> tuple[dict[str, int], dict[str, int]]:
    """What the parameters take on a device, by kind as ``options`` load them; and in all by what else could be asked for."""
    device = open_device_for(options)

    def by_kind(dtype: str, quantization: str | None) -> dict[str, int]:
        kinds = weight_kinds(plan, source, config.dtype, dtype, quantization)
        return bytes_by_kind(parameter_shapes(plan, device.ops, kinds))

    choices = [(dtype, None) for dtype in DTYPES[1:]] + [("auto", quantization) for quantization in QUANTIZATIONS[1:]]
    try:
        sizes = {quantization or dtype: sum(by_kind(dtype, quantization).values()) for dtype, quantization in choices}
        return by_kind(options.dtype, options.quantization), sizes
    finally:
        device.close()


def parameter_shapes(plan: Plan, ops: Ops, kinds: dict[str, str]) -> Iterator[Any]:
    """All parameters in the layout of ``ops``, padding included, without memory."""
    for parameter in plan.parameters:
        rows = sum(spec.shape[0] for spec in parameter.tensors)
        if parameter.role == "vector":
            yield _Shapes.empty((rows,), np.float32)
        else:
            yield ops.empty_weight((rows, parameter.tensors[0].shape[1]), kinds[parameter.name], _Shapes)


class _Shapes:
    """An array module whose arrays have a shape, a dtype and a size, and no memory."""

    @staticmethod
    def empty(shape: Any, dtype: Any) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), shape)

    zeros = empty
