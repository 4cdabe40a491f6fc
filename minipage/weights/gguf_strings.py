"""Arrays of strings in GGUF files: hundreds of thousands of them, each behind its length in eight bytes."""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np

LENGTH = struct.Struct("<Q")
_SHORTEST_RUN = 32  #: strings that are worth taking together


def split_strings(window: bytes, most: int) -> tuple[list[str], int]:
    """The strings that stand whole at the beginning of ``window``, no more than ``most``, and how many bytes they take.

    Where a string begins is known once the one before it is read. But a length below 256 is a byte and seven zeros, which
    texts hardly have: where all places that look like one fit to each other, from the first to the last, they are a run of
    strings that can be taken together, much faster than one by one.
    """
    texts: list[str] = []
    runs, position = _find_runs(window), 0
    while len(texts) < most and position + LENGTH.size <= len(window):
        run = runs.get(position)
        if run is not None:
            run = run[: most - len(texts) + 1]
            texts += _take_run(window, run)
            position = int(run[-1])
            continue
        stop = position + LENGTH.size + LENGTH.unpack_from(window, position)[0]
        if stop > len(window):
            break
        texts.append(window[position + LENGTH.size : stop].decode())
        position = stop
    return texts, position


def _find_runs(window: bytes) -> dict[int, np.ndarray]:
    """Runs of strings whose lengths agree, by where each begins: where its strings begin, and where the last one ends."""
    data = np.frombuffer(window, np.uint8)
    zeros = data == 0
    last = len(data) - LENGTH.size + 1
    if last < 1:
        return {}
    looks_like_length = zeros[1 : last + 1].copy()
    for byte in range(2, LENGTH.size):
        looks_like_length &= zeros[byte : last + byte]
    starts = np.flatnonzero(looks_like_length)
    stops = starts + LENGTH.size + data[starts]
    starts, stops = starts[stops <= len(data)], stops[stops <= len(data)]
    if not len(starts):
        return {}
    ends = np.append(np.flatnonzero(stops[:-1] != starts[1:]) + 1, len(starts))
    begins = np.append(0, ends[:-1])
    long = ends - begins >= _SHORTEST_RUN
    return {
        int(starts[begin]): np.append(starts[begin:end], stops[end - 1])
        for begin, end in zip(begins[long], ends[long], strict=True)
    }


def _take_run(window: bytes, run: np.ndarray) -> list[str]:
    """The strings of a run, given where each begins and where the last one ends."""
    first, end = int(run[0]), int(run[-1])
    data = np.frombuffer(window, np.uint8)[first:end].copy()
    starts = run[:-1] - first
    data[starts] = 0
    texts_alone = data != 0
    if len(data) - np.count_nonzero(texts_alone) == LENGTH.size * len(starts):
        texts_alone[starts] = True  # of each length, one zero is left
        joined = bytes(data[texts_alone])
        return joined.decode().split("\0")[1:]
    edges = run.tolist()  # a text has a zero of its own
    return [window[start + LENGTH.size : stop].decode() for start, stop in pairwise(edges)]
