#!/usr/bin/env python3
"""What Python does in a step, part by part, and what share of the step that is.

    python scripts/bench_scheduler.py
    python scripts/bench_scheduler.py --sequences 1 8 64 256 --steps 50 --json scheduler.json

Sequences decode with stop strings, their outputs taken at every step, greedily and sampled (temperature 0.8, top-k 40, top-p
0.95). The parts of a step:

    schedule   which sequences compute how many tokens, in which blocks
    batch      token ids, positions, slots and block tables, written into the arrays of the batch
    model      all layers, and the logits
    sample     a token from each row of logits, where the device does not draw it
    outputs    appended, turned into text, looked through for stops, and handed out

All but the model are the CPU time of the thread that steps, medians over the steps: what else the machine does slows them, but
does not count. The model, whose threads wait for each other, counts by the clock, and by its fastest step, so that the share
of Python is rather shown too large than too small. It should be a tenth at most.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the clone that this file is in

import numpy as np
from bench_options import new_parser
from memory_bench.report import Row, table, write_json

from minipage import LLM, SamplingParams
from minipage.cli.console import run_guarded
from minipage.engine import drawing

AT_MOST = 0.1  #: of a step
PYTHON = ("schedule", "batch", "sample", "outputs")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
}
STOPS = ["\n\nUser:", "\n\nAssistant:", "<|no such token|>"]
PROMPT_LENGTHS = range(16, 32)  #: in turn, so that sequences come to need new blocks at different steps
BLOCK_SIZE = 16
WARM_UP = 3  #: steps that are not counted


class Stopwatch:
    """Tells the time of parts that call each other: each has what passes in it and not in another that it calls."""

    def __init__(self) -> None:
        self._cpu: defaultdict[str, float] = defaultdict(float)
        self._wall: defaultdict[str, float] = defaultdict(float)
        self._part = ""
        self._since = (0.0, 0.0)

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed as a part."""

        def timed(*args: Any, **keywords: Any) -> Any:
            before = self._switch(part)
            try:
                return function(*args, **keywords)
            finally:
                self._switch(before)

        return timed

    def lap(self, call: Callable[[], Any]) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Call, and the seconds of each part meanwhile: of this thread, and by the clock."""
        self._cpu, self._wall = defaultdict(float), defaultdict(float)
        call()
        return self._cpu, self._wall

    def _switch(self, part: str) -> str:
        before, (cpu, wall) = self._part, self._since
        self._part, self._since = part, (time.thread_time(), time.perf_counter())
        self._cpu[before] += self._since[0] - cpu
        self._wall[before] += self._since[1] - wall
        return before


@contextmanager
def timed_parts(llm: LLM) -> Iterator[tuple[Callable[[], Any], Stopwatch]]:
    """A step of the engine, and the watch that tells its parts."""
    watch, engine = Stopwatch(), llm.engine
    scheduler, runner = engine._scheduler, engine.runner

    def recorded(record: Callable[..., Callable[[], None]]) -> Callable[..., Callable[[], None]]:
        return lambda *shape: watch.around("model", record(*shape))

    parts = [
        (scheduler, "schedule", watch.around("schedule", scheduler.schedule)),
        (scheduler, "advance", watch.around("schedule", scheduler.advance)),
        (runner, "execute", watch.around("batch", runner.execute)),
        (runner, "execute_next", watch.around("batch", runner.execute_next)),
        (runner, "logits", watch.around("batch", runner.logits)),
        (runner, "_forward", recorded(runner._forward)),
        (runner, "_logits", recorded(runner._logits)),
        (runner, "_next", recorded(runner._next)),
        (drawing, "sample", watch.around("sample", drawing.sample)),
    ]
    with ExitStack() as stack:
        for owner, name, replacement in parts:
            stack.enter_context(patch.object(owner, name, replacement))
        yield watch.around("outputs", engine.step), watch


def measure(llm: LLM, way: str, num_seqs: int, num_steps: int) -> Iterator[Row]:
    """The parts of steps in which so many sequences decode, in microseconds, and the share of Python."""
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=None, ignore_eos=True, stop=STOPS, seed=1, **WAYS[way])
    names = [f"{way}-{index}" for index in range(num_seqs)]
    for name, length in zip(names, cycle(PROMPT_LENGTHS)):
        llm.engine.add_request(name, rng.integers(0, llm.info.config.vocab_size, length).tolist(), params)
    begun: set[str] = set()
    while len(begun) < num_seqs:
        begun.update(out.request_id for out in llm.engine.step())
    with timed_parts(llm) as (step, watch):
        laps = [watch.lap(step) for _ in range(WARM_UP + num_steps)][WARM_UP:]
    for name in names:
        llm.engine.abort(name)
    where = f"s{num_seqs}/{way}"
    python = median(sum(cpu[part] for part in PYTHON) for cpu, _ in laps)
    model = min(wall["model"] for _, wall in laps)
    for part in PYTHON:
        yield Row(f"{part}_us/{where}", 1e6 * median(cpu[part] for cpu, _ in laps), "us")
    yield Row(f"python_us/{where}", 1e6 * python, "us")
    yield Row(f"model_us/{where}", 1e6 * model, "us")
    yield Row(f"python_share/{where}", python / (python + model), "fraction", AT_MOST)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a program."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--model", metavar="MODEL", help="a folder or a GGUF file (default: the demo model, in int4)")
    add("--device", default="cpu", help="of the model")
    add("--threads", type=int, metavar="N", help="CPU threads (default: the number of physical cores)")
    add("--sequences", type=int, nargs="+", default=[1, 32, 256], help="that decode at once")
    add("--steps", type=int, default=32, help="that are measured")
    add("--json", type=Path, metavar="FILE", help="write the rows there")
    args = parser.parse_args(arguments)
    if args.steps < 1 or min(args.sequences) < 1:
        parser.error(f"--steps and --sequences must be at least 1, got {args.steps} and {min(args.sequences)}")
    return run_guarded("bench_scheduler.py", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Measure and print the table."""
    longest = PROMPT_LENGTHS.stop + WARM_UP + args.steps + max(args.sequences)  # those that begin first go on meanwhile
    with LLM(
        args.model,
        device=args.device,
        num_threads=args.threads,
        max_num_seqs=max(args.sequences),
        max_model_len=longest,
        num_blocks=max(args.sequences) * -(-longest // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
    ) as llm:
        rows = [row for n in args.sequences for way in WAYS for row in measure(llm, way, n, args.steps)]
    print(table(rows, reference="at most"))
    if args.json is not None:
        write_json(rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
