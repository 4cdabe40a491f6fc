#!/usr/bin/env python3
"""The CUDA kernels as machine code, without a GPU: registers, occupancy, wide loads, and the least time of a launch.

    python scripts/kernel_report.py                        # all kernels, compiled for sm_80 and sm_90
    python scripts/kernel_report.py --only attention --bandwidth 2000
    python scripts/kernel_report.py --json kernels.json

A kernel with spills, float64 arithmetic, too low an occupancy, or without the wide loads or tensor-core instructions that it is
for, is over its budget: it is named last, and the exit status is 1. The floor of a launch is the time that its bytes take at the
bandwidth given (default: that of an H200's memory).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the clone that this file is in

if importlib.util.find_spec("numba_cuda") is None:  # numba has a target of its own, and an old one
    print("compiling CUDA kernels needs numba-cuda (in the extras dev, sim, cuda12, cuda13)", file=sys.stderr)
    sys.exit(2)

from kernel_code import attention, linear, sampling, small
from kernel_code.budget import Measured
from kernel_code.compiler import CAPABILITIES, Capability, KernelCode, compile_kernel, missing
from kernel_code.specimens import Specimen

from minipage.kernels import cuda as op_set

H200_BANDWIDTH = 4800.0  #: GB/s, by its data sheet
PROCESSES = 4  #: that compile at a time, where there are as many processors
SOURCES = (attention, linear, sampling, small)


def all_specimens(only: str = "") -> list[Specimen]:
    """Those whose name has ``only`` in it."""
    return [specimen for source in SOURCES for specimen in source.specimens() if only in specimen.name]


def all_kernels() -> set[str]:
    """The names of all kernels that the op set defines, those made by factories among them."""
    return {name for module in pkgutil.iter_modules(op_set.__path__) for name in _kernels_of(module.name)}


def _kernels_of(module: str) -> Iterator[str]:
    if module.startswith("simula"):
        return  # needs the simulator, which is off where kernels are compiled
    for value in _flat(vars(importlib.import_module(f"{op_set.__name__}.{module}"))):
        if hasattr(value, "py_func") and not value.targetoptions.get("device"):
            yield value.py_func.__name__


def _flat(value: Any) -> Iterator[Any]:
    """What is in a dict of dicts."""
    if isinstance(value, dict):
        for each in value.values():
            yield from _flat(each)
    else:
        yield value


HEADER = (
    f"{'kernel':38} {'arch':6} {'regs':>4} {'shared':>7} "
    f"{'spills':>6} {'f64':>4} {'128-bit':>7} {'HMMA':>5} "
    f"{'occup.':>6}  launch"
)


def measure(found: Sequence[Specimen]) -> Iterator[Measured]:
    """Each kernel compiled for each compute capability, in that order, by some processes at a time."""
    tasks = [(specimen.name, capability) for specimen in found for capability in CAPABILITIES]
    with ProcessPoolExecutor(min(PROCESSES, os.cpu_count() or 1)) as pool:
        for (name, capability), code in zip(tasks, pool.map(_compiled, *zip(*tasks, strict=True)), strict=True):
            yield Measured(by_name()[name], capability, code)


@cache
def by_name() -> dict[str, Specimen]:
    """Specimens by name: kernels cannot be sent from process to process."""
    return {specimen.name: specimen for specimen in all_specimens()}


def _compiled(name: str, capability: Capability) -> KernelCode:
    return compile_kernel(by_name()[name], capability)


def line(measured: Measured, bandwidth: float) -> str:
    """A row of the table."""
    specimen, capability, code = measured
    launch = specimen.launch
    megabytes, floor = launch.num_bytes / 1e6, launch.num_bytes / bandwidth / 1e3
    return (
        f"{specimen.name:38} sm_{capability[0]}{capability[1]:<2} {code.registers:4} {code.shared_bytes:7} "
        f"{code.spill_bytes:6} {code.float64_instructions:4} {code.wide_loads:7} {code.tensor_core_instructions:5} "
        f"{measured.occupancy:6.0%}  {launch.shape}: {launch.blocks} blocks, {megabytes:.2f} MB, at least {floor:.2f} us"
    )


def as_json(measured: Measured, bandwidth: float) -> dict[str, Any]:
    """The same as plain data."""
    specimen, capability, code = measured
    return {
        "name": specimen.name,
        "function": specimen.kernel.py_func.__name__,
        "capability": f"sm_{capability[0]}{capability[1]}",
        "threads": specimen.threads,
        **code._asdict(),
        "occupancy": measured.occupancy,
        **specimen.launch._asdict(),
        "floor_us": specimen.launch.num_bytes / bandwidth / 1e3,
        "faults": list(measured.faults()),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 where a kernel is over its budget, 2 where compiling lacks something."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="kernels whose name has TEXT in it")
    bandwidth_help = f"of the GPU's memory, for the least times (default: {H200_BANDWIDTH:g}, that of an H200)"
    parser.add_argument("--bandwidth", type=float, default=H200_BANDWIDTH, metavar="GB/S", help=bandwidth_help)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    args = parser.parse_args(arguments)
    if not 0 < args.bandwidth < math.inf:
        parser.error(f"--bandwidth must be above 0 and finite, got {args.bandwidth}")
    if args.json:
        if not args.json.parent.is_dir():
            parser.error(f"--json {args.json}: there is no folder {args.json.parent}")
        if args.json.is_dir() or not os.access(args.json if args.json.exists() else args.json.parent, os.W_OK):
            parser.error(f"--json {args.json}: no file can be written there")
    if reason := missing():
        print(f"compiling CUDA kernels needs {reason}", file=sys.stderr)
        return 2
    found = all_specimens(args.only)
    if not found:
        parser.error(f"--only {args.only}: no kernel has that in its name")
    print(HEADER)
    rows: list[Measured] = []
    for row in measure(found):
        rows.append(row)
        print(line(row, args.bandwidth), flush=True)
    if args.json:
        report = {"kernels": sorted(all_kernels()), "rows": [as_json(row, args.bandwidth) for row in rows]}
        args.json.write_text(json.dumps(report, indent=1))
    faults = [
        f"{row.specimen.name} on sm_{row.capability[0]}{row.capability[1]}: {x}" for row in rows for x in row.faults()
    ]
    print("\n".join(["", *faults] if faults else ["", f"{len(found)} kernels are within their budgets"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
