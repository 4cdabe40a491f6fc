"""The accounting of KV blocks: who holds which, what may be written, what can be shared. Pure Python, no arrays."""

from .block_allocator import BlockAllocator, OutOfBlocks
from .block_table import BlockCopy, BlockTable, copy_launches
from .prefix import Prefix
from .prefix_cache import PrefixCache

__all__ = ["BlockAllocator", "BlockCopy", "BlockTable", "OutOfBlocks", "Prefix", "PrefixCache", "copy_launches"]
