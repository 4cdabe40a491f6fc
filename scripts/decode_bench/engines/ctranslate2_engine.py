"""CTranslate2: ``Generator.generate_batch``, greedy; steps are timed by its callback. Converts the checkpoint once.

Its int8 has one scale a row where the GGUF formats have one for 32 weights.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ctranslate2  # type: ignore[import-not-found]
import tokenizers

from ..tasks import Settings, Task, Timed, token_ids


class CTranslate2Engine:
    """A generator in the number format that was asked for."""

    def __init__(self, settings: Settings) -> None:
        folder = converted(settings.model, settings.kind)
        self._generator = ctranslate2.Generator(
            str(folder), compute_type=settings.kind, inter_threads=1, intra_threads=settings.threads
        )
        self._tokenizer_file = Path(settings.model) / "tokenizer.json"
        self._vocabulary = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
        self._prefills = 0
        self.about = (
            f"ctranslate2 {ctranslate2.__version__}: generate_batch, {self._generator.compute_type}, "
            f"{settings.threads} threads"
        )

    def run(self, task: Task) -> Timed:
        if task.steps == 0:
            self._prefills += 1
            start = time.perf_counter()
            self._generate([self._prompt(task, ("prefill", self._prefills))], 1)
            return Timed(task.context, time.perf_counter() - start)
        times: dict[int, float] = {}  # step -> when the last sequence had its token

        def note(result: Any) -> bool:
            times[result.step] = time.perf_counter()
            return False  # go on

        prompts = [self._prompt(task, ("decode", number)) for number in range(task.batch)]
        self._generate(prompts, task.steps + 1, callback=note)
        return Timed(task.batch * task.steps, max(times.values()) - times[0])

    def first_token(self, prompt: str) -> str:
        tokenizer = tokenizers.Tokenizer.from_file(str(self._tokenizer_file))
        [result] = self._generate([[self._vocabulary[i] for i in tokenizer.encode(prompt).ids]], 1)
        return str(tokenizer.decode(result.sequences_ids[0]))

    def _prompt(self, task: Task, seed: Any) -> list[str]:
        return [self._vocabulary[i] for i in token_ids(len(self._vocabulary), task.context, seed)]

    def _generate(self, prompts: list[list[str]], length: int, **options: Any) -> Any:
        """``length`` tokens after each prompt, whatever they are."""
        return self._generator.generate_batch(
            prompts, min_length=length, max_length=length, beam_size=1, include_prompt_in_result=False, **options
        )


def converted(model: str, kind: str) -> Path:
    """CTranslate2's files for a checkpoint folder, beside it; they appear whole or not at all."""
    path = Path(f"{model}.ctranslate2-{kind}")
    if not path.is_dir():
        with tempfile.TemporaryDirectory(prefix="writing-", dir=path.parent) as folder:
            unfinished = Path(folder) / path.name
            ctranslate2.converters.TransformersConverter(model).convert(str(unfinished), quantization=kind)
            if not path.exists():
                os.replace(unfinished, path)
    return path
