#!/usr/bin/env python3
"""Checks the CUDA kernels on this machine's GPU, and measures them.

    python scripts/gpu_check.py                      # on a machine with a GPU: CuPy, numba-cuda and NumPy are enough
    python scripts/gpu_check.py --device cuda-sim    # the correctness part, in Numba's simulator

Every op is compared with the NumPy reference on several shapes, then the tokens of a tiny random model with those of the
reference device. On a GPU follow what only a GPU shows (the tokens of a 0.6B model as on the CPU, CUDA graphs against single
launches, a pool of more than 2^31 elements) and timings: attention, linear layers and whole decode steps of a 0.6B and an 8B
model as fractions of the bandwidth of a copy, and torch's attention and transformers' continuous batching where they are. A
table comes last; where the environment variable OUT names a folder, the same goes there as gpu_check.json. Exit status 1 means
that something is wrong. It runs from a clone with nothing installed, in a few minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the clone that this file is in

from gpu_check_decode import decode_step
from gpu_check_models import SHAPES, write_model
from gpu_check_ops import Check, Heads, against_reference, normal, pages, same_bits
from gpu_check_peers import minipage_rate, sdpa, time_of_torch, transformers_rate
from gpu_check_timings import Workload, time_of, workloads

from minipage.device import open_device
from minipage.device.base import Device
from minipage.kernels import reference
from minipage.kernels.dtypes import to_float32


class Row(NamedTuple):
    """One line of the table: a check, or a timing."""

    name: str
    ok: bool
    result: str
    microseconds: float | None = None
    gigabytes_per_second: float | None = None
    of_copy: float | None = None  #: the fraction of the bandwidth of a copy on the device


def guarded(name: str, step: Callable[..., Row], *args: Any) -> Row:
    """``step(name, *args)``; one that raises is a wrong row, and the others go on. What lacks a package is left out."""
    try:
        return step(name, *args)
    except ModuleNotFoundError as error:  # nothing need be installed beyond what the kernels use
        return Row(name, True, f"left out: {error}")
    except Exception as error:
        traceback.print_exc()
        return Row(name, False, f"{type(error).__name__}: {error}".splitlines()[0])


# ---- correctness ------------------------------------------------------------------------------------------------------


def run(device: Device, check: Check) -> list[np.ndarray]:
    """What a check writes with the ops of a device."""
    with device.compute():
        return [device.host(x) for x in check(device.ops, lambda x: device.array(x.copy()), device.xp)]


def check_ops(device: Device, large: bool) -> Iterator[Row]:
    """Every op against the reference, and the bits of results in different company."""
    for name, check, allowed in against_reference(large):
        yield guarded(name, compare, device, check, allowed)
    for name, few, many in same_bits(large):
        yield guarded(name, compare_bits, device, few, many)


def compare(name: str, device: Device, check: Check, allowed: float) -> Row:
    """The largest difference between what a check writes on the device and what the reference writes."""
    expected, actual = check(reference, np.copy, np), run(device, check)
    pairs = zip(map(to_float32, actual), map(to_float32, expected), strict=True)
    error = float(np.max([np.max(np.abs(a - b)) for a, b in pairs]))
    return Row(name, error <= allowed, f"error {error:.1e}, allowed {allowed:.0e}")  # NaN is not <=


def compare_bits(name: str, device: Device, few: Check, many: Check) -> Row:
    """Whether the first rows of what ``many`` writes are, bit for bit, those of ``few``."""
    first, second = run(device, few)[0], run(device, many)[0]
    same = np.array_equal(first, second[: len(first)])
    return Row(name, same, "same bits" if same else "other bits")


def greedy_tokens(folder: str, device: str, prompts: list[list[int]], **options: Any) -> tuple[list, list]:
    """Greedy tokens of some prompts, computed in chunks and in a batch, and how far the second best token was each time."""
    from minipage import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    with LLM(folder, device=device, block_size=4, **options) as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    best_two = [[sorted(x.logprob for x in top.values())[-2:] for top in one.logprobs or []] for one in outputs]
    return [list(one.token_ids) for one in outputs], [[b - a for a, b in pairs] for pairs in best_two]


def check_tokens(name: str, device: str, shape: str, expected_from: str) -> Row:
    """Tokens of a random model on ``device`` and on another, up to where the two best tokens are as good as equal."""
    vocab_size = SHAPES[shape]["vocab_size"]
    prompts = [[int(i) for i in np.random.default_rng(103).integers(0, vocab_size, n)] for n in (13, 3)]
    limits = {"num_blocks": 16, "max_model_len": 32, "max_num_batched_tokens": 8}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), SHAPES[shape])
        expected, gaps = greedy_tokens(folder, expected_from, prompts, **limits)
        tokens, _ = greedy_tokens(folder, device, prompts, **limits)
    ok = all(map(same_up_to_ties, tokens, expected, gaps))
    return Row(name, ok, f"{tokens}" if ok else f"{tokens} instead of {expected}")


def same_up_to_ties(tokens: list[int], expected: list[int], gaps: list[float], tie: float = 0.02) -> bool:
    """Whether tokens are as expected until one that may be another: its two best have log probabilities closer than a tie."""
    first = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), None)
    return first is None or gaps[first] < tie


def check_graph(name: str) -> Row:
    """Tokens of decode steps as CUDA graphs, and of the same ops launched one by one."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), SHAPES["tiny"])
        tokens = [greedy_tokens(folder, "cuda", [[5, 9, 1], [2], [7] * 9])[0]]
        with mock.patch("minipage.device.cuda.CudaDevice.record", lambda self, function: function):
            tokens.append(greedy_tokens(folder, "cuda", [[5, 9, 1], [2], [7] * 9])[0])
    return Row(name, tokens[0] == tokens[1], "same tokens" if tokens[0] == tokens[1] else f"{tokens}")


