"""transformers on torch's CPU: the forward pass in a greedy loop, without the overhead of ``generate``."""

from __future__ import annotations

import time
from typing import Any

import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]

from ..tasks import Settings, Task, Timed, token_ids


class TransformersEngine:
    """A causal LM, eager, with scaled-dot-product attention and a dynamic cache."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        self._folder = settings.model
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            settings.model, dtype=getattr(torch, settings.kind), attn_implementation="sdpa"
        ).eval()
        self._vocab_size = self._model.config.vocab_size
        self._caches: dict[Task, Any] = {}
        self._prefills = 0
        self.about = (
            f"transformers {transformers.__version__}, torch {torch.__version__}: forward passes, {settings.kind}, "
            f"sdpa, {torch.get_num_threads()} threads"
        )

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def run(self, task: Task) -> Timed:
        if task.steps == 0:
            self._prefills += 1
            ids = torch.tensor([token_ids(self._vocab_size, task.context, ("prefill", self._prefills))])
            start = time.perf_counter()
            self._forward(ids, transformers.DynamicCache())
            return Timed(task.context, time.perf_counter() - start)
        if task not in self._caches:
            prompts = [token_ids(self._vocab_size, task.context, ("decode", number)) for number in range(task.batch)]
            self._caches[task] = transformers.DynamicCache()
            self._forward(torch.tensor(prompts), self._caches[task])
        cache = self._caches[task]
        ids = torch.zeros((task.batch, 1), dtype=torch.long)
        start = time.perf_counter()
        for _ in range(task.steps):
            ids = self._forward(ids, cache)
        seconds = time.perf_counter() - start
        cache.crop(-task.steps)  # a number below 0 says how many to forget
        return Timed(task.batch * task.steps, seconds)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def first_token(self, prompt: str) -> str:
        tokenizer = transformers.AutoTokenizer.from_pretrained(self._folder)
        ids = self._forward(tokenizer(prompt, return_tensors="pt").input_ids, transformers.DynamicCache())
        return str(tokenizer.decode(ids[0]))

    def _forward(self, ids: Any, cache: Any) -> Any:
        """The likeliest next token of each row, [batch, 1]."""
        logits = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits.argmax(dim=-1)
