"""What gpu_check.py does on a device, step by step: checks of ops and models, timings, and the same work by others.

The steps of a part follow each other in one process; each gives a row of the table.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from gpu_check_decode import decode_step
from gpu_check_models import SHAPES, write_model
from gpu_check_ops import Check, Heads, against_reference, normal, pages, same_bits
from gpu_check_peers import minipage_rate, sdpa, time_of_torch, transformers_rate
from gpu_check_timings import Workload, time_of, workloads

from minipage.device.base import Device
from minipage.kernels import reference
from minipage.kernels.dtypes import to_float32

RATE = "tok/s"


class Row(NamedTuple):
    """One line of the table: a check, or a timing."""

    name: str
    ok: bool
    result: str
    microseconds: float | None = None
    gigabytes_per_second: float | None = None
    is_left_out: bool = False


class Step(NamedTuple):
    """What gives a row: ``call(name, device)``."""

    name: str
    call: Callable[[str, Device], Row]


def left_out(name: str, why: str) -> Row:
    """The row of a step that was not taken."""
    return Row(name, True, f"left out: {why}", is_left_out=True)


def guarded(step: Step, device: Device) -> Row:
    """The row of a step; one that raises is wrong, and the others go on. What lacks a package is left out."""
    try:
        return step.call(step.name, device)
    except ModuleNotFoundError as error:  # nothing need be installed beyond what the kernels use
        return left_out(step.name, str(error))
    except Exception as error:
        traceback.print_exc()
        return Row(step.name, False, f"{type(error).__name__}: {error}".splitlines()[0])


# ---- ops --------------------------------------------------------------------------------------------------------------


def op_steps(large: bool) -> Iterator[Step]:
    """Every op against the reference, and the bits of results in different company."""
    for name, check, allowed in against_reference(large):
        yield Step(name, partial(compare, check=check, allowed=allowed))
    for name, few, many in same_bits(large):
        yield Step(name, partial(compare_bits, few=few, many=many))


def run(device: Device, check: Check) -> list[np.ndarray]:
    """What a check writes with the ops of a device."""
    with device.compute():
        return [device.host(x) for x in check(device.ops, lambda x: device.array(x.copy()), device.xp)]


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


# ---- models -----------------------------------------------------------------------------------------------------------


def model_steps(large: bool) -> Iterator[Step]:
    """Tokens of whole models, and with ``large`` what only a GPU shows."""
    yield Step("tokens of a tiny model", partial(check_tokens, shape="tiny", expected_from="reference"))
    yield Step("tokens that the device draws, a step ahead", check_drawn)
    if large:
        yield Step("decode steps as CUDA graphs, and launched one by one", check_graph)
        yield Step("attention on a block beyond 2^31 elements", check_far_block)
        yield Step("tokens of a 0.6B model, as on the CPU", partial(check_tokens, shape="0.6B", expected_from="cpu"))


def greedy_tokens(
    folder: str, device: str, prompts: list[list[int]], logprobs: int | None = 2, max_tokens: int = 6, **options: Any
) -> tuple[list, list]:
    """Greedy tokens of some prompts, computed in chunks and in a batch, and how far the second best token was each time.

    Without ``logprobs`` tokens alone: where the device draws, it draws these, and is a step ahead.
    """
    from minipage import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs)
    with LLM(folder, device=device, block_size=4, **options) as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    best_two = [[sorted(x.logprob for x in top.values())[-2:] for top in one.logprobs or []] for one in outputs]
    return [list(one.token_ids) for one in outputs], [[b - a for a, b in pairs] for pairs in best_two]


def check_tokens(name: str, device: Device, shape: str, expected_from: str) -> Row:
    """Tokens of a random model on ``device`` and on another, up to where the two best tokens are as good as equal."""
    vocab_size = SHAPES[shape]["vocab_size"]
    prompts = [[int(i) for i in np.random.default_rng(103).integers(0, vocab_size, n)] for n in (13, 3)]
    limits = {"num_blocks": 16, "max_model_len": 32, "max_num_batched_tokens": 8}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), SHAPES[shape])
        expected, gaps = greedy_tokens(folder, expected_from, prompts, **limits)
        tokens, _ = greedy_tokens(folder, device.name, prompts, **limits)
    return compare_tokens(name, tokens, expected, gaps)


def check_drawn(name: str, device: Device) -> Row:
    """Tokens of a tiny model that the device draws and begins the next step with, against those drawn on the host."""
    prompts, limits = [[5, 9, 1], [2], [7] * 9], {"num_blocks": 32, "max_model_len": 32}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), SHAPES["tiny"])
        expected, gaps = greedy_tokens(folder, "reference", prompts, **limits)
        tokens, _ = greedy_tokens(folder, device.name, prompts, logprobs=None, **limits)
    return compare_tokens(name, tokens, expected, gaps)


def compare_tokens(name: str, tokens: list, expected: list, gaps: list) -> Row:
    """Whether all sequences of tokens are as expected, but for ties."""
    ok = all(map(same_up_to_ties, tokens, expected, gaps))
    return Row(name, ok, f"{tokens}" if ok else f"{tokens} instead of {expected}")


def same_up_to_ties(tokens: list[int], expected: list[int], gaps: list[float], tie: float = 0.02) -> bool:
    """Whether tokens are as expected until one that may be another: its two best have log probabilities closer than a tie."""
    first = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), None)
    return first is None or gaps[first] < tie


def check_graph(name: str, device: Device) -> Row:
    """Tokens of decode steps as CUDA graphs, and of the same ops launched one by one: drawn on the host, and on the device."""
    prompts, tokens = [[5, 9, 1], [2], [7] * 9], []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), SHAPES["tiny"])
        for logprobs in (2, None):
            tokens.append(greedy_tokens(folder, device.name, prompts, logprobs, max_tokens=12)[0])
            with mock.patch.object(type(device), "record", lambda self, function: function):
                tokens.append(greedy_tokens(folder, device.name, prompts, logprobs, max_tokens=12)[0])
    same = all(other == tokens[0] for other in tokens)
    return Row(name, same, "same tokens" if same else f"{tokens}")


def check_far_block(name: str, device: Device) -> Row:
    """A block whose elements lie beyond 2^31 gives what the first block gives."""
    heads, num_blocks = Heads(8, 8, 128, 16, "float16"), 131_073
    shape = num_blocks, heads.kv, heads.block, heads.dim
    if device.free_memory() < 3 * 2 * np.prod(shape):
        return left_out(name, "too little memory")
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


# ---- timings ----------------------------------------------------------------------------------------------------------


def timing_steps(large: bool) -> Iterator[Step]:
    """A copy on the device, whole decode steps, and what they consist of."""
    copy, *others = workloads()
    for name, workload in (copy, *decode_steps(), *others):
        yield Step(name, partial(measure, workload=workload))


def decode_steps() -> Iterator[tuple[str, Workload]]:
    """Whole decode steps."""
    for shape, kind in (("0.6B", "bfloat16"), ("8B", "bfloat16"), ("8B", "int4")):
        for batch in (1, 16, 64, 256):
            label = f"decode step {shape} {kind}, batch {batch}, context 1024"
            yield label, partial(decode_step, shape=shape, kind=kind, batch=batch, context=1024)


def measure(name: str, device: Device, workload: Workload) -> Row:
    """The time of one call, and how many of the bytes that it must move it moves in that time."""
    with device.compute():
        made = workload(device)
        if made is None:
            return left_out(name, "too little memory")
        call, num_bytes = made
        microseconds = time_of(device, call)
    return Row(name, True, "", microseconds, num_bytes / microseconds / 1e3)


# ---- others -----------------------------------------------------------------------------------------------------------


def peer_steps(large: bool) -> Iterator[Step]:
    """What torch and transformers take for the same work as minipage."""
    label = "0.6B, 64 prompts of 128, 64 new tokens: {}"
    yield Step(label.format("minipage"), partial(measure_rate, rate=minipage_rate))
    for batch in (1, 16, 64, 256):
        for context in (512, 2048, 8192):
            step = partial(measure_sdpa, batch=batch, context=context)
            yield Step(f"torch SDPA, contiguous, batch {batch}, context {context}", partial(optional, step=step))
    step = partial(measure_rate, rate=transformers_rate)
    yield Step(label.format("transformers, continuous batching"), partial(optional, step=step))


def measure_sdpa(name: str, device: Device, batch: int, context: int) -> Row:
    """The time of torch's attention on the shape of :func:`gpu_check_timings.decode_attention`."""
    return Row(name, True, "", time_of_torch(sdpa(batch, context, 32, 8, 128)))


def measure_rate(name: str, device: Device, rate: Callable[..., float]) -> Row:
    """Tokens a second from end to end."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), SHAPES["0.6B"])
        return Row(name, True, f"{rate(Path(folder), 64, SHAPES['0.6B']['vocab_size']):,.0f} {RATE}")


def optional(name: str, device: Device, step: Callable[[str, Device], Row]) -> Row:
    """A row that is for comparison: left out where what it needs is not there or does not work."""
    try:
        return step(name, device)
    except Exception as error:
        return left_out(name, f"{type(error).__name__}: {error}".splitlines()[0])


#: By name, the steps of a part; ``large`` adds what would take the simulator minutes.
PARTS: dict[str, Callable[[bool], Iterator[Step]]] = {
    "ops": op_steps,
    "models": model_steps,
    "timings": timing_steps,
    "peers": peer_steps,
}
