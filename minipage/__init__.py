"""minipage: a lightweight LLM inference runtime without torch, on a paged KV cache.

    from minipage import LLM, SamplingParams

    llm = LLM()  # SmolLM2-135M-Instruct; or a folder, a .gguf file, a hub id
    print(llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=32))[0].outputs[0].text)

Names load what they need on first use, so that importing the package is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import InvalidArgumentError, ModelLoadError, OutOfMemoryError
    from .llm import LLM
    from .outputs import CompletionOutput, Logprob, RequestOutput
    from .sampling_params import BeamSearchParams, SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": ".llm",
    "SamplingParams": ".sampling_params",
    "BeamSearchParams": ".sampling_params",
    "CompletionOutput": ".outputs",
    "Logprob": ".outputs",
    "RequestOutput": ".outputs",
    "InvalidArgumentError": ".errors",
    "ModelLoadError": ".errors",
    "OutOfMemoryError": ".errors",
}

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "InvalidArgumentError",
    "Logprob",
    "ModelLoadError",
    "OutOfMemoryError",
    "RequestOutput",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
