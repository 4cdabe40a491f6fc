"""exp as a few multiplications; the C library's takes one number at a time.

e^x = 2^n e^r, with x = n ln 2 + r and a polynomial for e^r (that of Cephes' expf): right to about 2e-7 of the value.
"""

from __future__ import annotations

from llvmlite import ir

from .vector import FLOAT, INT, Builder, Value, constant, fused_multiply_add

_LOG2_E = 1.4426950408889634
_LN2 = (0.693359375, -2.12194440e-4)  # in two parts: the first has so few bits that n times it is exact
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_ROUND = 12582912.0  # 1.5 * 2^23: added to a small number, it leaves the nearest integer in the last bits
_LOWEST, _HIGHEST = -87.0, 88.0


def exp_of(builder: Builder, x: Value) -> Value:
    """e^x of a vector of float32: 0 below -87, which is about 1e-38, and e^88 above 88. NaN stays NaN."""
    lanes = x.type.count

    def number(value: float) -> Value:
        return constant(FLOAT, lanes, value)

    # In this form a NaN passes both comparisons.
    bounded = builder.select(builder.fcmp_ordered("<", x, number(_LOWEST)), number(_LOWEST), x)
    bounded = builder.select(builder.fcmp_ordered(">", bounded, number(_HIGHEST)), number(_HIGHEST), bounded)
    shifted = fused_multiply_add(builder, bounded, number(_LOG2_E), number(_ROUND))
    n = builder.fsub(shifted, number(_ROUND))
    r = fused_multiply_add(builder, n, number(-_LN2[0]), bounded)
    r = fused_multiply_add(builder, n, number(-_LN2[1]), r)
    p = number(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p = fused_multiply_add(builder, p, r, number(coefficient))
    p = fused_multiply_add(builder, builder.fmul(p, r), r, r)
    exponent = builder.add(builder.bitcast(shifted, ir.VectorType(INT, lanes)), constant(INT, lanes, 127))
    power = builder.bitcast(builder.shl(exponent, constant(INT, lanes, 23)), x.type)
    value = builder.fmul(builder.fadd(p, number(1.0)), power)
    return builder.select(builder.fcmp_ordered("<", x, number(_LOWEST)), number(0.0), value)
