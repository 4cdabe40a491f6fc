"""Turns the messages of a chat into the prompt that its model was trained on, by the checkpoint's Jinja template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import InvalidArgumentError
from .lookalikes import LookalikeGuard
from .tokenizer import Tokenizer, check_text

Messages = Sequence[Mapping[str, Any]]


def render_chat(
    tokenizer: Tokenizer,
    messages: Messages,
    *,
    add_generation_prompt: bool = True,
    chat_template: str | None = None,
    **template_arguments: Any,
) -> str:
    """The chat as one text, as the template writes it.

    ``messages`` are mappings with a string "role" and a "content": a string, a list of text parts (which are joined), or None
    beside "tool_calls"; what else they hold is for the template. ``chat_template`` replaces the checkpoint's own;
    ``template_arguments`` (such as ``tools``) are what the template sees besides. Raises InvalidArgumentError.
    """
    return _render(tokenizer, messages, add_generation_prompt, chat_template, template_arguments, mark=str)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Messages,
    *,
    add_generation_prompt: bool = True,
    chat_template: str | None = None,
    **template_arguments: Any,
) -> list[int]:
    """The token ids of the chat. Arguments and errors are those of :func:`render_chat`.

    Nothing is added to the rendered text, with one exception: where it does not begin with BOS, BOS is put before it, unless
    the tokenizer has none or its checkpoint says ``add_bos_token: false``. So there is one BOS whoever writes it, and no EOS
    but those that the template writes.

    Control tokens that the template writes become control tokens; those that messages, tools and other arguments spell out
    stay text (see :class:`LookalikeGuard`).
    """
    guard = tokenizer.guard
    text = _render(tokenizer, messages, add_generation_prompt, chat_template, template_arguments, mark=guard.mark)
    ids = guard.encode(text)
    bos = tokenizer.bos_token_id
    if bos is not None and tokenizer.add_bos is not False and ids[:1] != [bos]:
        ids.insert(0, bos)
    return ids


def _render(
    tokenizer: Tokenizer,
    messages: Messages,
    add_generation_prompt: bool,
    chat_template: str | None,
    arguments: Mapping[str, Any],
    mark: Callable[[str], str],
) -> str:
    template = tokenizer.chat_template if chat_template is None else chat_template
    if template is None:
        raise InvalidArgumentError(
            "this checkpoint has no chat template; pass chat_template, or render the chat yourself and use generate"
        )
    check_text("chat_template", template)
    try:
        text = _compile(template).render(
            {
                "tools": None,
                "documents": None,
                **tokenizer.special_tokens,
                **_map_strings(arguments, mark),
                "messages": _map_strings(_checked(messages), mark),
                "add_generation_prompt": add_generation_prompt,
            }
        )
    except InvalidArgumentError:
        raise
    except Exception as failure:  # a template is a program: it may fail in any way
        raise InvalidArgumentError(f"the chat template cannot render these messages: {failure}") from failure
    check_text("the rendered chat", text)
    return text


def _checked(messages: object) -> list[dict[str, Any]]:
    """The messages with text parts joined. Raises InvalidArgumentError naming the index and the key."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidArgumentError(f"messages={messages!r} is not allowed; it must be a list of at least one message")
    return [_checked_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _checked_message(name: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidArgumentError(f"{name} must be a mapping with 'role' and 'content', not {type(message).__name__}")
    if "role" not in message:
        raise InvalidArgumentError(f"{name} lacks 'role'")
    check_text(f"{name}['role']", message["role"])
    content = message.get("content")
    if content is None:
        if not message.get("tool_calls"):
            raise InvalidArgumentError(f"{name} lacks 'content'; only a message with 'tool_calls' may")
        return dict(message)
    if isinstance(content, (list, tuple)):
        content = "".join(_text_part(f"{name}['content'][{index}]", part) for index, part in enumerate(content))
    check_text(f"{name}['content']", content)
    return {**message, "content": content}


def _text_part(name: str, part: object) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        raise InvalidArgumentError(f"{name}={part!r} is not allowed; it must be {{'type': 'text', 'text': ...}}")
    text = part.get("text")
    check_text(f"{name}['text']", text)
    return str(text)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """``value`` with ``change`` applied to every string in it, at any depth."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value


# ---- the environment that templates are written for ----------------------------------------------------------------------
class _GenerationTag(Extension):
    """``{% generation %}`` ... ``{% endgeneration %}`` marks what a model is trained on; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML that Jinja's own filter makes."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return LookalikeGuard.in_json(text) if ensure_ascii else text


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
