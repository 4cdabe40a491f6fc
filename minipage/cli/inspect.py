"""``minipage inspect``: a model's shape, and what its weights and its KV cache take."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..config import EngineConfig, parse_bytes
from .options import ENGINE_OPTIONS, add_options, engine_keywords

if TYPE_CHECKING:
    from ..inspection import Capacity, ModelReport

KEYWORDS = ("device", "dtype", "kv_cache_dtype", "block_size", "max_model_len", "sliding_window")
WIDTH = 22  #: of the column of names


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "inspect",
        help="tell a model's shape and what it takes",
        description="Tell a model's shape, what its weights take, and how many requests fit a KV cache, from headers alone.",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="as --model of the other commands (default: the demo model)"
    )
    parser.add_argument("--memory", default="4GiB", metavar="SIZE", help="bytes of the KV cache (default: 4GiB)")
    parser.add_argument(
        "--length",
        type=int,
        action="append",
        metavar="N",
        help="tokens of a request, prompt and output; repeatable (default: 499, as of ShareGPT on average: 161 in, 338 out)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_options(parser, [option for option in ENGINE_OPTIONS if option.keyword in KEYWORDS], EngineConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read headers and print what they tell."""
    memory = parse_bytes(args.memory, "memory")
    from ..inspection import SHAREGPT_MEAN_LENGTHS, inspect_model

    keywords = engine_keywords(args)
    longest = keywords.pop("max_model_len", None)
    report = inspect_model(args.model, **keywords)
    lengths = args.length or [min(sum(SHAREGPT_MEAN_LENGTHS), longest or report.config.max_position_embeddings)]
    capacities = [report.capacity(memory, length, longest) for length in lengths]
    if args.json:
        print(json.dumps({**asdict(report), "capacity": [asdict(capacity) for capacity in capacities]}))
    else:
        print("\n".join(f"{name:<{WIDTH}}{value}".rstrip() for name, value in rows(report, capacities)))
    return 0


def rows(report: ModelReport, capacities: list[Capacity]) -> Iterator[tuple[str, str]]:
    """The report as names and values."""
    config, kv = report.config, report.kv_shape
    tied = "tied to it" if config.tie_word_embeddings else "of its own"
    yield "model", report.path
    yield (
        "architecture",
        f"{config.architecture}: {config.num_layers} layers, hidden {config.hidden_size:,}, MLP {config.intermediate_size:,}",
    )
    yield "attention", f"{config.num_heads} query heads and {config.num_kv_heads} key/value heads of {config.head_dim}"
    for window in sorted(filter(None, set(config.windows))):
        yield "", f"{config.windows.count(window)} of {config.num_layers} layers see the last {window:,} tokens"
    yield "vocabulary", f"{config.vocab_size:,} tokens; embedding, and an output head {tied}"
    yield "positions", f"{config.rope.kind} rope, up to {config.max_position_embeddings:,} tokens"
    yield "parameters", f"{report.num_parameters:,}"
    share = ", ".join(f"{count / report.num_parameters:.2%} {dtype}" for dtype, count in report.file_dtypes.items())
    yield "weights in the file", f"{size(report.file_bytes)}: {share}"
    loaded = ", ".join(f"{kind} {size(count)}" for kind, count in report.weight_kinds.items())
    yield "weights loaded", f"{size(sum(report.weight_kinds.values()))}: {loaded}"
    yield "if asked for", ", ".join(f"{choice} {size(count)}" for choice, count in report.weight_bytes.items())
    yield (
        "KV of a token",
        f"{report.kv_bytes_per_token:,} bytes in {kv.dtype}; of a block of {kv.block_size} tokens {kv.bytes_per_block:,}",
    )
    yield "", ""
    yield from capacity_rows(capacities)


def capacity_rows(capacities: list[Capacity]) -> Iterator[tuple[str, str]]:
    """What fits the memory, in pages and in a static cache."""
    first = capacities[0]
    yield f"KV cache of {size(first.memory)}", f"{first.num_blocks:,} blocks, {first.num_tokens:,} tokens"
    for each in capacities:
        yield (
            f"requests of {each.length}",
            f"paged {each.paged_requests:,} at once, {each.paged_waste:.1%} of their memory unused",
        )
        static = f"static {each.static_requests:,} at once, {each.static_waste:.1%} of their memory unused"
        yield "", f"{static} ({each.max_model_len:,} tokens reserved for each)"


def size(num_bytes: int) -> str:
    """Bytes for people."""
    value, units = float(num_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:,.0f} {units[0]}" if value == int(value) else f"{value:,.1f} {units[0]}"
