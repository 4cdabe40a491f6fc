"""Shards: what each of several ranks has of a model, and how it reads no more than that.

Attention heads and MLP columns are split as in Megatron-LM (Shoeybi et al. 2019, section 3): the matrices before them by rows,
those after them by columns, so that each rank's outputs are summands of the whole's. Embedding and head are split by tokens,
since they are a large part of small models, and the head is read in every step: behind a rank's tokens is a row of zeros,
which stands for the tokens of other ranks, so that embeddings are summands, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..errors import InvalidArgumentError
from ..kernels.ops import GROUP_SIZE, Groups
from ..kernels.quantization import GROUP_KINDS
from ..models import ModelConfig, Parameter, Plan, TensorSpec
from .source import Array, TensorSource


class Tokens(NamedTuple):
    """The tokens ``first`` .. ``stop`` of a vocabulary, in a matrix of ``num_rows`` rows, the last of which is zeros."""

    first: int
    stop: int
    num_rows: int

    def rows(self, token_ids: list[int]) -> list[int]:
        """The rows of any tokens: the last one for those that are not here."""
        first, stop, zeros = self.first, self.stop, self.num_rows - 1
        return [token - first if first <= token < stop else zeros for token in token_ids]


class Shard(NamedTuple):
    """One of ``size`` parts, that of ``rank``."""

    rank: int
    size: int

    def part(self, count: int) -> slice:
        """Of ``count`` rows or columns, which ``size`` divides."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def tokens(self, vocab_size: int) -> Tokens:
        """Of a vocabulary. All shards have the same number of rows."""
        each = -(-vocab_size // self.size)
        first = min(self.rank * each, vocab_size)
        return Tokens(first, min(first + each, vocab_size), each + 1)

    def config(self, whole: ModelConfig) -> ModelConfig:
        """The model that this shard alone would be."""
        return replace(
            whole,
            vocab_size=self.tokens(whole.vocab_size).num_rows,
            num_heads=whole.num_heads // self.size,
            num_kv_heads=whole.num_kv_heads // self.size,
            intermediate_size=whole.intermediate_size // self.size,
        )

    def plan(self, whole: Plan) -> Plan:
        """The parameters of this shard, with the shapes that :class:`ShardedSource` gives them."""
        mine = [parameter for parameter in whole.parameters if parameter.split != "first" or self.rank == 0]
        return whole._replace(parameters=tuple(map(self._parameter, mine)))

    def _parameter(self, whole: Parameter) -> Parameter:
        return whole._replace(tensors=tuple(self._tensor(spec, whole.split) for spec in whole.tensors))

    def _tensor(self, spec: TensorSpec, split: str) -> TensorSpec:
        rows, columns = spec.shape[0], spec.shape[1:]
        if split == "rows":
            rows //= self.size
        elif split == "columns":
            columns = (columns[0] // self.size,)
        elif split == "vocabulary":
            rows = self.tokens(rows).num_rows
        return spec._replace(shape=(rows, *columns))

    def importance(self, whole: Mapping[str, Array], plan: Plan) -> dict[str, Array]:
        """Of the inputs that this shard has, by the parameter's name; ``plan`` is the whole model's."""
        splits = {parameter.name: parameter.split for parameter in plan.parameters}
        return {
            name: values[self.part(len(values))] if splits[name] == "columns" else values
            for name, values in whole.items()
        }


def check_shards(config: ModelConfig, plan: Plan, kinds: Mapping[str, str], size: int) -> None:
    """Raise InvalidArgumentError where a model whose matrices are of these ``kinds`` cannot be split among ``size`` ranks."""
    problem = _obstacle(config, plan, kinds, size)
    if problem is not None:
        allowed = [str(n) for n in range(1, config.num_kv_heads + 1) if _obstacle(config, plan, kinds, n) is None]
        raise InvalidArgumentError(
            f"tensor_parallel_size={size} is not allowed: {problem}; this model allows {', '.join(allowed)}"
        )


def _obstacle(config: ModelConfig, plan: Plan, kinds: Mapping[str, str], size: int) -> str | None:
    counts = {
        "attention heads": config.num_heads,
        "key/value heads": config.num_kv_heads,
        "columns of the MLP": config.intermediate_size,
    }
    for name, count in counts.items():
        if count % size:
            return f"the {count} {name} are not a multiple of it"
    for parameter in plan.parameters:
        if parameter.split == "columns" and size > 1 and kinds.get(parameter.name) in GROUP_KINDS:
            inputs = parameter.tensors[0].shape[1] // size
            if inputs % GROUP_SIZE:
                return (
                    f"each rank's {inputs} inputs of {parameter.name} are not a multiple of {GROUP_SIZE}, "
                    f"the size of a group of its kind, {kinds[parameter.name]}"
                )
    return None


class ShardedSource:
    """What one rank reads of a :class:`~.source.TensorSource`: tensors are shards here.

    Rows of other ranks are never read. Columns of other ranks are read with the rows that they are in, some rows at a time.
    """

    def __init__(self, source: TensorSource, plan: Plan, shard: Shard) -> None:
        """``plan`` is the whole model's."""
        self._source = source
        self._shard = shard
        self._tensors = {
            spec.name: (spec, parameter.split) for parameter in plan.parameters for spec in parameter.tensors
        }

    def kind(self, name: str) -> str | None:
        return self._source.kind(name)

    def file(self, name: str) -> str:
        return self._source.file(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        spec, split = self._tensors[name]
        first, last, num_zeros = self._rows(spec, split, start, stop)
        rows = self._source.read(name, first, last)
        if split == "columns":
            return np.ascontiguousarray(rows[:, self._shard.part(spec.shape[1])])
        return np.concatenate([rows, np.zeros((num_zeros, *rows.shape[1:]), rows.dtype)]) if num_zeros else rows

    def read_groups(self, name: str, start: int = 0, stop: int | None = None) -> Groups:
        spec, split = self._tensors[name]
        first, last, num_zeros = self._rows(spec, split, start, stop)
        groups = self._source.read_groups(name, first, last)
        if split != "columns" and not num_zeros:
            return groups
        part = self._shard.part(groups.codes.shape[1]) if split == "columns" else slice(None)

        def cut(array: Array) -> Array:
            zeros = np.zeros((num_zeros, *array.shape[1:]), array.dtype)
            return np.ascontiguousarray(np.concatenate([array, zeros])[:, part])

        return Groups(*(None if array is None else cut(array) for array in groups))

    def _rows(self, spec: TensorSpec, split: str, start: int, stop: int | None) -> tuple[int, int, int]:
        """Where rows start..stop of the shard are in the file, and how many rows of zeros come after these."""
        if split == "rows":
            part = self._shard.part(spec.shape[0])
            first, last, num_rows = part.start, part.stop, part.stop - part.start
        elif split == "vocabulary":
            first, last, num_rows = self._shard.tokens(spec.shape[0])
        else:
            first, last, num_rows = 0, spec.shape[0], spec.shape[0]
        stop = num_rows if stop is None else stop
        low, high = min(first + start, last), min(first + stop, last)
        return low, high, stop - start - (high - low)
