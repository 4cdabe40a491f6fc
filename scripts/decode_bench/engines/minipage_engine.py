"""minipage through ``LLM``: what a user of ``LLM.generate`` waits for, sampling and text included."""

from __future__ import annotations

import itertools
import time

import minipage
from minipage import LLM, SamplingParams

from ..tasks import Settings, Task, Timed, token_ids

BLOCK_SIZE = 16


class MinipageEngine:
    """An ``LLM`` with default settings, but for the number of threads and the size of the pool."""

    def __init__(self, settings: Settings) -> None:
        # All tasks have room at once, so that a long prompt stays in the prefix cache while others run; and twice, since
        # prefills are always of something new, and a pool just large enough would not admit a batch in one step.
        blocks = [2 * task.batch * -(-task.longest // BLOCK_SIZE) for task in settings.tasks]
        self.llm = LLM(
            settings.model,
            device=settings.device,
            num_threads=settings.threads,
            block_size=BLOCK_SIZE,
            num_blocks=sum(blocks),
            max_model_len=max(task.longest for task in settings.tasks),
        )
        info = self.llm.info
        self.about = (
            f"minipage {minipage.__version__}: {info.weight_bytes / 2**20:.1f} MiB of weights, "
            f"KV {info.kv_shape.dtype}, {settings.threads} threads"
        )
        self._vocab_size = info.config.vocab_size
        self._numbers = itertools.count()

    def run(self, task: Task) -> Timed:
        start = time.perf_counter()
        if task.steps == 0:  # a prompt that nothing is known of, up to its first token
            self._add(task, seed=next(self._numbers))
            self._step_until_all_began(1)
            return Timed(task.context, time.perf_counter() - start)
        for number in range(task.batch):
            self._add(task, seed=number)
        tokens = -self._step_until_all_began(task.batch)
        start = time.perf_counter()
        while self.llm.engine.has_unfinished_requests():
            finished = [out for out in self.llm.engine.step() if out.finished]
            tokens += sum(len(out.outputs[0].token_ids) for out in finished)
        return Timed(tokens, time.perf_counter() - start)

    def first_token(self, prompt: str) -> str:
        [out] = self.llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        return out.outputs[0].text

    def _add(self, task: Task, seed: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=task.steps + 1, ignore_eos=True)
        kind = "decode" if task.steps else "prefill"
        prompt = token_ids(self._vocab_size, task.context, (kind, seed))
        self.llm.engine.add_request(f"{next(self._numbers)}", prompt, params)

    def _step_until_all_began(self, count: int) -> int:
        """Step until ``count`` requests have a token; returns how many tokens those have then that go on."""
        lengths: dict[str, int] = {}
        while len(lengths) < count:
            for out in self.llm.engine.step():
                lengths[out.request_id] = 0 if out.finished else len(out.outputs[0].token_ids)
        return sum(lengths.values())
