"""scripts/bench_decode.py, run small: the files that it makes, the processes that take turns, and a whole run."""

from __future__ import annotations

import importlib
import json
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFReader
from helpers.gguf_files import write_gguf
from helpers.models import HISTORY_CONFIG, history_tensors
from helpers.tokenizers import byte_characters
from hypothesis import given
from hypothesis import strategies as st

from minipage import LLM, SamplingParams
from minipage.weights.gguf import open_gguf
from minipage.weights.safetensors import open_safetensors

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.append(str(SCRIPTS))

from decode_bench import bench as benching  # noqa: E402
from decode_bench import processes  # noqa: E402
from decode_bench.checkpoints import KINDS, gguf_of_kind, hugging_face_folder, type_of, weight_bytes  # noqa: E402
from decode_bench.engines.minipage_engine import MinipageEngine  # noqa: E402
from decode_bench.processes import EngineFailed, Side  # noqa: E402
from decode_bench.tasks import PROMPT, Settings, Task  # noqa: E402

CHARACTERS = byte_characters()
CONFIG = {**HISTORY_CONFIG, "vocab_size": 257, "head_dim": 16, "intermediate_size": 64, "max_position_embeddings": 512}
VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*CHARACTERS, "th"],
    "tokenizer.ggml.token_type": [1] * 257,
    "tokenizer.ggml.merges": ["t h"],
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A GGUF file of a tiny Llama in Q4_1, with a vocabulary of bytes."""
    return write_gguf(
        tmp_path / "tiny.gguf", CONFIG, history_tensors(3, CONFIG), matrix_type="Q4_1", metadata=VOCABULARY
    )


@pytest.fixture
def bench_decode() -> ModuleType:
    """The script as a module."""
    return importlib.import_module("bench_decode")


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_kind_holds_the_same_numbers(kind: str, model: Path, tmp_path: Path) -> None:
    """Matrices have the type asked for and the values that rounding to it leaves, vectors and metadata are untouched."""
    before = {tensor.name: tensor for tensor in GGUFReader(model).tensors}
    reader = GGUFReader(gguf_of_kind(model, kind, tmp_path / "cache"))
    assert [tensor.name for tensor in reader.tensors] == list(before)
    for tensor in reader.tensors:
        source = before[tensor.name]
        outer = kind.startswith("int4") and tensor.name in ("token_embd.weight", "output.weight")
        type = "F32" if len(source.shape) == 1 else "Q8_0" if outer else KINDS[kind]
        assert tensor.tensor_type.name == type
        values = gguf.dequantize(source.data, source.tensor_type)
        expected = (
            source.data if tensor.tensor_type == source.tensor_type else gguf.quantize(values, tensor.tensor_type)
        )
        assert tensor.data.tobytes() == expected.tobytes()
    for name, field in GGUFReader(model).fields.items():
        if not name.startswith("GGUF."):
            assert reader.fields[name].contents() == field.contents() and reader.fields[name].types == field.types


def test_the_type_of_a_file_is_the_one_of_its_matrices(model: Path, tmp_path: Path) -> None:
    """``general.file_type``, where there is one, tells the new type and not the old."""
    metadata = {**VOCABULARY, "general.file_type": 3}
    source = write_gguf(tmp_path / "typed.gguf", CONFIG, history_tensors(3, CONFIG), metadata=metadata)
    for kind, number in {"float32": 0, "float16": 1, "int4": 2, "int8": 7, "bfloat16": 32}.items():
        assert GGUFReader(gguf_of_kind(source, kind, tmp_path)).fields["general.file_type"].contents() == number


def test_files_are_written_once(model: Path, tmp_path: Path) -> None:
    """A second call finds the file; a changed source is another model."""
    path = gguf_of_kind(model, "int8", tmp_path / "cache")
    written = path.stat().st_mtime_ns
    assert gguf_of_kind(model, "int8", tmp_path / "cache") == path and path.stat().st_mtime_ns == written
    model.write_bytes(model.read_bytes() + bytes(32))
    assert gguf_of_kind(model, "int8", tmp_path / "cache") != path
    assert {each.suffix for each in (tmp_path / "cache").iterdir()} == {".gguf"}  # nothing unfinished stays


def test_the_folder_is_the_same_model(model: Path, tmp_path: Path) -> None:
    """The Hugging Face folder has the tensors of the float32 file, its config, and a tokenizer that encodes alike."""
    folder = hugging_face_folder(model, tmp_path / "cache")
    file = gguf_of_kind(model, "float32", tmp_path / "cache")
    tensors = open_gguf(file)
    texts = []
    for path in (folder, file):
        with LLM(str(path), device="reference", num_blocks=16) as llm:
            [out] = llm.generate("the sea", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
            texts.append((out.prompt_token_ids, out.outputs[0].token_ids))
    assert texts[0] == texts[1]
    source = open_safetensors(folder)
    assert sorted(source.names()) == sorted(tensors.names())
    for name in tensors.names():
        np.testing.assert_array_equal(source.read(name), tensors.read(name))


def test_the_weights_of_a_step_leave_out_an_embedding_that_is_only_looked_up(model: Path, tmp_path: Path) -> None:
    """This model has an output of its own: a step reads all other tensors, one row of the embedding aside."""
    path = gguf_of_kind(model, "float32", tmp_path)
    sizes = {name: tensor.nbytes for name, tensor in history_tensors(3, CONFIG).items()}
    assert weight_bytes(path) == sum(sizes.values()) - sizes["model.embed_tokens.weight"]


# ---- processes -------------------------------------------------------------------------------------------------------

#: An interpreter that has no packages but claims to: it answers as a worker of some peer would.
FAKE_PYTHON = """\
    #!{python}
    import json, sys
    if sys.argv[1] == "-c":
        sys.exit({missing!r} in sys.argv[3:])  # asked what it can import
    assert sys.argv[1:3] == ["-m", "decode_bench.worker"]
    if "--first-token" in sys.argv:
        print(" young")
        sys.exit()
    settings = json.loads(sys.argv[4])
    print(json.dumps({{"about": "a fake of " + sys.argv[3]}}), flush=True)
    for count, line in enumerate(sys.stdin):
        task = json.loads(line)
        assert task in settings["tasks"]
        if count == {dies_at}:
            sys.exit("out of luck")
        print(json.dumps({{"tokens": 1000, "seconds": 2.0, "peak_bytes": 3 << 20}}), flush=True)
