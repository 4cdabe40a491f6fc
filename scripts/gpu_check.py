#!/usr/bin/env python3
"""Checks the CUDA kernels on this machine's GPU, and measures them.

    python scripts/gpu_check.py                      # on a machine with a GPU: CuPy, numba-cuda and NumPy are enough
    python scripts/gpu_check.py --device cuda-sim    # the correctness part, in Numba's simulator

Every op is compared with the NumPy reference on several shapes, then the tokens of a tiny random model with those of the
reference device. On a GPU follow what only a GPU shows (the tokens of a 0.6B model as on the CPU, CUDA graphs against single
launches, a pool of more than 2^31 elements) and timings: whole decode steps of a 0.6B and an 8B model, attention, linear layers
and sampling as fractions of the bandwidth of a copy, and torch's attention and transformers' continuous batching where they are.

Checks run in several processes at a time, for most of their time goes into compiling; timings have the GPU to themselves. What
there is no time for is left out, and said to be. A short table comes last; where the environment variable OUT names a folder, the
same goes there as gpu_check.json, after each row. Exit status 1 means that something is wrong. It runs from a clone with nothing
installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from importlib import metadata
from itertools import chain, groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the clone that this file is in

from gpu_check_steps import PARTS, RATE, Row
from gpu_check_workers import Share, take, work

from minipage.device import open_device
from minipage.device.base import Device

MOST_WORKERS = 7  #: that check ops at the same time: not six, for of each six steps one takes longest
REPORT = "gpu_check.json"  #: in the folder OUT
COPY = "copy on the device"  #: the timing that others are compared with


class Report:
    """The rows so far, on the way to a table and to a file."""

    def __init__(self, device: Device) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._device_name, self._about = device.name, versions(device)
        self.rows: list[Row] = []

    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began

    def add(self, row: Row) -> None:
        """Say and write another row."""
        with self._lock:
            self.rows.append(row)
            print(f"{self.seconds():6.1f} s  {self._line(row)}", file=sys.stderr, flush=True)
            if folder := os.environ.get("OUT"):
                rows = [row._asdict() | {"of_copy": self._of_copy(row)} for row in self.rows]
                report = {"device": self._device_name, "versions": self._about, "rows": rows}
                Path(folder, REPORT).write_text(json.dumps(report, indent=1))

    def _of_copy(self, row: Row) -> float | None:
        """A rate as a fraction of that of a copy on the device."""
        rates = [each.gigabytes_per_second for each in self.rows if each.name == COPY]
        if row.gigabytes_per_second is None or not (rates and rates[0]):
            return None
        return row.gigabytes_per_second / rates[0]

    def _line(self, row: Row) -> str:
        """A row as text."""
        text = f"{'ok' if row.ok else 'WRONG':5} {row.name:60}"
        if row.microseconds is None:
            return f"{text} {row.result}"
        if row.gigabytes_per_second is None:
            return f"{text} {row.microseconds:9.1f} us"
        of_copy = self._of_copy(row)
        text = f"{text} {row.microseconds:9.1f} us {row.gigabytes_per_second:8.1f} GB/s"
        return text if of_copy is None else f"{text} {of_copy:6.1%} of copy"

    def print_table(self) -> None:
        """What is wrong, what was measured, and what was left out; of the checks that passed only how many."""
        print("\n".join(f"{name}: {value}" for name, value in self._about.items()))
        order = {step.name: i for i, step in enumerate(chain(*(steps(True) for steps in PARTS.values())))}
        rows = sorted(self.rows, key=lambda row: order.get(row.name, -1))
        for row in rows:
            if not row.ok or row.microseconds is not None or row.result.endswith(RATE):
                print(self._line(row))
        for why, group in groupby((row for row in rows if row.is_left_out), lambda row: row.result):
            print(f"{why}: {', '.join(row.name for row in group)}")
        left_out, wrong = sum(row.is_left_out for row in rows), sum(not row.ok for row in rows)
        print(f"{len(rows) - wrong - left_out} passed, {wrong} failed, {left_out} left out")


def versions(device: Device) -> dict[str, str]:
    """What was measured on what."""
    found = {"python": sys.version.split()[0]}
    for package in ("numpy", "numba", "numba-cuda", "cupy-cuda12x", "cupy-cuda13x", "torch", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if device.name == "cuda":
        runtime = device.xp.cuda.runtime
        found["gpu"] = runtime.getDeviceProperties(0)["name"].decode()
        found["driver"], found["runtime"] = str(runtime.driverGetVersion()), str(runtime.runtimeGetVersion())
    return found


def check(device: Device, minutes: float) -> int:
    """Run all parts; 0 where everything is right."""
    report, name = Report(device), device.name
    if name == "cuda":
        count = max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // 2))
        # Until what part of the time each is to be done.
        stages = [(0.5, ["ops", "models"]), (0.85, ["timings"]), (1.0, ["peers"])]
    else:
        count, stages = 1, [(1.0, ["ops", "models"])]
    for until, parts in stages:
        shares = [Share(part, i, n) for part in parts for n in (count if part == "ops" else 1,) for i in range(n)]
        take(name, shares, 60 * minutes * until - report.seconds() if name == "cuda" else None, report.add)
    report.print_table()
    return 1 if any(not row.ok for row in report.rows) else 0


def main() -> int:
    """Check, or be one of the processes that do."""
    parser = argparse.ArgumentParser(description="Check the CUDA kernels, and measure them on a GPU.")
    parser.add_argument(
        "--device",
        choices=["cuda", "cuda-sim"],
        default="cuda",
        help="cuda-sim: checks alone, small ones, without a GPU",
    )
    parser.add_argument("--minutes", type=float, default=6, help="on a GPU: what takes longer is left out (default: 6)")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # these are for the processes
    parser.add_argument("--share", type=int, nargs=3, default=(0, 1, 0), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        index, count, first = args.share
        return work(args.device, Share(args.part, index, count), first, args.seconds)
    if not args.minutes > 0:
        parser.error(f"--minutes must be above 0, got {args.minutes}")
    if folder := os.environ.get("OUT"):
        file = Path(folder, REPORT)
        if not file.parent.is_dir():
            parser.error(f"OUT={folder}: there is no such folder")
        if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
            parser.error(f"OUT={folder}: {REPORT} cannot be written there")
    try:
        device = open_device(args.device)
    except ValueError as error:
        parser.error(str(error))
    return check(device, args.minutes)


if __name__ == "__main__":
    sys.exit(main())
