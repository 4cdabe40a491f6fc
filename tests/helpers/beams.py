"""Beam search as one reads it in a book: no tables, no sharing, every candidate of every step in one sorted list."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

#: Log probabilities [V] of what follows the generated tokens.
NextLogprobs = Callable[[tuple[int, ...]], npt.NDArray[np.float64]]


class Found(NamedTuple):
    """A finished hypothesis."""

    token_ids: tuple[int, ...]
    score: float
    logprob: float


class Search(NamedTuple):
    """What a search finds, the best first, and how it went."""

    found: list[Found]
    siblings: list[list[int]]  #: after each step, how many live beams go on from each parent that has any
    gap: float  #: the closest call among all that was compared


def beam_search(
    next_logprobs: NextLogprobs,
    *,
    width: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    eos: Collection[int] = (),
) -> Search:
    """The rule of transformers' generate: of all continuations the best ``width`` may end, the best others go on."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[Found] = []
    siblings: list[list[int]] = []
    gap = np.inf
    for length in range(1, max_tokens + 1):
        candidates = [
            (logprob + float(step), (*tokens, token_id))
            for logprob, tokens in live
            for token_id, step in enumerate(next_logprobs(tokens))
            if np.isfinite(step)
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        ends = [tokens[-1] in eos or length == max_tokens for _, tokens in candidates]
        finished += [
            Found(tokens, logprob / length**length_penalty, logprob)
            for (logprob, tokens), end in zip(candidates[:width], ends, strict=False)
            if end
        ]
        finished.sort(key=lambda found: -found.score)
        live = [candidate for candidate, end in zip(candidates, ends, strict=True) if not end][:width]
        parents = [tokens[:-1] for _, tokens in live]
        siblings.append([parents.count(parent) for parent in dict.fromkeys(parents)])
        last = candidates.index(live[-1]) if live else width
        gap = min(gap, closest([logprob for logprob, _ in candidates[: max(last, width) + 2]]))
        gap = min(gap, closest([found.score for found in finished[: width + 1]]))
        del finished[width:]
        if not live:
            break
        hoped = max_tokens if early_stopping == "never" and length_penalty > 0 else length
        best = live[0][0] / hoped**length_penalty
        if len(finished) == width:
            gap = min(gap, abs(finished[-1].score - best))
            if early_stopping is True or finished[-1].score >= best:
                break
    return Search(finished, siblings, float(gap))


def all_sequences(
    next_logprobs: NextLogprobs, vocab_size: int, max_tokens: int, length_penalty: float, eos: Collection[int]
) -> list[Found]:
    """Every sequence that ends with an EOS or at ``max_tokens``, the best first: what a beam without bounds finds."""
    found = []
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(range(vocab_size), repeat=length):
            ends = tokens[-1] in eos or length == max_tokens
            if ends and not set(tokens[:-1]) & set(eos):
                logprob = sum(float(next_logprobs(tokens[:i])[tokens[i]]) for i in range(length))
                found.append(Found(tokens, logprob / length**length_penalty, logprob))
    return sorted(found, key=lambda each: -each.score)


def closest(values: Sequence[float]) -> float:
    """The smallest difference between two of these."""
    ordered = np.sort(np.asarray(values))
    return float(np.diff(ordered).min()) if len(ordered) > 1 else np.inf


def table_logprobs(table: npt.ArrayLike, last_prompt_token: int) -> NextLogprobs:
    """Of a script model: what follows is row ``last token`` of its table."""
    rows = np.asarray(table, np.float32).astype(np.float64)
    rows = rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    return lambda tokens: rows[tokens[-1] if tokens else last_prompt_token]
