"""The transformer: embedding, layers of attention and gated MLP, final norm, output head (Llama and its kin).

Letters in shapes: T tokens, H hidden size, NH query heads, KVH key/value heads, D head size, I MLP size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from .batch import Batch
from .config import ModelConfig
from .rope import rope_tables

Array = Any
AllReduce = Callable[[Array], None]  #: makes of x [T, H] the sum of what all ranks have there


class Device(Protocol):
    """What a model needs of a device: its ops, the sum over its ranks, and arrays for its buffers."""

    @property
    def ops(self) -> Any: ...
    def array(self, host: np.ndarray) -> Array: ...
    def empty(self, shape: Any, dtype: Any) -> Array: ...
    def new_all_reduce(self, max_rows: int, num_columns: int) -> AllReduce: ...


class Pages(NamedTuple):
    """The KV pages of one layer: K, V, and the group whose slots and block tables say where its tokens are."""

    key: Array
    value: Array
    group: int


class KVPages(Protocol):
    """What a model needs of the KV cache."""

    def layer(self, index: int) -> tuple[Array, Array, int]:
        """K and V pages of a layer, and its group."""
        ...


class Attention:
    """Grouped-query attention with rotary positions over paged K and V."""

    def __init__(self, config: ModelConfig, params: Mapping[str, Any], prefix: str, window: int) -> None:
        self.qkv, self.qkv_bias = params[prefix + "qkv"], params.get(prefix + "qkv_bias")
        self.output, self.output_bias = params[prefix + "o"], params.get(prefix + "o_bias")
        self.scale = config.head_dim**-0.5
        self.window, self.sinks = window, config.attention_sinks

    def __call__(self, ops: Any, out: Array, x: Array, buffers: Buffers, batch: Batch, pages: Pages) -> None:
        q, k, v, sink_q, attended = buffers.q, buffers.k, buffers.v, buffers.sink_q, buffers.attended
        ops.linear(buffers.qkv, x, self.qkv, self.qkv_bias)
        angles = buffers.cos, buffers.sin, batch.positions
        if self.sinks:  # the query as it meets the sinks, at its position in the cache: sinks, then the window
            ops.rope(sink_q, q, *angles, self.sinks + self.window - 1)
        ops.rope_and_cache(q, k, v, *angles, *pages[:2], batch.slots[pages.group])
        lengths = (batch.block_tables[pages.group], batch.context_lens, batch.query_start)
        sight = self.scale, self.window, 0.0, self.sinks, sink_q
        ops.paged_attention(attended, q, *pages[:2], *lengths, *sight)
        ops.linear(out, buffers.attended_rows, self.output, self.output_bias)


class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, params: Mapping[str, Any], prefix: str) -> None:
        self.gate_up, self.gate_up_bias = params[prefix + "gate_up"], params.get(prefix + "gate_up_bias")
        self.down, self.down_bias = params[prefix + "down"], params.get(prefix + "down_bias")
        self.activation = config.activation

    def __call__(self, ops: Any, out: Array, x: Array, buffers: Buffers) -> None:
        ops.linear(buffers.gate_up, x, self.gate_up, self.gate_up_bias)
        ops.gated_activation(buffers.activated, buffers.gate_up, self.activation)
        ops.linear(out, buffers.activated, self.down, self.down_bias)


class Layer:
    """A pre-norm transformer layer: h += attention(norm(h)); h += mlp(norm(h)).

    Where several ranks share a model, each has some of the heads and some of the MLP's columns, and all add up what theirs give
    (Megatron-LM, Shoeybi et al. 2019, section 3).
    """

    def __init__(self, config: ModelConfig, params: Mapping[str, Any], index: int, all_reduce: AllReduce) -> None:
        prefix = f"layers.{index}."
        self.is_first = index == 0
        self.all_reduce = all_reduce
        self.eps = config.norm_eps
        self.input_norm, self.post_norm = params[prefix + "input_norm"], params[prefix + "post_norm"]
        self.attention = Attention(config, params, prefix, config.windows[index])
        self.mlp = GatedMLP(config, params, prefix)

    def __call__(self, ops: Any, buffers: Buffers, batch: Batch, pages: Pages) -> None:
        """Leaves the last addition to whoever comes next: h is ``buffers.hidden`` + ``buffers.normed`` then."""
        h, x = buffers.hidden, buffers.normed
        if self.is_first:
            ops.rms_norm(x, h, self.input_norm, self.eps)
        else:
            ops.add_rms_norm(x, h, x, self.input_norm, self.eps)
        self.attention(ops, x, x, buffers, batch, pages)
        self.all_reduce(x)
        ops.add_rms_norm(x, h, x, self.post_norm, self.eps)
        self.mlp(ops, x, x, buffers)
        self.all_reduce(x)


class Buffers:
    """The activations of a step of up to T tokens, allocated once; :meth:`rows` gives views of the first tokens."""

    _ROWS = ("hidden", "normed", "qkv", "sink_q", "attended_rows", "gate_up", "activated")  #: arrays with a row a token

    def __init__(self, config: ModelConfig, device: Device, max_tokens: int, num_positions: int) -> None:
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._config = config

        def empty(*shape: int) -> Array:
            return device.empty(shape, np.float32)

        self.hidden = empty(max_tokens, config.hidden_size)
        self.normed = empty(max_tokens, config.hidden_size)
        self.qkv = empty(max_tokens, (heads + 2 * kv_heads) * dim)
        self.attended_rows = empty(max_tokens, heads * dim)
        self.sink_q = empty(max_tokens, heads, dim) if config.attention_sinks else None
        self.gate_up = empty(max_tokens, 2 * config.intermediate_size)
        self.activated = empty(max_tokens, config.intermediate_size)
        self.cos, self.sin = (device.array(table) for table in rope_tables(config.rope, num_positions))
        self._split_heads()

    def _split_heads(self) -> None:
        heads, kv_heads, dim = self._config.num_heads, self._config.num_kv_heads, self._config.head_dim
        qkv = self.qkv.reshape(len(self.qkv), -1, dim)
        self.q, self.k, self.v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        self.attended = self.attended_rows.reshape(len(self.qkv), heads, dim)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers and tables."""
        owned = (getattr(self, name) for name in (*self._ROWS, "cos", "sin"))
        return sum(int(array.nbytes) for array in owned if array is not None)

    def rows(self, num_tokens: int) -> Buffers:
        """The same buffers, cut to the first ``num_tokens`` rows; the rotary tables stay whole."""
        part = object.__new__(Buffers)
        part._config, part.cos, part.sin = self._config, self.cos, self.sin
        for name in self._ROWS:
            whole = getattr(self, name)
            setattr(part, name, None if whole is None else whole[:num_tokens])
        part._split_heads()
        return part


