"""Published prefixes as plain data, to be written down in one process and found again in another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .prefix import Prefix


class Chains(NamedTuple):
    """A forest: each node is a block's worth of tokens behind its parent's, each root a salt.

        salts    [""]                     root 0
        parents  [-1, 0, 0]               node 0 follows root 0; nodes 1 and 2 both follow node 0
        contents [a b c d, e f g h, x y z w]

    There are no keys: who reads it makes its own from the tokens.
    """

    salts: list[str]  #: of the roots
    parents: list[int]  #: of each node: an earlier node, or -1 - r for root r
    contents: list[bytes]  #: token ids of each node as int32
    holders: list[int]  #: the nodes whose blocks are stored, the heads of chains before what follows them


def collect(prefixes: Iterable[Prefix]) -> Chains:
    """Chains whose holders are these prefixes; what leads to them is among the nodes, with a block or without."""
    salts: dict[str, int] = {}
    nodes: dict[tuple[int, bytes], int] = {}
    seen: dict[int, int] = {}  # by id(), all chains being alive: where each prefix object is, as parents say it

    def place(prefix: Prefix) -> int:
        chain: list[Prefix] = []
        ancestor: Prefix | None = prefix
        while ancestor is not None and id(ancestor) not in seen:
            chain.append(ancestor)
            ancestor = ancestor.parent
        index = 0 if ancestor is None else seen[id(ancestor)]
        for each in reversed(chain):
            if each.parent is None:
                salt = each.content.decode("utf-8", "surrogatepass")
                index = -1 - salts.setdefault(salt, len(salts))
            else:
                index = nodes.setdefault((index, each.content), len(nodes))
            seen[id(each)] = index
        return index

    holders = [place(prefix) for prefix in prefixes]
    return Chains(list(salts), [parent for parent, _ in nodes], [content for _, content in nodes], holders)


def rebuild(
    chains: Chains, root: Callable[[str], Prefix], extend: Callable[[Prefix, bytes], Prefix]
) -> Sequence[Prefix]:
    """The prefixes of all nodes, made by ``root`` from a salt and by ``extend`` from a parent and a content."""
    roots = [root(salt) for salt in chains.salts]
    prefixes: list[Prefix] = []
    for parent, content in zip(chains.parents, chains.contents, strict=True):
        prefixes.append(extend(roots[-1 - parent] if parent < 0 else prefixes[parent], content))
    return prefixes
