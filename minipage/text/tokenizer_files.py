"""Reads a tokenizer's files from a folder in Hugging Face layout."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from ..errors import ModelLoadError

_PREFIX_KEY = b'"continuing_subword_prefix"'
_NO_PREFIX = re.compile(_PREFIX_KEY + rb'\s*:\s*(?:null|"")')
MAX_FILE_BYTES = 64 * 2**20  #: the largest real tokenizer.json is about half of this


class TokenizerSettings(NamedTuple):
    """What stands beside the vocabulary."""

    special_tokens: dict[str, str]  #: such as "bos_token" -> "<s>"
    chat_template: str | None
    add_bos: bool | None  #: whether a text gets a BOS; None: not said


@contextmanager
def backend_errors(error: type[ValueError], what: str) -> Iterator[None]:
    """Turns whatever the Rust library raises into ``error``; its panics are no Exception, only a BaseException."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, error):
        raise
    except BaseException as failure:
        raise error(f"{what}: {failure}") from failure


def read_backend(path: Path) -> Any:
    """The ``tokenizers.Tokenizer`` of a tokenizer.json, without the truncation and padding that it may ask for.

    Raises ModelLoadError naming the file where it is missing, too large or not a valid tokenizer.
    """
    data = _read_bytes(path)
    if data is None:
        raise ModelLoadError(f"{path} is missing; a model folder needs it to turn text into token ids")
    with backend_errors(ModelLoadError, f"{path} is not a valid tokenizer"):
        _check_merges(data, path)
        backend = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
        backend.no_truncation()
        backend.no_padding()
        if backend.get_vocab_size() == 0:
            raise ModelLoadError(f"{path} has an empty vocabulary")
    return backend


def _check_merges(data: bytes, path: Path) -> None:
    """Refuse merges that do not fit a ``continuing_subword_prefix``: the library cuts so many bytes off their right halves
    without looking, and where that breaks a character the whole process ends.
    """
    if data.count(_PREFIX_KEY) == len(_NO_PREFIX.findall(data)) > 0:
        return  # as all that Llamas have; a file of many megabytes need not be read twice
    content = json.loads(data)
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("merges"), list):
        return
    prefix = model.get("continuing_subword_prefix")
    if not isinstance(prefix, str):
        return
    for merge in model["merges"]:
        _, _, right = merge.rpartition(" ") if isinstance(merge, str) else (None, *merge)
        if not str(right).startswith(prefix):
            shown, wanted = reprlib.repr(merge), reprlib.repr(prefix)
            raise ModelLoadError(
                f"{path}: the merge {shown} does not go on with the continuing_subword_prefix, {wanted}"
            )


def read_settings(folder: Path) -> TokenizerSettings:
    """Settings from tokenizer_config.json, special_tokens_map.json and the chat template's own file; all optional.

    A chat_template.jinja goes before the template in tokenizer_config.json, and that before chat_template.json.
    """
    config_path = folder / "tokenizer_config.json"
    config = _read_object(config_path)
    special_tokens = _special_tokens({**_read_object(folder / "special_tokens_map.json"), **config})
    template = _read_text(folder / "chat_template.jinja")
    if template is None:
        template = _choose_template(config.get("chat_template"), config_path)
    if template is None:
        path = folder / "chat_template.json"
        template = _choose_template(_read_object(path).get("chat_template"), path)
    add_bos = config.get("add_bos_token")
    return TokenizerSettings(special_tokens, template, add_bos if isinstance(add_bos, bool) else None)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The entries ``*_token``; a token is a string, or a mapping with its string as "content"."""
    found = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _choose_template(value: Any, path: Path) -> str | None:
    """A template as string, or as a list of named ones: the one called "default", or the only one."""
    if value is None or isinstance(value, str):
        return value
    try:
        named = {str(entry["name"]): entry["template"] for entry in value}
        template = named["default"] if "default" in named else _only(named)
    except (TypeError, KeyError) as failure:
        raise ModelLoadError(f"{path}: chat_template is not a string or a list of {{name, template}}") from failure
    if not isinstance(template, str):
        raise ModelLoadError(f"{path}: chat_template is {type(template).__name__}; it must be a string")
    return template


def _only(named: Mapping[str, Any]) -> Any:
    if len(named) != 1:
        raise KeyError("default")
    return next(iter(named.values()))


def _read_object(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as failure:
        raise ModelLoadError(f"{path} is not valid JSON: {failure}") from failure
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a JSON {type(value).__name__}; it must be an object")
    return value


def _read_text(path: Path) -> str | None:
    data = _read_bytes(path)
    try:
        return None if data is None else data.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise ModelLoadError(f"{path} is not UTF-8: {failure}") from failure


def _read_bytes(path: Path) -> bytes | None:
    """The file's contents, None where there is none."""
    if not path.is_file():
        return None
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ModelLoadError(f"{path} has {size} bytes; at most {MAX_FILE_BYTES} are allowed")
    try:
        return path.read_bytes()
    except OSError as failure:
        raise ModelLoadError(f"{path} cannot be read: {failure}") from failure
