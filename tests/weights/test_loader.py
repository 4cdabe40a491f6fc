"""Loading: tensors end up where the plan says, everything is checked before anything is allocated, little memory is taken."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gguf_files import write_gguf
from helpers.models import HISTORY_CONFIG, bfloat16_bits, history_tensors, llama_shapes, write_folder

from minipage.errors import ModelLoadError
from minipage.kernels.dtypes import STORAGE, convert
from minipage.kernels.ops import PackedWeight
from minipage.models import parameters
from minipage.weights import loader
from minipage.weights.checkpoint import open_checkpoint
from minipage.weights.importance import input_importance
from minipage.weights.kinds import weight_kinds
from minipage.weights.loader import load_parameters

TENSORS = history_tensors(3)
TIED = {**HISTORY_CONFIG, "tie_word_embeddings": True}


class PlainDevice:
    """A device whose packed weights are plain arrays in the kind's storage dtype; it counts what it allocates."""

    def __init__(self) -> None:
        self.allocations = 0
        self.threads: set[int] = set()
        self.ops: Any = self

    def weight_memory(self) -> Any:
        return np

    def begin_thread(self) -> None:
        self.threads.add(threading.get_ident())

    def array(self, host: np.ndarray) -> np.ndarray:
        self.allocations += 1
        return host.copy()

    def empty_weight(self, shape: tuple[int, int], kind: str, xp: Any) -> PackedWeight:
        self.allocations += 1
        return PackedWeight(kind, shape, (xp.full(shape, 7, STORAGE[kind]),))

    def pack_rows(self, weight: PackedWeight, start: int, rows: np.ndarray) -> None:
        assert threading.get_ident() in self.threads  # a GPU has to be made the current one of each thread
        weight.arrays[0][start : start + len(rows)] = convert(rows, weight.kind)


def load(path: Path, device: Any = None, dtype: str = "float32", quantization: str | None = None) -> dict[str, Any]:
    """Open a checkpoint, load all of it in the kinds that these keywords of LLM ask for, and close it."""
    checkpoint = open_checkpoint(str(path))
    try:
        config = checkpoint.model_config()
        plan = parameters(config)
        loader.check(plan, checkpoint.source)
        kinds = weight_kinds(plan, checkpoint.source, config.dtype, dtype, quantization)
        importance = input_importance(plan, checkpoint.source, kinds, config)
        return load_parameters(plan, checkpoint.source, kinds, device or PlainDevice(), importance, num_threads=2)
    finally:
        checkpoint.close()


