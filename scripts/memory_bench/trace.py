"""Request traces: made up from the lengths of the paper's datasets, or read from files."""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from minipage.errors import InvalidArgumentError

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
HASHED_TOKENS = 512  #: tokens of a prompt that one of Mooncake's hash_ids stands for


class Piece(NamedTuple):
    """``num_tokens`` tokens of a prompt. Pieces of the same content are the same text."""

    content: int
    num_tokens: int


class TraceRequest(NamedTuple):
    """When a request arrives, in seconds from the first, what its prompt is, and how many tokens are generated for it."""

    arrival: float
    prompt: tuple[Piece, ...]
    num_output_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return sum(piece.num_tokens for piece in self.prompt)

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids that are equal where the texts are."""
        return [piece.content for piece in self.prompt for _ in range(piece.num_tokens)]


class Lengths(NamedTuple):
    """Mean and standard deviation, in tokens."""

    mean: float
    std: float


class Workload(NamedTuple):
    """A dataset as the paper describes it in section 6.1."""

    name: str
    prompt: Lengths
    output: Lengths
    rate: float  #: requests a second, at which the paper counts how many run at once (figure 13)


# The means are printed in figure 11. The standard deviations are those of its histograms, summed up from the bars of the
# vector graphics, whose means come out as 161.4, 338.0, 19.3 and 58.5.
SHAREGPT = Workload("sharegpt", Lengths(161.31, 299.6), Lengths(337.99, 283.9), rate=2.0)
ALPACA = Workload("alpaca", Lengths(19.31, 12.4), Lengths(58.45, 58.2), rate=30.0)


def made_up(workload: Workload, count: int, max_length: int, seed: int = 0) -> list[TraceRequest]:
    """``count`` requests of lognormal lengths and Poisson arrivals, prompt and output independent of each other.

    Lengths are evenly spaced quantiles, paired as the points of a lattice (quasi-Monte Carlo, Niederreiter 1992), so that a
    short trace is like a long one; ``seed`` is for their order and the arrivals. They are cut to ``max_length`` in all, and
    scaled until their means are those of the workload.
    """
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / workload.rate, count))
    quantiles = np.array([NormalDist().inv_cdf((place + 0.5) / count) for place in range(count)])
    order = rng.permutation(count)
    partners = (order * GOLDEN_RATIO % 1).argsort().argsort()
    prompts = _Lognormal(workload.prompt, quantiles[order])
    outputs = _Lognormal(workload.output, quantiles[partners])
    for _ in range(50):
        prompt = np.minimum(prompts.lengths(), max_length - 1)
        output = np.minimum(outputs.lengths(), max_length - prompt)
        prompts.scale *= prompts.wanted / prompt.mean()
        outputs.scale *= outputs.wanted / output.mean()
    return [
        TraceRequest(float(arrival), (Piece(number, int(prompt[number])),), int(output[number]))
        for number, arrival in enumerate(arrivals - arrivals[0])
    ]


class _Lognormal:
    def __init__(self, lengths: Lengths, normal: np.ndarray) -> None:
        self.wanted = self.scale = lengths.mean
        sigma = math.sqrt(math.log1p((lengths.std / lengths.mean) ** 2))
        self._factors = np.exp(sigma * normal - sigma**2 / 2)

    def lengths(self) -> np.ndarray:
        return np.maximum(np.rint(self.scale * self._factors), 1).astype(int)


def with_prefix(trace: Sequence[TraceRequest], num_tokens: int) -> list[TraceRequest]:
    """The same requests with ``num_tokens`` tokens before each prompt that are the same for all."""
    prefix = Piece(len(trace), num_tokens)
    return [request._replace(prompt=(prefix, *request.prompt)) for request in trace]


def at_once(trace: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The same requests, all there from the start: what runs at once is then limited by nothing but memory."""
    return [request._replace(arrival=0.0) for request in trace]


def read(path: Path, max_length: int) -> list[TraceRequest]:
    """A trace from a file, gzipped or not: Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) or Mooncake's JSON lines.

    Left out are requests of more than ``max_length`` tokens and those without any prompt or output. Raises
    InvalidArgumentError, naming file and line, for what is neither.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            first = file.readline()
            file.seek(0)
            requests = list(_mooncake(file) if first.startswith("{") else _azure(file))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"the trace {path} cannot be read: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"the trace {path} is not understood ({error}); allowed are CSV with the columns TIMESTAMP, ContextTokens, "
            "GeneratedTokens, and lines of JSON with timestamp, input_length, output_length, hash_ids"
        ) from error
    fitting = [
        request
        for request in requests
        if request.num_tokens <= max_length and request.num_prompt_tokens > 0 and request.num_output_tokens > 0
    ]
    if not fitting:
        raise InvalidArgumentError(f"the trace {path} has no request of up to {max_length} tokens (max_length)")
    start = fitting[0].arrival
    return [request._replace(arrival=request.arrival - start) for request in fitting]


def _azure(lines: Iterator[str]) -> Iterator[TraceRequest]:
    for number, row in enumerate(csv.DictReader(lines)):
        arrival = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
        yield TraceRequest(arrival, (Piece(number, int(row["ContextTokens"])),), int(row["GeneratedTokens"]))


def _mooncake(lines: Iterator[str]) -> Iterator[TraceRequest]:
    for line in lines:
        row = json.loads(line)
        left = int(row["input_length"])
        pieces = []
        for content in row["hash_ids"]:
            pieces.append(Piece(int(content), min(left, HASHED_TOKENS)))
            left -= pieces[-1].num_tokens
        yield TraceRequest(row["timestamp"] / 1000, tuple(pieces), int(row["output_length"]))
