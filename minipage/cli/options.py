"""Options that commands share, and what they are as keywords of ``LLM`` and fields of ``SamplingParams``.

An option that is not given is left out of the keywords, so defaults are stated once, where the keyword is.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from ..config import (
    DEVICES,
    DTYPES,
    KV_CACHE_DTYPES,
    PREEMPTION_MODES,
    QUANTIZATIONS,
    SPECULATIVE_METHODS,
    EngineConfig,
)
from ..sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 128


class Option(NamedTuple):
    """``--some-name`` for the keyword ``some_name``."""

    keyword: str
    type: type
    help: str
    choices: tuple[str, ...] | None = None


ENGINE_OPTIONS = (
    Option("device", str, "where to compute", DEVICES),
    Option("dtype", str, "of the weights; auto: as the checkpoint has them, quantised ones too", DTYPES),
    Option("quantization", str, "quantise the weights while loading", tuple(filter(None, QUANTIZATIONS))),
    Option("kv_cache_dtype", str, "of K and V; auto: as the weights", KV_CACHE_DTYPES),
    Option("block_size", int, "tokens a block of the KV cache holds"),
    Option("num_blocks", int, "blocks of the KV cache; or give --kv-cache-memory"),
    Option("kv_cache_memory", str, 'bytes of the KV cache, such as "512MiB"; default: from what is free'),
    Option(
        "gpu_memory_utilization", float, "part of a GPU's memory that may be in use with the KV cache; default: 0.9"
    ),
    Option("max_model_len", int, "most tokens of a sequence, prompt and output; default: what the model allows"),
    Option("max_num_seqs", int, "most sequences that run at once"),
    Option("max_num_batched_tokens", int, "most tokens that a step computes"),
    Option("preemption_mode", str, "what becomes of the blocks of a request that has to give way", PREEMPTION_MODES),
    Option("swap_space", str, 'host memory to swap blocks to, such as "1GiB"'),
    Option("sliding_window", int, "let every token see only so many of the last ones; default: as the model says"),
    Option("attention_sinks", int, "with a window in every layer, let every token see so many of the first ones too"),
    Option(
        "speculative",
        str,
        "guess tokens from what followed the same ones before: sooner where text repeats itself, never different",
        tuple(filter(None, SPECULATIVE_METHODS)),
    ),
    Option("num_speculative_tokens", int, "most tokens guessed for a sequence and step"),
    Option("num_threads", int, "CPU threads; default: the physical cores"),
    Option("tensor_parallel_size", int, "processes that share the model, as started by mpiexec -n"),
)

SAMPLING_OPTIONS = (
    Option("max_tokens", int, "most tokens of output"),
    Option("n", int, "completions of each prompt"),
    Option("temperature", float, "divides the logits; 0 is greedy"),
    Option("top_p", float, "keep the fewest most likely tokens that have this much of the probability"),
    Option("top_k", int, "keep this many tokens; 0 keeps all"),
    Option("min_p", float, "keep tokens at least this many times as likely as the most likely one"),
    Option("repetition_penalty", float, "on tokens of prompt and output; 1 is none"),
    Option("presence_penalty", float, "on tokens that are in the output; 0 is none"),
    Option("frequency_penalty", float, "on tokens by their count in the output; 0 is none"),
    Option("seed", int, "makes a sampled output the same each time"),
    Option("min_tokens", int, "fewest tokens of output"),
    Option("logprobs", int, "in JSON: report this many of the most likely tokens, and the chosen one"),
)


def add_engine_options(parser: argparse.ArgumentParser, *, without: tuple[str, ...] = ()) -> None:
    """Add --model and the keywords of LLM."""
    group = parser.add_argument_group("model and engine")
    group.add_argument(
        "-m",
        "--model",
        help="a folder in Hugging Face layout, a .gguf file, or a hub id (default: the demo model, SmolLM2-135M-Instruct)",
    )
    add_options(group, [option for option in ENGINE_OPTIONS if option.keyword not in without], EngineConfig)
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="keep computed blocks for prompts that begin alike (default: on)",
    )
    group.add_argument("-v", "--verbose", action="store_true", help="say how the KV cache was sized")


def add_sampling_options(
    parser: argparse.ArgumentParser, *, max_tokens: int = DEFAULT_MAX_TOKENS, without: tuple[str, ...] = ()
) -> None:
    """Add the fields of SamplingParams that make sense on a command line. Commands are greedy if not told otherwise."""
    group = parser.add_argument_group("sampling")
    options = [option for option in SAMPLING_OPTIONS if option.keyword not in without]
    add_options(group, options, SamplingParams, max_tokens=max_tokens, temperature=0.0)
    group.add_argument(
        "--stop", action="append", default=argparse.SUPPRESS, metavar="TEXT", help="end before this text; repeatable"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", default=argparse.SUPPRESS, help="go on after the model's own end"
    )


def add_options(group: Any, options: Sequence[Option], keywords_of: type, **defaults: Any) -> None:
    """Add options for fields of the dataclass ``keywords_of``; ``defaults`` are those that differ from the fields' own."""
    known = {field.name: field.default for field in fields(keywords_of)} | defaults
    for keyword, kind, text, choices in options:
        default = known[keyword]
        group.add_argument(
            "--" + keyword.replace("_", "-"),
            type=kind,
            choices=choices,
            default=defaults.get(keyword, argparse.SUPPRESS),
            help=text
            if default is None
            else f"{text} (default: {default:g})"
            if kind is float
            else f"{text} (default: {default})",
            metavar=None if choices else {int: "N", float: "X", str: "SIZE"}[kind],
        )


def engine_keywords(args: argparse.Namespace) -> dict[str, Any]:
    """What was given of the keywords of LLM, without the model."""
    return _given(args, ENGINE_OPTIONS, "enable_prefix_caching")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The sampling parameters that were asked for; InvalidArgumentError for values out of range."""
    return SamplingParams(**_given(args, SAMPLING_OPTIONS, "stop", "ignore_eos"))


def _given(args: argparse.Namespace, options: Sequence[Option], *others: str) -> dict[str, Any]:
    keywords = [*(option.keyword for option in options), *others]
    return {keyword: getattr(args, keyword) for keyword in keywords if hasattr(args, keyword)}