def check_far_block(name: str, device: Device) -> Row:
    """A block whose elements lie beyond 2^31 gives what the first block gives."""
    heads, num_blocks = Heads(8, 8, 128, 16, "float16"), 131_073
    shape = num_blocks, heads.kv, heads.block, heads.dim
    if device.free_memory() < 3 * 2 * np.prod(shape):
        return Row(name, True, "left out: too little memory")
    with device.compute():
        ops = device.ops
        pool = [device.empty([shape[axis] for axis in axes], np.float16) for axes in (ops.KEY_AXES, ops.VALUE_AXES)]
        outs = []
        for block in (0, num_blocks - 1):
            for cache, page in zip(pool, pages(ops, device.array, heads, 1), strict=True):
                cache[block] = page[0]
            q, out = (
                device.array(normal(1, 1, heads.query, heads.dim)),
                device.empty((1, heads.query, heads.dim), np.float32),
            )
            lengths = [device.array(np.array(x, np.int32)) for x in ([[block]], [heads.block], [0, 1])]
            ops.paged_attention(out, q, *pool, *lengths, 0.1, 0, 0.0)
            outs.append(device.host(out))
    same = np.array_equal(*outs)
    return Row(name, same, "same bits as the first block" if same else "other bits")


def measure(device: Device) -> Iterator[Row]:
    """The copy bandwidth of the device, and what attention, linear layers and whole decode steps reach of it."""
    copy_rate = None
    for name, workload in [*workloads(), *steps()]:
        row = guarded(name, measure_one, device, workload, copy_rate)
        copy_rate = copy_rate or row.gigabytes_per_second
        yield row


def steps() -> Iterator[tuple[str, Workload]]:
    """Whole decode steps."""
    for shape, kind in (("0.6B", "bfloat16"), ("8B", "bfloat16"), ("8B", "int4")):
        for batch in (1, 16, 64, 256):
            label = f"decode step {shape} {kind}, batch {batch}, context 1024"
            yield label, partial(decode_step, shape=shape, kind=kind, batch=batch, context=1024)


def measure_one(name: str, device: Device, workload: Workload, copy_rate: float | None) -> Row:
    """The time of one call, and the bytes that it must move as a fraction of what a copy moves."""
    with device.compute():
        made = workload(device)
        if made is None:
            return Row(name, True, "left out: too little memory")
        call, num_bytes = made
        microseconds = time_of(device, call)
    rate = num_bytes / microseconds / 1e3
    return Row(name, True, "", microseconds, rate, rate / (copy_rate or rate))


