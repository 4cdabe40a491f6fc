#!/usr/bin/env python3
"""The memory claims of the PagedAttention paper, measured on this engine beside the paper's figures.

    python scripts/bench_memory.py                                # all parts
    python scripts/bench_memory.py --parts waste blocks --plots plots --json memory.json
    python scripts/bench_memory.py --trace azure_conv.csv.gz --max-length 2048

Traces are replayed through the engine's scheduler and block manager, and through the contiguous allocation that the paper
compares with, at the paper's scale: OPT-13B on an A100 with 40 GB, 800 KiB of KV a token, 15,728 token slots. There is no
model and no GPU: a formula says how long a step takes. Beams and one part of swapping run on the demo model.

Parts: waste (useful memory, requests at once), blocks (the same for other block sizes), parallel (blocks saved by parallel
sampling), prefix (a prefix that all requests share), swap (against recompute), beams (blocks saved by beam search; the
slowest part). docs/memory.md explains the results.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the clone that this file is in

from bench_options import new_parser
from memory_bench import beams, plots, sharing, swapping, trace, waste
from memory_bench.contiguous import next_power_of_two
from memory_bench.replay import KV_SLOTS
from memory_bench.report import Row, table, write_json
from memory_bench.waste import Setting

from minipage.errors import InvalidArgumentError, ModelLoadError, OutOfMemoryError

Part = Callable[[argparse.Namespace], Iterator[Row]]


def made_up(args: argparse.Namespace, workload: trace.Workload, share: float = 1.0) -> Setting:
    """Requests like those of a dataset. Short ones are more at once, so there have to be more to fill the memory."""
    count = round(share * args.requests * (1 if workload is trace.SHAREGPT else 3))
    requests = trace.made_up(workload, count, args.max_length, args.seed)
    name = "" if workload is trace.SHAREGPT else workload.name
    return Setting(requests, args.slots, args.max_length, name, workload.name)


def settings(args: argparse.Namespace, share: float = 1.0) -> list[Setting]:
    """The trace of the file, or those made up; of both ``share`` of the requests."""
    if args.trace is None:
        return [made_up(args, workload, share) for workload in (trace.SHAREGPT, trace.ALPACA)]
    requests = trace.read(args.trace, args.max_length)[: round(share * args.requests)]
    return [Setting(requests, args.slots, args.max_length, "", "")]


def run_waste(args: argparse.Namespace) -> Iterator[Row]:
    """Useful memory, and requests at once."""
    for setting in settings(args):
        yield from waste.waste(setting)


def run_blocks(args: argparse.Namespace) -> Iterator[Row]:
    """The same for other block sizes."""
    for setting in settings(args):
        yield from waste.block_sizes(setting)


def run_parallel(args: argparse.Namespace) -> Iterator[Row]:
    """Parallel sampling."""
    for setting in settings(args, 0.5):
        yield from sharing.parallel(setting)


def run_prefix(args: argparse.Namespace) -> Iterator[Row]:
    """A prefix that all prompts have, or what a trace's prompts have in common."""
    if args.trace is None:
        yield from sharing.shared_prefix(4 * args.requests, args.slots, args.seed)
    else:
        yield from sharing.prefix_hits(settings(args)[0].trace, args.slots)


def run_swap(args: argparse.Namespace) -> Iterator[Row]:
    """Swapping against recomputing."""
    yield from swapping.modelled()
    yield from swapping.in_a_replay(settings(args)[0])
    yield from swapping.measured(args.model, args.device)


def run_beams(args: argparse.Namespace) -> Iterator[Row]:
    """Beam search on a model."""
    yield from beams.beams(args.model, args.device, args.beam_requests, args.seed, args.beam_scale)


PARTS: dict[str, Part] = {
    "waste": run_waste,
    "blocks": run_blocks,
    "parallel": run_parallel,
    "prefix": run_prefix,
    "swap": run_swap,
    "beams": run_beams,
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add(
        "--parts",
        nargs="+",
        choices=list(PARTS),
        metavar="PART",
        help=f"of {', '.join(PARTS)} (default: all that apply)",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="Azure's CSV or Mooncake's JSON lines, .gz or not, in place of made-up lengths",
    )
    add("--requests", type=int, default=300, help="of a trace; the made-up Alpaca-like one has three times as many")
    add("--max-length", type=int, default=2048, help="tokens of a request at most; longer ones are left out")
    add("--slots", type=int, default=KV_SLOTS, help="tokens whose K and V fit the memory")
    add("--seed", type=int, default=0, help="of made-up lengths and arrivals")
    add("--model", help="of beams and swaps: a folder, a .gguf file or a hub id (default: the demo model)")
    add("--device", default="cpu", help="of the model")
    add("--beam-requests", type=int, default=8, help="for each beam width and dataset")
    add("--beam-scale", type=float, default=0.25, help="of ShareGPT-like lengths and of their blocks, for beams")
    add("--plots", type=Path, metavar="DIR", help="write PNG files there (needs the extra 'plots')")
    add("--json", type=Path, metavar="FILE", help="write the rows there")
    args = parser.parse_args(arguments)
    for name in ("requests", "max_length", "slots", "beam_requests"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if next_power_of_two(args.max_length) > args.slots:
        parser.error(f"--max-length {args.max_length} has no contiguous place in {args.slots} slots")
    if not 0 < args.beam_scale <= 1:
        parser.error(f"--beam-scale must be above 0, up to 1, got {args.beam_scale}")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, print the table; 0, or 2 for a trace or model that cannot be used."""
    args = parse(arguments)
    rows: list[Row] = []
    applicable = PARTS if args.trace is None else [name for name in PARTS if name != "beams"]
    try:
        for name in args.parts or applicable:
            start = time.perf_counter()
            print(f"{name} ... ", end="", file=sys.stderr, flush=True)
            rows += PARTS[name](args)
            print(f"{time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    except (InvalidArgumentError, ModelLoadError, OutOfMemoryError) as error:
        print(f"\nbench_memory.py: error: {error}", file=sys.stderr)
        return 2
    print(table(rows))
    if args.json is not None:
        write_json(rows, args.json)
    if args.plots is not None:
        plots.draw(rows, args.plots)
    return 0


if __name__ == "__main__":
    sys.exit(main())
