"""Makes ``minipage`` of this tree and the tests' shared ``helpers`` importable, so that a raw clone can be tested."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
