"""Shards: all of them together are the whole, and a rank reads its own rows only."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gguf_files import write_gguf
from helpers.models import HISTORY_CONFIG, history_tensors, write_folder

from minipage.device import open_device
from minipage.kernels.ops import PackedWeight
from minipage.models import Plan, parameters
from minipage.weights.checkpoint import Checkpoint, open_checkpoint
from minipage.weights.importance import input_importance
from minipage.weights.kinds import weight_kinds
from minipage.weights.loader import load_parameters
from minipage.weights.shards import Shard, ShardedSource, Tokens

CONFIG = {
    **HISTORY_CONFIG,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 128,
    "attention_bias": True,
    "mlp_bias": True,
}
BIASES = {
    f"model.layers.{i}.{name}.bias": np.random.default_rng(i).normal(size=rows).astype(np.float32)
    for i in range(2)
    for name, rows in {
        "self_attn.q_proj": 128,
        "self_attn.k_proj": 64,
        "self_attn.v_proj": 64,
        "self_attn.o_proj": 32,
        "mlp.gate_proj": 128,
        "mlp.up_proj": 128,
        "mlp.down_proj": 32,
    }.items()
}
TENSORS = history_tensors(3, CONFIG) | BIASES


class Watched:
    """A source that notes which rows were read."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.rows: dict[str, set[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        self.rows.setdefault(name, set()).update(range(start, self._source.shape(name)[0])[: stop and stop - start])
        return self._source.read(name, start, stop)


def values(parameter: Any, ops: Any) -> np.ndarray:
    """A loaded parameter in float32."""
    if isinstance(parameter, PackedWeight):
        unpacked: np.ndarray = ops.unpack_rows(parameter, 0, parameter.shape[0])
        return unpacked
    return np.asarray(parameter)


def load(
    checkpoint: Checkpoint, shard: Shard | None, quantization: str | None
) -> tuple[Plan, dict[str, np.ndarray], dict[str, set[int]]]:
    """The whole plan, what is loaded of it, and the rows that were read."""
    config, source = checkpoint.model_config(), Watched(checkpoint.source)
    plan, device = parameters(config), open_device("reference")
    kinds = weight_kinds(plan, checkpoint.source, config.dtype, "auto", quantization)
    importance = input_importance(plan, checkpoint.source, kinds, config)
    if shard is None:
        found = load_parameters(plan, source, kinds, device, importance)
    else:
        reader = ShardedSource(source, plan, shard)
        found = load_parameters(shard.plan(plan), reader, kinds, device, shard.importance(importance, plan))
    return plan, {name: values(parameter, device.ops) for name, parameter in found.items()}, source.rows


def joined(plan: Plan, shards: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The whole from its shards."""
    whole = {}
    for name, _, tensors, split in plan.parameters:
        parts = [shard[name] for shard in shards if name in shard]
        if split == "columns":
            whole[name] = np.concatenate(parts, axis=1)
        elif split == "rows":  # each rank has its rows of every tensor, one tensor after the other
            ends = np.cumsum([spec.shape[0] // len(shards) for spec in tensors])[:-1]
            whole[name] = np.concatenate(
                [np.concatenate(rows) for rows in zip(*(np.split(p, ends) for p in parts), strict=True)]
            )
        elif split == "vocabulary":
            assert all(np.all(part[-1] == 0) for part in parts)
            whole[name] = np.concatenate([part[:-1] for part in parts])[: tensors[0].shape[0]]
        else:
            assert split == "whole" or len(parts) == 1
            whole[name] = parts[0]
    return whole


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_shards_together_are_the_whole(quantization: str | None, size: int, tmp_path: Path) -> None:
    """To the bit, quantised while loading or not; rows of other ranks are not read, but for those whose columns are split."""
    checkpoint = open_checkpoint(str(write_folder(tmp_path, CONFIG, TENSORS)))
    plan, whole, _ = load(checkpoint, None, quantization)
    loaded = [load(checkpoint, Shard(rank, size), quantization) for rank in range(size)]
    found = joined(plan, [shard for _, shard, _ in loaded])
    assert found.keys() == whole.keys()
    for name, expected in whole.items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
    for rank, (_, _, rows) in enumerate(loaded):
        query = range(rank * 128 // size, (rank + 1) * 128 // size)
        assert rows["model.layers.0.self_attn.q_proj.weight"] == set(query)
        each = -(-61 // size)
        assert rows["lm_head.weight"] == set(range(rank * each, min(rank * each + each, 61)))
        assert ("model.layers.0.mlp.down_proj.bias" in rows) == (rank == 0)


@pytest.mark.parametrize("matrix_type", ["Q8_0", "Q4_1", "Q4_0", "F16"])
def test_shards_of_a_quantised_file(matrix_type: str, tmp_path: Path) -> None:
    """They keep the file's groups, bit for bit, and heads in the order of Hugging Face."""
    path = write_gguf(tmp_path / "model.gguf", CONFIG, TENSORS, matrix_type=matrix_type)
    checkpoint = open_checkpoint(str(path))
    plan, whole, _ = load(checkpoint, None, None)
    found = joined(plan, [load(checkpoint, Shard(rank, 2), None)[1] for rank in range(2)])
    for name, expected in whole.items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)


def test_loading_a_shard_takes_the_memory_of_a_shard(tmp_path: Path) -> None:
    """Of matrices that are split by columns some rows at a time are held whole, and no matrix is."""
    config = {**HISTORY_CONFIG, "hidden_size": 256, "intermediate_size": 16384, "num_hidden_layers": 2}
    checkpoint = open_checkpoint(str(write_folder(tmp_path, config, history_tensors(3, config))))
    plan, device, shard = parameters(checkpoint.model_config()), open_device("reference"), Shard(1, 2)
    kinds = weight_kinds(plan, checkpoint.source, "float32", "auto", None)
    tracemalloc.start()
    try:
        loaded = load_parameters(shard.plan(plan), ShardedSource(checkpoint.source, plan, shard), kinds, device, {})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    own = sum(parameter.nbytes for parameter in loaded.values())
    assert own > 48 << 20
    assert peak < own + (16 << 20)


def test_tokens_of_a_shard() -> None:
    """Each token has a row on one rank, and is the row of zeros on all others; ranks may be left without tokens."""
    shards = [Shard(rank, 4).tokens(10) for rank in range(4)]
    assert shards == [Tokens(0, 3, 4), Tokens(3, 6, 4), Tokens(6, 9, 4), Tokens(9, 10, 4)]
    assert [shard.rows([0, 4, 9]) for shard in shards] == [[0, 3, 3], [3, 1, 3], [3, 3, 3], [3, 3, 0]]
    assert Shard(3, 4).tokens(5) == Tokens(5, 5, 3)


def test_the_model_of_a_shard() -> None:
    """Heads, key/value heads, MLP columns and tokens are divided; what is per token or per head stays."""
    checkpoint_config = {**CONFIG, "architectures": ["LlamaForCausalLM"]}
    from minipage.models import read_config

    whole = read_config(checkpoint_config)
    part = Shard(1, 2).config(whole)
    assert (part.num_heads, part.num_kv_heads, part.intermediate_size, part.vocab_size) == (4, 2, 64, 32)
    assert (part.hidden_size, part.head_dim, part.num_layers) == (32, 16, 2)
