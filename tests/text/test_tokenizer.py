"""The tokenizer of a Hugging Face folder: what it reads, what it refuses, and what it does with text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from helpers.tokenizers import F3_SPECIALS, f3_backend, f4_backend, wrap, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from minipage.errors import InvalidArgumentError, ModelLoadError
from minipage.text.tokenizer import Tokenizer

F3 = wrap(f3_backend())
F4 = wrap(f4_backend())


def load(folder: Path, backend: Any, **config: Any) -> Tokenizer:
    return Tokenizer.from_folder(write_tokenizer(folder, backend, **config))


# ---- reading -------------------------------------------------------------------------------------------------------------
def test_a_folder_gives_the_same_tokenizer(tmp_path: Path) -> None:
    """What was written is what is read: ids, special tokens, template."""
    tokenizer = load(tmp_path, f3_backend(), chat_template="{{ messages }}")
    text = "ab ins😀<|stop|>"
    assert tokenizer.encode(text) == F3.encode(text)
    assert tokenizer.vocab_size == F3.vocab_size
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (F3.bos_token_id, F3.eos_token_ids)
    assert tokenizer.all_special_ids == {tokenizer.special_id(special) for special in F3_SPECIALS}
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|endoftext|>"}


def test_special_tokens_may_be_mappings_or_stand_elsewhere(tmp_path: Path) -> None:
    """BOS as {"content": ...}, EOS from special_tokens_map.json; an explicit null is not overruled from there."""
    write_tokenizer(tmp_path, f3_backend())
    config = {"bos_token": {"content": "<|stop|>"}, "unk_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<|bos|>", "eos_token": {"content": "<|endoftext|>"}, "unk_token": "a"})
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.bos_token_id == tokenizer.special_id("<|stop|>")
    assert tokenizer.eos_token_ids == (tokenizer.special_id("<|endoftext|>"),)
    assert "unk_token" not in tokenizer.special_tokens


def test_only_tokenizer_json_is_needed(tmp_path: Path) -> None:
    """Without tokenizer_config.json there is no BOS, no EOS and no template, and text works."""
    write_tokenizer(tmp_path, f3_backend())
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.chat_template) == (None, (), None)
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"


def test_bos_and_eos_become_special(tmp_path: Path) -> None:
    """Tokens that are only called BOS and EOS are found in a text, and hidden, like special ones."""
    backend = f3_backend(specials=())
    tokenizer = load(tmp_path, backend, bos_token="ab", eos_token="in")
    assert tokenizer.all_special_ids == {tokenizer.bos_token_id, *tokenizer.eos_token_ids}
    assert tokenizer.decode(tokenizer.encode("abc")) == "c"


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"tokenizer_config.json": {"chat_template": "config"}}, "config"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "one"}]}}, "one"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
                }
            },
            "d",
        ),
        ({"tokenizer_config.json": {"chat_template": [{"name": "only", "template": "o"}]}}, "o"),
        ({"tokenizer_config.json": {"chat_template": "config"}, "chat_template.jinja": "jinja"}, "jinja"),
        ({"chat_template.json": {"chat_template": "json"}}, "json"),
        (
            {"tokenizer_config.json": {"chat_template": "config"}, "chat_template.json": {"chat_template": "j"}},
            "config",
        ),
    ],
)
def test_where_the_chat_template_is_found(tmp_path: Path, files: dict[str, Any], template: str) -> None:
    """As string, as list of named ones, in a file of its own."""
    write_tokenizer(tmp_path, f3_backend())
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert Tokenizer.from_folder(tmp_path).chat_template == template


def test_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    """A tokenizer.json that cuts or pads what it encodes does not cut or pad prompts."""
    backend = f3_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = load(tmp_path, backend)
    assert tokenizer.encode("x" * 20) == [ord("x")] * 20
    assert tokenizer.encode("x") == [ord("x")]


def corrupt(backend: Any, **changes: Any) -> str:
    state = json.loads(backend.to_str())
    state["model"].update(changes)
    return json.dumps(state)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is missing"),
        ("", "not a valid tokenizer"),
        ("{", "not a valid tokenizer"),
        ('{"a":' * 3000 + "1" + "}" * 3000, "not a valid tokenizer"),
        ("[" * 3000 + "]" * 3000, "not a valid tokenizer"),
        (corrupt(f3_backend(), merges=[["a", "nowhere"]]), "nowhere"),
        (corrupt(f3_backend(), continuing_subword_prefix="##"), r"merge \['a', 'b'\] does not go on with .*'##'"),
        (
            corrupt(f3_backend(), continuing_subword_prefix="##").replace("subword_prefix", r"subword\u005fprefix"),
            "does not go on with",
        ),
        (corrupt(f3_backend(), vocab={}), "not a valid tokenizer"),
        ('{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}', "empty vocabulary"),
        (corrupt(f3_backend(), vocab="x"), "not a valid tokenizer"),
        ("\udcff", "not a valid tokenizer"),
    ],
)
def test_a_bad_tokenizer_json_is_one_clear_error(tmp_path: Path, content: str | None, message: str) -> None:
    """Missing, cut off, nested too deep, without an entry that a merge needs, not UTF-8: the error names the file."""
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content.encode("utf-8", errors="surrogateescape"))
    with pytest.raises(ModelLoadError, match=f"{path}.*{message}"):
        Tokenizer.from_folder(tmp_path)


def test_merges_that_go_on_with_their_prefix(tmp_path: Path) -> None:
    """A tokenizer that writes the rest of a word with a prefix is read as ever."""
    model = tokenizers.models.BPE({"a": 0, "##b": 1, "ab": 2}, [("a", "##b")], continuing_subword_prefix="##")
    write_tokenizer(tmp_path, tokenizers.Tokenizer(model))
    assert Tokenizer.from_folder(tmp_path).encode("ab") == [2]


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_huge_file_is_refused_unread(tmp_path: Path, file: str) -> None:
    """A file of 100 MB is refused by its size."""
    write_tokenizer(tmp_path, f3_backend())
    with (tmp_path / file).open("wb") as huge:
        huge.truncate(100_000_000)
    with pytest.raises(ModelLoadError, match=f"{file} has 100000000 bytes"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be an object"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "not valid JSON"),
        ('{"chat_template": 5}', "chat_template is not a string"),
        ('{"chat_template": [{"name": "a", "template": "1"}, {"name": "b", "template": "2"}]}', "chat_template"),
        ('{"chat_template": [{"name": "default", "template": 5}]}', "it must be a string"),
    ],
)
def test_a_bad_tokenizer_config_is_one_clear_error(tmp_path: Path, config: str, message: str) -> None:
    """The error names the file and what is wrong in it."""
    write_tokenizer(tmp_path, f3_backend())
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ModelLoadError, match=f"tokenizer_config.json.*{message}"):
        Tokenizer.from_folder(tmp_path)


def test_panics_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library raises beside Exception is an error of the text; a Ctrl-C stays one."""

    class Panic(BaseException):
        pass

    class Backend:
        raised: type[BaseException] = Panic

        def encode(self, text: str, add_special_tokens: bool) -> None:
            raise self.raised("index out of bounds")

    tokenizer = wrap(f3_backend())
    monkeypatch.setattr(tokenizer, "_backend", Backend())
    with pytest.raises(InvalidArgumentError, match="cannot be tokenised: index out of bounds"):
        tokenizer.encode("a")
    monkeypatch.setattr(Backend, "raised", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("a")


# ---- encoding ------------------------------------------------------------------------------------------------------------
@given(st.text())
@settings(deadline=None)
def test_round_trip(text: str) -> None:
    """Any text without special tokens in it comes back as it was, NUL included."""
    assert F3.decode(F3.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("position", [0, 3])
def test_half_a_surrogate_pair_is_refused(position: int) -> None:
    """The error says which and where."""
    with pytest.raises(InvalidArgumentError, match=rf"U\+D83D, at character {position}"):
        F3.encode("a" * position + "\ud83d" + "b")


@pytest.mark.parametrize("text", [5, None, b"ab", ["ab"]])
def test_text_must_be_a_string(text: Any) -> None:
    """Anything else is an error that names its type."""
    with pytest.raises(InvalidArgumentError, match=f"text must be a string, not {type(text).__name__}"):
        F3.encode(text)


@pytest.mark.parametrize(("adds_bos", "adds_eos"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("make", [f3_backend, f4_backend])
def test_plain_text_gets_what_tokenizer_json_says(make: Any, adds_bos: bool, adds_eos: bool) -> None:
    """BOS, EOS, both or none are added to a text, and none of them on request."""
    tokenizer = wrap(make(adds_bos=adds_bos, adds_eos=adds_eos))
    bare = tokenizer.encode("ab", add_special_tokens=False)
    before = [tokenizer.bos_token_id] * adds_bos
    after = list(tokenizer.eos_token_ids) * adds_eos
    assert tokenizer.encode("ab") == [*before, *bare, *after]
    assert not tokenizer.all_special_ids & set(bare)


def test_a_second_bos_is_warned_of() -> None:
    """A text that brings its own BOS to a tokenizer that adds one is encoded as asked, with a warning."""
    tokenizer = wrap(f3_backend(adds_bos=True))
    with pytest.warns(UserWarning, match="BOS twice"):
        assert tokenizer.encode("<|bos|>a")[:2] == [tokenizer.bos_token_id] * 2


# ---- single tokens -------------------------------------------------------------------------------------------------------
def test_token_text_is_that_of_the_middle_of_a_text() -> None:
    """A piece's space shows, a special token shows, half a character is U+FFFD, an unknown id is nothing."""
    assert F4.token_text(F4.encode("ab in", add_special_tokens=False)[-1]) == " in"
    assert F4.token_text(F4.encode("ab", add_special_tokens=False)[0]) == " ab"
    assert F4.token_text(F4.special_id("</s>") or -1) == "</s>"
    assert F3.token_text(0xF0) == "\ufffd"
    assert F3.token_text(10**9) == ""


def test_special_id_knows_added_tokens_only() -> None:
    """The exact content of an added token, special or not; a piece of the vocabulary is none."""
    assert F3.special_id("<|stop|>") == F3.encode("<|stop|>")[0]
    assert F3.special_id("<tool>") == F3.encode("<tool>")[0]
    assert F3.special_id("ab") is None
    assert F3.special_id("<|stop|> ") is None


@given(st.lists(st.integers(-(2**70), 2**70)))
@settings(deadline=None)
def test_ids_outside_the_vocabulary_decode_to_nothing(ids: list[int]) -> None:
    """They count as if they were not there."""
    known = [token_id for token_id in ids if 0 <= token_id < F3.vocab_size]
    assert F3.decode(ids) == F3.decode(known)


@given(st.binary())
@settings(deadline=None)
def test_token_bytes_are_those_that_the_library_decodes(data: bytes) -> None:
    """Joined and read as UTF-8 they are the library's text, for bytes and for added tokens of any spelling."""
    ids = [*data, F3.special_id("<｜two words｜>") or -1, F3.special_id("<|stop|>") or -1, *range(256, F3.vocab_size)]
    joined = b"".join(F3.token_bytes(token_id) for token_id in ids)
    assert joined.decode("utf-8", errors="replace") == F3.decode(ids, skip_special_tokens=False)


@given(st.text() | st.text("ab<|endoftext|>"))
@settings(deadline=None)
def test_longest_token_bounds_a_text(text: str) -> None:
    """A text of n tokens has at most n * longest_token characters, so a longer one need not be tokenised to be refused."""
    assert len(text) <= len(F3.encode(text)) * F3.longest_token
