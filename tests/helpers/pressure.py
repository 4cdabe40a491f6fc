"""Requests in a crowd: everything that a caller sees of each, step by step, to be compared with what it gets alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from helpers import models, ref
from helpers.checks import Result, assert_idle_and_whole, result
from helpers.tokenizers import f3_backend, write_tokenizer

from minipage.engine.request import Status
from minipage.engine.step import Step
from minipage.kernels import philox, reference

if TYPE_CHECKING:
    from minipage import LLM, BeamSearchParams, SamplingParams
    from minipage.cache import Tables
    from minipage.outputs import RequestOutput


class Ask(NamedTuple):
    """A request."""

    prompt: Sequence[int]
    params: SamplingParams | BeamSearchParams
    salt: str | None = None


class Seen(NamedTuple):
    """What a caller has seen of a request: nothing of it may depend on company."""

    results: tuple[Result, ...]
    stop_reasons: tuple[Any, ...]
    scores: tuple[float | None, ...]  #: of beams
    streams: tuple[str, ...]  #: the joined deltas of each completion
    prompt_logprobs: Any


class Watch:
    """Follows requests from step to step, and checks that what was shown stays as it was shown."""

    def __init__(self) -> None:
        self.last: dict[str, RequestOutput] = {}
        self._streams: dict[str, list[str]] = {}

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """The outputs of a step, or of an abort."""
        for out in outputs:
            before = self.last.get(out.request_id)
            streams = self._streams.setdefault(out.request_id, [""] * len(out.outputs))
            assert before is None or not before.finished, f"{out.request_id} goes on after its end"
            for index, output in enumerate(out.outputs):
                assert output.index == index
                streams[index] += output.delta_text
                assert streams[index] == output.text
                if before is not None:
                    shown = before.outputs[index]
                    assert output.token_ids[: len(shown.token_ids)] == shown.token_ids
                    if shown.finish_reason is not None:
                        assert (output.token_ids, output.finish_reason) == (shown.token_ids, shown.finish_reason)
                assert output.finish_reason is not None or not out.finished
            self.last[out.request_id] = out

    def seen(self, request_id: str) -> Seen:
        """All of a request up to now."""
        out = self.last[request_id]
        return Seen(
            tuple(map(result, out.outputs)),
            tuple(output.stop_reason for output in out.outputs),
            tuple(output.score for output in out.outputs),
            tuple(self._streams[request_id]),
            out.prompt_logprobs,
        )


def draw(
    model: ref.Reference,
    prompt: Sequence[int],
    num_tokens: int,
    temperature: float,
    seed: int,
    child: int = 0,
    window: ref.Window = None,
) -> list[int]:
    """What REF's distributions give for the random numbers of a child; fails where rounding could decide."""
    token_ids = list(prompt)
    for position in range(num_tokens):
        logits = model.logits(token_ids, window)[-1] / temperature
        edges = np.exp(logits - logits.max()).cumsum()
        mark = philox.uniform(seed, child, position) * edges[-1]
        assert np.abs(edges - mark).min() > 1e-6, "a close call: take another seed"
        token_ids.append(int(np.searchsorted(edges, mark, side="right")))
    return token_ids[len(prompt) :]


def byte_model(folder: Path, seed: int, **overrides: Any) -> Path:
    """Write a model in which every past token matters and whose tokens are bytes: its text is full of broken characters."""
    backend = f3_backend()
    tokenizer = write_tokenizer(folder / "tokenizer", backend)
    return models.history_model(
        folder / "model", seed, vocab_size=backend.get_vocab_size(), tokenizer=tokenizer, **overrides
    )


def serve(llm: LLM, asks: Sequence[Ask], max_steps: int = 5000) -> list[Seen]:
    """All requests at once, through ``engine.step``; the books are checked after every step."""
    watch = Watch()
    for name, ask in enumerate(asks):
        llm.engine.add_request(str(name), list(ask.prompt), ask.params, cache_salt=ask.salt)
    finish(llm, watch, max_steps)
    return [watch.seen(str(name)) for name in range(len(asks))]


def finish(llm: LLM, watch: Watch, max_steps: int = 5000) -> None:
    """Step until nothing is left."""
    for _ in range(max_steps):
        if not llm.engine.has_unfinished_requests():
            assert_idle_and_whole(llm)
            host = llm.engine._scheduler.blocks.host
            assert host is None or host.num_free_blocks == host.num_blocks
            return
        watch.take(llm.engine.step())
        llm.check_integrity()
        assert_limits(llm)
    raise AssertionError(f"requests are unfinished after {max_steps} steps: {llm.stats()}")


def all_tables(llm: LLM) -> list[Tables]:
    """The tables of every sequence that is not finished."""
    requests = [tracked.request for tracked in llm.engine._tracked.values()]
    return [sequence.tables for request in requests for sequence in request.sequences]


def assert_limits(llm: LLM) -> None:
    """Between steps a table with a window W holds at most ceil(W / block_size) + 1 blocks and the sinks', seats suffice, and
    who came first is served first: the sequences of a request are on the device together, or in the host pool together.
    """
    scheduler = llm.engine._scheduler
    blocks = scheduler.blocks
    for tables in all_tables(llm):
        for group, table in zip(blocks.groups, tables.tables, strict=True):
            if group.window:
                held = sum(block >= 0 for block in table.blocks)
                sinks = -(-group.sinks // blocks.block_size)
                assert held <= -(-group.window // blocks.block_size) + 1 + sinks
    assert sum(len(request.unfinished) for request in scheduler.running) <= scheduler._max_num_seqs
    arrivals = {id(tracked.request): order for order, tracked in enumerate(llm.engine._tracked.values())}
    queue = [arrivals[id(request)] for request in [*scheduler.running, *scheduler.waiting]]
    assert queue == sorted(queue)
    for request in scheduler.waiting:
        is_swapped = request.status is Status.SWAPPED
        for sequence in request.unfinished:
            assert not sequence.tables.blocks
            assert is_swapped == bool(sequence.tables.swapped)


def poison(llm: LLM) -> None:
    """Fill all pages, on the device and in the host pool, with NaN: what was not written is not to be read."""
    kv = llm.engine.runner.kv
    for pages in (kv.key, kv.value, kv.host_key, kv.host_value):
        pages[...] = np.nan


def draw_ahead(llm: LLM) -> list[int]:
    """Let an engine on the CPU work as on a GPU: ops draw tokens, and steps are computed before those of the last are known.

    Returns a list that gets the number of sequences of each such step.
    """
    device, scheduler, sizes = llm.engine.runner._device, llm.engine._scheduler, []
    device.ops = SimpleNamespace(**{**vars(device.ops), "SAMPLES": True, "sample": reference.sample})
    device.record = lambda function: function  # what is recorded has native ops only
    device.runs_ahead = True
    schedule_ahead = scheduler.schedule_ahead

    def noted(step: Step) -> Step | None:
        ahead = schedule_ahead(step)
        if ahead is not None:
            sizes.append(len(ahead.scheduled))
        return ahead

    scheduler.schedule_ahead = noted
    return sizes
