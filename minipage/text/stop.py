"""Finds stop strings in a stream of text, and holds back no more than what could still become one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import copy

from ..errors import InvalidArgumentError


class StopFilter:
    """Passes text through up to the first stop string.

    The rule, which does not depend on how the text is cut into pieces: the stop whose last character comes first wins,
    whatever the order of the list; of several that end there, the longest. The text ends before it, or after it with
    ``include_stop``.

    It is the automaton of Aho and Corasick (1975), section 2: a node is a prefix of some stop, and the current node is the
    longest such prefix that the text ends with. So each character costs O(1) amortised whatever the number of stops, and
    the depth of the node is exactly what must be held back.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise InvalidArgumentError(
                    f"stop={stop!r} is not allowed; a stop is a string of at least one character"
                )
        #: The stop that was found, None as long as there is none.
        self.stopped: str | None = None
        self._include_stop = include_stop
        self._children: list[dict[str, int]] = [{}]
        self._fallback = [0]  # node -> the longest shorter prefix that the node's text ends with
        self._stop_length = [0]  # node -> length of the longest stop that it ends with; 0: none
        self._held_length = [0]  # node -> length of the longest suffix that is the beginning of a stop, not all of it
        for stop in stops:
            self._add(stop)
        self._link()
        self._beginnings = frozenset(self._children[0])  # what a stop can begin with
        self._node = 0
        self._held = ""

    def fresh(self) -> StopFilter:
        """A filter of the same stops for another text. It shares their tables, which may take megabytes."""
        other = copy(self)
        other.stopped, other._node, other._held = None, 0, ""
        return other

    def push(self, text: str, may_stop: bool = True) -> str:
        """Take the next piece of text; returns what is safe to show, ``""`` once stopped.

        A stop that is completed by a piece with ``may_stop=False`` is ignored for good.
        """
        if self.stopped is not None:
            return ""
        if not self._node and self._beginnings.isdisjoint(text):
            return text
        seen = len(self._held)
        text = self._held + text
        for end in range(seen + 1, len(text) + 1):
            self._node = self._step(self._node, text[end - 1])
            length = self._stop_length[self._node]
            if length and may_stop:
                self.stopped = text[end - length : end]
                self._held = ""
                return text[: end if self._include_stop else end - length]
        shown = len(text) - self._held_length[self._node]
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """What is still held back, for a generation that ended for another reason than a stop string."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _step(self, node: int, char: str) -> int:
        while node and char not in self._children[node]:
            node = self._fallback[node]
        return self._children[node].get(char, 0)

    def _add(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self._children[node]:
                self._children[node][char] = len(self._children)
                self._children.append({})
                self._fallback.append(0)
                self._stop_length.append(0)
                self._held_length.append(0)
            node = self._children[node][char]
        self._stop_length[node] = len(stop)

    def _link(self) -> None:
        """Fill in the tables breadth first: a node's fallback is shorter, so it is ready before the node is."""
        queue = deque((child, 0, char, 1) for char, child in self._children[0].items())
        while queue:
            node, parent, char, depth = queue.popleft()
            fallback = self._step(self._fallback[parent], char) if parent else 0
            self._fallback[node] = fallback
            self._stop_length[node] = self._stop_length[node] or self._stop_length[fallback]
            self._held_length[node] = depth if self._children[node] else self._held_length[fallback]
            queue.extend((child, node, next_char, depth + 1) for next_char, child in self._children[node].items())
