"""In which kind each matrix of a model is kept: that of its file, a float type for all, or quantised."""

from __future__ import annotations

from ..kernels.quantization import GROUP_KINDS
from ..models import Plan
from .source import TensorSource

VOCABULARY = ("embed", "lm_head")  #: parameters with a row for each token, to which logits are most sensitive


def weight_kinds(
    plan: Plan, source: TensorSource, model_dtype: str, dtype: str, quantization: str | None
) -> dict[str, str]:
    """The kind of every matrix of ``plan`` by its name, as the keywords ``dtype`` and ``quantization`` of ``LLM`` say.

    quantization "int8" is for all matrices; "int4" leaves the embedding and the output head in int8. Without it, a ``dtype``
    is for all. "auto" keeps what the file has, and stacks of different kinds in one that holds all of them; a source that
    leaves it to the config gets ``model_dtype``.
    """
    matrices = [parameter for parameter in plan.parameters if parameter.role == "linear"]
    if quantization is not None:
        return {matrix.name: "int8" if matrix.name in VOCABULARY else quantization for matrix in matrices}
    if dtype != "auto":
        return dict.fromkeys((matrix.name for matrix in matrices), dtype)
    return {
        matrix.name: common_kind({source.kind(spec.name) or model_dtype for spec in matrix.tensors})
        for matrix in matrices
    }


def common_kind(kinds: set[str]) -> str:
    """The kind for rows of these kinds together: their own where it is one, else the smallest that loses least."""
    if len(kinds) == 1:
        return next(iter(kinds))
    floats = [kind for kind in kinds if kind not in GROUP_KINDS]
    if not floats:
        return "int8"
    return floats[0] if len(floats) == 1 else "float32"
