"""What an engine can say of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """Where an engine is, and its counters since it was made. Blocks are those that requests can use."""

    num_blocks: int
    num_free_blocks: int  #: cached blocks that could be evicted included
    num_cached_blocks: int  #: blocks that hold published contents, in use or evictable
    num_running: int  #: requests
    num_waiting: int
    num_swapped: int
    preemptions: int
    swapped_in_blocks: int
    swapped_out_blocks: int
    cow_copies: int  #: blocks copied on write
    shared_block_savings: int  #: blocks that tables share now: entries of all tables less distinct blocks
    prefix_cache_hit_tokens: int
    prompt_tokens: int
    generation_tokens: int
    draft_tokens: int  #: computed on a guess (speculation)
    accepted_tokens: int  #: those of them that were right, so that a step more was saved
