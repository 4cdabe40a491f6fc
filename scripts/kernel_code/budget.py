"""What every kernel may use: how full a multiprocessor gets, and what counts as too much."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .compiler import Capability, KernelCode
from .specimens import Specimen

MULTIPROCESSORS = 132  #: of an H100 or H200
LEAST_OCCUPANCY = 0.5  #: warps that a multiprocessor must hold of a kernel, as a fraction of those that it can
WARP, REGISTERS, MAX_WARPS, MAX_BLOCKS = 32, 65536, 64, 32  #: of a multiprocessor, both generations
REGISTER_UNIT = 256  #: registers of a warp are given in multiples of it
RESERVED_SHARED = 1024  #: bytes of shared memory that the system takes of each block
MAX_STATIC_SHARED = 48 << 10  #: bytes that a block can have without asking for more

#: Bytes of shared memory of a multiprocessor, by compute capability (CUDA programming guide, technical specifications).
SHARED: dict[Capability, int] = {(8, 0): 164 << 10, (9, 0): 228 << 10}


class Measured(NamedTuple):
    """A kernel compiled for one compute capability."""

    specimen: Specimen
    capability: Capability
    code: KernelCode

    @property
    def occupancy(self) -> float:
        """Warps that a multiprocessor holds of the kernel's blocks, as a fraction of those that it could hold."""
        warps = -(-self.specimen.threads // WARP)
        registers = -(-max(self.code.registers, 1) * WARP // REGISTER_UNIT) * REGISTER_UNIT
        by_registers = REGISTERS // registers // warps
        by_shared = SHARED[self.capability] // (self.code.shared_bytes + RESERVED_SHARED)
        return min(MAX_BLOCKS, MAX_WARPS // warps, by_registers, by_shared) * warps / MAX_WARPS

    def faults(self) -> Iterator[str]:
        """Sentences on what is over the budget."""
        code, specimen = self.code, self.specimen
        if code.spill_bytes or code.stack_bytes:
            yield f"{code.spill_bytes} bytes of spills, {code.stack_bytes} of stack; allowed: none"
        if code.parameters != specimen.parameters:
            yield f"parameters {code.parameters}, of which a launch passes {specimen.parameters}"
        if code.float64_instructions:
            yield f"{code.float64_instructions} float64 instructions; allowed: none"
        if specimen.wide_loads and not code.wide_loads:
            yield "no 128-bit load of global memory"
        if specimen.tensor_cores and not code.tensor_core_instructions:
            yield "no tensor-core instruction"
        if code.shared_bytes > MAX_STATIC_SHARED:
            yield f"{code.shared_bytes:,} bytes of shared memory; allowed: at most {MAX_STATIC_SHARED:,}"
        if self.occupancy < LEAST_OCCUPANCY:
            yield f"occupancy {self.occupancy:.0%}; wanted: at least {LEAST_OCCUPANCY:.0%}"
        if specimen.fills_gpu and specimen.launch.blocks < MULTIPROCESSORS:
            yield f"its launch has fewer blocks than {MULTIPROCESSORS} multiprocessors"
