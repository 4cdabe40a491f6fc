"""The same work by torch and transformers, for gpu_check.py: what is there is measured beside minipage, else left out."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

NEW_TOKENS = 64


def sdpa(batch: int, context: int, heads: int, kv_heads: int, dim: int) -> Callable[[], Any]:
    """torch's scaled_dot_product_attention, one query a sequence over contiguous float16 K and V: CUDA arrays of its own."""
    import torch

    def tensor(*shape: int) -> Any:
        return torch.randn(shape, dtype=torch.float16, device="cuda")

    q, k, v = tensor(batch, heads, 1, dim), tensor(batch, kv_heads, context, dim), tensor(batch, kv_heads, context, dim)
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, enable_gqa=True)


def time_of_torch(call: Callable[[], Any], repeats: int = 20) -> float:
    """Microseconds of a call: the median of a few rounds of CUDA graph replays that hold it ``repeats`` times."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            call()
    times = []
    for _ in range(7):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(1e3 * start.elapsed_time(stop) / repeats)
    return float(np.median(times[1:]))


def prompts(batch: int, vocab_size: int, length: int = 128) -> list[list[int]]:
    """Random prompts."""
    return np.random.default_rng(1).integers(0, vocab_size, (batch, length)).tolist()  # type: ignore[no-any-return]


def minipage_rate(folder: Path, batch: int, vocab_size: int) -> float:
    """Tokens a second that LLM generates for ``batch`` prompts at once, the second time."""
    from minipage import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(str(folder), device="cuda", max_model_len=512, max_num_seqs=batch, enable_prefix_caching=False) as llm:
        return _rate(lambda: llm.generate(prompts(batch, vocab_size), params, use_tqdm=False), batch)


def transformers_rate(folder: Path, batch: int, vocab_size: int) -> float:
    """The same by transformers' continuous batching."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").to("cuda")
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    inputs = prompts(batch, vocab_size)
    return _rate(lambda: model.eval().generate_batch(inputs=inputs, generation_config=config), batch)


def _rate(generate: Callable[[], Any], batch: int) -> float:
    generate()  # compiles, captures, warms up
    start = time.perf_counter()
    generate()
    return batch * NEW_TOKENS / (time.perf_counter() - start)
