"""What an engine is asked to be: every keyword of ``LLM`` checked, before anything is allocated."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Any

from .errors import InvalidArgumentError

DEVICES = ("auto", "cpu", "cuda", "cuda-sim", "reference")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = (*DTYPES, "int8")
QUANTIZATIONS = (None, "int8", "int4")
PREEMPTION_MODES = ("recompute", "swap", "auto")
SPECULATIVE_METHODS = (None, "ngram")
MOST_SPECULATIVE_TOKENS = 8
MOST_THREADS = 1024
_SIZE = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([KMG]I?B)?\s*", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parse_bytes(value: int | str, name: str = "size") -> int:
    """A number of bytes from an int or a string such as ``"512MiB"``, ``"2 GB"`` or ``"1000"``."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is not None:
        return int(float(match[1]) * _UNITS[(match[2] or "").upper()])
    if isinstance(value, str):
        raise InvalidArgumentError(
            f"{name}={value!r} is not a size; write bytes, or a number with KiB, MiB, GiB, KB, MB or GB"
        )
    return _integer(name, value, 1)


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < low or (high is not None and number > high):
        allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
        raise InvalidArgumentError(f"{name}={value!r} is not allowed; it must be {allowed}")
    return number


def _choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise InvalidArgumentError(
            f"{name}={value!r} is not allowed; it must be one of {', '.join(map(repr, allowed))}"
        )


@dataclass(frozen=True)
class EngineConfig:
    """The keywords of ``LLM`` but for the model; see there for what each does."""

    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | str | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    preemption_mode: str = "recompute"
    swap_space: int | str = 0
    sliding_window: int | None = None
    attention_sinks: int = 0
    speculative: str | None = None
    num_speculative_tokens: int = 8
    num_threads: int | None = None
    tensor_parallel_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        _choice("device", self.device, DEVICES)
        _choice("dtype", self.dtype, DTYPES)
        _choice("quantization", self.quantization, QUANTIZATIONS)
        _choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _choice("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        _choice("speculative", self.speculative, SPECULATIVE_METHODS)
        _choice("enable_prefix_caching", self.enable_prefix_caching, (True, False))
        most = {
            "block_size": 1 << 16,
            "max_num_seqs": 1 << 16,
            "max_num_batched_tokens": 1 << 20,
            "num_speculative_tokens": MOST_SPECULATIVE_TOKENS,
            "tensor_parallel_size": 1 << 10,
        }
        for name, high in most.items():
            self._set(name, _integer(name, getattr(self, name), 1, high))
        for name in ("num_blocks", "max_model_len", "sliding_window"):
            if getattr(self, name) is not None:
                self._set(name, _integer(name, getattr(self, name), 1, (1 << 31) - 1))
        self._set("attention_sinks", _integer("attention_sinks", self.attention_sinks, 0, (1 << 31) - 1))
        if self.num_threads is not None:
            self._set("num_threads", _integer("num_threads", self.num_threads, 1, MOST_THREADS))
        self._set("seed", _integer("seed", self.seed, -(1 << 63), (1 << 64) - 1))
        if self.gpu_memory_utilization is not None:
            self._check_utilization(self.gpu_memory_utilization)
        if self.kv_cache_memory is not None:
            if self.num_blocks is not None:
                raise InvalidArgumentError(
                    "num_blocks and kv_cache_memory both say how large the KV cache is; give one of them"
                )
            self._set("kv_cache_memory", parse_bytes(self.kv_cache_memory, "kv_cache_memory"))

        self._set("swap_space", 0 if self.swap_space in (0, "0") else parse_bytes(self.swap_space, "swap_space"))
        if self.preemption_mode != "recompute" and not self.swap_space:
            raise InvalidArgumentError(
                f'preemption_mode={self.preemption_mode!r} needs room to swap to; give swap_space, such as "1GiB"'
            )

    def _check_utilization(self, value: Any) -> None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value <= 1:
            raise InvalidArgumentError(
                f"gpu_memory_utilization={value!r} is not allowed; it must be above 0 and at most 1"
            )
        for name in ("num_blocks", "kv_cache_memory"):
            if getattr(self, name) is not None:
                raise InvalidArgumentError(
                    f"{name} and gpu_memory_utilization both say how large the KV cache is; give one of them"
                )

    def _set(self, name: str, value: int) -> None:
        object.__setattr__(self, name, value)
