"""The processes of gpu_check.py. A kernel that goes astray takes its process along, and all that would have followed there: so
each part has a process of its own, and where one ends or hangs another goes on behind the step that it was at.

A worker writes lines of JSON: the names of its steps, then a row for each.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from signal import SIGKILL
from threading import Timer
from typing import Any, NamedTuple

from gpu_check_steps import PARTS, Row, Step, guarded, left_out

from minipage.device import open_device
from minipage.device.base import Device

SCRIPT = Path(__file__).with_name("gpu_check.py")
PATIENCE = 100.0  #: seconds that a step may take, with compiling
GRACE = 15.0  #: seconds that a step may take longer than there is time, before its process is ended
FOREVER = 1e6  #: seconds, for those who have all the time
UNSOUND = 9  #: the exit status of a worker that has left its device unusable


class Share(NamedTuple):
    """Steps ``index``, ``index + count`` .. of a part."""

    part: str
    index: int = 0
    count: int = 1

    def steps(self, large: bool) -> list[Step]:
        return list(islice(PARTS[self.part](large), self.index, None, self.count))


# ---- in the process of a worker ---------------------------------------------------------------------------------------


def work(device_name: str, share: Share, first: int, seconds: float) -> int:
    """Take the steps of a share from number ``first`` on, those that begin within ``seconds``. Returns an exit status."""
    began = time.monotonic()
    messages = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints does not come in between

    def say(**message: Any) -> None:
        print(json.dumps(message), file=messages, flush=True)

    large = device_name == "cuda"
    steps = share.steps(large)[first:]
    say(names=[step.name for step in steps])
    device = open_device(device_name)
    for step in steps:
        is_late = time.monotonic() - began > seconds
        row = left_out(step.name, "no time") if is_late else guarded(step, device)
        say(row=row._asdict())
        if not row.ok and not _is_sound(device):
            return UNSOUND
    return 0


def _is_sound(device: Device) -> bool:
    """Whether a device still works after an error: on a GPU, an access to memory that is not there ends all work."""
    try:
        device.synchronize()
        device.host(device.array(device.host(device.empty((1,), "f4"))))
    except Exception:
        return False
    return True


# ---- in the process that waits for them -------------------------------------------------------------------------------


def take(device_name: str, shares: Sequence[Share], seconds: float | None, report: Callable[[Row], None]) -> None:
    """Have the steps of all shares taken at the same time, by a process each, within ``seconds`` (None: however long)."""
    stop = None if seconds is None else time.monotonic() + seconds
    with ThreadPoolExecutor(len(shares)) as threads:
        for _ in threads.map(lambda share: _follow(device_name, share, stop, report), shares):
            pass


def _follow(device_name: str, share: Share, stop: float | None, report: Callable[[Row], None]) -> None:
    """Report the rows of a share, by as many processes as that takes."""
    first, names = 0, [share.part]  # the part stands for its steps until a process has told their names
    while first < len(names):
        left = FOREVER if stop is None else stop - time.monotonic()
        status, told, rows = _run(device_name, share, first, left, report)
        names[first:] = told or names[first:]
        first += rows
        if stop is not None and time.monotonic() > stop:
            for name in names[first:]:
                report(left_out(name, "no time"))
            return
        if first < len(names) and not (rows and status == UNSOUND):
            ended = f"its process ended with status {status}"
            report(Row(names[first], False, f"killed after {PATIENCE:.0f} s" if status == -SIGKILL else ended))
            first += 1


def _run(
    device_name: str, share: Share, first: int, seconds: float, report: Callable[[Row], None]
) -> tuple[int, list[str], int]:
    """A process that goes on at step number ``first``: its exit status, the names that it told, how many rows it gave."""
    command = [sys.executable, str(SCRIPT), "--device", device_name, "--part", share.part, "--share"]
    command += [*map(str, (share.index, share.count, first)), f"--seconds={seconds}"]
    names, rows, stop = [], 0, time.monotonic() + seconds + GRACE
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        patience = FOREVER if seconds == FOREVER else PATIENCE
        while message := _next_message(process, min(patience, max(stop - time.monotonic(), 1))):
            if "row" in message:
                rows += 1
                report(Row(**message["row"]))
            else:
                names = message["names"]
    return process.returncode, names, rows


def _next_message(process: subprocess.Popen[str], patience: float) -> dict[str, Any] | None:
    """The next message of a worker; None where it ends, which it is made to where there is none for so many seconds."""
    assert process.stdout is not None
    timer = Timer(patience, process.kill)
    timer.start()
    try:
        line = process.stdout.readline()
    finally:
        timer.cancel()
    return json.loads(line) if line.endswith("\n") else None


def environment() -> dict[str, str]:
    """That of the workers: NumPy's threads are few, and the CUDA toolkit that nvcc is of is named, for Numba looks for its
    compiler there.
    """
    found = {"OPENBLAS_NUM_THREADS": "2", **os.environ}
    if not {"CUDA_HOME", "CUDA_PATH"} & found.keys():
        nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        home = Path(nvcc).resolve().parent.parent
        if (home / "nvvm").is_dir():
            found["CUDA_HOME"] = str(home)
    return found
