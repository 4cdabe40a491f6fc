"""``LLM``: a model in your program. Names follow vLLM's offline API."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .config import EngineConfig
from .engine.loading import load_engine
from .engine.prompt import CheckedParams, Messages, Params, Prompt, conversations, params_list, prompt_list
from .engine.request import Request
from .engine.stats import Stats
from .errors import InvalidArgumentError
from .interrupts import DelayInterrupt
from .outputs import RequestOutput
from .sampling_params import BeamSearchParams, SamplingParams


class LLM:
    """A model on a device with a paged KV cache, serving any number of prompts by continuous batching.

    Args:
        model: a folder in Hugging Face layout, a .gguf file, a hub id; None is the demo model, SmolLM2-135M-Instruct.
        device: "auto", "cpu", "cuda", "cuda-sim" (CUDA kernels in Numba's simulator) or "reference" (NumPy), both for tests.
        dtype: of the weights, "auto" (the checkpoint's; a GGUF file keeps its quantised bits), "float32", "bfloat16" or
            "float16". Activations are float32; on a CPU, layers with quantised weights quantise their inputs as well.
        quantization: "int8" or "int4" quantises the weights while loading; "int4" leaves embedding and output head in int8.
        kv_cache_dtype: of K and V, "auto" (the dtype of the weights; float16 where a file has quantised ones), "float32",
            "bfloat16", "float16", or "int8", with a scale for each token and head: about a quarter of the memory of float32,
            and less to read. Not on CUDA devices.
        block_size: tokens a block holds.
        num_blocks: blocks to hold; None takes them from ``kv_cache_memory`` (bytes, or "512MiB"), or from what is free.
        gpu_memory_utilization: on a GPU, the part of its memory that may be in use once the KV cache is there (None: 0.9).
        max_model_len: the most tokens, prompt and output, of a sequence; None is what the model allows. It may be more where
            every layer has a window, since what a token sees then never gets longer.
        max_num_seqs: the most sequences that run at once.
        max_num_batched_tokens: the most tokens that a step computes; longer prompts are computed in chunks.
        enable_prefix_caching: keep the blocks of what was computed and find them again for prompts that begin alike.
        preemption_mode: what happens to a request that gives its blocks up: "recompute", "swap" (its blocks go to host memory
            and come back) or "auto", the cheaper by measurement.
        swap_space: host memory to swap to, in bytes or as "1GiB"; where it is short, requests are recomputed.
        sliding_window: let every layer see the last so many tokens only, whatever the model's config says.
        attention_sinks: with a window in every layer, let all tokens see the first so many as well, at the positions that
            they have in the cache: text then stays fluent beyond the trained length (StreamingLLM, Xiao et al. 2023). 4 will do.
        speculative: "ngram" guesses what comes next from what followed the same tokens before, in prompt and output, and
            computes the guesses in the same step: outputs are the same, sooner where text repeats itself and few sequences run
            at once, since wrong guesses cost time in a step that is busy anyway (None: off).
        num_speculative_tokens: the most tokens guessed for a sequence and step, 1 to 8.
        num_threads: CPU threads; None is the number of physical cores.
        tensor_parallel_size: processes that share the model, started by ``mpiexec -n`` so many; all run the same program. Each
            has some of the attention heads, MLP columns and tokens of the vocabulary, and pages for its heads; sizes of memory
            are those of each. The first (rank 0) has the engine. On the others ``LLM(...)`` does not return: they serve it, and
            exit when it is closed.
        seed: seeds the requests that have no seed of their own.

    Raises:
        InvalidArgumentError, ModelLoadError, OutOfMemoryError: all are ValueError, and say what is allowed.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_memory: int | str | None = None,
        gpu_memory_utilization: float | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = True,
        preemption_mode: str = "recompute",
        swap_space: int | str = 0,
        sliding_window: int | None = None,
        attention_sinks: int = 0,
        speculative: str | None = None,
        num_speculative_tokens: int = 8,
        num_threads: int | None = None,
        tensor_parallel_size: int = 1,
        seed: int = 0,
    ) -> None:
        config = EngineConfig(
            device=device,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_cache_memory=kv_cache_memory,
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            preemption_mode=preemption_mode,
            swap_space=swap_space,
            sliding_window=sliding_window,
            attention_sinks=attention_sinks,
            speculative=speculative,
            num_speculative_tokens=num_speculative_tokens,
            num_threads=num_threads,
            tensor_parallel_size=tensor_parallel_size,
            seed=seed,
        )
        self.engine, self.info = load_engine(model, config)  #: the engine, and what was loaded
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; results are in the order of the prompts.

        A prompt is text, a list of token ids, or ``{"prompt": text}`` / ``{"prompt_token_ids": ids}``. ``sampling_params`` is
        one for all, or one a prompt. One bad prompt is an error before any work starts. From several threads at once, all are
        served together. Only requests with the same ``cache_salt`` share cached prefixes: who has another cannot tell from
        how fast an answer comes what others have asked.
        """
        many = prompt_list(prompts)
        params = self.engine.check_params(params_list(sampling_params, len(many)))
        requests = [self._prepare(prompt, each, salt=cache_salt) for prompt, each in zip(many, params, strict=True)]
        return self._run(requests, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | None = None,
        use_tqdm: bool = True,
        *,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Search the most likely completions of one prompt or many; ``outputs`` of each are the best ``n``, the best first.

        ``outputs[j].score`` is the sum of logprobs over length ** length_penalty; an end-of-sequence token counts.
        """
        params = BeamSearchParams() if params is None else params
        if not isinstance(params, BeamSearchParams):
            raise InvalidArgumentError(f"beam_search takes BeamSearchParams, not {type(params).__name__}")
        many = prompt_list(prompts)
        checked = self.engine.check_params([params] * len(many))
        requests = [self._prepare(prompt, each, salt=cache_salt) for prompt, each in zip(many, checked, strict=True)]
        return self._run(requests, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, cache_salt: str | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding its output each time that something is new; ``outputs[j].delta_text`` is the new text.

        Leaving the iteration early aborts the request.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        return self._stream(self._prepare(prompt, params, salt=cache_salt))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        cache_salt: str | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many: messages are dicts with "role" and "content", put through the model's chat template.

        ``template_options`` are passed to the template (``tools``, ``add_generation_prompt``, ...).
        """
        many = conversations(messages)
        params = self.engine.check_params(params_list(sampling_params, len(many)))
        requests = [
            self._prepare_chat(each, options, template_options, cache_salt)
            for each, options in zip(many, params, strict=True)
        ]
        return self._run(requests, use_tqdm)

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        **template_options: Any,
    ) -> Iterator[RequestOutput]:
        """Answer one conversation as :meth:`stream` completes a prompt."""
        params = SamplingParams() if sampling_params is None else sampling_params
        return self._stream(self._prepare_chat(messages, params, template_options, cache_salt))

    def stats(self) -> Stats:
        """Blocks, requests and counters; see :class:`~minipage.engine.stats.Stats`."""
        return self.engine.stats()

    def save_prefix_cache(self, path: str | os.PathLike[str]) -> int:
        """Write the prefix cache to a safetensors file, and return how many blocks it has.

        A process that loads it answers prompts that begin alike without computing their beginnings. The file holds the tokens
        of those prompts, and their salts.
        """
        return self.engine.save_prefix_cache(path)

    def load_prefix_cache(self, path: str | os.PathLike[str]) -> int:
        """Add what :meth:`save_prefix_cache` wrote, on this device or another; returns how many blocks there was room for.

        Nothing cached is given up for it. Raises InvalidArgumentError, with nothing changed, for a file of another model,
        dtype, block size or window, or one that is damaged. K and V in it are believed: load what you trust.
        """
        return self.engine.load_prefix_cache(path)

    def check_integrity(self) -> None:
        """Raise AssertionError, naming the block, where reference counts, tables and free list disagree."""
        self.engine.check_integrity()

    def close(self) -> None:
        """Abort what is running and give the memory back."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ---- inside --------------------------------------------------------------------------------------------------------
    def _prepare(
        self, prompt: Prompt, params: Params | CheckedParams, text: str | None = None, salt: str | None = None
    ) -> Request:
        ids = (f"llm-{number}" for number in self._ids)
        request_id = next(each for each in ids if not self.engine.is_unfinished(each))  # a caller's own may look so
        return self.engine.prepare(request_id, prompt, params, prompt_text=text, cache_salt=salt)

    def _prepare_chat(
        self, messages: Messages, params: Params | CheckedParams, options: Mapping[str, Any], salt: str | None
    ) -> Request:
        from .text.chat import encode_chat, render_chat

        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise InvalidArgumentError(
                "this model has no tokenizer, so it has no chat template; use generate with token ids"
            )
        text = render_chat(tokenizer, messages, **options)
        return self._prepare(encode_chat(tokenizer, messages, **options), params, text, salt)

    def _run(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        """Step the engine until all requests are finished; they are aborted where anything raises."""
        done: dict[str, RequestOutput] = {}
        submitted: list[Request] = []
        with _progress(len(requests), use_tqdm) as progress:

            def take(output: RequestOutput) -> None:
                done[output.request_id] = output
                progress(output)

            try:
                for request in requests:
                    with DelayInterrupt():
                        self.engine.submit(request, on_output=take, final_only=True)
                        submitted.append(request)
                while len(done) < len(requests):
                    with DelayInterrupt():
                        self.engine.step()
            finally:
                with DelayInterrupt():
                    for request in submitted:
                        self.engine.abort(request.request_id)
        return [done[request.request_id] for request in requests]

    def _stream(self, request: Request) -> Iterator[RequestOutput]:
        outputs: list[RequestOutput] = []
        is_submitted = finished = False
        try:
            with DelayInterrupt():
                self.engine.submit(request, on_output=outputs.append)
                is_submitted = True
            while not finished:
                with DelayInterrupt():
                    self.engine.step()
                ready, outputs[:] = list(outputs), []
                for output in ready:
                    finished = output.finished
                    yield output
        finally:
            if is_submitted:
                with DelayInterrupt():
                    self.engine.abort(request.request_id)


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[RequestOutput], None]]:
    """A bar of finished prompts with generated tokens a second, on a terminal only; yields what to call with each output."""
    if not shown:
        yield lambda output: None
        return
    from tqdm import tqdm

    tokens = 0
    with tqdm(total=total, desc="Prompts", disable=None, dynamic_ncols=True) as bar:

        def advance(output: RequestOutput) -> None:
            nonlocal tokens
            tokens += sum(len(completion.token_ids) for completion in output.outputs)
            elapsed = bar.format_dict["elapsed"]
            bar.set_postfix_str(f"{tokens / elapsed if elapsed else 0:.1f} tok/s", refresh=False)
            bar.update()

        yield advance
