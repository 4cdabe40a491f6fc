"""In which kind each matrix is kept, by the keywords of LLM and by what the file has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.gguf_files import write_gguf
from helpers.kernels import assert_same_bits
from helpers.models import HISTORY_CONFIG, history_tensors, write_folder

from minipage.device import open_device
from minipage.kernels.ops import WEIGHT_KINDS, PackedWeight
from minipage.models import parameters
from minipage.weights.checkpoint import open_checkpoint
from minipage.weights.kinds import common_kind, weight_kinds
from minipage.weights.loader import load_parameters

CONFIG = {**HISTORY_CONFIG, "intermediate_size": 64}
TENSORS = history_tensors(3, CONFIG)


def kinds(path: Path, dtype: str = "auto", quantization: str | None = None) -> dict[str, str]:
    """The kind of every matrix, as these keywords of LLM say."""
    checkpoint = open_checkpoint(str(path))
    config = checkpoint.model_config()
    found = weight_kinds(parameters(config), checkpoint.source, config.dtype, dtype, quantization)
    checkpoint.close()
    return found


def test_a_dtype_is_for_all(tmp_path: Path) -> None:
    """Asked for, it is what every matrix gets, of a folder or a quantised file."""
    folder = write_folder(tmp_path / "folder", CONFIG, TENSORS, dtype="bfloat16")
    file = write_gguf(tmp_path / "model.gguf", CONFIG, TENSORS, matrix_type="Q4_1")
    for path in (folder, file):
        found = kinds(path, "float16")
        assert set(found.values()) == {"float16"} and {"embed", "lm_head", "layers.1.gate_up"} <= found.keys()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantization_is_for_all_but_the_vocabulary(quantization: str, tmp_path: Path) -> None:
    """Embedding and output head are int8 either way, whatever dtype is asked for."""
    folder = write_folder(tmp_path, CONFIG, TENSORS)
    for dtype in ("auto", "float16"):
        found = kinds(folder, dtype, quantization)
        assert found.pop("embed") == found.pop("lm_head") == "int8"
        assert set(found.values()) == {quantization}


def test_auto_is_the_dtype_of_the_config(tmp_path: Path) -> None:
    """A folder's weights are in the dtype that its config names."""
    for dtype in ("float32", "bfloat16", "float16"):
        folder = write_folder(tmp_path / dtype, CONFIG, TENSORS, dtype=dtype)
        assert set(kinds(folder).values()) == {dtype}


@pytest.mark.parametrize(
    ("matrix_type", "kind"),
    [
        ("F32", "float32"),
        ("F16", "float16"),
        ("BF16", "bfloat16"),
        ("Q8_0", "int8"),
        ("Q4_1", "int4"),
        ("Q4_0", "int4_symmetric"),
        ("Q5_1", "int8"),
    ],
)
def test_auto_keeps_what_a_gguf_file_has(matrix_type: str, kind: str, tmp_path: Path) -> None:
    """Every matrix in the kind of its type; loaded, it means what the file's blocks do, to the bit where they are kept."""
    path = write_gguf(tmp_path / "model.gguf", CONFIG, TENSORS, matrix_type=matrix_type)
    found = kinds(path)
    assert set(found.values()) == {kind}
    checkpoint, device = open_checkpoint(str(path)), open_device("reference")
    config, source = checkpoint.model_config(), checkpoint.source
    plan = parameters(config)
    kept = load_parameters(plan, source, found, device, {}, num_threads=3)
    wide = load_parameters(plan, source, dict.fromkeys(found, "float32"), device, {})
    for name, weight in kept.items():
        if not isinstance(weight, PackedWeight):
            assert_same_bits(weight, wide[name])
        elif matrix_type == "Q5_1":
            np.testing.assert_allclose(
                device.ops.unpack_rows(weight, 0, weight.shape[0]), wide[name].arrays[0], atol=0.01
            )
        else:
            assert_same_bits(device.ops.unpack_rows(weight, 0, weight.shape[0]), wide[name].arrays[0])


def test_stacks_of_different_types(tmp_path: Path) -> None:
    """Rows of different kinds that are stacked get one that holds them all; the others keep their own."""
    types = {"model.layers.0.self_attn.v_proj.weight": "Q8_0", "model.layers.1.mlp.up_proj.weight": "F16"}
    path = write_gguf(tmp_path / "model.gguf", CONFIG, TENSORS, matrix_type="Q4_1", types=types)
    found = kinds(path)
    assert found["layers.0.qkv"] == "int8"
    assert found["layers.1.gate_up"] == "float16"
    assert {found[name] for name in ("layers.1.qkv", "layers.0.gate_up", "layers.0.down", "embed")} == {"int4"}
    checkpoint, device = open_checkpoint(str(path)), open_device("reference")
    config = checkpoint.model_config()
    loaded = load_parameters(parameters(config), checkpoint.source, found, device, {}, num_threads=2)
    for name, stem, tensors in (
        ("layers.0.qkv", "model.layers.0.self_attn.", ("q_proj", "k_proj", "v_proj")),
        ("layers.1.gate_up", "model.layers.1.mlp.", ("gate_proj", "up_proj")),
    ):
        expected = np.concatenate([checkpoint.source.read(f"{stem}{tensor}.weight") for tensor in tensors])
        values = device.ops.unpack_rows(loaded[name], 0, len(expected))
        np.testing.assert_allclose(values, expected, atol=0.01)


def test_common_kinds() -> None:
    """One kind stays as it is; quantised ones meet in int8, any with a float in that, different floats in float32."""
    for kind in WEIGHT_KINDS:
        assert common_kind({kind}) == kind
    assert common_kind({"int4", "int4_symmetric"}) == common_kind({"int8", "int4"}) == "int8"
    assert common_kind({"int4", "bfloat16"}) == "bfloat16"
    assert common_kind({"float16", "bfloat16"}) == common_kind({"float32", "int8", "float16"}) == "float32"
