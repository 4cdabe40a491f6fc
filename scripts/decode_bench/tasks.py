"""What is measured, and what every engine offers for it. Imports nothing but the standard library: peers need no minipage."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from math import isqrt
from typing import Any, NamedTuple, Protocol

#: 16 tokens of SmolLM2's vocabulary, which every engine continues with a word.
PROMPT = "Once upon a time, in a small village by the sea, there lived a"
SHORT_CONTEXT = 16  #: tokens that a sequence has before it is decoded, if nothing else is said


@dataclass(frozen=True)
class Task:
    """What an engine does between two readings of the clock: a prefill, or some decode steps of a batch."""

    batch: int = 1
    context: int = SHORT_CONTEXT  #: tokens of each sequence; those of a prefill
    steps: int = 0  #: decode steps; 0 is a prefill

    @property
    def name(self) -> str:
        """As in the names of rows: ``prefill/512``, ``decode/b8``, ``decode/b1/c4096``."""
        if self.steps == 0:
            return f"prefill/{self.context}"
        return f"decode/b{self.batch}" + (f"/c{self.context}" if self.context != SHORT_CONTEXT else "")

    @property
    def longest(self) -> int:
        """Tokens of a sequence in the end."""
        return self.context + self.steps + 1

    def to_json(self) -> dict[str, int]:
        """The fields, for ``Task(**...)`` in another process."""
        return asdict(self)


class Timed(NamedTuple):
    """A measurement."""

    tokens: int
    seconds: float


class Settings(NamedTuple):
    """What an engine is opened with."""

    model: str  #: a GGUF file or a folder in Hugging Face layout, whichever the engine reads
    kind: str  #: the number format of the weights, of ``checkpoints.KINDS``
    threads: int
    tasks: tuple[Task, ...]  #: all that it will be asked for, so that it can make room
    device: str = "cpu"  #: minipage's; peers know the CPU only


class Engine(Protocol):
    """A model that is loaded and warm. Work is done on the calling thread and the engine's own, and has ended on return."""

    about: str  #: name, version and settings, for the reader of the report

    def __init__(self, settings: Settings) -> None: ...

    def run(self, task: Task) -> Timed:
        """Do a task once. Prompts of decode tasks are the same each time, so that what was computed of one may be kept."""

    def first_token(self, prompt: str) -> str:
        """The text of the token that continues a prompt, chosen greedily."""


def token_ids(vocab_size: int, count: int, seed: Any) -> list[int]:
    """Ordinary tokens, drawn at random; the same for the same seed."""
    draw = random.Random(str(seed))
    return [draw.randrange(vocab_size // 2, vocab_size) for _ in range(count)]  # control tokens come first


def decode_steps(batch: int) -> int:
    """Enough steps for a measurement of about a second, whatever the batch."""
    return max(64 // isqrt(batch), 16)
