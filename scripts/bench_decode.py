#!/usr/bin/env python3
"""Speed on a CPU, end to end: minipage beside llama.cpp and others, on the same weights in the same bits, in turns.

    python scripts/bench_decode.py                                           # minipage alone
    python scripts/bench_decode.py --peer-python PEERS/bin/python --json decode.json
    python scripts/bench_decode.py --kinds int4 --parts decode --rounds 9 --peers llama.cpp --peer-python PEERS/bin/python

Measured are prefill, decode at several batches, decode at a long context, the time from the start of a process to its first
token, memory, and beside them how fast the machine reads memory, which is the roof of decode. Each side is a process of its
own, run by the interpreter that has its packages; a peer that no interpreter has is left out. In a round the sides do each
task one after the other. The number formats are made of one GGUF file, once, and kept in a cache folder.
docs/performance.md says how to set up the peers, and what exactly is measured.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the clone that this file is in

from bench_options import new_parser
from decode_bench.bench import Bench, say
from decode_bench.checkpoints import KINDS
from decode_bench.processes import OURS, PEER_MODULES, EngineFailed, Side, find_llama_cli, find_peer
from decode_bench.report import table, write_json

from minipage.device.cpu import physical_cores
from minipage.errors import InvalidArgumentError, ModelLoadError
from minipage.weights.demo_model import cache_folder, demo_model_path

PARTS = ("prefill", "decode", "context", "ttft", "memory")
DEFAULT_KINDS = ("float32", "bfloat16", "float16", "int8", "int4")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--model", type=Path, metavar="FILE", help="a GGUF file of architecture llama (default: the demo model)")
    add("--kinds", nargs="+", choices=list(KINDS), default=list(DEFAULT_KINDS), help="number formats of the weights")
    add("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="what to measure")
    add("--batches", type=int, nargs="+", default=[1, 8, 32], help="sequences of decode")
    add("--prefill", type=int, default=512, help="tokens of a prefill")
    add("--context", type=int, default=4096, help="tokens before a decode at long context")
    add("--rounds", type=int, default=5, help="measured ones, after one to warm up")
    add("--device", default="cpu", help="of minipage; peers are measured on the CPU")
    add("--threads", type=int, default=physical_cores(), help="of every side")
    add("--peers", nargs="*", choices=list(PEER_MODULES), default=list(PEER_MODULES), help="to compare with")
    add("--peer-python", nargs="+", default=[], metavar="PATH", help="interpreters that may have them, beside this one")
    add(
        "--passive-peers",
        action=argparse.BooleanOptionalAction,
        help="let threads of peers sleep where they would wait busily (default: if the machine is busy already)",
    )
    add("--llama-cli", metavar="PATH", help="llama.cpp's llama-completion, for the first token (default: from PATH)")
    add("--cache", type=Path, default=cache_folder() / "bench", metavar="DIR", help="where the number formats are kept")
    add("--json", type=Path, metavar="FILE", help="write the rows there")
    add("--quick", action="store_true", help="two rounds of a few tokens, to see that all parts run")
    args = parser.parse_args(arguments)
    for name in ("batches", "prefill", "context", "rounds", "threads"):
        value = getattr(args, name)
        if min(value if isinstance(value, list) else [value]) < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    if args.quick:
        args.rounds, args.prefill, args.context = min(args.rounds, 2), min(args.prefill, 32), min(args.context, 64)
    if args.passive_peers is None:
        args.passive_peers = os.getloadavg()[0] > 1
    args.llama_cli = find_llama_cli(args.llama_cli)
    return args


def find_sides(args: argparse.Namespace) -> list[Side]:
    """minipage, and the peers that are there; the others are named."""
    sides = [Side(OURS, sys.executable)]
    for name in args.peers:
        peer = find_peer(name, [*args.peer_python, sys.executable])
        if peer is None:
            say(f"{name} is left out: no interpreter has {' and '.join(PEER_MODULES[name])} (--peer-python names more)")
        else:
            sides.append(peer)
    return sides


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table; 0, or 2 for a model that cannot be used, or where minipage fails: then of what there is."""
    args = parse(arguments)
    status = 0
    try:
        bench = Bench(args, args.model or demo_model_path(), find_sides(args))
    except (InvalidArgumentError, ModelLoadError) as error:
        say(f"bench_decode.py: error: {error}")
        return 2
    waiting = "passively" if args.passive_peers else "busily"
    say(
        f"{args.threads} threads, load average {os.getloadavg()[0]:.1f}; threads of peers wait for each other {waiting}"
    )
    try:
        bench.run()
    except (EngineFailed, InvalidArgumentError) as error:
        say(f"bench_decode.py: error: {error}")
        status = 2
    rows = bench.results.rows()
    print(table(rows))
    if args.json is not None:
        write_json(rows, args.json)
    return status


if __name__ == "__main__":
    sys.exit(main())
