"""How the tokens of a request are chosen and when it ends: plain data, checked when it is made."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from .errors import InvalidArgumentError

MAX_N = 128  #: completions of one prompt
MAX_COUNT = 2**31 - 1  #: tokens that a request may ask for, and top_k
MAX_LOGPROBS = 128  #: entries at each position; the whole vocabulary for each token of a long prompt fills a memory
MAX_STOPS = 256  #: stop strings
MAX_STOP_CHARACTERS = 65_536  #: all stop strings together
MAX_TOKEN_IDS = 5_000  #: entries of stop_token_ids or of logit_bias
MAX_BIAS = 1e30  #: of either sign; float32 logits and a bias then add up to a float32


@dataclass
class SamplingParams:
    """How one request is sampled. Names and meaning follow vLLM's class of the same name.

    Every field is checked and normalised when the object is made, before anything is allocated; InvalidArgumentError (a
    ValueError) names the field, its value and what is allowed. NaN, infinities and bools are not numbers here, NumPy's
    integers and floats are. What depends on the vocabulary is checked by :meth:`validate_for_vocab`. The object may be
    changed by who made it, so whoever keeps one keeps a :meth:`clone`.

    The order of steps: penalties and logit_bias, temperature, top_k, top_p, min_p.
    """

    n: int = 1  #: completions of the prompt, 1 to 128
    temperature: float = 1.0  #: logits are divided by it; 0 is greedy: the largest logit, of equal ones the lowest id
    top_p: float = 1.0  #: keep the fewest most likely tokens that have this much of the probability; 0 < top_p <= 1
    top_k: int = 0  #: keep the k largest logits, of equal ones the lowest ids; 0 (or vLLM's -1) keeps all
    min_p: float = 0.0  #: keep tokens at least min_p times as likely as the most likely one, 0 to 1
    #: 0.01 to 100; divides the positive and multiplies the negative logits of ids in the prompt or the output
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  #: -2 to 2; subtracted once from the logit of each id in the output
    frequency_penalty: float = 0.0  #: -2 to 2; subtracted as often as the id is in the output
    #: an integer of 64 bits, signed or not: equal bits, equal seeds; None: the engine draws one
    seed: int | None = None
    stop: Sequence[str] | None = None  #: a string or a list of strings that end the text; kept as a tuple
    stop_token_ids: Sequence[int] | None = None  #: ids that end the output, ignore_eos or not; kept as a tuple
    include_stop_str_in_output: bool = False  #: whether the text ends after the stop string, or before it
    ignore_eos: bool = False  #: go on after the model's own end-of-sequence ids
    min_tokens: int = 0  #: no end-of-sequence, stop id or stop string ends the output before this many tokens
    max_tokens: int | None = 16  #: tokens of output; None: as many as the model's length allows
    logprobs: int | None = None  #: 0 to 128 most likely tokens to report beside the chosen one; None: report nothing
    prompt_logprobs: int | None = None  #: the same for each token of the prompt
    logit_bias: Mapping[int, float] | None = None  #: added to the logits of these ids; -inf bans an id; kept as a dict
    skip_special_tokens: bool = True  #: leave special tokens out of the text

    def __post_init__(self) -> None:
        """Check and normalise every field."""
        self.n = _integer("n", self.n, 1, MAX_N)
        self.temperature = _number("temperature", self.temperature, lambda x: x >= 0, "0 (greedy) or more")
        self.top_p = _number("top_p", self.top_p, lambda x: 0 < x <= 1, "more than 0, up to 1")
        self.top_k = max(0, _integer("top_k", self.top_k, -1, MAX_COUNT))
        self.min_p = _number("min_p", self.min_p, lambda x: 0 <= x <= 1, "0 to 1")
        self.repetition_penalty = _number(
            "repetition_penalty", self.repetition_penalty, lambda x: 0.01 <= x <= 100, "0.01 to 100"
        )
        self.presence_penalty = _number("presence_penalty", self.presence_penalty, lambda x: -2 <= x <= 2, "-2 to 2")
        self.frequency_penalty = _number("frequency_penalty", self.frequency_penalty, lambda x: -2 <= x <= 2, "-2 to 2")
        self.seed = _optional_integer("seed", self.seed, -(2**63), 2**64 - 1)
        self.stop = _stops(self.stop)
        self.stop_token_ids = _token_ids("stop_token_ids", () if self.stop_token_ids is None else self.stop_token_ids)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        self.max_tokens = _optional_integer("max_tokens", self.max_tokens, 1, MAX_COUNT)
        self.min_tokens = _integer("min_tokens", self.min_tokens, 0, MAX_COUNT)
        most = self.max_tokens or MAX_COUNT
        _require(self.min_tokens <= most, "min_tokens", self.min_tokens, f"up to max_tokens, which is {most}")
        self.logprobs = _optional_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        self.prompt_logprobs = _optional_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        self.logit_bias = _logit_bias({} if self.logit_bias is None else self.logit_bias)

    def clone(self) -> SamplingParams:
        """A copy that shares nothing with this one, checked again."""
        return dataclasses.replace(self)

    def validate_for_vocab(self, vocab_size: int) -> None:
        """Check what depends on the model: ids are those of its ``vocab_size`` tokens; no more logprobs."""
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            _optional_integer(name, count, 0, min(MAX_LOGPROBS, vocab_size))
        for name, ids in (("stop_token_ids", self.stop_token_ids or ()), ("logit_bias", self.logit_bias or ())):
            for token_id in ids:
                _integer(f"an id of {name}", token_id, 0, vocab_size - 1)


@dataclass
class BeamSearchParams:
    """How one request is searched by beams; checked as :class:`SamplingParams` is.

    The score of a hypothesis is the sum of its tokens' logprobs over (number of tokens ** length_penalty): generated tokens
    alone, an end-of-sequence token among them.
    """

    beam_width: int = 4  #: hypotheses that are followed at once, 1 to 128
    max_tokens: int = 16  #: tokens of output
    length_penalty: float = 1.0  #: above 0 long hypotheses gain, below 0 short ones; -10 to 10
    #: True: end with beam_width finished hypotheses; False: end too where no beam looks able to beat the worst of them;
    #: "never": end only where no beam can, at whatever length
    early_stopping: bool | str = False
    ignore_eos: bool = False  #: go on after the model's own end-of-sequence ids
    n: int | None = None  #: best hypotheses to return; None: beam_width of them

    def __post_init__(self) -> None:
        """Check and normalise every field."""
        self.beam_width = _integer("beam_width", self.beam_width, 1, MAX_N)
        self.max_tokens = _integer("max_tokens", self.max_tokens, 1, MAX_COUNT)
        self.length_penalty = _number("length_penalty", self.length_penalty, lambda x: -10 <= x <= 10, "-10 to 10")
        is_known = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        _require(is_known, "early_stopping", self.early_stopping, 'True, False or "never"')
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
        self.n = _integer("n", self.beam_width if self.n is None else self.n, 1, self.beam_width)

    def clone(self) -> BeamSearchParams:
        """A copy, checked again."""
        return dataclasses.replace(self)


def _require(holds: bool, name: str, value: Any, allowed: str) -> None:
    if not holds:
        raise InvalidArgumentError(f"{name} is {_show(value)}; allowed: {allowed}")


def _show(value: Any) -> str:
    """A short repr, whatever the value: no megabyte of text, and no failure on an integer of 10,000 digits."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return f"of type {type(value).__name__}, too large to print"


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if type(value) is int and low <= value <= high:  # thousands of ids are checked
        return value
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    _require(is_integer and low <= value <= high, name, value, f"an integer from {low} to {high}")
    return int(value)


