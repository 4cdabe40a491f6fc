"""The rows as pictures; each is drawn where its rows are there. Matplotlib is the extra ``plots``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .report import Row
from .waste import BLOCK_SIZE, BLOCK_SIZES, KINDS

HERE, PAPER = "#2a6f97", "#c9ada7"  #: colours of what was measured here and of what the paper has
KIND_COLOURS = {"useful": "#2a9d8f", "reserved": "#e9c46a", "internal": "#e76f51", "external": "#bdbdbd"}
SYSTEMS = {"static_max": "Orca (Max)", "static_pow2": "Orca (Pow2)", "oracle": "Orca (Oracle)", "paged": "paged, 16"}

Rows = Mapping[str, Row]


def draw(rows: Iterable[Row], folder: Path) -> None:
    """Write waste.png, concurrency.png, block_size.png, sharing.png and swap.png into ``folder``, which is made if missing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_name = {row.name: row for row in rows}
    folder.mkdir(parents=True, exist_ok=True)
    for name, (needed, size, panels, draw_one) in FIGURES.items():
        if all(row in by_name for row in needed):
            figure, axes = pyplot.subplots(*panels, figsize=size, layout="constrained", squeeze=False)
            draw_one(list(axes.flat), by_name)
            figure.savefig(folder / f"{name}.png", dpi=120)
            pyplot.close(figure)


def waste(axes: Sequence[Any], rows: Rows) -> None:
    """What KV memory holds: a bar of this engine's and one of the paper's for each system."""
    [axis] = axes
    labels: list[str] = []
    for name, label in SYSTEMS.items():
        if name == "paged":
            useful = rows["useful_kv/paged/16"]
            here: list[float] = [useful.value, 0, 1 - useful.value, 0]
            paper = None if useful.reference is None else [useful.reference, 0, 1 - useful.reference, 0]
        else:
            found = [rows[f"{kind}_kv/{name}"] for kind in KINDS]
            here = [row.value for row in found]
            paper = None if found[0].reference is None else [row.reference or 0.0 for row in found]
        for values, suffix in ((paper, ", paper"), (here, ", here")):
            if values is not None:
                stack(axis, len(labels), values)
                labels.append(label + suffix)
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    axis.set(xlim=(0, 100), xlabel="% of KV memory (paged: of the blocks held)", title="What the KV memory holds")
    handles = [axis.barh(0, 0, color=colour) for colour in KIND_COLOURS.values()]
    names = ["tokens", "reserved for tokens to come", "internal fragmentation", "external fragmentation and free"]
    axis.legend(handles, names, ncols=2, loc="upper center", bbox_to_anchor=(0.4, -0.12), frameon=False)


def stack(axis: Any, place: int, values: Sequence[float]) -> None:
    """One bar of parts that add up to 1."""
    left = 0.0
    for value, colour in zip(values, KIND_COLOURS.values(), strict=True):
        axis.barh(place, 100 * value, left=left, color=colour, height=0.75)
        if value > 0.05:
            axis.text(left + 50 * value, place, f"{100 * value:.1f}", ha="center", va="center", fontsize=9)
        left += 100 * value


def concurrency(axes: Sequence[Any], rows: Rows) -> None:
    """Requests at once, a panel for each dataset."""
    for axis, (prefix, title) in zip(axes, (("", "ShareGPT-like"), ("alpaca/", "Alpaca-like")), strict=True):
        found = [rows[f"concurrency/{prefix}{name}"] for name in SYSTEMS]
        pairs(axis, list(SYSTEMS.values()), [row.value for row in found], [row.reference for row in found])
        axis.set(title=title, ylabel="requests at once")


def pairs(axis: Any, labels: Sequence[str], here: Sequence[float], paper: Sequence[float | None]) -> None:
    """Bars of here and of the paper side by side, with their values."""
    for offset, values, colour, name in ((-0.2, here, HERE, "here"), (0.2, paper, PAPER, "paper")):
        places = [place + offset for place, value in enumerate(values) if value is not None]
        bars = axis.bar(places, [value for value in values if value is not None], 0.4, color=colour, label=name)
        axis.bar_label(bars, fmt="{:.1f}", fontsize=8, padding=2)
    axis.set_xticks(range(len(labels)), labels, fontsize=9)
    axis.margins(y=0.12)
    axis.legend(frameon=False)


