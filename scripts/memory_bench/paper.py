"""What the paper measured: Kwon et al., Efficient Memory Management for LLM Serving with PagedAttention, SOSP 2023.

Numbers that are printed in the paper are given as printed. Those of figure 19a were read from its vector graphics.
"""

from __future__ import annotations

#: Figure 2: fractions of the KV memory that hold tokens, are reserved for them, and are lost inside and between allocations.
WASTE = {
    "static_max": (0.204, 0.133, 0.573, 0.089),
    "static_pow2": (0.268, 0.179, 0.136, 0.416),
    "oracle": (0.382, 0.252, 0.0, 0.366),
}
USEFUL_PAGED = 0.963  #: figure 2, blocks of 16

#: Figure 13: requests that run at once, OPT-13B on 40 GB.
CONCURRENCY = {
    "sharegpt": {"static_max": 7.00, "static_pow2": 9.81, "oracle": 13.62, "paged": 30.42},
    "alpaca": {"static_max": 7.00, "static_pow2": 43.24, "oracle": 72.75, "paged": 132.44},
}

#: Section 6.2: times as many requests a second at the same latency, the lower ends of what is printed (1.7 to 2.7, 2.7 to 8).
REQUEST_RATE = {("sharegpt", "oracle"): 1.7, ("sharegpt", "static_max"): 2.7}

#: Figure 15 and section 6.3: fractions of blocks saved by sharing, by sequences a request.
SAVED = {
    ("parallel", "alpaca"): {2: 0.0609, 4: 0.0853, 6: 0.0979},
    ("parallel", "sharegpt"): {2: 0.162, 6: 0.305},
    ("beam", "alpaca"): {2: 0.3756, 4: 0.5313, 6: 0.5516},
    ("beam", "sharegpt"): {2: 0.443, 6: 0.663},
}

#: Section 6.4: throughput over that of Orca (Oracle), by tokens of the prefix that all requests share.
PREFIX_SPEEDUP = {80: 1.67, 341: 3.58}

#: Figure 19a: milliseconds to recompute a preempted request, and to swap it out and in, by block size.
RECOMPUTE_MS = 38.1
SWAP_MS = {1: 136.5, 2: 87.9, 4: 59.5, 8: 45.4, 16: 38.5, 32: 34.8, 64: 33.2, 128: 32.1, 256: 31.7}
