"""GGUF files: every tensor type, row order and names, and refusal of what is unknown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from helpers.gguf_files import CONFIG, TENSORS, opened, write_gguf
from helpers.kernels import assert_same_bits
from helpers.memory import holds
from helpers.models import bfloat16_bits

from minipage.errors import ModelLoadError
from minipage.kernels.quantization import dequantize, ungroup
from minipage.models import parameters
from minipage.weights.checkpoint import open_checkpoint
from minipage.weights.gguf import half_rotated_order, readable_types
from minipage.weights.gguf_header import read_header
from minipage.weights.loader import check


@pytest.mark.parametrize("matrix_type", ["F32", "F16", "BF16"])
def test_float_tensors_come_back_bit_for_bit(matrix_type: str, tmp_path: Path) -> None:
    """Names, shapes, row order and bits of every tensor are those of the Hugging Face model, q and k included."""
    source = opened(tmp_path, matrix_type=matrix_type).source
    assert sorted(source.names()) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        stored = tensor
        if tensor.ndim > 1:
            stored = {"F32": tensor, "F16": tensor.astype(np.float16), "BF16": bfloat16_bits(tensor)}[matrix_type]
        assert source.shape(name) == tensor.shape
        for start, stop in ((0, None), (0, 1), (3, 21), (17, 18), (5, 5)):
            rows = source.read(name, start, stop)
            assert rows.dtype == stored.dtype
            np.testing.assert_array_equal(rows, stored[start:stop], err_msg=name)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random bytes make infinite scales
@pytest.mark.parametrize("matrix_type", readable_types())
def test_quantised_rows_are_dequantised_alone(matrix_type: str, tmp_path: Path) -> None:
    """Every type that the gguf package dequantises is read, and a range of rows equals those rows of the whole."""
    type = gguf.GGMLQuantizationType[matrix_type]
    block, size = gguf.GGML_QUANT_SIZES[type]
    columns = max(block, 64)
    stored = np.random.default_rng(0).integers(0, 256, (32, columns // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value in {
        "embedding_length": 64,
        "feed_forward_length": 8,
        "block_count": 1,
        "context_length": 16,
    }.items():
        writer.add_uint32("llama." + key, value)
    writer.add_uint32("llama.attention.head_count", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_up.weight"):
        writer.add_tensor(name, stored, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    source = open_checkpoint(str(tmp_path / "model.gguf")).source
    assert source.dtype("model.layers.0.mlp.up_proj.weight") == matrix_type
    whole = np.asarray(gguf.dequantize(stored, type), np.float32)
    order = np.arange(32).reshape(1, 16, 2).swapaxes(1, 2).reshape(-1)  # one head of 32, undone by hand
    for name, expected in (("mlp.up_proj", whole), ("self_attn.q_proj", whole[order])):
        for start, stop in ((0, 32), (3, 9)):
            rows = source.read(f"model.layers.0.{name}.weight", start, stop)
            if rows.dtype == np.uint16:
                rows = (rows.astype(np.uint32) << 16).view(np.float32)
            np.testing.assert_array_equal(rows.astype(np.float32), expected[start:stop])


@pytest.mark.parametrize("matrix_type", ["Q8_0", "Q4_1", "Q4_0", "Q5_1"])
def test_groups_are_read_by_rows(matrix_type: str, tmp_path: Path) -> None:
    """A range of rows is quantised as those rows of the whole, q and k in the order of their rows as floats."""
    source = opened(tmp_path, matrix_type=matrix_type).source
    for name, tensor in TENSORS.items():
        if tensor.ndim < 2:
            assert source.kind(name) == "float32"
            continue
        kind = source.kind(name)
        assert kind is not None
        for start, stop in ((0, None), (0, 1), (3, 21), (17, 18)):
            values = ungroup(dequantize(source.read_groups(name, start, stop), kind), tensor.shape[1])
            if matrix_type == "Q5_1":
                np.testing.assert_allclose(values, source.read(name, start, stop), atol=0.01)
            else:
                assert_same_bits(values, source.read(name, start, stop))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the infinite scale
def test_values_that_cannot_be_quantised_again_are_refused(tmp_path: Path) -> None:
    """A type that is quantised again, with an infinite scale in the file: the error names file and tensor."""
    path = write_gguf(tmp_path / "model.gguf", CONFIG, TENSORS, matrix_type="Q5_1")
    place = read_header(path).tensors["blk.1.ffn_up.weight"].offset
    content = bytearray(path.read_bytes())
    content[place : place + 2] = np.array([np.inf], "<f2").tobytes()
    path.write_bytes(content)
    source = open_checkpoint(str(path)).source
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ModelLoadError, match=rf"model\.gguf: tensor {name}: a weight that is NaN or infinite"):
        source.read_groups(name)


def test_row_order_with_a_partly_rotated_head() -> None:
    """Neighbours among the first R rows become halves; the rest of a head stays where it is."""
    np.testing.assert_array_equal(half_rotated_order(8, 8), [0, 2, 4, 6, 1, 3, 5, 7])
    np.testing.assert_array_equal(half_rotated_order(8, 4), [0, 2, 1, 3, 4, 5, 6, 7])


@pytest.mark.parametrize(("matrix_type", "needed"), [("Q4_0", False), ("Q8_0", False), ("F16", False), ("Q5_1", True)])
def test_the_package_is_imported_for_rare_types_only(matrix_type: str, needed: bool, tmp_path: Path) -> None:
    """Its import takes a tenth of a second, which the start of a program feels."""
    path = write_gguf(tmp_path / "model.gguf", CONFIG, TENSORS, matrix_type=matrix_type)
    code = (
        "import sys; from minipage.weights.checkpoint import open_checkpoint;"
        f"source = open_checkpoint({str(path)!r}).source; name = 'model.layers.0.mlp.up_proj.weight';"
        "source.readable; (source.read_groups if source.kind(name).startswith('int') else source.read)(name);"
        "print('gguf' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{needed}\n"


def test_a_refused_file_is_closed(tmp_path: Path) -> None:
    """A file whose metadata is refused does not stay open, nor does one that is closed."""
    with pytest.raises(ModelLoadError, match="expert_count") as caught:
        opened(tmp_path, metadata={"llama.expert_count": 8})
    assert caught.tb is not None
    assert not holds(tmp_path / "model.gguf")
    opened(tmp_path).close()
    assert not holds(tmp_path / "model.gguf")


def test_other_architectures_and_types_are_refused(tmp_path: Path) -> None:
    """An unknown architecture is named with what is allowed; so is a tensor type that cannot be dequantised."""
    path = write_gguf(tmp_path / "model.gguf", CONFIG, {}, architecture="falcon")
    with pytest.raises(ModelLoadError, match=r"model\.gguf: general\.architecture is 'falcon'; allowed: llama"):
        open_checkpoint(str(path))
    tensors = {**TENSORS, "model.layers.1.mlp.up_proj.weight": np.zeros((48, 32), np.int8)}
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "types.gguf", CONFIG, tensors)))
    message = r"types\.gguf: tensor model\.layers\.1\.mlp\.up_proj\.weight has dtype I8, allowed: F32, F16, Q4_0"
    with pytest.raises(ModelLoadError, match=message):
        check(parameters(checkpoint.model_config()), checkpoint.source)