"""


def fake_python(folder: Path, missing: str = "torch", dies_at: int = -1) -> str:
    """Write the fake; it cannot import ``missing``, and dies instead of the given answer."""
    path = folder / f"fake-{missing}-{dies_at}"
    path.write_text(textwrap.dedent(FAKE_PYTHON).format(python=sys.executable, missing=missing, dies_at=dies_at))
    path.chmod(0o755)
    return str(path)


def run_quick(bench_decode: ModuleType, model: Path, tmp_path: Path, *options: str) -> dict[str, dict[str, Any]]:
    """The rows of a quick run on the tiny model, by name."""
    path = tmp_path / "rows.json"
    where = ["--model", str(model), "--cache", str(tmp_path / "cache"), "--json", str(path)]
    always = ["--quick", "--device", "reference", "--threads", "1"]
    assert bench_decode.main([*always, *where, *options]) == 0
    return {row["name"]: row for row in json.loads(path.read_text())}


def test_a_whole_run_beside_a_peer(bench_decode: ModuleType, model: Path, tmp_path: Path, capsys: Any) -> None:
    """Every part has a row with both sides and their ratio; a peer that is not there is named and left out."""
    options = ["--kinds", "bfloat16", "--batches", "1", "3", "--rounds", "1", "--peer-python", fake_python(tmp_path)]
    rows = run_quick(bench_decode, model, tmp_path, *options)
    speeds = ["prefill/32/bfloat16", "decode/b1/bfloat16", "decode/b3/bfloat16", "decode/b1/c64/bfloat16"]
    for name in speeds:
        assert rows[name]["value"] > 0 and rows[name]["peer"] == "llama.cpp" and rows[name]["peer_value"] == 500.0
        assert rows[name]["ratio"] == rows[name]["value"] / 500.0
    assert rows["memory/bfloat16"]["peer_value"] == 3.0 and 10 < rows["memory/bfloat16"]["value"] < 4000
    assert 0 < rows["ttft/bfloat16"]["peer_value"] < rows["ttft/bfloat16"]["value"]
    step = weight_bytes(gguf_of_kind(model, "bfloat16", tmp_path / "cache"))
    long = step + 64 * 2 * (2 * 2 * 2 * 16)  # K and V of 2 layers with 2 heads of 16, 2 bytes a number
    for name, num_bytes in (("decode/b1/bfloat16", step), ("decode/b1/c64/bfloat16", long)):
        share = rows[f"roof_share/{name}"]
        assert share["peer_value"] == pytest.approx(500.0 * num_bytes / 1e9 / rows["read_roof"]["value"])
        assert share["value"] == pytest.approx(rows[name]["value"] * num_bytes / 1e9 / rows["read_roof"]["value"])
    said = capsys.readouterr()
    assert "transformers is left out: no interpreter has transformers and torch" in said.err
    assert "a fake of llama.cpp" in said.err and "decode/b3/bfloat16" in said.out


def test_every_token_of_a_decode_counts(model: Path) -> None:
    """Of as many sequences as there are, which all begin before the clock starts, each step's; and of none before."""
    task = Task(batch=32, steps=2)
    engine = MinipageEngine(Settings(str(model), "int4-min", threads=1, tasks=(task,), device="reference"))
    assert [engine.run(task).tokens for _ in range(2)] == [64, 64]
    engine.llm.close()


