"""What the 32 lanes of a warp find out together, by exchanging numbers without shared memory."""

from __future__ import annotations

from typing import Any

from .target import WARP, cuda, device_function

ALL_LANES = 0xFFFFFFFF
LOG_WARP = 5  #: log2 of the lanes


@device_function
def warp_sum(value: Any) -> Any:
    """The sum of ``value`` over the lanes of a warp, in every one of them: halves are exchanged five times."""
    distance = WARP // 2
    while distance > 0:
        value += cuda.shfl_xor_sync(ALL_LANES, value, distance)
        distance //= 2
    return value


@device_function
def quad_sum(x: Any) -> Any:
    """The sum of x over four lanes side by side, in each of them."""
    x += cuda.shfl_xor_sync(ALL_LANES, x, 1)
    return x + cuda.shfl_xor_sync(ALL_LANES, x, 2)


@device_function
def quad_max(x: Any) -> Any:
    """The largest x of four lanes side by side, in each of them."""
    x = max(x, cuda.shfl_xor_sync(ALL_LANES, x, 1))
    return max(x, cuda.shfl_xor_sync(ALL_LANES, x, 2))
