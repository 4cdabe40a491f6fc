"""Tensors of a GGUF file of architecture llama, under their Hugging Face names, dequantised by the gguf package."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ..errors import ModelLoadError
from ..kernels.dtypes import to_float32
from ..models.fields import refuse
from .files import DataFile
from .gguf_config import translate_config, translate_generation_config
from .gguf_header import Header, TensorInfo, read_header, row_bytes
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

#: Types that are stored as one of the loader's float formats; all others are dequantised to float32.
PLAIN = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


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
        self.readable = readable_types()
        self._data = data
        self.config = translate_config(header, self._freq_factors(header))
        self.generation_config = translate_generation_config(header.metadata)
        self.vocabulary = {key: value for key, value in header.metadata.items() if key.startswith("tokenizer.")}
        self._tensors = {hugging_face_name(n): info for n, info in header.tensors.items() if n != ROPE_FACTORS}

    def _freq_factors(self, header: Header) -> list[float] | None:
        """The values of ``rope_freqs.weight``, which belong to the config."""
        info = header.tensors.get(ROPE_FACTORS)
        if info is None:
            return None
        if info.type.name not in self.readable:
            raise refuse(f"the dtype of tensor {ROPE_FACTORS}", info.type.name, ", ".join(self.readable))
        factors: list[float] = to_float32(self._rows(info, 0, info.shape[0])).tolist()
        return factors

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        return str(self._tensors[name].type.name)

    def file(self, name: str) -> str:
        return self.path

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        info = self._tensors[name]
        start, stop, _ = slice(start, stop).indices(info.shape[0])
        if not re.search(r"\.self_attn\.[qk]_proj\.", name):
            return self._rows(info, start, stop)
        # llama.cpp rotates neighbours, and files have q and k rows in that order, head by head: read whole heads, reorder
        dim, share = self.config["head_dim"], self.config["rope_parameters"]["partial_rotary_factor"]
        first, last = start // dim, -(-stop // dim)
        order = np.arange(last - first)[:, None] * dim + half_rotated_order(dim, round(dim * share))
        heads = self._rows(info, first * dim, last * dim)
        rows: Array = np.take(heads, order.reshape(-1)[start - first * dim : stop - first * dim], axis=0)
        return rows

    def _rows(self, info: TensorInfo, start: int, stop: int) -> Array:
        """Rows of a tensor in the file's order. A vector is quantised as one row, so it is read whole and cut."""
        if len(info.shape) == 1:
            vector: Array = self._rows(info._replace(shape=(1, *info.shape)), 0, 1)[0, start:stop]
            return vector
        inner = math.prod(info.shape[1:-1])
        size = row_bytes(info)
        stored = self._data.read(info.offset + start * inner * size, (stop - start) * inner * size, np.uint8)
        return dequantized(stored.reshape(-1, size), info.type).reshape(stop - start, *info.shape[1:])

    def close(self) -> None:
        self._data.close()


def dequantized(stored: npt.NDArray[np.uint8], type: GGMLQuantizationType) -> Array:
    """Rows of bytes as rows of numbers: bit for bit for the float types, else float32."""
    values: Array = stored.view(PLAIN[type.name]) if type.name in PLAIN else gguf.dequantize(stored, type)
    return values


@cache
def readable_types() -> tuple[str, ...]:
    """The types that the gguf package can dequantise, found out by asking it for one block of each."""
    names: list[str] = []
    for type, (_, size) in GGML_QUANT_SIZES.items():
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
