"""Builds an engine from a model: resolve, read the configuration, load weights, size the cache."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..config import EngineConfig
from ..device import Communicator, Device, join_ranks, open_device
from ..device.cpu import physical_cores
from ..device.kv_cache import KVCache, KVShape
from ..errors import InvalidArgumentError, RankError
from ..kernels.ops import PackedWeight
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from ..models.fields import read_token_ids
from ..text.tokenizer import Tokenizer
from ..weights.checkpoint import Checkpoint, open_checkpoint
from ..weights.fingerprint import fingerprint
from ..weights.hub import resolve_model
from ..weights.importance import input_importance
from ..weights.loader import load_parameters
from ..weights.shards import Shard, ShardedSource
from ..weights.source import TensorReader, TensorSource
from . import debug
from .cache_setup import make_cache
from .engine import Engine
from .headers import Headers, read_headers
from .preemption import PreemptionCost
from .prefix_store import PrefixStore
from .prompt import PromptReader
from .ranks import ShardRunner, check_agreement, check_first, serve_rank_0, with_threads
from .runner import Runner
from .scheduler import Scheduler


@dataclass(frozen=True)
class ModelInfo:
    """What was loaded, for callers who want to report it; of several ranks, sizes are those of this one."""

    path: str
    config: ModelConfig
    weight_kinds: dict[str, int]  #: bytes of the weights by their kind, most first
    kv_shape: KVShape
    max_model_len: int
    weight_bytes: int
    kv_cache_bytes: int
    buffer_bytes: int


def load_engine(model: str | None, config: EngineConfig) -> tuple[Engine, ModelInfo]:
    """An engine for a folder in Hugging Face layout, a .gguf file, a hub id, or (None) the demo model.

    Where several ranks share the model, all have to call it. Those other than rank 0 serve rank 0's engine until that is closed,
    and then raise SystemExit, as they do where rank 0 fails and says why.

    Raises ModelLoadError for a checkpoint that cannot be served, InvalidArgumentError for keywords that do not fit it,
    OutOfMemoryError where the device has no room, RankError where another rank did.
    """
    if config.tensor_parallel_size > 1:
        check_first(config.tensor_parallel_size)
    ranks = join_ranks(config.tensor_parallel_size)
    if ranks.size > 1:
        check_agreement(ranks, model, config)
        config = with_threads(ranks, config)
    try:
        # Rank 0 before the others, since what is not there yet is fetched.
        ranks.together(lambda: resolve_model(model) if ranks.rank == 0 else None)
        path = ranks.together(lambda: resolve_model(model))
        with collection_paused():
            engine, info = _open_and_load(path, config, ranks)
    except RankError as error:
        if ranks.rank > 0 and error.rank == 0:
            raise SystemExit from None
        raise
    if ranks.rank > 0:
        serve_rank_0(engine)
        raise SystemExit
    return engine, info


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


def _open_and_load(path: str, config: EngineConfig, ranks: Communicator) -> tuple[Engine, ModelInfo]:
    checkpoint = ranks.together(lambda: open_checkpoint(path))
    try:
        device = ranks.together(lambda: open_device_for(config, ranks.local_rank if ranks.size > 1 else None))
        try:
            ranks.together(lambda: device.join(ranks))
            with device.allocating():
                return _load(checkpoint, config, device)
        except BaseException:
            device.close()
            raise
    finally:
        checkpoint.close()


def open_device_for(config: EngineConfig, gpu: int | None = None) -> Device:
    """The device that is asked for; InvalidArgumentError where it cannot be used, or has no pages of the dtype asked for."""
    device = open_device(config.device, config.num_threads, gpu)
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
    ranks = device.communicator
    model = ranks.together(lambda: read_headers(checkpoint, config))
    tokenizer = ranks.together(lambda: load_tokenizer(checkpoint) if ranks.rank == 0 else None)
    decoder, params = _load_decoder(model, checkpoint.source, config, device)
    weight_bytes = bytes_by_kind(params.values())
    free = min(ranks.exchange(device.free_memory()))
    default = min(ranks.exchange(device.memory_for_cache(config.gpu_memory_utilization)))
    kv, blocks = ranks.together(
        lambda: make_cache(
            decoder.config, config, device, sum(weight_bytes.values()), model.max_model_len, free, default
        )
    )
    info = ModelInfo(
        path=checkpoint.path,
        config=model.config,
        weight_kinds=weight_bytes,
        kv_shape=kv.shape,
        max_model_len=model.max_model_len,
        weight_bytes=sum(weight_bytes.values()),
        kv_cache_bytes=kv.nbytes,
        buffer_bytes=decoder.buffer_bytes,
    )
    cost = PreemptionCost(config.preemption_mode, kv.shape.bytes_per_block)
    runner = _make_runner(model, config, device, decoder, kv, cost)
    scheduler = Scheduler(
        blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_speculative_tokens=_num_speculative_tokens(config),
        prefers_swap=cost.prefers_swap,
    )
    prompts = PromptReader(
        tokenizer,
        vocab_size=model.config.vocab_size,
        max_model_len=model.max_model_len,
        max_num_seqs=config.max_num_seqs,
        longest_total=blocks.longest_total,
    )
    prefix_store = PrefixStore(
        device,
        kv,
        blocks,
        vocab_size=model.config.vocab_size,
        fingerprint=lambda: fingerprint(model.config, params, device),
    )
    new_engine = debug.CheckedEngine if debug.is_enabled() else Engine
    engine = new_engine(
        runner,
        scheduler,
        prompts,
        tokenizer,
        prefix_store,
        eos_token_ids=eos_token_ids(checkpoint, model.config, tokenizer),
        seed=config.seed,
        on_close=runner.close,
    )
    return engine, info


def _load_decoder(
    model: Headers, source: TensorSource, config: EngineConfig, device: Device
) -> tuple[Decoder, dict[str, Any]]:
    """The model, or this rank's shard of it, and its parameters."""
    ranks, num_threads = device.communicator, config.num_threads or physical_cores()
    # Which inputs matter is found out by one rank, since it takes all weights.
    importance = ranks.exchange(
        ranks.together(
            lambda: input_importance(model.plan, source, model.kinds, model.config) if ranks.rank == 0 else {}
        )
    )[0]

    def load() -> tuple[Decoder, dict[str, Any]]:
        model_config, plan, inputs = model.config, model.plan, importance
        reader: TensorReader = source
        if ranks.size > 1:
            shard = Shard(ranks.rank, ranks.size)
            model_config, plan = shard.config(model_config), shard.plan(plan)
            reader, inputs = ShardedSource(source, model.plan, shard), shard.importance(importance, model.plan)
        params = load_parameters(plan, reader, model.kinds, device, inputs, num_threads)
        max_logit_rows = max(config.max_num_seqs, 1 + _num_speculative_tokens(config))
        decoder = Decoder(
            model_config,
            params,
            device,
            max_tokens=min(config.max_num_batched_tokens, config.max_num_seqs * model.max_model_len),
            max_logit_rows=min(max_logit_rows, config.max_num_batched_tokens),
            num_positions=model.max_model_len,
        )
        return decoder, params

    return ranks.together(load)


def _make_runner(
    model: Headers, config: EngineConfig, device: Device, decoder: Decoder, kv: KVCache, cost: PreemptionCost
) -> Runner:
    ranks = device.communicator
    limits: dict[str, Any] = {"max_num_seqs": config.max_num_seqs, "max_model_len": model.max_model_len}
    if ranks.size == 1:
        return Runner(device, decoder, kv, cost, **limits)
    vocab_size = model.config.vocab_size
    tokens = Shard(ranks.rank, ranks.size).tokens(vocab_size)
    return ShardRunner(device, decoder, kv, cost, tokens=tokens, vocab_size=vocab_size, **limits)


def _num_speculative_tokens(config: EngineConfig) -> int:
    return config.num_speculative_tokens if config.speculative is not None else 0


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """The checkpoint's tokenizer, None for a folder without one: it then takes and gives token ids only."""
    if checkpoint.vocabulary is not None:
        return Tokenizer.from_gguf(checkpoint.vocabulary)
    return Tokenizer.from_folder(checkpoint.path) if checkpoint.has_tokenizer else None


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
