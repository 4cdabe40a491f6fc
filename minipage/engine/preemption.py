"""Swap or recompute: which is cheaper for a request that has to give way (PagedAttention, section 7.3)."""

from __future__ import annotations

from .request import Request

_SMOOTHING = 0.2  #: weight of the newest measurement


class PreemptionCost:
    """Compares what moving a request's blocks out and in takes with what computing its tokens again takes.

    Both speeds are measured while the engine runs, so that they are those of this model on this machine.
    """

    def __init__(self, mode: str, bytes_per_block: int) -> None:
        """``mode`` is "recompute", "swap" or "auto": the cheaper."""
        self._mode = mode
        self._bytes_per_block = bytes_per_block
        self.bytes_per_second = 4e9  #: of block copies; a cautious guess until the first is measured
        self.tokens_per_second: float | None = None  #: of steps with several tokens a sequence

    def swapped(self, num_blocks: int, seconds: float) -> None:
        """Note how long it took to move blocks."""
        measured = num_blocks * self._bytes_per_block / max(seconds, 1e-9)
        self.bytes_per_second += _SMOOTHING * (measured - self.bytes_per_second)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Note how long it took to compute a step; a recompute runs as fast as the fastest steps, those of prompts."""
        measured = num_tokens / max(seconds, 1e-9)
        known = self.tokens_per_second
        self.tokens_per_second = measured if known is None else max(measured, known - _SMOOTHING * (known - measured))

    def prefers_swap(self, request: Request) -> bool:
        """Whether a running request should rather be swapped than recomputed; in mode "auto", until a step is measured, yes."""
        if self._mode != "auto" or self.tokens_per_second is None:
            return self._mode != "recompute"
        sequences = request.unfinished
        blocks = {block for sequence in sequences for block in sequence.tables.blocks if block >= 0}
        shared = request.num_prompt_tokens * (len(sequences) - 1)
        tokens = max(sum(sequence.num_computed for sequence in sequences) - shared, 0)
        return 2 * len(blocks) * self._bytes_per_block / self.bytes_per_second < tokens / self.tokens_per_second
