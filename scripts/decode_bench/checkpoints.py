"""One model in many number formats: GGUF files of other types, and a Hugging Face folder, from a single GGUF file.

All sides of the comparison then read the same numbers, llama.cpp and minipage the same files. What was written once is found
again in ``folder``; a file appears there whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from safetensors.numpy import save_file

from minipage.errors import InvalidArgumentError
from minipage.kernels.dtypes import to_float32
from minipage.text.gguf_vocabulary import build_backend, read_vocabulary_settings
from minipage.weights.gguf import open_gguf
from minipage.weights.gguf_header import read_header, row_bytes

#: What people call a number format -> the GGUF type of matrices. int4 is Q4_0, int4-min is Q4_1 (with a minimum a group).
KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "Q8_0", "int4": "Q4_0", "int4-min": "Q4_1"}
FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "BF16": LlamaFileType.MOSTLY_BF16,
    "F16": LlamaFileType.MOSTLY_F16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
    "Q4_1": LlamaFileType.MOSTLY_Q4_1,
}
#: Kept in Q8_0 in the 4-bit files, as llama.cpp's quantiser keeps them where rows are no multiple of 256.
OUTER_TENSORS = ("token_embd.weight", "output.weight")


def type_of(name: str, num_dims: int, kind: str) -> GGMLQuantizationType:
    """The type of a tensor in a file of ``kind``: vectors stay float32, embedding and output have 8 bits at least."""
    if num_dims == 1:
        return GGMLQuantizationType.F32
    if kind.startswith("int4") and name in OUTER_TENSORS:
        return GGMLQuantizationType.Q8_0
    return GGMLQuantizationType[KINDS[kind]]


def gguf_of_kind(source: Path, kind: str, folder: Path) -> Path:
    """A GGUF file with the model of ``source`` in ``kind`` (of :data:`KINDS`), written to ``folder`` where it is not there yet.

    Tensors that have the type already are copied byte for byte, others dequantised to float32 and quantised. Raises
    InvalidArgumentError where rows are not whole groups of the type.
    """
    path = folder / f"{_stem(source)}.{KINDS[kind]}.gguf"
    if not path.is_file():
        with _appearing(path) as unfinished:
            _write_gguf(source, kind, unfinished)
    return path


def _write_gguf(source: Path, kind: str, path: Path) -> None:
    reader = GGUFReader(source)
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        value_type = field.types[0] if field.types else None
        if field.name.startswith("GGUF.") or field.name == "general.architecture" or value_type is None:
            continue  # the writer's own
        value = int(FILE_TYPES[KINDS[kind]]) if field.name == "general.file_type" else field.contents()
        sub_type = field.types[-1] if value_type == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, value_type, sub_type=sub_type)
    for tensor in reader.tensors:
        wanted = type_of(tensor.name, len(tensor.shape), kind)
        data = tensor.data
        if tensor.tensor_type != wanted:
            try:
                data = gguf.quantize(gguf.dequantize(data, tensor.tensor_type), wanted)
            except gguf.QuantError as error:
                raise InvalidArgumentError(
                    f"{source}: tensor {tensor.name} cannot be {wanted.name}: {error}"
                ) from error
        writer.add_tensor(tensor.name, data, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def hugging_face_folder(source: Path, folder: Path) -> Path:
    """The model of a GGUF file as a folder in Hugging Face layout: float32 safetensors, config, tokenizer."""
    path = folder / _stem(source)
    if not path.is_dir():
        with _appearing(path) as unfinished:
            _write_hugging_face(gguf_of_kind(source, "float32", folder), unfinished)
    return path


def _write_hugging_face(source: Path, folder: Path) -> None:
    folder.mkdir()
    tensors = open_gguf(source)
    try:
        arrays = {name: np.ascontiguousarray(to_float32(tensors.read(name))) for name in tensors.names()}
        save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
        _write_json(folder / "config.json", {**tensors.config, "dtype": "float32"})
        if tensors.vocabulary:
            build_backend(tensors.vocabulary).save(str(folder / "tokenizer.json"))
            settings, _ = read_vocabulary_settings(tensors.vocabulary)
            special = {"tokenizer_class": "PreTrainedTokenizerFast", **settings.special_tokens}
            _write_json(folder / "tokenizer_config.json", special)
    finally:
        tensors.close()


def weight_bytes(path: Path) -> int:
    """Bytes of weights that a decode step reads of a GGUF file: all but an embedding that is not the output as well."""
    tensors = read_header(path).tensors
    looked_up = {"token_embd.weight"} if "output.weight" in tensors else set()
    return sum(math.prod(info.shape[:-1]) * row_bytes(info) for name, info in tensors.items() if name not in looked_up)


def _stem(source: Path) -> str:
    """A name for what is made of ``source``: another when the file changes."""
    stat = source.stat()
    identity = f"{source.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    return f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """A path to write to; what is there in the end is put at ``path``, unless another process was faster."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="writing-", dir=path.parent) as folder:
        unfinished = Path(folder) / path.name
        yield unfinished
        if not path.exists():
            os.replace(unfinished, path)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