def test_a_peer_that_fails_is_left_out(bench_decode: ModuleType, model: Path, tmp_path: Path, capsys: Any) -> None:
    """From then on: minipage is measured to the end, and the peer's last words are shown."""
    options = ["--kinds", "float32", "--parts", "prefill", "decode", "--batches", "2", "--peers", "llama.cpp"]
    rows = run_quick(bench_decode, model, tmp_path, *options, "--peer-python", fake_python(tmp_path, dies_at=3))
    assert rows["prefill/32/float32"]["peer"] == "llama.cpp"
    assert rows["decode/b2/float32"]["value"] > 0 and rows["decode/b2/float32"]["peer"] is None
    assert "llama.cpp failed: out of luck; left out from here on" in capsys.readouterr().err


def test_minipage_must_not_fail(
    bench_decode: ModuleType, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Where it does, the exit code says so, and what was measured until then is shown."""
    monkeypatch.setattr(bench_decode.sys, "executable", fake_python(tmp_path, dies_at=4))
    monkeypatch.setitem(benching.__dict__, "weight_bytes", lambda path: 1)
    options = ["--quick", "--kinds", "float32", "--parts", "prefill", "decode", "--peers"]
    where = ["--model", str(model), "--cache", str(tmp_path / "cache"), "--threads", "1", "--batches", "2"]
    assert bench_decode.main([*options, *where]) == 2
    said = capsys.readouterr()
    assert "error: minipage failed: out of luck" in said.err and "prefill/32/float32" in said.out


def test_sides_take_turns(bench_decode: ModuleType, model: Path, tmp_path: Path) -> None:
    """Every other round begins with the side that ended the one before; a side has a turn only in what it can do."""
    args = bench_decode.parse(["--quick", "--model", str(model), "--cache", str(tmp_path)])
    sides = [Side(name, "python") for name in ("minipage", "llama.cpp", "transformers")]
    bench = benching.Bench(args, model, sides)
    assert bench.turns("float32", 0) == sides and bench.turns("float32", 1) == sides[::-1]
    assert [side.name for side in bench.turns("int4", 0)] == ["minipage", "llama.cpp"]


def test_contexts_fit_the_model(bench_decode: ModuleType, model: Path, tmp_path: Path, capsys: Any) -> None:
    """A task that is longer than the model takes is refused before anything is measured, as is a file that is no model."""
    options = ["--kinds", "float16", "--prefill", "32", "--cache", str(tmp_path / "cache"), "--peers", "--model"]
    assert bench_decode.main([*options, str(model), "--context", "480"]) == 2
    assert "decode/b1/c480 takes 513 tokens; allowed: 512" in capsys.readouterr().err
    assert bench_decode.main([*options, str(tmp_path / "missing.gguf")]) == 2
    assert "missing.gguf" in capsys.readouterr().err


@given(
    st.integers(0, len(PROMPT)), st.text(st.characters(categories=["L", "P"]), min_size=1), st.sampled_from(["", "\n"])
)
def test_only_what_goes_beyond_the_prompt_is_a_token(length: int, more: str, before: str) -> None:
    """A prompt that is repeated, in part or whole, is none; anything after it or without it is."""
    assert not processes.beyond(before + PROMPT[:length], PROMPT)
    assert processes.beyond(before + PROMPT + more, PROMPT)
    assert processes.beyond(before + "Ω" + more, PROMPT)


def test_the_first_token_is_timed_from_the_start_of_the_process() -> None:
    """Whatever the program shows before it; one that shows none has failed, and its last words are told."""
    program = (
        "import sys, time; print(sys.argv[1], flush=True); time.sleep(0.3); print(*sys.argv[2:]); sys.exit('the end')"
    )
    command = [sys.executable, "-c", program, PROMPT]
    assert 0.3 < processes.seconds_to_first_token([*command, " young"], {}, PROMPT) < 20
    with pytest.raises(EngineFailed, match="showed no token: the end"):
        processes.seconds_to_first_token(command, {}, PROMPT)


def test_llama_cpp_has_a_command_line_of_its_own() -> None:
    """Its own program where there is one, else a worker; what is named goes before what is in PATH."""
    settings, side = Settings("m.gguf", "int4", 3, ()), Side("llama.cpp", "python")
    own = processes.first_token_command(side, settings, PROMPT, "llama-completion")
    assert own[0] == "llama-completion" and own[own.index("-t") + 1] == "3" and own[own.index("-n") + 1] == "1"
    worker = processes.first_token_command(side, settings, PROMPT, None)
    assert worker[:3] == ["python", "-m", "decode_bench.worker"] and worker[-2:] == ["--first-token", PROMPT]
    assert processes.find_llama_cli("/some/llama-cli") == "/some/llama-cli"


def test_peers_wait_as_told_and_find_no_minipage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleeping threads are for peers, whose own choice is kept otherwise; the clone is in minipage's path alone."""
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    ours, peer = (processes.environment(Side(name, "python"), True) for name in ("minipage", "llama.cpp"))
    assert "PYTHONDONTWRITEBYTECODE" not in ours
    assert ours["OMP_WAIT_POLICY"] == "active" and peer["OMP_WAIT_POLICY"] == "passive"
    assert processes.environment(Side("llama.cpp", "python"), False)["OMP_WAIT_POLICY"] == "active"
    assert ours["PYTHONPATH"].split(":") == [str(SCRIPTS), str(SCRIPTS.parent), "/elsewhere"]
    assert peer["PYTHONPATH"].split(":") == [str(SCRIPTS), "/elsewhere"]


@pytest.mark.parametrize("options", [["--batches", "0"], ["--rounds", "0"], ["--kinds", "int3"], ["--peers", "vllm"]])
def test_options_are_checked(bench_decode: ModuleType, options: list[str]) -> None:
    """Before anything is done."""
    with pytest.raises(SystemExit):
        bench_decode.parse(options)


def test_the_types_of_tensors() -> None:
    """Vectors are never rounded, and the ends of a model in 4 bits have 8."""
    assert type_of("blk.0.attn_norm.weight", 1, "int4").name == "F32"
    assert type_of("output.weight", 2, "int4").name == type_of("token_embd.weight", 2, "int4-min").name == "Q8_0"
    assert type_of("token_embd.weight", 2, "bfloat16").name == "BF16"
