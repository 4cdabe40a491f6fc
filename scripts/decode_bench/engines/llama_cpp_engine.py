"""llama.cpp through the C API of llama-cpp-python: ``llama_decode`` on batches, as llama-bench and llama-batched-bench do.

Tokens are given rather than sampled: the engine is spared sampling and text. For each task it runs the way of attention
(flash or not) that was faster in its first runs.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import llama_cpp  # type: ignore[import-not-found]

from ..tasks import Settings, Task, Timed, token_ids

UBATCH = 512  #: tokens that are computed at once, llama.cpp's default
FLASH = {"on": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED, "off": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED}


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _silent(level: int, text: bytes, user_data: Any) -> None:
    """llama.cpp's log, several lines a tensor, goes nowhere."""


class Context:
    """A llama.cpp context of the size that a task needs, and its batch."""

    def __init__(self, model: Any, task: Task, threads: int, flash: str) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = task.batch
        params.n_ctx = task.batch * -(-task.longest // 256) * 256  # an equal share for each sequence
        params.n_batch = max(UBATCH, task.batch)
        params.n_ubatch = UBATCH
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = FLASH[flash]
        self.flash = flash
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp made no context for {task}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self._most = params.n_batch
        self._token, self._pos = self._batch.token, self._batch.pos
        self._seq_id, self._logits = self._batch.seq_id, self._batch.logits
        for row in range(self._most):
            self._batch.n_seq_id[row] = 1
        self.num_tokens = 0  #: of each sequence, that are in the cache

    def decode(self, tokens: list[list[int]], start: int) -> None:
        """Append tokens[sequence][i] at positions ``start`` + i; logits are computed for the last token of each sequence."""
        flat = [
            (token, start + index, sequence, index == len(each) - 1)
            for sequence, each in enumerate(tokens)
            for index, token in enumerate(each)
        ]
        for first in range(0, len(flat), self._most):
            part = flat[first : first + self._most]
            self._batch.n_tokens = len(part)
            for row, values in enumerate(part):
                self._token[row], self._pos[row], self._seq_id[row][0], self._logits[row] = values
            if status := llama_cpp.llama_decode(self._context, self._batch):
                raise RuntimeError(f"llama_decode returned {status}")
        llama_cpp.llama_synchronize(self._context)
        self.num_tokens = start + len(tokens[0])

    def cut(self, num_tokens: int) -> None:
        """Forget what lies beyond the first ``num_tokens`` of every sequence."""
        llama_cpp.llama_memory_seq_rm(self._memory, -1, num_tokens, -1)
        self.num_tokens = num_tokens

    def best_token(self, vocab_size: int) -> int:
        """The likeliest token after the last one."""
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)[:vocab_size]
        return int(logits.index(max(logits)))

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)


class LlamaCppEngine:
    """A model with a context for each task that it was asked for."""

    def __init__(self, settings: Settings) -> None:
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._threads = settings.threads
        self._model = llama_cpp.llama_model_load_from_file(
            settings.model.encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {settings.model}")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self._contexts: dict[Task, Context] = {}
        system = llama_cpp.llama_print_system_info().decode().strip()
        self.about = (
            f"llama.cpp by llama-cpp-python {llama_cpp.__version__}: llama_decode, KV float16, flash attention on or off "
            f"as is faster, ubatch {UBATCH}, {settings.threads} threads; {system}"
        )

    def run(self, task: Task) -> Timed:
        if task not in self._contexts:
            self._contexts[task] = self._faster_context(task)
        return self._run_in(self._contexts[task], task)

    def _faster_context(self, task: Task) -> Context:
        """With flash attention or without, whichever does the task faster; one after the other, as memory is measured too."""
        seconds = {}
        for flash in FLASH:
            context = Context(self._model, task, self._threads, flash)
            self._run_in(context, task)  # touches all memory, computes the prompts
            seconds[flash] = min(self._run_in(context, task).seconds for _ in range(2))
            context.close()
        return Context(self._model, task, self._threads, min(seconds, key=lambda flash: seconds[flash]))

    def _run_in(self, context: Context, task: Task) -> Timed:
        if task.steps == 0:
            prompt = token_ids(self._vocab_size, task.context, "prefill")
            context.cut(0)
            start = time.perf_counter()
            context.decode([prompt], 0)
            return Timed(task.context, time.perf_counter() - start)
        if context.num_tokens < task.context:
            prompts = [token_ids(self._vocab_size, task.context, ("decode", number)) for number in range(task.batch)]
            context.decode(prompts, 0)
        context.cut(task.context)
        start = time.perf_counter()
        for step in range(task.steps):
            context.decode([[step + sequence + 1] for sequence in range(task.batch)], task.context + step)
        return Timed(task.batch * task.steps, time.perf_counter() - start)

    def first_token(self, prompt: str) -> str:
        text = prompt.encode()
        tokens = (llama_cpp.llama_token * (len(text) + 2))()
        count = llama_cpp.llama_tokenize(self._vocab, text, len(text), tokens, len(tokens), True, True)
        context = Context(self._model, Task(context=count), self._threads, "on")
        context.decode([list(tokens[:count])], 0)
        piece = ctypes.create_string_buffer(64)
        token = context.best_token(self._vocab_size)
        length = llama_cpp.llama_token_to_piece(self._vocab, token, piece, len(piece), 0, True)
        return piece.raw[:length].decode(errors="replace")
