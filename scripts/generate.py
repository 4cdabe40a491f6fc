#!/usr/bin/env python3
"""Standalone inference: prompts in, text or JSON lines out, timings on standard error.

    python scripts/generate.py "Once upon a time" "The sea is"
    python scripts/generate.py --chat "What is gravity?"
    python scripts/generate.py --file prompts.txt --json > results.jsonl
    echo "Once upon a time" | python scripts/generate.py --max-tokens 32 --temperature 0.8 --seed 1

It runs from a clone, installed or not, and shows how a program drives the engine itself: queue requests, step until none is
left, take each output when it comes. ``LLM.generate`` is the same loop in one call, without the clock.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the clone that this file is in, if it is in one

from tqdm import tqdm

from minipage import LLM, RequestOutput, SamplingParams
from minipage.cli.console import run_guarded, show_log
from minipage.cli.options import add_engine_options, add_sampling_options, engine_keywords, sampling_params
from minipage.cli.prompts import (
    Prompt,
    add_prompt_options,
    check_complete,
    conversation,
    read_prompts,
    to_json,
    to_text,
)
from minipage.text.chat import encode_chat, render_chat


@dataclass
class Timing:
    """When the tokens of one request came, in seconds from when it was queued."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    lengths: Sequence[int] = (0,)  #: tokens of each completion so far
    first: float | None = None  #: the first token of any completion
    last: float = 0.0

    def update(self, output: RequestOutput, now: float) -> int:
        """Note what a step brought; returns how many tokens that was."""
        before = sum(self.lengths)
        self.lengths = [len(completion.token_ids) for completion in output.outputs]
        self.num_prompt_tokens, self.num_cached_tokens = len(output.prompt_token_ids), output.num_cached_tokens
        self.first = now if self.first is None else self.first
        self.last = now
        return sum(self.lengths) - before

    @property
    def per_token(self) -> float | None:
        """Seconds from one token to the next of the longest completion; None where there is only one."""
        steps = max(self.lengths) - 1
        return (self.last - self.first) / steps if steps and self.first is not None else None


@dataclass
class Measurements:
    """The timings of a run, and the most KV blocks that were in use between two steps."""

    timings: list[Timing]
    seconds: float = 0.0
    num_steps: int = 0
    peak_blocks: int = 0
    finished: dict[int, RequestOutput] = field(default_factory=dict)


def complete(
    llm: LLM, prompts: Sequence[Any], params: SamplingParams, bar: Any, emit: Callable[[int, RequestOutput], None]
) -> Measurements:
    """Run all prompts together; ``emit`` gets the results in the order of the prompts, each as soon as it can."""
    run = Measurements([Timing() for _ in prompts])
    start = time.perf_counter()
    for number, prompt in enumerate(prompts):
        llm.engine.add_request(str(number), prompt, params)
    emitted = 0
    while llm.engine.has_unfinished_requests():
        outputs = llm.engine.step()
        run.num_steps += 1
        run.seconds = time.perf_counter() - start
        stats = llm.stats()
        run.peak_blocks = max(run.peak_blocks, stats.num_blocks - stats.num_free_blocks)
        for output in outputs:
            number = int(output.request_id)
            bar.update(run.timings[number].update(output, run.seconds))
            if output.finished:
                run.finished[number] = output
        while emitted in run.finished:
            emit(emitted, run.finished[emitted])
            emitted += 1
    return run


def report(run: Measurements, llm: LLM, loading: float) -> str:
    """The timings in words."""
    prompt_tokens = sum(timing.num_prompt_tokens for timing in run.timings)
    cached = sum(timing.num_cached_tokens for timing in run.timings)
    tokens = sum(sum(timing.lengths) for timing in run.timings)
    firsts = [timing.first for timing in run.timings if timing.first is not None]
    gaps = [timing.per_token for timing in run.timings if timing.per_token is not None]
    stats, size = llm.stats(), llm.info.kv_shape.block_size
    lines = {
        "loading": f"{loading:.2f} s",
        "prompts": f"{len(run.timings)}, {prompt_tokens:,} tokens, {cached:,} of them from the prefix cache",
        "output": f"{tokens:,} tokens in {run.seconds:.2f} s and {run.num_steps:,} steps: {tokens / run.seconds:.1f} tokens/s",
        "time to first token": f"{mean(firsts) * 1e3:.1f} ms on average, {max(firsts) * 1e3:.1f} ms at most",
        "time per output token": f"{mean(gaps) * 1e3:.1f} ms on average" if gaps else "-",
        "KV blocks": f"{run.peak_blocks:,} used at the peak of {stats.num_blocks:,}, {size} tokens each",
        "preemptions": f"{stats.preemptions:,}",
        "guesses": f"{stats.draft_tokens:,} tokens, {stats.accepted_tokens:,} of them right",
    }
    return "\n".join(f"{name:<23}{value}" for name, value in lines.items())


def engine_prompts(llm: LLM, prompts: Sequence[Prompt], args: argparse.Namespace) -> list[Any]:
    """What to hand to ``add_request``: the prompts themselves, or the text and token ids of a chat."""
    if not args.chat:
        return list(prompts)
    tokenizer = llm.engine.tokenizer
    if tokenizer is None:
        raise ValueError("--chat needs a model with a tokenizer")
    chats = [conversation(prompt, args.system) for prompt in prompts]
    return [{"prompt": render_chat(tokenizer, c), "prompt_token_ids": encode_chat(tokenizer, c)} for c in chats]


def run(args: argparse.Namespace) -> int:
    """Load the model, complete the prompts, say how long it took."""
    prompts, params = read_prompts(args), sampling_params(args)
    if args.verbose:
        show_log()
    start = time.perf_counter()
    with LLM(args.model, **engine_keywords(args)) as llm:
        loading = time.perf_counter() - start
        total = None if params.max_tokens is None else len(prompts) * params.n * params.max_tokens
        with tqdm(total=total, unit=" tokens", disable=None, dynamic_ncols=True) as bar:

            def emit(number: int, output: RequestOutput) -> None:
                labelled = len(prompts) > 1 or params.n > 1
                text = to_text(output, number, show_prompt=not args.chat, labelled=labelled)
                bar.write(to_json(output) if args.json else text, file=sys.stdout)
                if params.max_tokens is not None:  # those that ended early leave fewer tokens to wait for
                    bar.total -= sum(params.max_tokens - len(completion.token_ids) for completion in output.outputs)

            measured = complete(llm, engine_prompts(llm, prompts, args), params, bar, emit)
        print(report(measured, llm, loading), file=sys.stderr)
        check_complete(measured.finished[number] for number in range(len(prompts)))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Read the arguments and run; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Complete prompts on a paged KV cache, with timings.",
        epilog="Examples are at the top of this file.",
    )
    add_prompt_options(parser)
    add_sampling_options(parser)
    add_engine_options(parser)
    args = parser.parse_args(argv)
    return run_guarded("generate.py", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
