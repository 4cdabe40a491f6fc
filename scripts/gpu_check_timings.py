"""The timings of gpu_check.py: calls recorded in a CUDA graph and replayed, so that launching them costs nothing.

Each workload gives a call and the bytes that it must at least move: the weight of a linear layer, K and V of a decode step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from gpu_check_ops import Heads

from minipage.device.base import Device
from minipage.kernels.draws import DRAW, as_words

#: Makes the arrays of a call on a device, and returns the call and the bytes that it moves.
#: None where the device has too little memory.
Workload = Callable[[Device], tuple[Callable[[], None], int] | None]

#: Temperature, top_k, min_p and top_p (in units of 2**-64) of tokens that are drawn.
DRAWS = {
    "greedy": (0.0, 0, 0.0, 0),
    "temperature": (1.0, 0, 0.0, 0),
    "top_k 50": (1.0, 50, 0.0, 0),
    "top_p 0.9": (1.0, 0, 0.0, int(0.9 * 2**64)),
}


def workloads() -> Iterator[tuple[str, Workload]]:
    """A copy on the device first: what the others are compared with."""
    yield "copy on the device", partial(copy, num_bytes=1 << 29)
    for batch in (1, 16, 64, 256):
        for context in (512, 2048, 8192):
            label = f"decode attention, batch {batch}, context {context}"
            yield label, partial(decode_attention, batch=batch, context=context)
    for kind in ("float32", "bfloat16", "int8", "int4"):
        for num_tokens in (1, 8, 64):
            yield f"linear {kind} 16384x16384, {num_tokens} rows", partial(linear, kind=kind, num_tokens=num_tokens)
    for batch in (1, 64):
        for name, draw in DRAWS.items():
            yield f"sample {name}, {batch} x 128256", partial(sample, batch=batch, draw=draw)


def copy(device: Device, num_bytes: int) -> tuple[Callable[[], None], int]:
    """A copy by the driver, read and write."""
    cuda, runtime = device.xp.cuda, device.xp.cuda.runtime
    to, source = (device.xp.zeros(num_bytes, np.uint8) for _ in range(2))

    def call() -> None:
        kind, stream = runtime.memcpyDeviceToDevice, cuda.get_current_stream().ptr
        runtime.memcpyAsync(to.data.ptr, source.data.ptr, num_bytes, kind, stream)

    return call, 2 * num_bytes


def decode_attention(device: Device, batch: int, context: int) -> tuple[Callable[[], None], int]:
    """One query a sequence over ``context`` tokens in float16 pages; 32 heads, 8 of K and V, head size 128."""
    heads, ops = Heads(32, 8, 128, 16, "float16"), device.ops
    blocks = context // heads.block
    shape = batch * blocks, heads.kv, heads.block, heads.dim
    key, value = (device.xp.zeros([shape[a] for a in axes], np.float16) for axes in (ops.KEY_AXES, ops.VALUE_AXES))
    q, out = (device.xp.ones((batch, heads.query, heads.dim), np.float32) for _ in range(2))
    tables = np.random.default_rng(0).permutation(batch * blocks).reshape(batch, blocks)
    lengths = [device.array(x.astype(np.int32)) for x in (tables, np.full(batch, context), np.arange(batch + 1))]
    return lambda: ops.paged_attention(out, q, key, value, *lengths, 0.1, 0, 0.0), int(key.nbytes + value.nbytes)


def linear(device: Device, kind: str, num_tokens: int, size: int = 16384) -> tuple[Callable[[], None], int]:
    """A square linear layer, of more bytes than any cache holds."""
    weight = device.ops.empty_weight((size, size), kind, device.xp)
    x, out = (device.xp.ones((num_tokens, size), np.float32) for _ in range(2))
    return lambda: device.ops.linear(out, x, weight, None), weight.nbytes


def sample(device: Device, batch: int, draw: tuple[float, int, float, int]) -> tuple[Callable[[], None], int]:
    """A token of each of some rows of a large vocabulary."""
    logits = device.array(3 * np.random.default_rng(0).standard_normal((batch, 128256), np.float32))
    draws = device.array(as_words(np.array([(*draw, seed, 0, 0) for seed in range(batch)], DRAW)))
    out = device.empty((batch,), np.int32)
    return lambda: device.ops.sample(out, logits, draws), int(logits.nbytes)


def time_of(device: Device, call: Callable[[], Any], repeats: int = 10, replays: int = 6) -> float:
    """Microseconds of a call: the median over replays of a graph that holds it ``repeats`` times."""
    cuda = device.xp.cuda
    stream = cuda.Stream(non_blocking=True)
    device.synchronize()
    with stream:
        call()  # compiles, and makes room for what the stream's ops keep for themselves: neither can be recorded
        stream.synchronize()
        stream.begin_capture()
        for _ in range(repeats):
            call()
        graph = stream.end_capture()
    times = []
    for _ in range(1 + replays):
        start, stop = cuda.Event(), cuda.Event()
        start.record(stream)
        graph.launch(stream)
        stop.record(stream)
        stop.synchronize()
        times.append(1e3 * cuda.get_elapsed_time(start, stop) / repeats)
    return float(np.median(times[1:]))
