"""Makes ``minipage`` of this tree and the tests' shared ``helpers`` importable, so that a raw clone can be tested."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

# Set before NumPy is imported: its threads gain nothing on the tests' tiny matrices, and cost a lot on a busy machine.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for a GPU, ``helpers.fake_gpu.Gpu``: what ``device="cuda"`` is meanwhile."""
    pytest.importorskip("numba_cuda")
    pytest.importorskip("greenlet")
    from helpers import fake_cupy

    from minipage.device.cuda import cuda_is_available

    if cuda_is_available():
        pytest.skip("a process with a GPU cannot simulate one")
    return fake_cupy.install(monkeypatch)
