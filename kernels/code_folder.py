"""Machine code of kernels: compiled once on a machine, kept in a folder, and loaded from there by later processes."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

logger = logging.getLogger("minipage")

_SUFFIXES = ".o", ".cubin", ".lock", ".tmp"  #: of all files in a folder of code
_CHECKSUM_BYTES = 32
#: Of Numba's settings, those that choose the code it makes: what was compiled for a debugger must not serve later processes.
_SETTINGS = (
    "NUMBA_BOUNDSCHECK",
    "NUMBA_CPU_FEATURES",
    "NUMBA_CPU_NAME",
    "NUMBA_CUDA_DEBUGINFO",
    "NUMBA_DEBUGINFO",
    "NUMBA_ENABLE_AVX",
    "NUMBA_LOOP_VECTORIZE",
    "NUMBA_OPT",
    "NUMBA_SLP_VECTORIZE",
)
_KEPT_UNUSED = 30 * 24 * 3600  #: seconds since its last use for which code of another state is kept
_seconds = 0.0  #: that compiling has taken
_announced: set[Path] = set()  #: files of kernels that are known to be needed
_num_missing = 0  #: of these, how many were not there
_num_compiled = 0
_lock = threading.Lock()


class CodeFolder:
    """The code that was compiled from one state of sources, versions and machine."""

    def __init__(self, sources: Path, versions: Callable[[], tuple[object, ...]], suffix: str) -> None:
        """Made from the sources in a folder by what has ``versions``, which are asked for once; files end with ``suffix``."""
        self._sources, self._versions, self._suffix = sources, cache(versions), suffix
        self._digest = source_digest(sources)  # now, since it is these that the process imports

    @property
    def path(self) -> Path:
        """Where it is: in a folder of MINIPAGE_KERNEL_CACHE, else of the user's cache folder."""
        settings = [(name, os.environ[name]) for name in _SETTINGS if name in os.environ]
        return _cache_root() / _digest(self._digest + repr((sys.version, *self._versions(), *settings)))

    def code(self, name: str, variant: str, compile: Callable[[], bytes]) -> bytes:
        """A kernel's code, by ``compile`` unless it is in the folder; ``name`` and ``variant`` say which kernel it is."""
        with _lock:
            path = self._file(name, variant)
            code = _read(path)
            if code is not None:
                _note_use(path.parent)
                return code
            with _one_process_at_a_time(path):
                # Another process may have compiled it meanwhile.
                return _read(path) or self._compile(name, compile, path)

    def announce(self, kernels: Iterable[tuple[str, str]]) -> None:
        """Say how many of these kernels, (name, variant) each, have to be compiled before they can be used."""
        global _num_missing
        with _lock:
            new = {self._file(*kernel) for kernel in kernels} - _announced
            missing = sum(not os.path.isfile(path) for path in new)  # which raises nothing
            _announced.update(new)
            _num_missing += missing
        if missing and not sys.stderr.isatty():  # on a terminal, a line shows each
            what = "kernels, once for this machine; most take a second or two"
            logger.warning("compiling %d of the next %d %s", missing, len(new), what)

    def _file(self, name: str, variant: str) -> Path:
        return self.path / f"{name}-{_digest(variant)}{self._suffix}"

    def _compile(self, name: str, compile: Callable[[], bytes], path: Path) -> bytes:
        with _progress(name):
            code = compile()
        if source_digest(self._sources) != self._digest:
            logger.info("compiled code is not kept, since the sources have changed, and it may be of either state")
        elif _write(path, code):
            _delete_unused(_cache_root())
        return code


def _cache_root() -> Path:
    if chosen := os.environ.get("MINIPAGE_KERNEL_CACHE"):
        return Path(chosen).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "minipage" / "kernels"


def source_digest(folder: Path) -> str:
    """What identifies the sources of kernels in a folder, and those beside this file, which all kernels may use."""
    digest = hashlib.sha256()
    for path in sorted([*Path(__file__).parent.glob("*.py"), *folder.rglob("*.py")]):
        with suppress(OSError):  # an editor has links to nowhere beside the files that are open
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(path: Path) -> bytes | None:
    """The code in a file, None where it is not there or not whole: broken code would crash the process."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    code = content[_CHECKSUM_BYTES:]
    return code if content[:_CHECKSUM_BYTES] == _checksum(code) else None


def _checksum(code: bytes) -> bytes:
    return hashlib.sha256(code).digest()


@contextmanager
def _one_process_at_a_time(path: Path) -> Iterator[None]:
    """Let one process compile and the others wait for its result, where files can be locked."""
    with ExitStack() as stack:
        with suppress(ImportError, OSError):  # some systems, folders and file systems have no locks
            import fcntl

            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(path.with_suffix(".lock"), "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        yield


def _write(path: Path, code: bytes) -> bool:
    """Keep code in a file, whole or not at all; False, and a warning, where that cannot be done."""
    # Others may be at the same: each writes a file of its own, and a rename is all or nothing.
    file = path.with_name(f"{os.urandom(8).hex()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Its mode is what the umask allows: a folder may serve all users of a machine.
        file.write_bytes(_checksum(code) + code)
        os.replace(file, path)
    except OSError as error:
        logger.warning("compiled code is not kept, since %s cannot be written (%s)", path.parent, error)
        return False
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)
    return True


@cache
def _note_use(folder: Path) -> None:
    """Let the time of a folder's last change be that of its last use, for :func:`_delete_unused`."""
    with suppress(OSError):
        os.utime(folder)


@cache
def _delete_unused(root: Path) -> None:
    """Delete the code of states that has served nobody for long, as far as it can be; once a process.

    Other processes may do the same meanwhile, or need just what is deleted: they compile it anew.
    """
    oldest = time.time() - _KEPT_UNUSED
    for folder in root.glob("[0-9a-f]" * 16):
        with suppress(OSError):  # others delete it, too, or something in it is not ours
            if folder.stat().st_mtime < oldest:
                for file in folder.iterdir():
                    if file.suffix in _SUFFIXES:
                        file.unlink(missing_ok=True)
                folder.rmdir()


@contextmanager
def _progress(name: str) -> Iterator[None]:
    """Says what is being compiled, which of how many, and how long it has taken: the first start on a machine is long."""
    global _seconds, _num_compiled
    number = _num_compiled + 1
    which = f"{number} of {max(_num_missing, number)}"
    start = time.perf_counter()
    if sys.stderr.isatty():
        what = f"compiling kernels for this machine, once: {which}, {_seconds:.0f} s so far: {name}"
        print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)  # over the line before
    try:
        yield
    finally:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    took = time.perf_counter() - start
    _seconds += took
    _num_compiled = number
    logger.info("compiled %s: %.1f s, %.1f s so far, kept in %s", name, took, _seconds, _cache_root())