def block_size(axes: Sequence[Any], rows: Rows) -> None:
    """Useful memory and requests at once by block size."""
    left, right = axes
    for prefix, label, colour in (("", "ShareGPT-like", HERE), ("alpaca/", "Alpaca-like", "#e76f51")):
        found = [rows[f"useful_kv/{prefix}paged/{size}"] for size in BLOCK_SIZES]
        left.plot(BLOCK_SIZES, [100 * row.value for row in found], "o-", color=colour, label=label)
        names = [f"concurrency/{prefix}paged" + (f"/{size}" if size != BLOCK_SIZE else "") for size in BLOCK_SIZES]
        running = [rows[name].value for name in names]
        right.plot(BLOCK_SIZES, running, "o-", color=colour, label=label)
    left.set(ylim=(0, 103), ylabel="% of the blocks held", title="Memory that holds tokens")
    right.set(ylim=(0, None), ylabel="requests", title="Requests at once")
    for axis in axes:
        log_sizes(axis)


def log_sizes(axis: Any) -> None:
    """An axis of block sizes."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(BLOCK_SIZES, [str(size) for size in BLOCK_SIZES])
    axis.set_xlabel("block size (tokens)")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)


def sharing(axes: Sequence[Any], rows: Rows) -> None:
    """Blocks saved by parallel sampling and by beams, a panel for each dataset."""
    kinds = (("parallel", "parallel sampling, samples"), ("beam", "beam search, beams"))
    datasets = (("alpaca", "Alpaca-like"), ("sharegpt", "ShareGPT-like"))
    panels = [(kind, words, dataset, title) for kind, words in kinds for dataset, title in datasets]
    for axis, (kind, words, dataset, title) in zip(axes, panels, strict=True):
        found = [rows[f"sharing/{kind}/{dataset}/{width}"] for width in (2, 4, 6)]
        paper = [None if row.reference is None else 100 * row.reference for row in found]
        pairs(axis, ["2", "4", "6"], [100 * row.value for row in found], paper)
        axis.set(title=f"{title}: {words}", ylabel="% of blocks saved")


def swap(axes: Sequence[Any], rows: Rows) -> None:
    """Time to bring a preempted request back, by block size: modelled beside the paper's, and measured."""
    for axis, kind in zip(axes, ("modelled", "measured"), strict=True):
        found = [rows[f"swap_ms/{kind}/{size}"] for size in BLOCK_SIZES]
        axis.plot(BLOCK_SIZES, [row.value for row in found], "o-", color=HERE, label="swap out and in")
        axis.axhline(rows[f"recompute_ms/{kind}"].value, color="#e76f51", label="recompute")
        if kind == "modelled":
            axis.plot(BLOCK_SIZES, [row.reference for row in found], "x", color="black", label="swap, paper")
            axis.set(title="OPT-13B on an A100, modelled", ylim=(0, None))
        else:
            axis.set_yscale("log")
            axis.set_title("the model and machine of this run, measured")
        axis.set(ylabel="ms for 256 tokens")
        log_sizes(axis)


#: name -> rows that it needs among others, inches, panels, what draws it
FIGURES: dict[str, tuple[Sequence[str], tuple[float, float], tuple[int, int], Any]] = {
    "waste": (["useful_kv/paged/16", "useful_kv/oracle"], (8, 4.6), (1, 1), waste),
    "concurrency": (["concurrency/paged", "concurrency/alpaca/paged"], (10, 4), (1, 2), concurrency),
    "block_size": (
        ["concurrency/paged", "concurrency/paged/256", "concurrency/alpaca/paged/256"],
        (10, 4),
        (1, 2),
        block_size,
    ),
    "sharing": (["sharing/parallel/sharegpt/2", "sharing/beam/sharegpt/2"], (10, 7), (2, 2), sharing),
    "swap": (["swap_ms/modelled/1", "swap_ms/measured/1"], (10, 4), (1, 2), swap),
}
