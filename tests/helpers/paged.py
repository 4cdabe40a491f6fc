"""Attention problems for tests of kernels: sequences scattered over pages, and the same attention by its formula."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .kernels import Implementation, rounded

Array = Any


@dataclass(frozen=True)
class Problem:
    """Sequences with random queries, keys and values.

    Sequence s has ``contexts[s]`` tokens, and asks for the attention of the last ``queries[s]`` of them. Its numbers
    depend on ``seeds[s]`` and on the position only, so that parts of a problem can be computed on their own.
    """

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    block_size: int = 4
    contexts: tuple[int, ...] = (9,)
    queries: tuple[int, ...] = (1,)
    window: int = 0
    sinks: int = 0  #: with a window: the first tokens, which all queries see
    soft_cap: float = 0.0
    kind: str = "float32"
    fill: float = 0.0  #: what the slots hold that no query sees
    shuffle: int = 0  #: seed of the physical places of blocks
    seeds: tuple[int, ...] = field(default=())  #: of the sequences; default 0, 1, 2...

    def __str__(self) -> str:
        """A test's id."""
        return (
            f"h{self.heads}/{self.kv_heads} d{self.head_dim} b{self.block_size} c{_short(self.contexts)} "
            f"q{_short(self.queries)} w{self.window}+{self.sinks} cap{self.soft_cap:g} {self.kind}"
        ).replace(" ", "-")

    @property
    def scale(self) -> float:
        """What scores are multiplied with."""
        return float(self.head_dim**-0.5)

    def numbers(self, sequence: int) -> tuple[Array, Array, Array]:
        """q [context, NH, D], and k and v [context, KVH, D] as they come back from the pages.

        q and k count as rotated by their positions in the sequence.
        """
        context = self.contexts[sequence]
        rng = np.random.default_rng((self.seeds or range(len(self.contexts)))[sequence])
        width = self.heads + 2 * self.kv_heads
        qkv = rng.standard_normal((context, width, self.head_dim), dtype=np.float32)
        q, k, v = np.split(qkv, [self.heads, self.heads + self.kv_heads], axis=1)
        return q, rounded(k, self.kind), rounded(v, self.kind)

    def seen(self, sequence: int) -> list[int]:
        """The tokens of a sequence that its queries see, or one of them."""
        first_query, context = self.contexts[sequence] - self.queries[sequence], self.contexts[sequence]
        return sorted({token for position in range(first_query, context) for token in self.seen_from(position)})

    def seen_from(self, position: int) -> list[int]:
        """The tokens that a query sees: what a cache holds of the sinks and of the last ones, itself included."""
        recent = range(max(position - self.window + 1, 0) if self.window else 0, position + 1)
        return [token for token in range(position + 1) if token < self.sinks or token in recent]

    def arguments(self, impl: Implementation) -> tuple[Any, ...]:
        """All arguments of ``paged_attention`` but ``out``, on the device."""
        needed = [-(-context // self.block_size) for context in self.contexts]
        num_blocks = sum(needed) + 2  # two that nobody owns
        free = list(np.random.default_rng(self.shuffle).permutation(num_blocks))
        tables = np.full((len(needed), max(needed) + 1), -1, np.int32)
        plain = (num_blocks, self.kv_heads, self.block_size, self.head_dim)
        keys, values = np.full(plain, self.fill, np.float32), np.full(plain, self.fill, np.float32)
        queries, sink_queries = [], []
        for s, context in enumerate(self.contexts):
            q, k, v = self.numbers(s)
            asked = range(context - self.queries[s], context)
            queries.append(q[asked])
            # The sinks meet each query at its place in the cache.
            sink_queries += [rotate(q[p].astype(np.float64), len(self.seen_from(p)) - 1 - p) for p in asked]
            seen = np.array(self.seen(s), np.int64)
            for block in np.unique(seen // self.block_size):
                tables[s, block] = free.pop()
            places = tables[s, seen // self.block_size], slice(None), seen % self.block_size
            keys[places], values[places] = k[seen], v[seen]
        query_start = np.cumsum([0, *self.queries]).astype(np.int32)
        lengths = np.array(self.contexts, np.int32), query_start
        pages = impl.key_pages(keys, self.kind), impl.value_pages(values, self.kind)
        arrays = (impl.array(a) for a in (tables, *lengths))
        numbers = self.scale, self.window, self.soft_cap
        sinks = (self.sinks, impl.array(np.array(sink_queries, np.float32))) if self.sinks else ()
        return (impl.array(np.concatenate(queries)), *pages, *arrays, *numbers, *sinks)

    def attend(self, impl: Implementation) -> Array:
        """The result [T, NH, D] of an implementation, on the host."""
        arguments = self.arguments(impl)
        out = impl.array(np.full(arguments[0].shape, np.nan, np.float32))
        impl.run("paged_attention", out, *arguments)
        return impl.host(out)

    def formula(self) -> Array:
        """The same result by the definition of attention, in float64, a query and a head at a time.

        With sinks, the query and all keys that it sees are rotated from their positions in the sequence to those in the
        cache, one by one.
        """
        results = []
        for s, context in enumerate(self.contexts):
            q, k, v = (x.astype(np.float64) for x in self.numbers(s))
            for position in range(context - self.queries[s], context):
                seen = self.seen_from(position)
                query, keys = q[position], k[seen]
                if self.sinks:
                    keys = np.array(
                        [rotate(key, i - token) for i, (key, token) in enumerate(zip(keys, seen, strict=True))]
                    )
                    query = rotate(query, len(seen) - 1 - position)
                results.append([self._one(query[head], keys, v[seen], head) for head in range(self.heads)])
        return np.array(results)

    def _one(self, q: Array, k: Array, v: Array, head: int) -> Array:
        kv_head = head // (self.heads // self.kv_heads)
        scores = k[:, kv_head] @ q * self.scale
        if self.soft_cap:
            scores = self.soft_cap * np.tanh(scores / self.soft_cap)
        weights = np.exp(scores - scores.max())
        return weights @ v[:, kv_head] / weights.sum()

    def part(self, sequence: int, stop: int, count: int) -> Problem:
        """The last ``count`` queries of the first ``stop`` tokens of one sequence, alone and at other physical places."""
        seeds = self.seeds or tuple(range(len(self.contexts)))
        alone = {"contexts": (stop,), "queries": (count,), "seeds": (seeds[sequence],)}
        return replace(self, **alone, shuffle=self.shuffle + 1)


def rotate(x: Array, distance: float) -> Array:
    """x [heads, D] with dim i and dim i + D // 2 turned as rotary positions do over a distance; the odd dim stays."""
    half = x.shape[-1] // 2
    turned = x[:, :half] + 1j * x[:, half : 2 * half]
    turned = turned * np.exp(1j * distance * 100.0 ** -(np.arange(half) / max(half, 1)))
    return np.concatenate([turned.real, turned.imag, x[:, 2 * half :]], axis=-1)


def _short(numbers: tuple[int, ...]) -> str:
    """A few numbers, or the first few of many."""
    shown = ",".join(map(str, numbers[:4]))
    return shown if len(numbers) <= 4 else f"{shown}..x{len(numbers)}"


def contexts(block_size: int) -> list[int]:
    """Context lengths at and around the ends of blocks and of what kernels reduce at once."""
    return sorted({1, max(block_size - 1, 1), block_size, block_size + 1, 257, 1025})


def odd_problem(
    heads: tuple[int, int], head_dim: int, block_size: int, batch: int, longest: int, **more: Any
) -> Problem:
    """A problem with one sequence of the ``longest`` context, and others up to it; a few decode, a few prefill."""
    rng = random.Random(head_dim * block_size + batch + longest)
    lengths = [longest] + [rng.choice([n for n in contexts(block_size) if n <= longest]) for _ in range(batch - 1)]
    queries = [1 if rng.random() < 0.7 else rng.randint(1, min(n, 5)) for n in lengths]
    return Problem(*heads, head_dim, block_size, tuple(lengths), tuple(queries), **more)


#: Problems that a simulated GPU has time for.
SMALL = [
    Problem(1, 1, 4, 1, (1, 3), (1, 2)),
    Problem(3, 1, 33, 4, (5, 4), (1, 4)),
    Problem(4, 2, 8, 16, (17, 40), (1, 2)),
]

#: A whole prompt, the ends of two, and a single token, in one batch.
MIXED = Problem(6, 2, 20, 4, (9, 150, 40, 3), (9, 40, 1, 2))
