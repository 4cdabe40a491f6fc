"""Prompts in, from arguments, a file or standard input; results out, as text or JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from ..errors import InvalidArgumentError
from ..outputs import CompletionOutput, RequestOutput

Prompt = str | dict[str, Any]
BYTE_ORDER_MARK = "\ufeff"  #: that some editors begin a file with
_PROMPT_KEYS = {"prompt", "prompt_token_ids"}


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`read_prompts` and :func:`conversation` read, and --json."""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to complete; default: from standard input")
    parser.add_argument(
        "-f",
        "--file",
        help='read prompts from a file ("-": standard input), one a line, or JSON lines with "prompt" or "prompt_token_ids"',
    )
    parser.add_argument(
        "--chat", action="store_true", help="put each prompt through the chat template, as a user's message"
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: a system message before it")
    parser.add_argument("--json", action="store_true", help="print one JSON line a result")


def read_prompts(args: argparse.Namespace) -> list[Prompt]:
    """The prompts of the arguments, then those of --file; of standard input where there are neither."""
    prompts: list[Prompt] = list(args.prompts)
    if args.file not in (None, "-"):
        with open(args.file, encoding="utf-8") as lines:
            prompts += parse_lines(lines, args.file)
    elif getattr(args, "tensor_parallel_size", 1) > 1 and not prompts:
        raise InvalidArgumentError(
            "with --tensor-parallel-size give prompts as arguments or with --file; only one rank has standard input"
        )
    elif args.file == "-" or (not prompts and not sys.stdin.isatty()):
        prompts += parse_lines(sys.stdin, "standard input")
    if not prompts:
        raise InvalidArgumentError("no prompt; give one as an argument, with --file, or on standard input")
    if args.system is not None and not args.chat:
        raise InvalidArgumentError("--system needs --chat")
    return prompts


def parse_lines(lines: Iterable[str], name: str) -> list[Prompt]:
    """One prompt a line, empty lines left out; all lines are JSON where the first one is a JSON object."""
    texts = (
        line.rstrip("\r\n").removeprefix(BYTE_ORDER_MARK if number == 0 else "") for number, line in enumerate(lines)
    )
    numbered = [(number, text) for number, text in enumerate(texts, 1) if text.strip()]
    if not numbered or not _is_object(numbered[0][1]):
        return [text for _, text in numbered]
    return [_parse_object(text, f"{name}, line {number}") for number, text in numbered]


def _is_object(text: str) -> bool:
    try:
        return isinstance(_parse(text), dict)
    except ValueError:
        return False


def _parse(text: str) -> Any:
    """JSON; ValueError too where it is nested deeper than Python reads."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _parse_object(text: str, where: str) -> Prompt:
    try:
        prompt = _parse(text)
    except ValueError as error:
        raise InvalidArgumentError(f"{where} is not JSON: {error}") from error
    if not isinstance(prompt, dict) or not prompt or set(prompt) - _PROMPT_KEYS:
        raise InvalidArgumentError(f'{where} must be an object with "prompt" or "prompt_token_ids", not {text[:80]}')
    return prompt


def conversation(prompt: Prompt, system: str | None) -> list[dict[str, str]]:
    """A prompt as the user's message of a conversation."""
    text = prompt if isinstance(prompt, str) else prompt.get("prompt")
    if not isinstance(text, str):
        raise InvalidArgumentError('--chat needs prompts that are text, not "prompt_token_ids"')
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]


def to_json(output: RequestOutput) -> str:
    """One result in one line; names are those of RequestOutput and CompletionOutput."""
    result = asdict(output)
    for completion in result["outputs"]:
        del completion["delta_text"]
    del result["finished"]
    return json.dumps(result)


def check_complete(outputs: Iterable[RequestOutput]) -> None:
    """Raise ValueError where a completion was ended by the engine, which says why: such as logits that are not numbers."""
    for number, output in enumerate(outputs):
        for completion in output.outputs:
            if completion.finish_reason == "abort":
                raise ValueError(
                    f"completion {completion.index} of prompt {number} was cut off: {completion.stop_reason}"
                )


def to_text(output: RequestOutput, number: int, *, show_prompt: bool, labelled: bool) -> str:
    """The completions of a result, after the prompt if ``show_prompt``; ``labelled``: behind ``[number]``."""
    prompt = output.prompt or "" if show_prompt else ""

    def line(completion: CompletionOutput) -> str:
        label = f"[{number}.{completion.index}] " if len(output.outputs) > 1 else f"[{number}] "
        return (label if labelled else "") + prompt + completion.text

    return "\n".join(map(line, output.outputs))
