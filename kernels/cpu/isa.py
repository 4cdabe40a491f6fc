"""Which vector instructions kernels are made for."""

from __future__ import annotations

import os
import platform
from functools import cache

import llvmlite.binding as llvm

LEVELS = ("vnni", "avx2", "portable")


@cache
def level() -> str:
    """The best of LEVELS that this machine has, or what MINIPAGE_ISA says.

    "vnni": AVX2 and the dot product instructions of AVX-VNNI or AVX-512; "avx2"; "portable": LLVM's own vectors, which it
    turns into what there is (NEON, for instance).
    """
    chosen = os.environ.get("MINIPAGE_ISA")
    if chosen is not None:
        if chosen not in LEVELS:
            raise ValueError(f"MINIPAGE_ISA={chosen!r} is not allowed; allowed: {', '.join(LEVELS)}")
        return chosen
    features = host_features()
    if not features.get("avx2") or not features.get("fma"):
        return "portable"
    has_vnni = features.get("avxvnni") or (features.get("avx512vnni") and features.get("avx512vl"))
    return "vnni" if has_vnni else "avx2"


@cache
def host_features() -> dict[str, bool]:
    """The instruction sets of this machine, by LLVM's names."""
    if platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686"):
        return {}
    return dict(llvm.get_host_cpu_features())


def target() -> tuple[str, ...]:
    """What machine code of this process depends on."""
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), level()
