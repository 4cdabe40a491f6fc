"""Prompt lookup: what a sequence says next is guessed from what followed the same tokens before.

Text that quotes, edits or sums up its prompt, code, tables and lists repeat themselves, and so do small models. A guess costs
a look into a dict, and is verified in one step together with the last known token (speculative decoding, Leviathan et al.
2023, section 2, with the text itself in the place of their smaller model; prompt lookup decoding, Saxena 2023). Tokens are
drawn as ever, by a number that depends on their place alone, and a guess is right where it is the token that is drawn. So what
comes out is what would come out without guesses, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 3  #: n-grams that are looked up; longer matches are found from these


class NgramIndex:
    """Where each n-gram of one sequence was last followed by something; it grows with the sequence, at O(1) a token.

    Sequences that begin alike can have one index of their beginning, which grows when one of them needs it.
    """

    def __init__(self, beginning: NgramIndex | None = None, num_tokens: int = 0) -> None:
        """``beginning`` is that of the first ``num_tokens`` tokens."""
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> the position behind it
        self._beginning = beginning
        self._num_shared = self._num_indexed = num_tokens  # positions that are behind n-grams in the dicts

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Guess what follows ``token_ids``, which begin with those of the call before.

            a b c d e . . . x b c d       the last three tokens were followed by e: three tokens from there on are guessed
              ^^^^^ |         ^^^^^
                    start

        A guess is as long as the match that it is made from, ``most`` tokens at most: what agrees for longer is more often
        right, and wrong guesses cost time. A guess that reaches the end of ``token_ids`` goes on with itself, so that
        patterns of any period are continued. Empty where the last token is new.
        """
        self._extend(token_ids, len(token_ids) - 1)
        for n in range(LONGEST, 0, -1):
            start = self._find(tuple(token_ids[-n:]))
            if start is not None:
                return _continue(token_ids, start, min(_match(token_ids, start, n, most), most))
        return ()

    def _find(self, ngram: tuple[int, ...]) -> int | None:
        start = self._after.get(ngram)
        return self._beginning._find(ngram) if start is None and self._beginning is not None else start

    def _extend(self, token_ids: Sequence[int], last: int) -> None:
        """Take in the n-grams that end before position ``last`` or earlier. Behind the last token is nothing yet."""
        if self._beginning is not None:
            self._beginning._extend(token_ids, self._num_shared)
        for position in range(self._num_indexed + 1, last + 1):
            for n in range(1, min(LONGEST, position) + 1):
                self._after[tuple(token_ids[position - n : position])] = position
            self._num_indexed = position


def _match(token_ids: Sequence[int], start: int, known: int, most: int) -> int:
    """How many tokens before ``start`` are those at the end; ``known`` of them are, and it looks no further than ``most``."""
    length = known
    while length < min(most, start) and token_ids[start - length - 1] == token_ids[-length - 1]:
        length += 1
    return length


def _continue(token_ids: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """``count`` tokens from ``start`` on, as if ``token_ids`` went on with them."""
    copied = list(token_ids[start : start + count])
    while len(copied) < count:
        copied.append(copied[start - len(token_ids) + len(copied)])
    return tuple(copied)
