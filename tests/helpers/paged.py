"""Attention problems for tests of kernels: sequences scattered over pages, and the same attention by its formula."""

from __future__ import annotations

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
    soft_cap: float = 0.0
    kind: str = "float32"
    fill: float = 0.0  #: what the slots hold that no query sees
    shuffle: int = 0  #: seed of the physical places of blocks
    seeds: tuple[int, ...] = field(default=())  #: of the sequences; default 0, 1, 2...

    def __str__(self) -> str:
        """A test's id."""
        return (
            f"h{self.heads}/{self.kv_heads} d{self.head_dim} b{self.block_size} c{_short(self.contexts)} "
            f"q{_short(self.queries)} w{self.window} cap{self.soft_cap:g} {self.kind}"
        ).replace(" ", "-")

    @property
    def scale(self) -> float:
        """What scores are multiplied with."""
        return float(self.head_dim**-0.5)

    def numbers(self, sequence: int) -> tuple[Array, Array, Array]:
        """q [context, NH, D], and k and v [context, KVH, D] as they come back from the pages."""
        context = self.contexts[sequence]
        rng = np.random.default_rng((self.seeds or range(len(self.contexts)))[sequence])
        width = self.heads + 2 * self.kv_heads
        qkv = rng.standard_normal((context, width, self.head_dim), dtype=np.float32)
        q, k, v = np.split(qkv, [self.heads, self.heads + self.kv_heads], axis=1)
        return q, rounded(k, self.kind), rounded(v, self.kind)

    def first_seen(self, sequence: int) -> int:
        """The first token of a sequence that one of its queries sees."""
        first_query = self.contexts[sequence] - self.queries[sequence]
        return max(first_query - self.window + 1, 0) if self.window else 0

    def arguments(self, impl: Implementation) -> tuple[Any, ...]:
        """All arguments of ``paged_attention`` but ``out``, on the device."""
        needed = [-(-context // self.block_size) for context in self.contexts]
        num_blocks = sum(needed) + 2  # two that nobody owns
        free = list(np.random.default_rng(self.shuffle).permutation(num_blocks))
        tables = np.full((len(needed), max(needed) + 1), -1, np.int32)
        plain = (num_blocks, self.kv_heads, self.block_size, self.head_dim)
        keys, values = np.full(plain, self.fill, np.float32), np.full(plain, self.fill, np.float32)
        queries = []
        for s, context in enumerate(self.contexts):
            q, k, v = self.numbers(s)
            queries.append(q[context - self.queries[s] :])
            seen = np.arange(self.first_seen(s), context)
            for block in np.unique(seen // self.block_size):
                tables[s, block] = free.pop()
            places = tables[s, seen // self.block_size], slice(None), seen % self.block_size
            keys[places], values[places] = k[seen], v[seen]
        query_start = np.cumsum([0, *self.queries]).astype(np.int32)
        lengths = np.array(self.contexts, np.int32), query_start
        pages = impl.key_pages(keys, self.kind), impl.value_pages(values, self.kind)
        arrays = (impl.array(a) for a in (tables, *lengths))
        return (impl.array(np.concatenate(queries)), *pages, *arrays, self.scale, self.window, self.soft_cap)

    def attend(self, impl: Implementation) -> Array:
        """The result [T, NH, D] of an implementation, on the host."""
        arguments = self.arguments(impl)
        out = impl.array(np.full(arguments[0].shape, np.nan, np.float32))
        impl.run("paged_attention", out, *arguments)
        return impl.host(out)

    def formula(self) -> Array:
        """The same result by the definition of attention, in float64, a query and a head at a time."""
        results = []
        for s, context in enumerate(self.contexts):
            q, k, v = (x.astype(np.float64) for x in self.numbers(s))
            for position in range(context - self.queries[s], context):
                first = max(position - self.window + 1, 0) if self.window else 0
                heads = range(self.heads)
                results.append(
                    [self._one(q[position, h], k[first : position + 1], v[first : position + 1], h) for h in heads]
                )
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


def _short(numbers: tuple[int, ...]) -> str:
    """A few numbers, or the first few of many."""
    shown = ",".join(map(str, numbers[:4]))
    return shown if len(numbers) <= 4 else f"{shown}..x{len(numbers)}"
