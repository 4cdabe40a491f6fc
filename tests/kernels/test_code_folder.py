"""The folder of compiled code where something goes wrong: locks, disks, compilers, other users, sources that change."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from minipage.kernels import code_folder
from minipage.kernels.code_folder import CodeFolder, source_digest

KERNEL = "name", "variant"
CODE = b"code"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where all code is kept."""
    monkeypatch.setenv("MINIPAGE_KERNEL_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Sources of some kernels."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "kernel.py").write_text("from inner import f")
    (folder / "inner.py").write_text("def f(): return 1")
    return folder


def a_process(sources: Path) -> CodeFolder:
    """The folder as another process finds it."""
    return CodeFolder(sources, lambda: (1,), ".o")


def files(kept: Path, suffix: str) -> list[Path]:
    """Those of the code that are named so."""
    return list(kept.rglob(f"*{suffix}"))


def never() -> bytes:
    """No compiler."""
    raise AssertionError("compiled what is there")


def test_settings_of_the_compiler_give_other_code(sources: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled without optimization serves only where that is wanted; other settings of Numba change nothing."""
    usual = a_process(sources).path
    for name, value in {"NUMBA_OPT": "0", "NUMBA_CPU_NAME": "generic", "NUMBA_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
        assert (a_process(sources).path == usual) == (name == "NUMBA_NUM_THREADS")
        monkeypatch.delenv(name)
    assert a_process(sources).path == usual


def test_sources_that_change_give_other_code(sources: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any of them, not only the kernel's own, and those that all kernels share."""
    shared = sources.parent / "shared"
    shared.mkdir()
    monkeypatch.setattr(code_folder, "__file__", str(shared / "code_folder.py"))
    paths = {a_process(sources).path}
    assert a_process(sources).path in paths
    (sources / "inner.py").write_text("def f(): return 12")
    paths.add(a_process(sources).path)
    (shared / "constants.py").write_text("GROUP_SIZE = 32")
    paths.add(a_process(sources).path)
    paths.add(CodeFolder(sources, lambda: (2,), ".o").path)
    assert len(paths) == 4


def test_sources_that_change_meanwhile(sources: Path, kept: Path) -> None:
    """What a process compiles then is not kept: of which of the two states its imports are, nobody knows."""
    old = a_process(sources)
    before = (sources / "inner.py").read_text()
    (sources / "inner.py").write_text("def f(): return 12")
    new = a_process(sources)
    assert old.path != new.path
    assert old.code(*KERNEL, lambda: b"mixed") == b"mixed"
    assert new.code(*KERNEL, lambda: CODE) == a_process(sources).code(*KERNEL, never) == CODE
    (sources / "inner.py").write_text(before)
    assert a_process(sources).code(*KERNEL, lambda: b"old") == b"old"


def test_links_to_nowhere_among_sources(sources: Path) -> None:
    """Editors make them beside files that are open."""
    before = source_digest(sources)
    (sources / ".#kernel.py").symlink_to("somebody@somewhere.1234")
    assert source_digest(sources) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_compiler_that_fails(sources: Path, kept: Path, error: type[BaseException]) -> None:
    """Nothing is kept of it, and others compile: threads and processes."""

    def fails() -> bytes:
        raise error

    folder = a_process(sources)
    with pytest.raises(error):
        folder.code(*KERNEL, fails)
    assert not files(kept, ".o") and not files(kept, ".tmp")
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(a_process(sources).code(*KERNEL, lambda: CODE)), daemon=True)
    thread.start()
    thread.join(60)
    assert found == [CODE] == [folder.code(*KERNEL, never)]


def test_threads_that_start_together(sources: Path, kept: Path) -> None:
    """One compiles, the others have its result."""
    folder, begin, compiled, found = a_process(sources), threading.Barrier(4), [], []

    def compile() -> bytes:
        compiled.append(1)
        return CODE

    def use() -> None:
        begin.wait(60)
        found.append(folder.code(*KERNEL, compile))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [CODE] * 4 and compiled == [1]


def test_file_systems_without_locks(sources: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code is compiled and kept all the same."""
    fcntl = pytest.importorskip("fcntl")

    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert a_process(sources).code(*KERNEL, lambda: CODE) == CODE
    assert a_process(sources).code(*KERNEL, never) == CODE


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_nothing(
    sources: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    """On a full disk each process would leave some more; code is used all the same, and the reason said."""

    def refuse(*args: Any) -> None:
        raise error

    monkeypatch.setattr(os, "replace", refuse)
    if isinstance(error, OSError):
        with caplog.at_level(logging.WARNING, "minipage"):
            assert a_process(sources).code(*KERNEL, lambda: CODE) == CODE
        assert "No space left on device" in caplog.text
    else:
        with pytest.raises(KeyboardInterrupt):
            a_process(sources).code(*KERNEL, lambda: CODE)
    assert files(kept, ".lock") and not files(kept, ".o") and not files(kept, ".tmp")


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_other_users_may_read_what_the_umask_lets_them(sources: Path, kept: Path) -> None:
    """So one folder serves all users of a machine, or of an image."""
    old = os.umask(0o022)
    try:
        a_process(sources).code(*KERNEL, lambda: CODE)
    finally:
        os.umask(old)
    assert [file.stat().st_mode & 0o777 for file in files(kept, ".o")] == [0o644]


def test_a_folder_that_cannot_be_looked_into(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are announced as missing, and compiled."""
    monkeypatch.setenv("MINIPAGE_KERNEL_CACHE", "/" + "x" * 300)  # for root, too
    folder = a_process(sources)
    folder.announce([KERNEL])
    assert folder.code(*KERNEL, lambda: CODE) == CODE