@pytest.mark.parametrize("chunk_bytes", [1, 600, loader.CHUNK_BYTES])
def test_every_tensor_is_where_the_plan_says(chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k, v and gate, up are stacked in order, all values exact, whatever the size of a chunk."""
    monkeypatch.setattr(loader, "CHUNK_BYTES", chunk_bytes)
    params = load(write_folder(tmp_path, HISTORY_CONFIG, TENSORS))
    layer = "model.layers.1."
    expected = {
        "embed": TENSORS["model.embed_tokens.weight"],
        "lm_head": TENSORS["lm_head.weight"],
        "norm": TENSORS["model.norm.weight"],
        "layers.1.qkv": np.concatenate([TENSORS[f"{layer}self_attn.{name}_proj.weight"] for name in "qkv"]),
        "layers.1.gate_up": np.concatenate([TENSORS[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up")]),
        "layers.1.down": TENSORS[layer + "mlp.down_proj.weight"],
        "layers.1.input_norm": TENSORS[layer + "input_layernorm.weight"],
    }
    for name, array in expected.items():
        found = params[name].arrays[0] if isinstance(params[name], PackedWeight) else params[name]
        np.testing.assert_array_equal(found, array, err_msg=name)
    assert params["layers.0.qkv"].shape == (64, 32)
    assert params["norm"].dtype == np.float32


def test_folder_and_gguf_give_the_same_parameters(tmp_path: Path) -> None:
    """The same model as bfloat16 safetensors and as a BF16 GGUF file is the same, bit for bit, vectors in float32."""
    tensors = {name: np.float32(tensor) for name, tensor in TENSORS.items()}
    folder = load(write_folder(tmp_path / "folder", HISTORY_CONFIG, tensors, dtype="bfloat16"), dtype="bfloat16")
    file = load(write_gguf(tmp_path / "model.gguf", HISTORY_CONFIG, tensors, matrix_type="BF16"), dtype="bfloat16")
    assert folder.keys() == file.keys()
    for name, found in folder.items():
        if isinstance(found, PackedWeight):
            assert found.arrays[0].dtype == np.uint16
            np.testing.assert_array_equal(found.arrays[0], file[name].arrays[0], err_msg=name)
        else:
            np.testing.assert_array_equal(found, file[name])
    np.testing.assert_array_equal(folder["embed"].arrays[0], bfloat16_bits(tensors["model.embed_tokens.weight"]))


def test_biases_are_stacked(tmp_path: Path) -> None:
    """The biases of q, k and v become one float32 vector in that order."""
    config = {**HISTORY_CONFIG, "attention_bias": True, "mlp_bias": True}
    rng = np.random.default_rng(0)
    tensors = dict(TENSORS)
    for name, tensor in TENSORS.items():
        if "_proj.weight" in name:
            tensors[name.replace(".weight", ".bias")] = rng.normal(size=len(tensor)).astype(np.float32)
    params = load(write_folder(tmp_path, config, tensors, dtype="float16"))
    expected = np.concatenate([tensors[f"model.layers.0.self_attn.{name}_proj.bias"] for name in "qkv"])
    np.testing.assert_array_equal(params["layers.0.qkv_bias"], expected.astype(np.float16).astype(np.float32))
    assert params["layers.0.gate_up_bias"].shape == (96,)


def test_a_padded_vocabulary_is_cut(tmp_path: Path) -> None:
    """Rows of the embedding and the head beyond vocab_size are not loaded; fewer rows are an error."""
    tensors = dict(TENSORS)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.concatenate([TENSORS[name], np.full((3, 32), 1e4, np.float32)])
    params = load(write_folder(tmp_path, HISTORY_CONFIG, tensors))
    assert params["embed"].shape == params["lm_head"].shape == (61, 32)
    np.testing.assert_array_equal(params["lm_head"].arrays[0], TENSORS["lm_head.weight"])
    tensors["lm_head.weight"] = TENSORS["lm_head.weight"][:60]
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight has shape \[60, 32\], wanted \[61, 32\], or more rows"):
        load(write_folder(tmp_path, HISTORY_CONFIG, tensors))


# ---- tied, missing, extra ------------------------------------------------------------------------------------------


def without(*names: str) -> dict[str, np.ndarray]:
    """The tensors but those of these names."""
    return {name: tensor for name, tensor in TENSORS.items() if name not in names}


def test_tied_head_is_left_out(tmp_path: Path) -> None:
    """Tied and no lm_head in the file: nothing is missing, and no head is loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = load(write_folder(tmp_path, TIED, without("lm_head.weight")))
    assert "lm_head" not in params


def test_tied_head_in_the_file_is_not_used(tmp_path: Path) -> None:
    """Tied and a different lm_head in the file: the embedding wins, with a warning that names the file and the tensor."""
    with pytest.warns(UserWarning, match=r"model\.safetensors: lm_head\.weight is not used"):
        params = load(write_folder(tmp_path, TIED, TENSORS))
    assert "lm_head" not in params
    np.testing.assert_array_equal(params["embed"].arrays[0], TENSORS["model.embed_tokens.weight"])


@pytest.mark.parametrize("flag", [False, None])
def test_untied_head_must_be_there(flag: bool | None, tmp_path: Path) -> None:
    """Not tied, said or by default: a file without lm_head is an error."""
    config = {**HISTORY_CONFIG, "tie_word_embeddings": flag}
    with pytest.raises(ModelLoadError, match=r"missing tensors: lm_head\.weight$"):
        load(write_folder(tmp_path, config, without("lm_head.weight")))


def test_known_buffers_are_ignored(tmp_path: Path) -> None:
    """Rotary frequencies and attention masks that some files carry change nothing, whatever their shape."""
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
        "model.rotary_emb.inv_freq": np.ones(4, np.float32),
        "model.layers.1.attn.bias": np.ones((1, 1, 4, 4), np.float32),
        "model.layers.1.attn.masked_bias": np.ones((), np.float32),
    }
    params = load(write_folder(tmp_path, HISTORY_CONFIG, {**TENSORS, **buffers}))
    assert params.keys() == load(write_folder(tmp_path, HISTORY_CONFIG, TENSORS)).keys()


KPROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (without(KPROJ), rf"missing tensors: {KPROJ}$"),
        (
            {**TENSORS, "model.layers.0.self_attn.q_norm.weight": np.ones(8)},
            r"unknown tensors: model\.layers\.0\.self_attn\.q_",
        ),
        (
            {**TENSORS, "model.layers.0.self_attn.q_proj.bias": np.ones(32)},
            r"unknown tensors: model\.layers\.0\.self_attn\.q_",
        ),
        (
            {**TENSORS, "model.layers.2.mlp.up_proj.weight": np.ones((48, 32))},
            r"unknown tensors: model\.layers\.2\.mlp\.up_",
        ),
        (
            {**TENSORS, KPROJ: np.ones((32, 32))},
            rf"safetensors: tensor {KPROJ} has shape \[32, 32\], wanted \[16, 32\]$",
        ),
        ({**TENSORS, KPROJ: np.ones((17, 32))}, r"wanted \[16, 32\]$"),
        ({**TENSORS, KPROJ: np.ones(16 * 32)}, r"has shape \[512\], wanted \[16, 32\]$"),
        ({**without(KPROJ), "other": np.ones(1)}, rf"missing tensors: {KPROJ}; .*unknown tensors: other$"),
        ({}, r"missing tensors: model\.embed_tokens\.weight, .* and 16 more$"),
    ],
)
def test_what_does_not_fit_is_refused(tensors: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    """Missing, unknown and misshapen tensors are one error that names them, and nothing has been allocated."""
    device = PlainDevice()
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(write_folder(tmp_path, HISTORY_CONFIG, tensors), device)
    assert str(tmp_path) in str(caught.value)
    assert device.allocations == 0


def test_dtypes_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    """A wanted tensor of another dtype is named with its dtype and those allowed; an ignored one may have any."""
    path = write_folder(tmp_path, HISTORY_CONFIG, TENSORS) / "model.safetensors"
    content = path.read_bytes()
    at = content.index(b'"F32"', content.index(KPROJ.encode()))
    path.write_bytes(content[:at] + b'"I32"' + content[at + 5 :])
    device = PlainDevice()
    with pytest.raises(ModelLoadError, match=rf"{KPROJ} has dtype I32, allowed: F32, F16, BF16"):
        load(tmp_path, device)
    assert device.allocations == 0


def test_float16_overflow_names_the_tensor(tmp_path: Path) -> None:
    """A value that float16 cannot hold is an error that names file and tensor, not an infinite weight."""
    tensors = {**TENSORS, KPROJ: np.full((16, 32), 1e6, np.float32)}
    with pytest.raises(ModelLoadError, match=rf"model\.safetensors: tensor {KPROJ}: .*float16"):
        load(write_folder(tmp_path, HISTORY_CONFIG, tensors), dtype="float16")


# ---- memory --------------------------------------------------------------------------------------------------------

MEASURE = """
import sys
from pathlib import Path
from helpers.memory import measure_peak
from test_loader import load
from minipage.device import open_device
small, big, dtype, quantization = sys.argv[1:]
settings = {"device": open_device("reference"), "dtype": dtype, "quantization": quantization or None}
load(Path(small), **settings)  # whatever is allocated once, is
with measure_peak() as peak:
    params = load(Path(big), **settings)
print(peak.nbytes, sum(p.nbytes for p in params.values()))
"""


@pytest.mark.parametrize(
    ("stored", "dtype", "quantization"),
    [
        ("F32 folder", "float32", ""),
        ("F32 folder", "float16", ""),
        ("F32 folder", "auto", "int8"),
        ("F32 folder", "auto", "int4"),
        ("Q8_0 file", "float32", ""),
        ("Q8_0 file", "auto", ""),
        ("Q4_1 file", "auto", ""),
    ],
)
def test_peak_memory(stored: str, dtype: str, quantization: str, tmp_path: Path) -> None:
    """At the peak, loading takes less than 16 MB more than the loaded model, of 110 MB in float32, pages of files included."""
    big = {**HISTORY_CONFIG, "vocab_size": 4096, "hidden_size": 1024, "head_dim": 256, "intermediate_size": 2048}
    paths = []
    for name, config in (("small", {**HISTORY_CONFIG, "intermediate_size": 64}), ("big", big)):
        tensors = {key: np.ones(shape, np.float32) for key, shape in llama_shapes(config).items()}
        if stored.endswith("file"):
            write_gguf(tmp_path / name, config, tensors, matrix_type=stored.split()[0])
        else:
            write_folder(tmp_path / name, config, tensors)
        paths.append(str(tmp_path / name))
    here = Path(__file__).parent
    path = os.pathsep.join(str(folder) for folder in (here, here.parent, here.parents[1]))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *paths, dtype, quantization],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    peak, size = map(float, done.stdout.split())
    assert 0.9 * size < peak < size + 16e6
