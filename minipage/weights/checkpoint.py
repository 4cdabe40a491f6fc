"""A path to an open checkpoint, whatever its format: config, generation config, vocabulary and tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelLoadError
from ..models import ModelConfig, read_config
from ..models.fields import read_token_ids
from .files import read_json
from .gguf import open_gguf
from .safetensors import open_safetensors
from .source import TensorSource


@dataclass(frozen=True)
class Checkpoint:
    """A model's files. Headers are read and checked; tensors are read through ``source``."""

    path: str
    config_file: str  #: the file that ``config`` is from, for messages
    config: dict[str, Any]  #: in the form of a Hugging Face config.json
    generation_config: dict[str, Any]  #: in the form of a generation_config.json; may be empty
    source: TensorSource
    vocabulary: dict[str, Any] | None  #: a GGUF file's ``tokenizer.*`` metadata by its full keys; None for a folder

    def model_config(self) -> ModelConfig:
        """The config as the models read it; ModelLoadError naming the file, the key, its value and what is allowed."""
        try:
            return read_config(self.config)
        except ValueError as error:
            raise ModelLoadError(f"{self.config_file}: {error}") from error

    @property
    def has_tokenizer(self) -> bool:
        """Whether the files bring a tokenizer that can be read."""
        return self.vocabulary is not None or (Path(self.path) / "tokenizer.json").is_file()

    def close(self) -> None:
        self.source.close()


def open_checkpoint(path: str) -> Checkpoint:
    """Open a folder in Hugging Face layout or a GGUF file; ModelLoadError says what is wrong with it."""
    place = Path(path)
    if place.is_dir():
        return open_folder(place)
    if not place.exists():
        raise ModelLoadError(f"{path}: does not exist; allowed: a folder in Hugging Face layout, or a GGUF file")
    if place.suffix == ".safetensors":
        raise ModelLoadError(f"{path}: safetensors files are loaded by their folder, with its config.json beside them")
    source = open_gguf(place)
    return Checkpoint(path, path, source.config, source.generation_config, source, source.vocabulary)


def open_folder(folder: Path) -> Checkpoint:
    """Open a folder with config.json, safetensors weights and, often, generation_config.json."""
    config_file, generation_file = folder / "config.json", folder / "generation_config.json"
    if not config_file.exists():
        raise ModelLoadError(
            f"{folder}: config.json is missing; allowed: a folder in Hugging Face layout, or the path of a GGUF file"
        )
    config = read_json(config_file)
    generation_config = read_json(generation_file) if generation_file.exists() else {}
    try:
        read_token_ids(generation_config, "eos_token_id")
    except ValueError as error:
        raise ModelLoadError(f"{generation_file}: {error}") from error
    source = open_safetensors(folder)
    return Checkpoint(str(folder), str(config_file), config, generation_config, source, vocabulary=None)
