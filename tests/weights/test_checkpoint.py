"""Opening a checkpoint: what a folder must hold, and errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.gguf_files import write_gguf
from helpers.models import HISTORY_CONFIG, history_model, history_tensors

from minipage.errors import ModelLoadError
from minipage.weights.checkpoint import open_checkpoint


def test_a_folder(tmp_path: Path) -> None:
    """config.json, generation_config.json and the tensors are there; without a tokenizer.json it has no tokenizer."""
    path = history_model(tmp_path, 3, generation_config={"eos_token_id": [5, 6]}, dtype="bfloat16")
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.path == str(path)
    assert checkpoint.config["vocab_size"] == 61
    assert checkpoint.generation_config == {"eos_token_id": [5, 6]}
    assert checkpoint.vocabulary is None
    assert not checkpoint.has_tokenizer
    assert checkpoint.model_config().dtype == "bfloat16"
    assert checkpoint.source.dtype("lm_head.weight") == "BF16"
    checkpoint.close()
    (path / "tokenizer.json").write_text("{}")
    assert open_checkpoint(str(path)).has_tokenizer


def test_a_folder_without_generation_config(tmp_path: Path) -> None:
    """generation_config.json may be absent: it is empty then."""
    assert open_checkpoint(str(history_model(tmp_path, 3))).generation_config == {}


def test_a_gguf_file(tmp_path: Path) -> None:
    """A GGUF file opens by its path, whatever its name, with its own vocabulary."""
    path = write_gguf(tmp_path / "blob", HISTORY_CONFIG, history_tensors(3))
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.has_tokenizer
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1, 2]", b'"text"', b"\xff\xfe", b'{"a": ' * 100_000, b'{"a": ' + b"9" * 10_000 + b"}"],
    ids=["empty", "cut", "list", "string", "not UTF-8", "deep", "long number"],
)
def test_broken_json_names_the_file(file: str, content: bytes, tmp_path: Path) -> None:
    """Anything but a JSON object is a ModelLoadError that names the file."""
    path = history_model(tmp_path, 3)
    (path / file).write_bytes(content)
    with pytest.raises(ModelLoadError, match=rf"{file}: "):
        open_checkpoint(str(path))


def test_errors_in_the_config_name_the_file(tmp_path: Path) -> None:
    """A config that no model is read from is a ModelLoadError naming config.json, the key, its value and what is allowed."""
    path = history_model(tmp_path, 3)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["FooForCausalLM"]}))
    with pytest.raises(ModelLoadError, match=r"config\.json: architectures is \['FooForCausalLM'\]; allowed: Llama"):
        open_checkpoint(str(path)).model_config()


def test_bad_end_tokens_name_the_file(tmp_path: Path) -> None:
    """An eos_token_id that is no id is an error when the folder is opened."""
    path = history_model(tmp_path, 3, generation_config={"eos_token_id": "</s>"})
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: eos_token_id is '</s>'"):
        open_checkpoint(str(path))


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    """A folder without config.json or weights, a safetensors file by itself and a missing path say what is allowed."""
    path = history_model(tmp_path, 3)
    with pytest.raises(ModelLoadError, match="loaded by their folder"):
        open_checkpoint(str(path / "model.safetensors"))
    (path / "model.safetensors").unlink()
    with pytest.raises(
        ModelLoadError, match=r"no weights that can be loaded, only none at all; allowed: model\.safetensors"
    ):
        open_checkpoint(str(path))
    (path / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"config\.json is missing"):
        open_checkpoint(str(path))
    with pytest.raises(ModelLoadError, match=r"nowhere: does not exist"):
        open_checkpoint(str(tmp_path / "nowhere"))
    (tmp_path / "weights.bin").write_bytes(b"PK\3\4")
    with pytest.raises(ModelLoadError, match=r"weights\.bin: not a valid GGUF file"):
        open_checkpoint(str(tmp_path / "weights.bin"))
