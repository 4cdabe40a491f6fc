"""A tiny model that talks: a script model with the byte-level tokenizer, for tests of what people see.

It looks at the last character only. After ``>`` it says ``Paris.`` and ends, after ``*`` it says ``né`` (the last character is
two tokens) and ends, after ``~`` it says ``xyxyxy`` for ever.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.models import script_model, script_table
from helpers.tokenizers import F3_SPECIALS, f3_backend, write_tokenizer

#: A chat is its messages with | between them, so the answer depends on the last character of the last message.
CHAT_TEMPLATE = "{{ messages | map(attribute='content') | join('|') }}"


def talker(folder: Path, chat_template: str | None = CHAT_TEMPLATE, **config: Any) -> Path:
    """Write the model into ``folder`` and return its path; ``config`` changes its config.json."""
    backend = f3_backend()
    end = backend.token_to_id(F3_SPECIALS[1])
    chains = [[*b">Paris.", end], [*"*né".encode(), end], [*b"~xy"], [*b"yx"]]
    table = script_table(backend.get_vocab_size(), *chains)
    settings = {} if chat_template is None else {"chat_template": chat_template}
    tokenizer = write_tokenizer(folder / "tokenizer", backend, **settings)
    return script_model(folder / "model", table, tokenizer=tokenizer, **config)
