"""How much of the KV memory holds tokens: the paged cache beside the static one, on the same requests (paper, figure 2)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.models import history_model

from minipage import LLM
from minipage.cache import BlockManager
from minipage.device import host_memory, open_device
from minipage.device.contiguous import ContiguousKVCache
from minipage.device.kv_cache import KVCache, KVShape
from minipage.engine.request import Request
from minipage.engine.scheduler import Scheduler
from minipage.errors import OutOfMemoryError
from minipage.sampling_params import SamplingParams

BLOCK, MAX_LENGTH, BATCH = 16, 2048, 32


def sharegpt_like(count: int, mean: float, rng: np.random.Generator) -> np.ndarray:
    """Lognormal lengths of a mean, cut to what fits the model beside its counterpart."""
    sigma = 1.0
    return np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count).astype(int), 1, MAX_LENGTH // 2 - 1)


def make_requests(count: int) -> list[tuple[int, int]]:
    rng = np.random.default_rng(0)
    return list(zip(sharegpt_like(count, 161.3, rng).tolist(), sharegpt_like(count, 338.0, rng).tolist(), strict=True))


def test_blocks_waste_little_where_a_static_cache_wastes_most() -> None:
    """With ShareGPT-like lengths and blocks of 16, under 4% of the held slots are empty; a static cache leaves over half so."""
    blocks = BlockManager(4096, BLOCK, caching=False)
    allocator = blocks.allocator
    scheduler = Scheduler(blocks, max_num_seqs=BATCH, max_num_batched_tokens=MAX_LENGTH)
    lengths = make_requests(200)
    for index, (prompt, output) in enumerate(lengths):
        params = SamplingParams(max_tokens=output)
        scheduler.add(Request(str(index), None, [0] * prompt, params, 0, prompt + output))
    shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=1, block_size=MAX_LENGTH, dtype="float32")
    static = ContiguousKVCache(open_device("reference"), shape, BATCH)
    rows: dict[str, int] = {}
    paged_fractions, static_fractions = [], []
    while scheduler.running or scheduler.waiting:
        step = scheduler.schedule()
        scheduler.advance(step)
        for item in step.scheduled:
            request, sequence = item.request, item.sequence
            if request.request_id not in rows:
                row = static.reserve()
                assert row is not None
                rows[request.request_id] = row
            static.append(rows[request.request_id], item.num_tokens)
            if sequence.num_computed == len(sequence.token_ids):
                sequence.token_ids.append(0)
        held = allocator.num_blocks - allocator.num_free_blocks
        computed = sum(sequence.num_computed for request in scheduler.running for sequence in request.sequences)
        paged_fractions.append(computed / (held * BLOCK))
        static_fractions.append(static.useful_fraction())
        for request in list(scheduler.running):
            for sequence in request.unfinished:
                if len(sequence.token_ids) == request.max_total_tokens:
                    scheduler.finish(sequence, "length")
            if scheduler.remove_finished(request):
                static.release(rows[request.request_id])
    assert len(rows) == 200 and static.num_free_rows == BATCH
    assert np.mean(paged_fractions) > 0.96
    assert 0.1 < np.mean(static_fractions) < 0.45


def test_pages_take_what_their_shape_says() -> None:
    """The bytes that sizes are planned with are the bytes of the arrays."""
    device = open_device("reference")
    for dtype, size in (("float32", 4 * 8), ("bfloat16", 2 * 8), ("float16", 2 * 8), ("int8", 8 + 4)):
        shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=dtype)
        assert KVCache(device, shape, 7).nbytes == 7 * shape.bytes_per_block == 28 * shape.bytes_per_token
        assert shape.bytes_per_token == 2 * 3 * 2 * size


@pytest.mark.parametrize("swap_space", ["3MiB", 10**30, "9" * 30 + "GB"])
def test_swap_space_must_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swap_space: int | str) -> None:
    """More space to swap to than the host has free besides the pages is refused before any of it is taken."""
    monkeypatch.setattr(host_memory, "free", lambda: 4 << 20)
    folder, pages = str(history_model(tmp_path, 3)), {"num_blocks": 128, "block_size": 64}  # of 16 KiB
    with pytest.raises(OutOfMemoryError, match=r"swap_space=.* does not fit; 2\.0 MiB of host memory are free"):
        LLM(folder, device="reference", swap_space=swap_space, **pages)
    with LLM(folder, device="reference", swap_space="2MiB", **pages) as llm:
        assert llm.engine._scheduler.blocks.host.num_blocks == 128  # type: ignore[union-attr]
