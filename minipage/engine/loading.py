"""Builds an engine from a model: resolve, read the configuration, load weights, size the cache."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..cache import BlockManager, Group
from ..config import EngineConfig
from ..device import Device, open_device
from ..device.cpu import physical_cores
from ..device.kv_cache import KVCache, KVShape, plan_num_blocks
from ..errors import InvalidArgumentError, ModelLoadError
from ..kernels.ops import MAX_HEAD_DIM, PackedWeight
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from ..models.fields import read_token_ids
from ..models.registry import parameters
from ..text.tokenizer import Tokenizer
from ..weights.checkpoint import Checkpoint, open_checkpoint
from ..weights.fingerprint import fingerprint
from ..weights.hub import resolve_model
from ..weights.kinds import weight_kinds
from ..weights.loader import load_parameters
from . import debug
from .engine import Engine
from .preemption import PreemptionCost
from .prefix_store import PrefixStore
from .prompt import PromptReader
from .runner import Runner
from .scheduler import Scheduler

_MOST_POSITIONS = 1 << 24  #: that rotary tables are made for, whatever a config claims
_MOST_ROLLING = 1 << 20  #: the same beyond what a model claims; 512 MiB of tables at a head size of 128

logger = logging.getLogger("minipage")


@dataclass(frozen=True)
class ModelInfo:
    """What was loaded, for callers who want to report it."""

    path: str
    config: ModelConfig
    weight_kinds: dict[str, int]  #: bytes of the weights by their kind, most first
    kv_shape: KVShape
    max_model_len: int
    weight_bytes: int
    kv_cache_bytes: int
    buffer_bytes: int
    memory_message: str


def load_engine(model: str | None, config: EngineConfig) -> tuple[Engine, ModelInfo]:
    """An engine for a folder in Hugging Face layout, a .gguf file, a hub id, or (None) the demo model.

    Raises ModelLoadError for a checkpoint that cannot be served, InvalidArgumentError for keywords that do not fit it,
    OutOfMemoryError where the device has no room.
    """
    path = resolve_model(model)
    with collection_paused():
        return _open_and_load(path, config)


@contextmanager
def collection_paused() -> Iterator[None]:
    """No search for garbage in cycles meanwhile: loading makes some hundred thousand objects, and they all stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _open_and_load(path: str, config: EngineConfig) -> tuple[Engine, ModelInfo]:
    checkpoint = open_checkpoint(path)
    try:
        device = open_device_for(config)
        try:
            with device.allocating():
                return _load(checkpoint, config, device)
        except BaseException:
            device.close()
            raise
    finally:
        checkpoint.close()


def open_device_for(config: EngineConfig) -> Device:
    """The device that is asked for; InvalidArgumentError where it cannot be used, or has no pages of the dtype asked for."""
    device = open_device(config.device, config.num_threads)
    allowed = ("auto", *device.ops.PAGE_KINDS)
    if config.kv_cache_dtype not in allowed:
        device.close()
        raise InvalidArgumentError(
            f"kv_cache_dtype={config.kv_cache_dtype!r} is not allowed on the device {device.name!r}; "
            f"it must be one of {', '.join(map(repr, allowed))}"
        )
    if config.gpu_memory_utilization is not None and not device.has_own_memory:
        device.close()
        raise InvalidArgumentError(
            f"gpu_memory_utilization={config.gpu_memory_utilization} is not allowed on the device {device.name!r}, which "
            "shares its memory with other programs; give num_blocks or kv_cache_memory"
        )
    return device


def _load(checkpoint: Checkpoint, config: EngineConfig, device: Device) -> tuple[Engine, ModelInfo]:
    model_config = with_windows(checkpoint.model_config(), config)
    if model_config.head_dim > MAX_HEAD_DIM:
        raise ModelLoadError(
            f"{checkpoint.config_file}: head_dim={model_config.head_dim}; allowed: up to {MAX_HEAD_DIM}"
        )
    tokenizer = load_tokenizer(checkpoint)
    max_model_len = _max_model_len(model_config, config)
    plan = parameters(model_config)
    kinds = weight_kinds(plan, checkpoint.source, model_config.dtype, config.dtype, config.quantization)
    params = load_parameters(
        plan, checkpoint.source, kinds, device, model_config, config.num_threads or physical_cores()
    )
    num_speculative_tokens = config.num_speculative_tokens if config.speculative is not None else 0
    weight_bytes = bytes_by_kind(params.values())
    decoder = Decoder(
        model_config,
        params,
        device,
        max_tokens=min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len),
        max_logit_rows=min(max(config.max_num_seqs, 1 + num_speculative_tokens), config.max_num_batched_tokens),
        num_positions=max_model_len,
    )
    kv, blocks, message = _make_cache(model_config, config, device, sum(weight_bytes.values()), max_model_len)
    info = ModelInfo(
        path=checkpoint.path,
        config=model_config,
        weight_kinds=weight_bytes,
        kv_shape=kv.shape,
        max_model_len=max_model_len,
        weight_bytes=sum(weight_bytes.values()),
        kv_cache_bytes=kv.nbytes,
        buffer_bytes=decoder.buffer_bytes,
        memory_message=message,
    )
    cost = PreemptionCost(config.preemption_mode, kv.shape.bytes_per_block)
    scheduler = Scheduler(
        blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_speculative_tokens=num_speculative_tokens,
        prefers_swap=cost.prefers_swap,
    )
    prompts = PromptReader(
        tokenizer,
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        longest_total=blocks.longest_total,
    )
    prefix_store = PrefixStore(
        device,
        kv,
        blocks,
        vocab_size=model_config.vocab_size,
        fingerprint=lambda: fingerprint(model_config, params, device),
    )
    new_engine = debug.CheckedEngine if debug.is_enabled() else Engine
    engine = new_engine(
        Runner(device, decoder, kv, cost, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len),
        scheduler,
        prompts,
        tokenizer,
        prefix_store,
        eos_token_ids=eos_token_ids(checkpoint, model_config, tokenizer),
        seed=config.seed,
        on_close=device.close,
    )
    return engine, info