def beside_peers() -> Iterator[Row]:
    """What torch and transformers take for the same work."""
    for batch in (1, 16, 64, 256):
        for context in (512, 2048, 8192):
            yield optional(f"torch SDPA, contiguous, batch {batch}, context {context}", measure_sdpa, batch, context)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), SHAPES["0.6B"])
        for label, rate in (("minipage", minipage_rate), ("transformers, continuous batching", transformers_rate)):
            yield optional(f"0.6B, 64 prompts of 128, 64 new tokens: {label}", measure_rate, rate, Path(folder))


def measure_sdpa(name: str, batch: int, context: int) -> Row:
    """The time of torch's attention on the shape of :func:`gpu_check_timings.decode_attention`."""
    return Row(name, True, "", time_of_torch(sdpa(batch, context, 32, 8, 128)))


def measure_rate(name: str, rate: Callable[..., float], folder: Path) -> Row:
    """Tokens a second from end to end."""
    return Row(name, True, f"{rate(folder, 64, SHAPES['0.6B']['vocab_size']):,.0f} tok/s")


def optional(name: str, step: Callable[..., Row], *args: Any) -> Row:
    """A row that is for comparison: left out where what it needs is not there or does not work."""
    try:
        return step(name, *args)
    except Exception as error:
        return Row(name, True, f"left out: {type(error).__name__}: {error}".splitlines()[0])


# ---- report -----------------------------------------------------------------------------------------------------------


def versions(device: Device) -> dict[str, str]:
    """What was measured on what."""
    found = {"python": sys.version.split()[0]}
    for package in ("numpy", "numba", "numba-cuda", "cupy-cuda12x", "cupy-cuda13x"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if device.name == "cuda":
        runtime = device.xp.cuda.runtime
        found["gpu"] = runtime.getDeviceProperties(0)["name"].decode()
        found["driver"], found["runtime"] = str(runtime.driverGetVersion()), str(runtime.runtimeGetVersion())
    return found


def line(row: Row) -> str:
    """A row as text."""
    text = f"{'ok' if row.ok else 'WRONG':5} {row.name:60}"
    if row.microseconds is None:
        return f"{text} {row.result}"
    if row.gigabytes_per_second is None:
        return f"{text} {row.microseconds:9.1f} us"
    return f"{text} {row.microseconds:9.1f} us {row.gigabytes_per_second:8.1f} GB/s {row.of_copy:6.1%} of copy"


def main() -> int:
    """Run all parts; 0 where everything is right."""
    parser = argparse.ArgumentParser(description="Check the CUDA kernels, and measure them on a GPU.")
    parser.add_argument("--device", choices=["cuda", "cuda-sim"], default="cuda")
    name = parser.parse_args().device
    try:
        device = open_device(name)
    except ValueError as error:
        parser.error(str(error))
    on_gpu, began = device.name == "cuda", time.perf_counter()
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        print(f"{time.perf_counter() - began:6.1f} s  {line(row)}", file=sys.stderr, flush=True)

    for row in check_ops(device, large=on_gpu):
        add(row)
    add(guarded("tokens of a tiny model", check_tokens, device.name, "tiny", "reference"))
    if on_gpu:
        add(guarded("tokens of a 0.6B model, as on the CPU", check_tokens, device.name, "0.6B", "cpu"))
        add(guarded("decode steps as CUDA graphs, and launched one by one", check_graph))
        add(guarded("attention on a block beyond 2^31 elements", check_far_block, device))
        for row in chain(measure(device), beside_peers()):
            add(row)

    about = versions(device)
    wrong = [row for row in rows if not row.ok]
    print("\n".join([f"{name}: {value}" for name, value in about.items()] + list(map(line, rows))))
    print(f"{len(rows) - len(wrong)} passed, {len(wrong)} failed")
    if folder := os.environ.get("OUT"):
        report = {"device": device.name, "versions": about, "rows": [row._asdict() for row in rows]}
        Path(folder, "gpu_check.json").write_text(json.dumps(report, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
