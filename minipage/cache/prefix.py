"""The name of what a block holds: its tokens, and all tokens before them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The first ``num_blocks`` whole blocks of a token sequence, as a chain from the last block back to the root.

    K and V of a block depend on every token up to its end, so the chain is what tells whether two blocks hold the same.
    Chains are immutable and share their beginnings.
    """

    parent: Prefix | None = field(repr=False)  #: None for the root, which stands for no tokens
    content: bytes  #: the last block's token ids as int32; of the root: the salt
    key: bytes  #: a hash over the parent's key and the content
    num_blocks: int

    def equals(self, other: Prefix) -> bool:
        """Whether both are the same tokens under the same salt, whatever their keys.

        O(1) where they share the chain of their parents, as published prefixes do as a rule; O(num_blocks) at most.
        """
        a: Prefix | None = self
        b: Prefix | None = other
        while a is not b:
            if a is None or b is None or a.content != b.content:
                return False
            a, b = a.parent, b.parent
        return True
