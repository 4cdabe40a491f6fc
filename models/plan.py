"""Which tensors of a checkpoint become which parameters of a model: a family states it, a loader follows it."""

from __future__ import annotations

from typing import Literal, NamedTuple


class TensorSpec(NamedTuple):
    """A tensor that the checkpoint must have."""

    name: str
    shape: tuple[int, ...]
    #: the file may have more rows than ``shape``, which are not used: a vocabulary padded to a round size
    padded: bool = False


#: What each of several ranks has of a parameter: "whole": all of it; "rows": its part of the rows of each tensor; "columns":
#: its part of the columns; "vocabulary": the rows of some tokens; "first": all of it, and only rank 0, since what is added to
#: a sum over ranks must be added once.
Split = Literal["whole", "rows", "columns", "vocabulary", "first"]


class Parameter(NamedTuple):
    """One parameter, made of one or more tensors stacked by rows in the order given (q, k and v to qkv)."""

    name: str
    role: Literal["linear", "vector"]  #: linear: a packed weight (N, K); vector: float32 [N]
    tensors: tuple[TensorSpec, ...]
    split: Split = "whole"


class Plan(NamedTuple):
    """All parameters of a model, and what else its files may hold."""

    parameters: tuple[Parameter, ...]
    ignored: tuple[str, ...]  #: regular expressions that match the whole name of a buffer that is computed, never read
    superseded: tuple[str, ...]  #: names of tensors that another one stands in for; not used, with a warning