def _optional_integer(name: str, value: Any, low: int, high: int) -> int | None:
    return None if value is None else _integer(name, value, low, high)


def _number(name: str, value: Any, holds: Callable[[float], bool], allowed: str) -> float:
    number = _to_float(value)
    _require(math.isfinite(number) and holds(number), name, value, f"a finite number, {allowed}")
    return number


def _to_float(value: Any) -> float:
    """A real number as a float; NaN, which no check lets pass, for anything else."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer beyond float's range
        return math.nan


def _stops(value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else () if value is None else value
    _require(isinstance(stops, (list, tuple, set, frozenset)), "stop", value, "a string or a list of strings")
    _require(len(stops) <= MAX_STOPS, "the number of stop strings", len(stops), f"up to {MAX_STOPS}")
    for stop in stops:
        _require(isinstance(stop, str) and stop != "", "an entry of stop", stop, "strings that are not empty")
    characters = sum(map(len, stops))
    _require(
        characters <= MAX_STOP_CHARACTERS, "the length of stop", characters, f"{MAX_STOP_CHARACTERS} characters in all"
    )
    return tuple(stops)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    """A collection of ids; of a mapping, its keys."""
    _require(isinstance(value, Collection) and not isinstance(value, (str, bytes)), name, value, "a list of token ids")
    _require(len(value) <= MAX_TOKEN_IDS, f"the number of ids in {name}", len(value), f"up to {MAX_TOKEN_IDS}")
    return tuple(_integer(f"an id of {name}", token_id, 0, MAX_COUNT) for token_id in value)


def _logit_bias(value: Any) -> dict[int, float]:
    _require(isinstance(value, Mapping), "logit_bias", value, "a dict from token id to number")
    biases = {}
    for token_id, given in zip(_token_ids("logit_bias", value), value.values(), strict=True):
        bias = biases[token_id] = _to_float(given)
        if not (abs(bias) <= MAX_BIAS or bias == -math.inf):
            _require(False, f"the logit_bias of id {token_id}", given, f"-{MAX_BIAS:g} to {MAX_BIAS:g}, or -inf")
    return biases
