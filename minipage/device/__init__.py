"""Devices, and the KV storage that lives on them. The one place that chooses between CPU and CUDA."""

from __future__ import annotations

from .base import Device
from .communicator import Communicator, join_ranks

__all__ = ["Communicator", "Device", "join_ranks", "open_device"]


def open_device(name: str = "auto", num_threads: int | None = None, gpu: int | None = None) -> Device:
    """The device of that name: "cpu", "cuda", "cuda-sim", "reference", or "auto": CUDA where it works, else the CPU.

    ``gpu`` is the number of the GPU to use where that is CUDA; None is the current one.

    Raises InvalidArgumentError where the device cannot be used here, saying what is missing.
    """
    if name == "auto":
        from .cuda import cuda_is_available

        name = "cuda" if cuda_is_available() else "cpu"
    if name == "cpu":
        from .cpu import CpuDevice

        return CpuDevice(num_threads)
    if name == "reference":
        from .cpu import ReferenceDevice

        return ReferenceDevice()
    from .cuda import open_cuda

    return open_cuda(name, gpu)
