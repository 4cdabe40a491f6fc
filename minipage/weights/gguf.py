"""Tensors of a GGUF file of architecture llama, under their Hugging Face names."""

from __future__ import annotations

import re
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ModelLoadError
from ..kernels.dtypes import to_float32
from ..kernels.ops import Groups
from ..models.fields import refuse
from .files import DataFile
from .gguf_blocks import Bytes, dequantized, groups_of, kind_of
from .gguf_config import translate_config, translate_generation_config
from .gguf_header import Header, TensorInfo, read_header, row_bytes
from .gguf_types import KNOWN_TYPES
from .source import Array

ROPE_FACTORS = "rope_freqs.weight"

#: GGUF name -> Hugging Face name, both without .weight or .bias.
MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_rot_embd": "self_attn.rotary_emb.inv_freq",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def open_gguf(path: Path) -> GGUFSource:
    """Open a GGUF file; ModelLoadError names the file, the key, what was found and what is allowed."""
    header = read_header(path)
    data = DataFile(path)
    try:
        return GGUFSource(data, header)
    except ValueError as error:
        data.close()
        raise ModelLoadError(f"{path}: {error}") from error


class GGUFSource:
    """The tensors of a file, a :class:`~.source.TensorSource`, and what its metadata says beside them."""

    def __init__(self, data: DataFile, header: Header) -> None:
        self.path = str(data.path)
        self._data = data
        self._types = {info.type for info in header.tensors.values()}
        self.config = translate_config(header, self._freq_factors(header))
        self.generation_config = translate_generation_config(header.metadata)
        self.vocabulary = {key: value for key, value in header.metadata.items() if key.startswith("tokenizer.")}
        self._tensors = {hugging_face_name(n): info for n, info in header.tensors.items() if n != ROPE_FACTORS}

    @cached_property
    def readable(self) -> tuple[str, ...]:
        """All types that can be read; where the file has known ones only, these, without importing the gguf package."""
        known = self._types.issubset(KNOWN_TYPES)
        return tuple(type.name for type in KNOWN_TYPES) if known else readable_types()

    def _freq_factors(self, header: Header) -> list[float] | None:
        """The values of ``rope_freqs.weight``, which belong to the config."""
        info = header.tensors.get(ROPE_FACTORS)
        if info is None:
            return None
        if info.type.name not in self.readable:
            raise refuse(f"the dtype of tensor {ROPE_FACTORS}", info.type.name, ", ".join(self.readable))
        if len(info.shape) != 1:
            raise refuse(f"the shape of tensor {ROPE_FACTORS}", list(info.shape), "one dimension")
        factors: list[float] = to_float32(self._vector(info)).tolist()
        return factors

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        return str(self._tensors[name].type.name)

    def kind(self, name: str) -> str:
        return kind_of(self._tensors[name].type)

    def file(self, name: str) -> str:
        return self.path

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        info = self._tensors[name]
        if len(info.shape) == 1:
            return self._in_order(name, self._vector(info))[start:stop]
        return dequantized(self._stored(name, start, stop), info.type)

    def read_groups(self, name: str, start: int = 0, stop: int | None = None) -> Groups:
        try:
            return groups_of(self._stored(name, start, stop), self._tensors[name].type)
        except ValueError as error:
            raise ModelLoadError(f"{self.path}: tensor {name}: {error}") from error

    def _stored(self, name: str, start: int, stop: int | None) -> Bytes:
        """Rows start..stop of a matrix as the file's bytes [rows, bytes], in the order of Hugging Face."""
        info = self._tensors[name]
        start, stop, _ = slice(start, stop).indices(info.shape[0])
        first, last = start, stop
        if self._is_rotated(name):  # whole heads
            dim = self.config["head_dim"]
            first, last = start // dim * dim, -(-stop // dim) * dim
        size = row_bytes(info)
        stored = self._data.read(info.offset + first * size, (last - first) * size, np.uint8).reshape(-1, size)
        return self._in_order(name, stored)[start - first : stop - first]

    def _vector(self, info: TensorInfo) -> Array:
        """A vector, in the file's order; it may be quantised as one row."""
        stored = self._data.read(info.offset, row_bytes(info), np.uint8)
        vector: Array = dequantized(stored.reshape(1, -1), info.type)[0]
        return vector

    @staticmethod
    def _is_rotated(name: str) -> bool:
        """Whether the rows of a tensor are dims that rope rotates."""
        return re.search(r"\.self_attn\.[qk]_proj\.", name) is not None

    def _in_order(self, name: str, rows: Array) -> Array:
        """Rows of whole heads in the order of Hugging Face: llama.cpp rotates neighbours, and files have the rows of q and k
        in that order, head by head."""
        if not self._is_rotated(name):
            return rows
        dim, share = self.config["head_dim"], self.config["rope_parameters"]["partial_rotary_factor"]
        heads = np.arange(0, len(rows), dim)[:, None]
        ordered: Array = np.take(rows, (heads + half_rotated_order(dim, round(dim * share))).reshape(-1), axis=0)
        return ordered

    def close(self) -> None:
        self._data.close()


@cache
def readable_types() -> tuple[str, ...]:
    """The types that the gguf package can dequantise, found out by asking it for one block of each."""
    import gguf

    names: list[str] = []
    for type, (_, size) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.dequantize(np.zeros((1, size), np.uint8), type)
        except NotImplementedError:
            continue
        names.append(type.name)
    return tuple(names)


def hugging_face_name(name: str) -> str:
    """A tensor's name in a Hugging Face checkpoint; a name that has none stays as it is."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in LAYER_NAMES:
        found = f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}"
        return found if layer[2] == "attn_rot_embd" else f"{found}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{MODEL_NAMES[stem]}.{kind}" if stem in MODEL_NAMES else name


def half_rotated_order(head_dim: int, rotary_dim: int) -> npt.NDArray[Any]:
    """Where each row of a head that is rotated in halves (dim i with i + R/2) lies in one that is rotated in neighbours
    (dim 2i with 2i + 1): the inverse of what the conversion to GGUF does. Dims beyond R stay where they are."""
    rotated = np.arange(rotary_dim)
    return np.concatenate([rotated[0::2], rotated[1::2], np.arange(rotary_dim, head_dim)])
