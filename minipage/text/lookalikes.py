"""Keeps text that only looks like a control token from becoming one, without changing the text."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import tokenizers

from ..errors import InvalidArgumentError
from .tokenizer_files import backend_errors

#: Symbols that hardly any text has, and that stay as they are where a template prints a list or a dict as Python does.
MARK = "\u2425"
ESCAPE = "\u244a"
ESCAPED_MARK, ESCAPED_ESCAPE = ESCAPE + "\u2440", ESCAPE + "\u2441"
_TURN_TOKEN = re.compile(r"<(\||｜).+\1>", re.DOTALL)
_IN_JSON = re.compile(
    r"\\(?:u(?:2425|244a|2440|2441)|.)"
)  #: these and all other escapes, so that none is read from its middle


def is_turn_token(text: str) -> bool:
    """Whether an added token is written as those that begin and end turns: <|im_end|>, or DeepSeek's <｜User｜>.

    Not all checkpoints call them special: DeepSeek's do not, nor GGUF files made from a list of added tokens.
    """
    return _TURN_TOKEN.fullmatch(text) is not None


class LookalikeGuard:
    """Marks look-alikes in the parts of a chat before its template is rendered, and encodes what the template made of them.

    :meth:`mark` puts a MARK after the first character of every spelled-out control token, so that the tokenizer's search
    for control tokens, which comes first, misses it. A second tokenizer, made when it is first needed, takes the marks out
    in its normalizer, which runs after that search: what is left is the original text, tokenised as plain text where it
    stands. A text may also end with the beginning of a control token and meet its rest in the next message: such ends are
    marked too. (A control token of a single character has no inside to mark, and is left alone.)

    Where a text has these symbols itself, they are escaped, and come back.
    """

    def __init__(self, backend: Any, control_tokens: Iterable[str]) -> None:
        self._backend = backend
        self._control_tokens = tuple(token for token in control_tokens if len(token) > 1)
        self._longest = max(map(len, self._control_tokens), default=0)
        self._sorted = sorted(self._control_tokens)
        self._sorted_reversed = sorted(token[::-1] for token in self._control_tokens)

    def mark(self, text: str) -> str:
        """``text`` with marks where it spells out a control token, whole or at its ends."""
        text = text.replace(ESCAPE, ESCAPED_ESCAPE).replace(MARK, ESCAPED_MARK)
        lengths = range(1, min(self._longest, len(text) + 1))
        starts_inside = any(_begins_any(text[n - 1 :: -1], self._sorted_reversed) for n in lengths)
        ends_inside = any(_begins_any(text[-n:], self._sorted) for n in lengths)
        present = [re.escape(token) for token in self._control_tokens if token in text]
        if present:
            # A lookahead, since look-alikes may overlap: after marking "<|<|x|>|>" no control token must be left.
            text = re.sub(rf"(?=(?:{'|'.join(present)})).", rf"\g<0>{MARK}", text, flags=re.DOTALL)
        return (MARK if starts_inside else "") + text + (MARK if ends_inside else "")

    def encode(self, text: str) -> list[int]:
        """The ids of a text with marks in it, without special tokens added."""
        with backend_errors(InvalidArgumentError, "the chat cannot be tokenised"):
            backend = self._unmarking_backend if MARK in text or ESCAPE in text else self._backend
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    @staticmethod
    def in_json(text: str) -> str:
        """JSON in ASCII with the marks as they were, so that they are found again."""
        return _IN_JSON.sub(lambda escape: chr(int(escape[0][2:], 16)) if len(escape[0]) > 2 else escape[0], text)

    @cached_property
    def _unmarking_backend(self) -> Any:
        state = json.loads(self._backend.to_str())
        for token in state["added_tokens"]:
            if token["special"] or token["content"] in self._control_tokens:
                token["normalized"] = False  # or it would be searched for after the marks are gone
        unmark = [
            {"type": "Replace", "pattern": {"String": spelling}, "content": content}
            for spelling, content in ((MARK, ""), (ESCAPED_MARK, MARK), (ESCAPED_ESCAPE, ESCAPE))
        ]
        normalizer = state["normalizer"]
        state["normalizer"] = {"type": "Sequence", "normalizers": unmark + ([normalizer] if normalizer else [])}
        return tokenizers.Tokenizer.from_str(json.dumps(state))


def _begins_any(text: str, tokens: list[str]) -> bool:
    """Whether ``text`` is the beginning of one of ``tokens``, which are sorted, and not all of it."""
    after = bisect_right(tokens, text)  # what begins with a text comes next after it
    return after < len(tokens) and tokens[after].startswith(text)
