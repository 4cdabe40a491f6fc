"""The op checks of gpu_check.py: each computes ops on inputs drawn from seeds, with whatever implementation it is given.

Letters in labels: T tokens, N outputs, K inputs, NH query heads, KVH key/value heads, D head size, B block size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from minipage.kernels.draws import DRAW, as_words
from minipage.kernels.dtypes import STORAGE, convert
from minipage.kernels.ops import ACTIVATIONS, WEIGHT_KINDS

Array = Any
#: (ops, what brings a host array to their device, their array module) -> the arrays that the ops wrote.
Check = Callable[[Any, Callable[[np.ndarray], Array], Any], list[Array]]


class Heads(NamedTuple):
    """The shapes of an attention layer and its pages."""

    query: int
    kv: int
    dim: int
    block: int
    kind: str = "float32"

    def __str__(self) -> str:
        return f"NH{self.query} KVH{self.kv} D{self.dim} B{self.block} {self.kind}"


class Span(NamedTuple):
    """The queries of one sequence in a call: its tokens first..stop, ``stop`` tokens being in the cache."""

    first: int
    stop: int


def normal(seed: int, *shape: int) -> np.ndarray:
    """Normally distributed float32; of a longer array of the same seed, the first rows are the same."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def linear(kind: str, num_tokens: int, num_outputs: int, num_inputs: int) -> Check:
    """A linear layer with and without bias, and the embedding of three tokens."""

    def check(ops: Any, array: Callable[[np.ndarray], Array], xp: Any) -> list[Array]:
        weight = ops.empty_weight((num_outputs, num_inputs), kind, xp)
        ops.pack_rows(weight, 0, normal(1, num_outputs, num_inputs) / np.float32(np.sqrt(num_inputs)))
        x, bias = array(normal(2, num_tokens, num_inputs)), array(normal(3, num_outputs))
        outs = [array(np.full((num_tokens, num_outputs), np.nan, np.float32)) for _ in range(2)]
        rows = array(np.zeros((3, num_inputs), np.float32))
        ops.linear(outs[0], x, weight, None)
        ops.linear(outs[1], x, weight, bias)
        ops.embed(rows, weight, array(np.array([0, num_outputs - 1, 2], np.int32)))
        return [*outs, rows]

    return check


def norms(num_tokens: int, size: int) -> Check:
    """Root mean square norm, plain and with the addition before it, and layer norm in place."""

    def check(ops: Any, array: Callable[[np.ndarray], Array], xp: Any) -> list[Array]:
        x, weight, bias = array(normal(1, num_tokens, size)), array(normal(2, size)), array(normal(3, size))
        out, total, sums = (array(np.zeros((num_tokens, size), np.float32)) for _ in range(3))
        ops.rms_norm(out, x, weight, 1e-5)
        ops.add_rms_norm(sums, total, x, weight, 1e-5)
        ops.layer_norm(x, x, weight, bias, 1e-5)
        return [out, sums, total, x]

    return check


def elementwise(num_tokens: int, size: int) -> Check:
    """All activations, an addition, rows in reverse order."""

    def check(ops: Any, array: Callable[[np.ndarray], Array], xp: Any) -> list[Array]:
        gate_up = array(normal(1, num_tokens, 2 * size) * 4)
        outs = [array(np.zeros((num_tokens, size), np.float32)) for _ in range(len(ACTIVATIONS) + 2)]
        for out, activation in zip(outs, ACTIVATIONS, strict=False):
            ops.gated_activation(out, gate_up, activation)
        ops.add(outs[-1], outs[0], outs[1])
        ops.gather_rows(outs[-2], outs[0], array(np.arange(num_tokens, dtype=np.int32)[::-1].copy()))
        return outs

    return check


def pages(ops: Any, array: Callable[[np.ndarray], Array], heads: Heads, num_blocks: int) -> tuple[Array, Array]:
    """Random K and V pages in the layout of ``ops``, the same numbers for every implementation."""
    shape = num_blocks, heads.kv, heads.block, heads.dim
    key = convert(normal(7, *shape), heads.kind).transpose(ops.KEY_AXES)
    value = convert(normal(8, *shape), heads.kind).transpose(ops.VALUE_AXES)
    return array(np.ascontiguousarray(key)), array(np.ascontiguousarray(value))


