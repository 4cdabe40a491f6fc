"""Prompt lookup: what a sequence says next is guessed from what followed the same tokens before.

Text that quotes, edits or sums up its prompt, code, tables and lists repeat themselves, and so do small models. A guess costs
a look into a dict, and is verified in one step together with the last known token (speculative decoding, Leviathan et al.
2023, section 2, with the text itself in the place of their smaller model; prompt lookup decoding, Saxena 2023). Tokens are
drawn as ever, by a number that depends on their place alone: a guess is right where it is the token that is drawn. So what
comes out is what would come out without guesses, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST, SHORTEST = 4, 1  #: n-grams that are looked up, the longest first


class NgramIndex:
    """Where each n-gram of one sequence was last followed by something; it grows with the sequence, at O(1) a token."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> the position behind it
        self._num_indexed = 0  # positions that are behind n-grams in the dict

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """``most`` tokens guessed to follow ``token_ids``, or none where the last token is new.

        ``token_ids`` begin with those of the call before. A guess that reaches their end goes on with itself, so that a
        pattern of any period is continued.
        """
        self._extend(token_ids)
        for n in range(LONGEST, SHORTEST - 1, -1):
            start = self._after.get(tuple(token_ids[-n:]))
            if start is not None:
                draft = list(token_ids[start : start + most])
                while len(draft) < most:
                    draft.append(draft[len(draft) + start - len(token_ids)])
                return tuple(draft)
        return ()

    def _extend(self, token_ids: Sequence[int]) -> None:
        """Take in the n-grams that have something behind them: all but those that end with the last token."""
        for position in range(self._num_indexed + 1, len(token_ids)):
            for n in range(SHORTEST, min(LONGEST, position) + 1):
                self._after[tuple(token_ids[position - n : position])] = position
            self._num_indexed = position
