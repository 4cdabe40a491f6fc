"""Builds an engine from a model: resolve, read the configuration, load weights, size the cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ..cache import BlockAllocator, PrefixCache
from ..config import EngineConfig
from ..device import Device, open_device
from ..device.kv_cache import KVCache, KVShape, plan_num_blocks
from ..errors import InvalidArgumentError
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from ..models.fields import read_token_ids
from ..models.registry import parameters
from ..text.tokenizer import Tokenizer
from ..weights.checkpoint import Checkpoint, open_checkpoint
from ..weights.hub import resolve_model
from ..weights.loader import load_parameters
from .engine import Engine
from .prompt import PromptReader
from .runner import Runner
from .scheduler import Scheduler

logger = logging.getLogger("minipage")


@dataclass(frozen=True)
class ModelInfo:
    """What was loaded, for callers who want to report it."""

    path: str
    config: ModelConfig
    dtype: str
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
    checkpoint = open_checkpoint(path)
    try:
        device = open_device(config.device, config.num_threads)
        try:
            return _load(checkpoint, config, device)
        except BaseException:
            device.close()
            raise
    finally:
        checkpoint.close()


def _load(checkpoint: Checkpoint, config: EngineConfig, device: Device) -> tuple[Engine, ModelInfo]:
    model_config = checkpoint.model_config()
    tokenizer = load_tokenizer(checkpoint)
    max_model_len = _max_model_len(model_config, config)
    dtype = model_config.dtype if config.dtype == "auto" else config.dtype
    params = load_parameters(
        parameters(model_config), checkpoint.source, config.quantization or dtype, device, embed_kind=dtype
    )
    weight_bytes = sum(int(value.nbytes) for value in params.values())
    decoder = Decoder(
        model_config,
        params,
        device,
        max_tokens=min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len),
        max_logit_rows=min(config.max_num_seqs, config.max_num_batched_tokens),
        num_positions=max_model_len,
    )
    shape = kv_shape(
        model_config, config.block_size, dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    )
    num_blocks, message = plan_num_blocks(
        shape,
        free_memory=device.free_memory(),
        weight_bytes=weight_bytes,
        budget=config.kv_cache_memory if isinstance(config.kv_cache_memory, int) else None,
        num_blocks=config.num_blocks,
        most_tokens=config.max_num_seqs * max_model_len,
    )
    logger.info("KV cache: %s", message)
    kv = KVCache(device, shape, num_blocks)
    info = ModelInfo(
        path=checkpoint.path,
        config=model_config,
        dtype=dtype,
        kv_shape=shape,
        max_model_len=max_model_len,
        weight_bytes=weight_bytes,
        kv_cache_bytes=kv.nbytes,
        buffer_bytes=decoder.buffer_bytes,
        memory_message=message,
    )
    runner = Runner(device, decoder, kv)
    return _assemble(checkpoint, config, info, runner, tokenizer, device), info


def _assemble(
    checkpoint: Checkpoint,
    config: EngineConfig,
    info: ModelInfo,
    runner: Runner,
    tokenizer: Tokenizer | None,
    device: Device,
) -> Engine:
    allocator = BlockAllocator(runner.kv.num_blocks)
    scheduler = Scheduler(
        allocator,
        config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefix_cache=PrefixCache(allocator, config.block_size) if config.enable_prefix_caching else None,
    )
    prompts = PromptReader(
        tokenizer,
        vocab_size=info.config.vocab_size,
        max_model_len=info.max_model_len,
        max_num_seqs=config.max_num_seqs,
        longest_total=scheduler.longest_total,
    )
    return Engine(
        runner,
        scheduler,
        allocator,
        prompts,
        tokenizer,
        eos_token_ids=eos_token_ids(checkpoint, info.config, tokenizer),
        seed=config.seed,
        on_close=device.close,
    )


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """The checkpoint's tokenizer, None for a folder without one: it then takes and gives token ids only."""
    if checkpoint.vocabulary is not None:
        return Tokenizer.from_gguf(checkpoint.vocabulary)
    return Tokenizer.from_folder(checkpoint.path) if checkpoint.has_tokenizer else None


def kv_shape(model_config: ModelConfig, block_size: int, dtype: str) -> KVShape:
    """What a block takes for this model."""
    return KVShape(model_config.num_layers, model_config.num_kv_heads, model_config.head_dim, block_size, dtype)


def eos_token_ids(checkpoint: Checkpoint, model_config: ModelConfig, tokenizer: Tokenizer | None) -> frozenset[int]:
    """All ids that end a generation: those of config, generation_config and tokenizer together."""
    ids = [*model_config.eos_token_ids, *read_token_ids(checkpoint.generation_config, "eos_token_id")]
    ids += tokenizer.eos_token_ids if tokenizer is not None else ()
    return frozenset(token_id for token_id in ids if 0 <= token_id < model_config.vocab_size)


def _max_model_len(model_config: ModelConfig, config: EngineConfig) -> int:
    longest = model_config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise InvalidArgumentError(
            f"max_model_len={config.max_model_len} is not allowed; this model takes at most {longest}"
        )
    return config.max_model_len or longest