class Decoder:
    """A whole model over the ops of a device. One step at a time: the buffers are its own."""

    def __init__(
        self,
        config: ModelConfig,
        params: Mapping[str, Any],
        device: Device,
        *,
        max_tokens: int,
        max_logit_rows: int,
        num_positions: int,
    ) -> None:
        """``params`` are named as a family's plan does; a step has at most ``max_tokens`` tokens, at positions below
        ``num_positions``.
        """
        self.config = config
        self.max_tokens, self.max_logit_rows = max_tokens, max_logit_rows
        self.num_reductions = 1 + 2 * config.num_layers  #: sums over the ranks in :meth:`forward`, [T, H] each
        self._ops = device.ops
        self._all_reduce = device.new_all_reduce(max_tokens, config.hidden_size)
        self._embed, self._norm = params["embed"], params["norm"]
        self._head = params.get("lm_head", params["embed"])
        self._layers = [Layer(config, params, i, self._all_reduce) for i in range(config.num_layers)]
        self._buffers = Buffers(config, device, max_tokens, num_positions)
        self.logits = device.empty((max_logit_rows, config.vocab_size), np.float32)
        self._last = device.empty((max_logit_rows, config.hidden_size), np.float32)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of activations, rotary tables and logits."""
        return self._buffers.nbytes + int(self.logits.nbytes + self._last.nbytes)

    def forward(self, batch: Batch, kv: KVPages) -> None:
        """Run all layers over a batch: K and V are written into ``kv``, the hidden states kept for :meth:`compute_logits`."""
        ops, buffers = self._ops, self._buffers.rows(len(batch.token_ids))
        ops.embed(buffers.hidden, self._embed, batch.token_ids)
        self._all_reduce(buffers.hidden)
        for index, layer in enumerate(self._layers):
            layer(ops, buffers, batch, Pages(*kv.layer(index)))
        ops.add(buffers.hidden, buffers.hidden, buffers.normed)

    def compute_logits(self, rows: Array) -> None:
        """Compute the logits of the tokens ``rows`` [n] int32 of the last batch, n <= max_logit_rows, to ``logits[:n]``."""
        ops, count = self._ops, len(rows)
        last = self._last[:count]
        ops.gather_rows(last, self._buffers.hidden, rows)
        ops.rms_norm(last, last, self._norm, self.config.norm_eps)
        ops.linear(self.logits[:count], last, self._head, None)
