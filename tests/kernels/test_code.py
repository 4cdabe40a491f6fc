"""Compiled code on disk, and code for other machines than this one."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from minipage.kernels.cpu.code import folder
from minipage.kernels.cpu.isa import level
from minipage.kernels.cpu.kernel import JIT_IS_DISABLED

pytestmark = pytest.mark.skipif(JIT_IS_DISABLED, reason="there is no compiled code")

ROOT = Path(__file__).parents[2]
#: Prints what an op computes, and whether Numba was needed for it.
ONE_OP = (
    "import sys, numpy as np; from minipage.kernels import cpu; "
    "x = np.arange(8, dtype=np.float32).reshape(2, 4); out = np.empty_like(x); cpu.add(out, x, x); "
    "print(int(out.sum()), 'numba' in sys.modules)"
)


def python(code: str, **environment: str) -> str:
    """What a Python process of its own prints."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=variables, check=True, capture_output=True, text=True, timeout=300
    ).stdout.strip()


def test_compiled_code_is_found_again_without_numba(tmp_path: Path) -> None:
    """The second process loads the code from the folder that MINIPAGE_KERNEL_CACHE names, and does not import Numba."""
    assert python(ONE_OP, MINIPAGE_KERNEL_CACHE=str(tmp_path)) == "56 True"
    assert python(ONE_OP, MINIPAGE_KERNEL_CACHE=str(tmp_path)) == "56 False"
    assert len(list(tmp_path.rglob("elementwise.add-*.o"))) == 1


def old_code(folder: Path, days: float) -> Path:
    """A folder of code that was last used so many days ago."""
    folder.mkdir()
    for name in ("a.o", "a.lock", "tmp1.tmp"):
        (folder / name).touch()
    set_age(folder, days)
    return folder


def set_age(path: Path, days: float) -> None:
    """Let a file or folder be as old as that."""
    then = time.time() - days * 24 * 3600
    os.utime(path, (then, then))


def test_code_that_nobody_uses_any_more_is_deleted(tmp_path: Path) -> None:
    """When other code is compiled, and has been unused for 30 days; what is not code stays. To load code is to use it."""
    gone, kept = old_code(tmp_path / ("a" * 16), 31), old_code(tmp_path / ("b" * 16), 29)
    with_notes, foreign = old_code(tmp_path / ("c" * 16), 31), old_code(tmp_path / "other", 31)
    (with_notes / "notes.txt").touch()
    set_age(with_notes, 31)
    file = tmp_path / ("d" * 16)
    file.touch()
    set_age(file, 31)
    assert python(ONE_OP, MINIPAGE_KERNEL_CACHE=str(tmp_path)) == "56 True"
    assert not gone.exists() and file.exists()
    assert len(list(kept.iterdir())) == len(list(foreign.iterdir())) == 3
    assert [each.name for each in with_notes.iterdir()] == ["notes.txt"]
    [used] = {each.parent for each in tmp_path.rglob("elementwise.add-*.o")}
    set_age(used, 31)
    another = old_code(gone, 31)
    assert python(ONE_OP, MINIPAGE_KERNEL_CACHE=str(tmp_path)) == "56 False"
    assert time.time() - used.stat().st_mtime < 3600
    assert another.exists(), "nothing was compiled"


