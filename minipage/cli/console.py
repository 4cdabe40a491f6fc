"""How commands behave on a terminal and in a pipe: errors in one line, Ctrl-C, a reader that goes away."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial

from ..errors import RankError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_BROKEN_PIPE = 128 + 13  #: as the shell reports a program ended by SIGPIPE


def run_guarded(program: str, run: Callable[[], int]) -> int:
    """Call ``run`` and return its exit code. Bad input (ValueError, OSError) is one line on stderr and no traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # text that the terminal's encoding lacks must not end a generation
    try:
        with warnings.catch_warnings():
            warnings.showwarning = partial(_show_warning, program)
            code = run()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The interpreter flushes stdout once more when it ends; there is nobody to tell of that failure.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (ValueError, OSError, RankError) as error:
        print(f"{program}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED


def _show_warning(program: str, message: Warning | str, *where: object) -> None:
    print(f"{program}: warning: {message}", file=sys.stderr)


def show_log() -> None:
    """Write what the engine logs, such as how it sized the KV cache, to stderr."""
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("minipage").setLevel(logging.INFO)
