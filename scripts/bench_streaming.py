#!/usr/bin/env python3
"""Text far beyond the trained length in bounded memory: perplexity with attention sinks, and without.

    python scripts/bench_streaming.py                     # the demo model over 20,000 tokens; takes minutes
    python scripts/bench_streaming.py --tokens 2000 --short 400 --window 128
    python scripts/bench_streaming.py --file book.txt --json streaming.json

The model reads a text through a rolling KV cache, every token given and none drawn: with a window and the first tokens
kept (StreamingLLM, Xiao et al. 2023), and with a window of as many tokens in all that keeps none. The beginning of the
text is read with all tokens in view as well, for comparison. Then each goes on writing where its text ended.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the clone that this file is in, if it is in one

from bench_options import new_parser
from tqdm import tqdm

from minipage import LLM, SamplingParams
from minipage.cli.console import run_guarded
from minipage.engine.loading import load_tokenizer
from minipage.errors import InvalidArgumentError
from minipage.weights.checkpoint import open_checkpoint
from minipage.weights.hub import resolve_model

BLOCK_SIZE = 16
MOST_RATIO = 2.0  #: perplexity of the whole text over that of its beginning, with sinks


@dataclass(frozen=True)
class Reading:
    """A text, read in one way."""

    name: str
    label: str
    logprobs: Sequence[float]  #: of every token but the first
    most_blocks: int  #: that were held between two steps
    continuation: str

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return len(self.logprobs) + 1

    def perplexity(self, start: int, stop: int) -> float:
        """exp of the mean surprise at the tokens start..stop."""
        part = self.logprobs[max(start - 1, 0) : stop - 1]
        return math.exp(-sum(part) / len(part))


def standard_text() -> str:
    """700 KB of English that come with Python: the topics of its help, from its language reference."""
    from pydoc_data.topics import topics

    return "\n\n".join(text for _, text in sorted(topics.items()))


def tokens_of(args: argparse.Namespace) -> tuple[list[int], int]:
    """The first ``args.tokens`` tokens of the text, and the length that the model was trained for."""
    checkpoint = open_checkpoint(resolve_model(args.model))
    try:
        tokenizer, trained = load_tokenizer(checkpoint), checkpoint.model_config().max_position_embeddings
    finally:
        checkpoint.close()
    if tokenizer is None:
        raise InvalidArgumentError(f"--model {args.model} has no tokenizer to read a text with")
    token_ids = tokenizer.encode(args.file.read_text(encoding="utf-8") if args.file else standard_text())
    if len(token_ids) < args.tokens:
        raise InvalidArgumentError(f"--tokens {args.tokens} is not allowed; the text has {len(token_ids)}")
    return token_ids[: args.tokens], trained


def read(args: argparse.Namespace, name: str, label: str, token_ids: list[int], **settings: Any) -> Reading:
    """Read the tokens with an engine of these settings, and write ``args.write`` more."""
    params = SamplingParams(temperature=0, max_tokens=args.write, ignore_eos=True, prompt_logprobs=0)
    settings |= {
        "block_size": BLOCK_SIZE,
        "max_model_len": len(token_ids) + args.write,
        "max_num_batched_tokens": args.chunk,
    }
    most_blocks, outputs = 0, []
    with (
        LLM(args.model, device=args.device, num_threads=args.threads, enable_prefix_caching=False, **settings) as llm,
        tqdm(desc=label, unit=" steps", disable=None) as bar,
    ):
        llm.engine.add_request("text", token_ids, params)
        while llm.engine.has_unfinished_requests():
            outputs += llm.engine.step()[-1:]
            stats = llm.stats()
            most_blocks = max(most_blocks, stats.num_blocks - stats.num_free_blocks)
            bar.update()
    scored = zip(token_ids[1:], (outputs[-1].prompt_logprobs or [])[1:], strict=True)
    logprobs = [entry[token_id].logprob for token_id, entry in scored if entry is not None]
    return Reading(name, label, logprobs, most_blocks, outputs[-1].outputs[0].text)


def readings(args: argparse.Namespace, token_ids: list[int], trained: int) -> Iterator[Reading]:
    """The text with sinks and with a window alone, and its beginning with all tokens in view."""
    seen = args.window + args.sinks
    pool = 2 * -(-seen // BLOCK_SIZE) + 2  # for what a token sees, and a chunk of as many tokens
    label = f"{args.sinks} sinks, window {args.window:,}"
    yield read(args, "sinks", label, token_ids, num_blocks=pool, sliding_window=args.window, attention_sinks=args.sinks)
    yield read(args, "window", f"window {seen:,}", token_ids, num_blocks=pool, sliding_window=seen)
    short = token_ids[: min(args.short, trained - args.write)]
    yield read(args, "all", "all tokens", short, num_blocks=-(-(len(short) + args.write) // BLOCK_SIZE))


def spans(args: argparse.Namespace) -> list[tuple[int, int]]:
    """The beginning, the whole, and then part after part as long as the beginning."""
    parts = [(start, min(start + args.short, args.tokens)) for start in range(0, args.tokens, args.short)]
    return [parts[0], (0, args.tokens), *parts[1:]]


def rows(args: argparse.Namespace, found: Sequence[Reading]) -> Iterator[dict[str, Any]]:
    """The results, each with what it may be at most and its ratio to that."""

    def row(name: str, value: float, unit: str, reference: float | None = None) -> dict[str, Any]:
        ratio = None if reference is None else value / reference
        return {"name": f"streaming/{name}", "value": value, "unit": unit, "reference": reference, "ratio": ratio}

    for reading in found:
        for start, stop in spans(args):
            if stop <= reading.num_tokens:
                yield row(f"perplexity/{reading.name}/{start}-{stop}", reading.perplexity(start, stop), "perplexity")
        if reading.num_tokens == args.tokens:
            grown = reading.perplexity(0, args.tokens) / reading.perplexity(0, args.short)
            yield row(f"growth/{reading.name}", grown, "x", MOST_RATIO if reading.name == "sinks" else None)
        yield row(f"blocks/{reading.name}", reading.most_blocks, "blocks")


def table(args: argparse.Namespace, found: Sequence[Reading]) -> Iterator[str]:
    """A column a reading, a line a span."""
    yield f"{'perplexity of tokens':24}" + "".join(f"{reading.label:>24}" for reading in found)
    for start, stop in spans(args):
        values = [f"{r.perplexity(start, stop):,.2f}" if stop <= r.num_tokens else "" for r in found]
        yield f"{f'{start:,} to {stop:,}':24}" + "".join(f"{value:>24}" for value in values)
    whole = [reading for reading in found if reading.num_tokens == args.tokens]
    growth = [reading.perplexity(0, args.tokens) / reading.perplexity(0, args.short) for reading in whole]
    yield f"{'the whole over the first':24}" + "".join(f"{f'{value:.2f}x':>24}" for value in growth)
    yield f"{'KV blocks held, at most':24}" + "".join(f"{reading.most_blocks:>24,}" for reading in found)
    for reading in found:
        yield f"{reading.label} goes on: {reading.continuation!r}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("-m", "--model", help="a folder, a .gguf file or a hub id (default: the demo model)")
    add("--file", type=Path, help="the text, UTF-8 (default: Python's language reference)")
    add("--tokens", type=int, default=20_000, help="of the text to read")
    add("--short", type=int, default=4_000, help="tokens of its beginning, that the whole is compared with")
    add("--window", type=int, default=1024, help="tokens that a token sees, itself among them")
    add("--sinks", type=int, default=4, help="first tokens that all see")
    add("--chunk", type=int, default=512, help="tokens computed at once")
    add("--write", type=int, default=40, help="tokens to write after the text")
    add("--device", default="auto", help="where to compute")
    add("--threads", type=int, help="CPU threads (default: the physical cores)")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args(arguments)
    if not 2 <= args.short <= args.tokens or args.write < 1:
        parser.error(
            f"--short {args.short}, --tokens {args.tokens} and --write {args.write} are not allowed; they must be "
            "2 <= --short <= --tokens, and 1 <= --write"
        )
    return args


def run(args: argparse.Namespace) -> int:
    """Read, print the table; 1 where the text got harder to read than allowed."""
    token_ids, trained = tokens_of(args)
    print(f"{args.tokens:,} tokens; the model was trained for {trained:,}", flush=True)
    found = list(readings(args, token_ids, trained))
    print("\n".join(table(args, found)))
    results = list(rows(args, found))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(any(row["ratio"] is not None and row["ratio"] > 1 for row in results))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a program."""
    args = parse(arguments)
    return run_guarded("bench_streaming.py", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