def _make_cache(
    model_config: ModelConfig, config: EngineConfig, device: Device, weight_bytes: int, max_model_len: int
) -> tuple[KVCache, BlockManager, str]:
    """The pages of all groups of layers, the accounting of their blocks, and a sentence on their size."""
    groups, layer_groups = group_layers(model_config.windows, model_config.attention_sinks)
    shape = kv_shape(model_config, config.block_size, kv_dtype(model_config, config), layer_groups.count(0))
    num_blocks, message = plan_num_blocks(
        shape,
        free_memory=device.free_memory(),
        weight_bytes=weight_bytes,
        budget=config.kv_cache_memory if isinstance(config.kv_cache_memory, int) else None,
        default_budget=device.memory_for_cache(config.gpu_memory_utilization),
        num_blocks=config.num_blocks,
        most_blocks=config.max_num_seqs * len(groups) * -(-max_model_len // config.block_size),
    )
    logger.info("KV cache: %s", message)
    num_host_blocks = int(config.swap_space) // shape.bytes_per_block
    blocks = BlockManager(
        num_blocks, config.block_size, groups, caching=config.enable_prefix_caching, num_host_blocks=num_host_blocks
    )
    new_cache = partial(debug.CheckedKVCache, blocks) if debug.is_enabled() else KVCache
    kv = new_cache(device, shape, num_blocks, layer_groups=layer_groups, num_host_blocks=num_host_blocks)
    return kv, blocks, message


def group_layers(windows: Sequence[int], sinks: int = 0) -> tuple[list[Group], list[int]]:
    """Groups of layers that see alike, all of the size of the smallest kind, and the group of each layer.

    The last group of a kind may have fewer layers; its blocks are as large as the others' all the same.
    """
    size = min(windows.count(window) for window in windows)
    groups: list[Group] = []
    layer_groups: list[int] = []
    for index, window in enumerate(windows):
        if windows[:index].count(window) % size == 0:
            newest = len(groups)
            groups.append(Group(window, sinks))
        else:
            newest = max(group for group, previous in zip(layer_groups, windows, strict=False) if previous == window)
        layer_groups.append(newest)
    return groups, layer_groups


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """The checkpoint's tokenizer, None for a folder without one: it then takes and gives token ids only."""
    if checkpoint.vocabulary is not None:
        return Tokenizer.from_gguf(checkpoint.vocabulary)
    return Tokenizer.from_folder(checkpoint.path) if checkpoint.has_tokenizer else None


def kv_shape(model_config: ModelConfig, block_size: int, dtype: str, num_layers: int | None = None) -> KVShape:
    """What a block takes for a group of ``num_layers`` of this model's layers (None: for all of them)."""
    return KVShape(
        num_layers or model_config.num_layers, model_config.num_kv_heads, model_config.head_dim, block_size, dtype
    )


def kv_dtype(model_config: ModelConfig, config: EngineConfig) -> str:
    """The dtype of K and V: the one asked for, else that asked for the weights, else the model's."""
    asked = (config.kv_cache_dtype, config.dtype, model_config.dtype)
    return next(dtype for dtype in asked if dtype != "auto")


def bytes_by_kind(parameters: Iterable[Any]) -> dict[str, int]:
    """What parameters take by their kind, most first; vectors are float32."""
    found: Counter[str] = Counter()
    for parameter in parameters:
        found[parameter.kind if isinstance(parameter, PackedWeight) else "float32"] += int(parameter.nbytes)
    return dict(found.most_common())


def eos_token_ids(checkpoint: Checkpoint, model_config: ModelConfig, tokenizer: Tokenizer | None) -> frozenset[int]:
    """All ids that end a generation: those of config, generation_config and tokenizer together."""
    ids = [*model_config.eos_token_ids, *read_token_ids(checkpoint.generation_config, "eos_token_id")]
    ids += tokenizer.eos_token_ids if tokenizer is not None else ()
    return frozenset(token_id for token_id in ids if 0 <= token_id < model_config.vocab_size)


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
