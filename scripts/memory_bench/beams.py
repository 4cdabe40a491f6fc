"""Blocks that beams share, on a real model (paper, figure 15b): what beams have in common is the model's doing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from minipage import LLM, BeamSearchParams
from minipage.engine.runner import Runner
from minipage.engine.step import Step

from . import paper
from .report import Row
from .sharing import WIDTHS
from .trace import ALPACA, SHAREGPT, Workload, made_up

#: What requests are made of. Prompts are cut from it, each from another line on.
INSTRUCTIONS = """\
Explain why the sky is blue to a child of six.
Write a short story about a lighthouse keeper who finds a letter.
List three ways to save water at home.
Describe how bread is made, step by step.
Compare trains and planes as a way to travel in Europe.
Write an email that asks a colleague for feedback on a report.
Name the planets of the solar system and say one thing about each.
Give advice to somebody who starts a new job next week.
What are the main causes of the First World War?
Summarize the plot of Romeo and Juliet in five sentences.
How does a bicycle stay upright while it moves?
Write a poem about autumn in the mountains.
Explain the difference between weather and climate.
Suggest a dinner for four people that takes half an hour.
What should a good password look like, and why?
Tell me about the history of the printing press.
Describe a city of the future in which nobody owns a car.
How do vaccines work?
Write a dialogue between a doctor and a worried patient.
Explain what inflation is and how it affects savings.
Give five tips for learning a foreign language.
What makes a good teacher?
Describe the life cycle of a butterfly.
Write a review of a restaurant that you did not like.
""".splitlines(keepends=True)


@dataclass
class BlockCount:
    """Blocks of the sequences of all steps."""

    named: int = 0  #: by block tables
    distinct: int = 0


@contextmanager
def counting(runner: Runner) -> Iterator[BlockCount]:
    """Counts what each step that the runner executes holds, once the blocks that it writes are allocated."""
    count = BlockCount()
    execute = runner.execute

    def counted(step: Step) -> None:
        blocks = [block for item in step.scheduled for block in item.sequence.tables.tables[0].blocks]
        count.named += len(blocks)
        count.distinct += len(set(blocks))
        execute(step)

    runner.execute = counted  # type: ignore[method-assign]
    try:
        yield count
    finally:
        runner.execute = execute  # type: ignore[method-assign]


def beams(model: str | None, device: str, num_requests: int, seed: int, scale: float) -> Iterator[Row]:
    """Alpaca-like lengths as they are; ShareGPT-like lengths and their blocks ``scale`` times as long, to end in time."""
    yield from _beams(model, device, ALPACA, num_requests, seed, 1.0)
    yield from _beams(model, device, SHAREGPT, num_requests, seed, scale)


def _beams(
    model: str | None, device: str, workload: Workload, num_requests: int, seed: int, scale: float
) -> Iterator[Row]:
    requests = [
        (max(round(scale * prompt), 1), max(round(scale * output), 2))
        for prompt, output in typical_lengths(workload, num_requests, seed)
    ]
    block_size = max(round(16 * scale), 1)
    num_blocks = max(WIDTHS) * sum((prompt + output) // block_size + 2 for prompt, output in requests)
    with LLM(model, device=device, block_size=block_size, num_blocks=num_blocks, enable_prefix_caching=False) as llm:
        for width in WIDTHS:
            for number, (prompt, output) in enumerate(requests):
                params = BeamSearchParams(beam_width=width, max_tokens=output, ignore_eos=True, n=1)
                llm.engine.add_request(f"{width} {number}", prompt_token_ids(llm, number, prompt), params)
            with counting(llm.engine.runner) as count:
                while llm.engine.has_unfinished_requests():
                    llm.engine.step()
            name = f"sharing/beam/{workload.name}/{width}"
            reference = paper.SAVED["beam", workload.name].get(width)
            yield Row(name, 1 - count.distinct / count.named, "fraction", reference)


def typical_lengths(workload: Workload, count: int, seed: int) -> list[tuple[int, int]]:
    """Prompt and output lengths of a few requests that stand for many: those in the middle of ``count`` classes of output."""
    size = 25
    requests = sorted(made_up(workload, count * size, 2048, seed), key=lambda request: request.num_output_tokens)
    return [(request.num_prompt_tokens, request.num_output_tokens) for request in requests[size // 2 :: size]]


def prompt_token_ids(llm: LLM, number: int, num_tokens: int) -> list[int]:
    """A prompt of the length wanted, about something else for each number."""
    assert llm.engine.tokenizer is not None
    start = 7 * number % len(INSTRUCTIONS)
    text = "".join(INSTRUCTIONS[start:] + INSTRUCTIONS[:start])
    token_ids = llm.engine.tokenizer.encode(text, add_special_tokens=False)
    return (token_ids * (num_tokens // len(token_ids) + 1))[:num_tokens]