def test_where_compiled_code_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """In MINIPAGE_KERNEL_CACHE, else in a folder in XDG_CACHE_HOME, else in one in ~/.cache."""
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("MINIPAGE_KERNEL_CACHE", "~/kernels")
    assert folder.path.parent == Path("/home/somebody/kernels")
    monkeypatch.delenv("MINIPAGE_KERNEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert folder.path.parent == Path("/var/cache/minipage/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert folder.path.parent == Path("/home/somebody/.cache/minipage/kernels")


def test_how_many_kernels_are_compiled_is_said_before(tmp_path: Path) -> None:
    """An op and the three of the team that runs it, then the op alone, then nothing."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MINIPAGE_KERNEL_CACHE": str(tmp_path)}
    for missing in (4, 1, 0):
        done = subprocess.run(
            [sys.executable, "-c", ONE_OP], env=environment, check=True, capture_output=True, text=True
        )
        said = f"compiling {missing} of the next 4 kernels, once for this machine; most take a second or two"
        assert done.stderr.splitlines() == ([said] if missing else [])
        if missing == 4:
            for file in tmp_path.rglob("elementwise.add-*.o"):
                file.unlink()


def test_a_broken_file_is_compiled_anew(tmp_path: Path) -> None:
    """A file that was cut short or overwritten does no harm."""
    python(ONE_OP, MINIPAGE_KERNEL_CACHE=str(tmp_path))
    for file in tmp_path.rglob("*.o"):
        whole = file.read_bytes()
        for broken in (b"", whole[: len(whole) // 2], bytes(len(whole))):
            file.write_bytes(broken)
            assert python(ONE_OP, MINIPAGE_KERNEL_CACHE=str(tmp_path)).startswith("56 ")


def test_without_a_folder_code_is_compiled_each_time(tmp_path: Path) -> None:
    """Where nothing can be written, kernels work all the same."""
    (tmp_path / "file").write_text("")
    assert python(ONE_OP, MINIPAGE_KERNEL_CACHE=str(tmp_path / "file")) == "56 True"


def test_processes_that_start_together(tmp_path: Path) -> None:
    """Several processes with an empty folder all get the code, and nothing half-written is left; all delete what is old."""
    for number in range(40):
        old_code(tmp_path / f"{number:016x}", 31)
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "MINIPAGE_KERNEL_CACHE": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", ONE_OP], env=variables, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    printed = [process.communicate(timeout=300)[0].split() for process in started]
    assert [sum_ for sum_, _ in printed] == ["56"] * 3
    assert len(list(tmp_path.rglob("*.tmp"))) == 0
    assert len(list(tmp_path.iterdir())) == 1


def test_portable_code_gives_the_same_bits(tmp_path: Path) -> None:
    """What LLVM makes of its own vectors, for machines without AVX2, computes the same bits in every quantised layer."""
    code = (
        "import sys, numpy as np; sys.path.insert(0, 'tests'); from helpers.kernels import CPU, normal; "
        "from minipage.kernels.quantization import GROUP_KINDS; "
        "results = {f'{kind}{t}': CPU.result('linear', (t, 50), normal(1, t, 100), CPU.weight(normal(2, 50, 100), kind), None)"
        " for kind in GROUP_KINDS for t in (1, 7)}; np.savez(sys.argv[1], **results)"
    )
    arrays = []
    for isa in ("portable", level()):
        file = tmp_path / f"{isa}.npz"
        variables = {"MINIPAGE_ISA": isa, "MINIPAGE_KERNEL_CACHE": str(tmp_path / "code"), "NUMBA_ENABLE_CUDASIM": "1"}
        python(code.replace("sys.argv[1]", repr(str(file))), **variables)
        with np.load(file) as results:
            arrays.append(dict(results))
    for name, expected in arrays[1].items():
        np.testing.assert_array_equal(arrays[0][name], expected)


def test_an_unknown_instruction_set_is_refused() -> None:
    """MINIPAGE_ISA says one of the levels."""
    code = "from minipage.kernels.cpu import isa; isa.level()"
    with pytest.raises(subprocess.CalledProcessError) as error:
        python(code, MINIPAGE_ISA="mmx")
    assert "MINIPAGE_ISA='mmx' is not allowed; allowed: vnni, avx2, portable" in error.value.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions are of x86-64")
@pytest.mark.parametrize(
    ("level", "instructions"), [("vnni", ["vpdpwssd", "vpdpbusd"]), ("avx2", ["vpmaddwd", "vpmaddubsw"])]
)
def test_products_of_integers_are_single_instructions(level: str, instructions: list[str]) -> None:
    """Code for a machine with VNNI, which this one need not be, has its dot products; for AVX2, pairs of products."""
    code = (
        "from numba.core import registry; from minipage.kernels.cpu.compiler import compile_kernel; "
        "from minipage.kernels.cpu import linear; import sys; "
        "machine = registry.cpu_target.target_context.codegen()._tm; machine.emit_object = machine.emit_assembly; "
        "kernels = sys.modules['minipage.kernels.cpu.linear']; "
        "found = [kernels._linear_kernel(kind) for kind in ('int8', 'int4')]; "
        "print(*(compile_kernel(kernel.function, kernel.signature, 'entry') for kernel in found))"
    )
    name = "icelake-server" if level == "vnni" else "haswell"
    features = "+avx512vnni,+avx512vl,+avx512f" if level == "vnni" else "+avx2,+fma,+f16c"
    assembly = python(code, MINIPAGE_ISA=level, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features)
    for instruction in instructions:
        assert assembly.count(instruction) > 4, instruction
