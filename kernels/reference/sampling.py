"""Tokens from logits, by full sorts."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..draws import DRAW
from ..ops import Array
from ..philox import uniform


def sample(out: Array, logits: Array, draws: Array) -> None:
    """out [R] = a token of each row of logits [R, V], drawn as the records of ``draws`` say, or -1."""
    for row, record in enumerate(draws.view(DRAW)[:, 0]):
        out[row] = _draw(logits[row], record)


@np.errstate(over="ignore", invalid="ignore")  # -inf is right for what is far below the largest; and NaN is looked for
def _draw(logits: Array, draw: Any) -> int:
    peak = logits.max()
    if not np.isfinite(peak):
        return -1
    kept = np.argsort(-logits, kind="stable")
    if draw["temperature"] == 0:
        return int(kept[0])
    weights = np.exp((logits - peak) / draw["temperature"])
    if draw["top_k"]:
        kept = np.sort(kept[: draw["top_k"]])
    if draw["top_p"]:
        kept = np.sort(kept)
        kept = kept[np.argsort(-weights[kept], kind="stable")]
        mass = np.cumsum(weights[kept], dtype=np.float64)
        before = np.concatenate([[-1.0], mass[:-1]])  # the first is always kept
        kept = kept[before < float(draw["top_p"]) / 2**64 * mass[-1]]
    kept = np.sort(kept[weights[kept] >= draw["min_p"]])
    mass = np.cumsum(weights[kept], dtype=np.float64)
    mark = uniform(int(draw["seed"]), int(draw["child"]), int(draw["position"])) * mass[-1]
    return int(kept[np.searchsorted(mass, min(mark, np.nextafter(mass[-1], 0)), side="right")])