def plain(pages: Array, axes: tuple[int, ...]) -> Array:
    """Pages as [num_blocks, KVH, B, D], whatever their layout."""
    return pages.transpose(*(axes.index(axis) for axis in range(4)))


def rope_and_cache(heads: Heads, num_tokens: int, rotary: int) -> Check:
    """q, k and v views of one buffer, rotated and written to slots in random order, the first token being padding; and q
    rotated into another buffer, to positions up to 40.
    """

    def check(ops: Any, array: Callable[[np.ndarray], Array], xp: Any) -> list[Array]:
        qkv = array(normal(1, num_tokens, heads.query + 2 * heads.kv, heads.dim))
        q, k, v = qkv[:, : heads.query], qkv[:, heads.query : -heads.kv], qkv[:, -heads.kv :]
        angles = np.outer(np.arange(64), 1.0 / 100 ** np.linspace(0, 1, rotary // 2)).astype(np.float32)
        positions = np.random.default_rng(2).integers(0, 64, num_tokens).astype(np.int32)
        num_blocks = 2 + num_tokens // heads.block
        slots = np.random.default_rng(3).permutation(num_blocks * heads.block)[:num_tokens].astype(np.int64)
        slots[0] = -1
        key, value = pages(ops, array, heads, num_blocks)
        tables = array(np.cos(angles)), array(np.sin(angles))
        sink_q = array(np.full((num_tokens, heads.query, heads.dim), np.nan, np.float32))
        ops.rope(sink_q, q, *tables, array(positions), 40)
        ops.rope_and_cache(q, k, v, *tables, array(positions), key, value, array(slots))
        return [sink_q, qkv, plain(key, ops.KEY_AXES), plain(value, ops.VALUE_AXES)]

    return check


def attention(
    heads: Heads, spans: list[Span], tokens: int, window: int = 0, soft_cap: float = 0.0, sinks: int = 0
) -> Check:
    """Attention of several sequences, each with pages for ``tokens``; one sequence's numbers do not depend on the others."""

    def check(ops: Any, array: Callable[[np.ndarray], Array], xp: Any) -> list[Array]:
        longest = -(-tokens // heads.block)
        tables = [s * longest + np.random.default_rng(s).permutation(longest) for s in range(len(spans))]
        key, value = pages(ops, array, heads, len(spans) * longest)
        queries = [normal(100 + s, span.stop, heads.query, heads.dim)[span.first :] for s, span in enumerate(spans)]
        q = array(np.concatenate(queries))
        out = array(np.full(q.shape, np.nan, np.float32))
        context_lens = np.array([span.stop for span in spans], np.int32)
        query_start = np.cumsum([0, *map(len, queries)]).astype(np.int32)
        sequences = array(np.array(tables, np.int32)), array(context_lens), array(query_start)
        sink_q = array(np.concatenate(queries)[:, ::-1].copy())  # as good as any: the heads in another order
        ops.paged_attention(out, q, key, value, *sequences, heads.dim**-0.5, window, soft_cap, sinks, sink_q)
        return [out]

    return check


def block_copies(heads: Heads) -> Check:
    """Copies within two pools of two layers, then from one pool to another of a different size."""

    def check(ops: Any, array: Callable[[np.ndarray], Array], xp: Any) -> list[Array]:
        keys, values = (pool[None].repeat(2, axis=0) for pool in pages(ops, array, heads, 9))
        others = [pool[None].repeat(2, axis=0) for pool in pages(ops, array, heads, 12)]
        src, dst = array(np.array([0, 3, 8])), array(np.array([4, 1, 7]))
        ops.copy_blocks(keys, values, src, dst)
        ops.swap_blocks(keys, values, *others, src, dst)
        pairs = (keys, ops.KEY_AXES), (values, ops.VALUE_AXES), (others[0], ops.KEY_AXES), (others[1], ops.VALUE_AXES)
        return [plain(pool[1], axes) for pool, axes in pairs]

    return check


def draws(num_rows: int) -> np.ndarray:
    """How tokens of some rows are drawn: one after the other greedy, by temperature alone, and with more and more filters."""
    half, most = 1 << 63, int(0.95 * 2**64)
    settings = [(0.0, 0, 0.0, 0), (1.0, 0, 0.0, 0), (0.7, 50, 0.0, 0), (1.5, 0, 0.01, most), (2.0, 300, 0.0, half)]
    return np.array(
        [(*settings[i % len(settings)], 0x9E3779B97F4A7C15 * i % 2**64, i % 3, i) for i in range(num_rows)], DRAW
    )


def sample(num_rows: int, vocab_size: int) -> Check:
    """Tokens of random rows, every other of which has but 32 different logits, drawn in all ways."""

    def check(ops: Any, array: Callable[[np.ndarray], Array], xp: Any) -> list[Array]:
        logits = 3 * normal(1, num_rows, vocab_size)
        logits[1::2] = np.rint(2 * logits[1::2]) / 2
        out = array(np.full(num_rows, -2, np.int32))
        ops.sample(out, array(logits), array(as_words(draws(num_rows))))
        return [out.astype(np.float32)]

    return check


def against_reference(large: bool) -> Iterator[tuple[str, Check, float]]:
    """Name, check and allowed error of every op; ``large`` adds shapes that would take the simulator minutes."""
    for kind in WEIGHT_KINDS:
        for shape in [(5, 61, 40), (1, 1024, 2048), (65, 500, 1000)] if large else [(5, 61, 40)]:
            yield "linear, embed {} T{} N{} K{}".format(kind, *shape), linear(kind, *shape), 2e-5
        if large:  # so many tokens that they, and weights that are codes, may be rounded
            allowed = {"float32": 2e-5, "bfloat16": 1e-2}.get(kind, 1e-3)
            yield f"linear {kind} T300 N500 K1001", linear(kind, 300, 500, 1001), allowed
    for shape in [(3, 40), (7, 2048), (33, 4097)] if large else [(3, 40)]:
        yield "norms T{} H{}".format(*shape), norms(*shape), 1e-5
        yield "elementwise T{} I{}".format(*shape), elementwise(*shape), 5e-5
    for shape in [(10, 50), (10, 1001), (100, 32000), (10, 151936)] if large else [(5, 50)]:
        yield "sample rows {}, vocabulary {}".format(*shape), sample(*shape), 0.0
    shapes = [Heads(4, 2, 8, 4), Heads(3, 1, 33, 1, "bfloat16"), Heads(2, 2, 4, 16, "float16")]
    if large:
        shapes += [Heads(65, 5, 128, 16, kind) for kind in STORAGE] + [Heads(128, 8, 256, 32), Heads(6, 3, 80, 16)]
    for heads in shapes:
        spans = [Span(8, 13), Span(0, 4), Span(16, 17)]
        yield f"rope_and_cache {heads}", rope_and_cache(heads, 5, heads.dim // 4 * 2), 1e-6
        yield f"copy_blocks, swap_blocks {heads}", block_copies(heads), 0.0
        yield f"attention {heads}", attention(heads, spans, 17), 1e-5
        yield f"attention {heads}, window 5, cap 20", attention(heads, spans, 17, 5, 20.0), 1e-5
        yield f"attention {heads}, window 5, sinks 3", attention(heads, spans, 17, 5, sinks=3), 1e-5
        if large:
            yield f"attention {heads}, long", attention(heads, [Span(985, 1025), Span(256, 257)], 1025), 1e-5
    for heads in [Heads(32, 8, 128, 16, kind) for kind in STORAGE] if large else []:  # two tiles a block
        yield f"attention {heads}, a prompt", attention(heads, [Span(500, 1025), Span(256, 257)], 1025), 1e-5


def same_bits(large: bool) -> Iterator[tuple[str, Check, Check]]:
    """Pairs of checks: the first array of the first is, bit for bit, the first rows of the second's."""
    for kind in WEIGHT_KINDS:
        size = (500, 4096) if large else (61, 72)
        yield f"linear {kind} alone and in a batch", linear(kind, 1, *size), linear(kind, 9, *size)
    rows, vocab_size = (64, 32000) if large else (8, 50)
    yield "sample alone and in a batch", sample(5, vocab_size), sample(rows, vocab_size)
    heads, tokens = (Heads(32, 8, 128, 16, "float16"), 600) if large else (Heads(4, 2, 8, 4), 40)
    chunk, whole = Span(0, tokens // 6), Span(0, tokens)  # which are one tile a block and two
    company = [Span(0, 3), Span(tokens - 1, tokens)]
    yield "attention in chunks and at once", attention(heads, [chunk], tokens), attention(heads, [whole], tokens)
    yield (
        "attention alone and in a batch",
        attention(heads, [chunk], tokens),
        attention(heads, [chunk, *company], tokens),
    )
