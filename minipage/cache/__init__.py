"""The accounting of KV blocks: who holds which, what may be written, what can be shared. Pure Python, no arrays."""

from .block_allocator import BlockAllocator, OutOfBlocks
from .block_manager import BlockManager, Group, Swap, Tables
from .block_table import RELEASED, BlockCopy, BlockTable, copy_launches
from .chains import Chains
from .prefix import Prefix
from .prefix_cache import PrefixCache

__all__ = [
    "RELEASED",
    "BlockAllocator",
    "BlockCopy",
    "BlockManager",
    "BlockTable",
    "Chains",
    "Group",
    "OutOfBlocks",
    "Prefix",
    "PrefixCache",
    "Swap",
    "Tables",
    "copy_launches",
]
