#!/usr/bin/env python3
"""Checks the CUDA kernels on this machine's GPU, and measures them.

    python scripts/gpu_check.py                      # on a machine with a GPU: CuPy, numba-cuda and NumPy are enough
    python scripts/gpu_check.py --device cuda-sim    # the correctness part, in Numba's simulator

Every op is compared with the NumPy reference on several shapes, then the tokens of a tiny random model with those of the
reference device; on a GPU follow what only a GPU shows (a pool of more than 2^31 elements, recording in a CUDA graph) and
timings. A table comes last; where the environment variable OUT names a folder, the same goes there as gpu_check.json. Exit
status 1 means that something is wrong. It runs from a clone with nothing installed, in a few minutes.
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
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the clone that this file is in

from gpu_check_ops import Check, Heads, against_reference, normal, pages, same_bits
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


def check_tokens(name: str, device: str) -> Row:
    """Greedy tokens of a random two-layer model on ``device`` and on the reference device, in chunks and in a batch."""
    from minipage import LLM, SamplingParams

    prompts = [[int(i) for i in np.random.default_rng(103).integers(0, 61, 13)], [5, 9, 1]]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    limits = {"num_blocks": 16, "block_size": 4, "max_model_len": 32, "max_num_batched_tokens": 8}
    tokens = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for one in ("reference", device):
            with LLM(folder, device=one, **limits) as llm:
                outputs = llm.generate(prompts, params, use_tqdm=False)
                tokens.append([list(output.outputs[0].token_ids) for output in outputs])
    return Row(name, tokens[0] == tokens[1], f"{tokens[1]}")


def write_model(folder: Path) -> None:
    """A random Llama without a tokenizer, as a folder in Hugging Face layout."""
    from safetensors.numpy import save_file

    layer = {
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (16, 32),
        "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
    }
    shapes = {"model.embed_tokens": (61, 32), "lm_head": (61, 32)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    norms = [f"model.layers.{i}.{name}_layernorm" for i in range(2) for name in ("input", "post_attention")]
    tensors = {f"{name}.weight": normal(i, *shape) * np.float32(0.4) for i, (name, shape) in enumerate(shapes.items())}
    tensors |= {f"{name}.weight": np.ones(32, np.float32) for name in [*norms, "model.norm"]}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


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
    """The copy bandwidth of the device, and what decode attention and linear layers reach of it."""
    copy_rate = None
    for name, workload in workloads():
        row = guarded(name, measure_one, device, workload, copy_rate)
        copy_rate = copy_rate or row.gigabytes_per_second
        yield row


def measure_one(name: str, device: Device, workload: Workload, copy_rate: float | None) -> Row:
    """The time of one call, and the bytes that it must move as a fraction of what a copy moves."""
    with device.compute():
        call, num_bytes = workload(device)
        microseconds = time_of(device, call)
    rate = num_bytes / microseconds / 1e3
    return Row(name, True, "", microseconds, rate, rate / (copy_rate or rate))


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
    add(guarded("tokens of a tiny model", check_tokens, device.name))
    if on_gpu:
        add(guarded("attention on a block beyond 2^31 elements", check_far_block, device))
        for row in measure(device):
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
