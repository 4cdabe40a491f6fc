"""``minipage generate``: complete prompts. ``scripts/generate.py`` does the same over the engine's steps, with timings."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .console import show_log
from .options import add_engine_options, add_sampling_options, engine_keywords, sampling_params
from .prompts import Prompt, add_prompt_options, check_complete, conversation, read_prompts, to_json, to_text

if TYPE_CHECKING:
    from ..llm import LLM
    from ..sampling_params import SamplingParams


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "generate",
        help="complete prompts",
        description="Complete prompts. One prompt is shown as it is written; several are computed together.",
    )
    add_prompt_options(parser)
    add_sampling_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load the model and complete what was asked for."""
    prompts, params = read_prompts(args), sampling_params(args)
    if args.verbose:
        show_log()
    from ..llm import LLM

    with LLM(args.model, **engine_keywords(args)) as llm:
        if len(prompts) == 1 and params.n == 1 and not args.json:
            _stream(llm, prompts[0], params, args)
        else:
            _batch(llm, prompts, params, args)
    return 0


def _stream(llm: LLM, prompt: Prompt, params: SamplingParams, args: argparse.Namespace) -> None:
    beginning = ""  # shown with the first text, and not before what compiling kernels says on the same line
    if args.chat:
        outputs = llm.stream_chat(conversation(prompt, args.system), params)
    else:
        outputs = llm.stream(prompt, params)
        beginning = prompt if isinstance(prompt, str) else prompt.get("prompt") or ""
    for output in outputs:
        print(beginning + output.outputs[0].delta_text, end="", flush=True)
        beginning = ""
    print()
    check_complete([output])


def _batch(llm: LLM, prompts: list[Prompt], params: SamplingParams, args: argparse.Namespace) -> None:
    if args.chat:
        outputs = llm.chat([conversation(prompt, args.system) for prompt in prompts], params)
    else:
        outputs = llm.generate(prompts, params)
    for number, output in enumerate(outputs):
        print(to_json(output) if args.json else to_text(output, number, show_prompt=not args.chat, labelled=True))
    check_complete(outputs)
