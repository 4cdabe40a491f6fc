"""Makes ``minipage`` of this tree and the tests' shared ``helpers`` importable, so that a raw clone can be tested."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

# Set before NumPy is imported: its threads gain nothing on the tests' tiny matrices, and cost a lot on a busy machine.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
