"""A process with one engine in it, which does what it is told.

    python -m decode_bench.worker ENGINE '{"model": ..., "kind": ..., "threads": ..., "tasks": [...]}' [--first-token PROMPT]

It loads the model, says ``{"about": ...}``, and answers each line of standard input, a task, with a line of standard output:
``{"tokens": ..., "seconds": ..., "peak_bytes": ...}``. It ends with its input. With --first-token it prints one token's text.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys

from .tasks import Engine, Settings, Task

#: Name -> module and class. Modules are imported only where their engine is wanted.
ENGINES = {
    "minipage": ("minipage_engine", "MinipageEngine"),
    "llama.cpp": ("llama_cpp_engine", "LlamaCppEngine"),
    "ctranslate2": ("ctranslate2_engine", "CTranslate2Engine"),
    "transformers": ("transformers_engine", "TransformersEngine"),
}


def open_engine(name: str, settings: Settings) -> Engine:
    """The engine of a name."""
    module, cls = ENGINES[name]
    engine: Engine = getattr(importlib.import_module(f"{__package__}.engines.{module}"), cls)(settings)
    return engine


def peak_bytes() -> int:
    """The most memory that this process had resident so far."""
    try:  # ru_maxrss would count what the parent had when it made this process
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def main(arguments: list[str]) -> None:
    """Serve until standard input ends, or print the first token."""
    name, settings_json, *rest = arguments
    # What libraries print goes to standard error: standard output is for answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(text: str) -> None:
        print(text, file=answers, flush=True)

    fields = json.loads(settings_json)
    fields["tasks"] = tuple(Task(**task) for task in fields["tasks"])
    engine = open_engine(name, Settings(**fields))
    if rest:
        answer(engine.first_token(rest[1]))
        return
    answer(json.dumps({"about": engine.about}))
    for line in sys.stdin:
        timed = engine.run(Task(**json.loads(line)))
        answer(json.dumps({**timed._asdict(), "peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    main(sys.argv[1:])
