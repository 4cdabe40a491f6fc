"""Several ranks serve as one does: the same tokens from shards of the weights, and no failure of one leaves another waiting."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers import models, rank_program

from minipage import LLM
from minipage.device import Communicator
from minipage.device.cpu import physical_cores
from minipage.errors import InvalidArgumentError

MPIEXEC = Path(sys.executable).with_name("mpiexec")
TESTS = Path(__file__).resolve().parent.parent
TIMEOUT = 240  #: seconds for a program that takes a few, where kernels have to be compiled on a busy machine
#: A model whose shards for two ranks are whole groups of 32 inputs.
SHAPE: dict[str, Any] = {"head_dim": 16, "intermediate_size": 64}
TIGHT: dict[str, Any] = {"device": "cpu", "block_size": 4, "num_blocks": 14, "num_threads": 1}
GAP = 0.002  #: between the best two tokens of each greedy step; ranks round differently, by less than 0.001

KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16", "preemption_mode": "swap", "swap_space": "1MiB"},
    "int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"quantization": "int4", "max_num_batched_tokens": 7},
}


class Done(NamedTuple):
    """How a program on several ranks ended."""

    returncode: int
    stdout: str  #: of rank 0
    others: list[str]  #: the stdout of rank 1, 2, ...
    stderr: str  #: of rank 0, then 1, ..., each whole


def run(command: list[str], ranks: int = 2) -> Done:
    """Start a program on so many ranks; TimeoutExpired where it hangs.

    Each rank writes files of its own: in one pipe the lines of several get mixed, and within a line where Python does not buffer.
    """
    assert MPIEXEC.exists(), "the tests need MPI beside Python, as the extra minipage[test] brings it"
    with tempfile.TemporaryDirectory() as folder:
        files = [f"-{name}file-pattern={folder}/{name}-%r" for name in ("out", "err")]
        start = [str(MPIEXEC), *files, "-n", str(ranks), sys.executable, *command]
        where: dict[str, Any] = {"cwd": TESTS, "stdin": subprocess.DEVNULL}
        done = subprocess.run(start, capture_output=True, text=True, timeout=TIMEOUT, **where)
        stdout, *others = (_text(Path(folder, f"out-{rank}")) for rank in range(ranks))
        stderr = "".join(_text(Path(folder, f"err-{rank}")) for rank in range(ranks))
    return Done(done.returncode, stdout, others, stderr + done.stderr)


def _text(file: Path) -> str:
    """What a rank wrote: there is no file where that is nothing."""
    return file.read_text() if file.exists() else ""


def run_program(ranks: int, *trouble: str, **keywords: Any) -> Done:
    """The program of ``helpers/rank_program.py`` on so many ranks."""
    return run(["-m", "helpers.rank_program", json.dumps(keywords | {"tensor_parallel_size": ranks}), *trouble], ranks)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a history model."""
    return cache(lambda **shape: str(models.history_model(tmp_path_factory.mktemp("model"), 3, **(SHAPE | shape))))


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_give_the_tokens_of_one(model: Any, kind: str) -> None:
    """Greedy and sampled, n=3, beams, prefix hits, preemption, abort, in all kinds of weights; each has half of them."""
    keywords = {"model": model()} | TIGHT | KINDS[kind]
    with LLM(**keywords) as llm:
        alone = rank_program.serve(llm)
    assert alone["gap"] > GAP
    assert alone["counted"]["preemptions"] > 0 and alone["counted"]["hit_tokens"] > 0
    assert alone["counted"]["cow_copies"] > 0
    assert bool(alone["counted"]["swapped_in_blocks"]) == ("swap_space" in keywords)
    done = run_program(2, **keywords)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tokens"] == alone["tokens"]
    assert found["counted"] == alone["counted"]
    assert 0.5 <= found["weight_bytes"] / alone["weight_bytes"] < 0.56


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("llama-biases-bfloat16", 2), ("llama-tied-head-dim", 2), ("mistral-bfloat16", 2), ("llama-mha", 4)],
)
def test_other_models(name: str, ranks: int) -> None:
    """A bias that is added to a sum counts once, a tied matrix is both shards, windows; and four ranks are as good as two."""
    keywords = {"model": str(TESTS / "models" / "golden" / name)} | TIGHT
    with LLM(**keywords) as llm:
        alone = rank_program.serve(llm)
    done = run_program(ranks, **keywords)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == alone["tokens"]


def test_simulated_gpus(model: Any) -> None:
    """Ranks whose steps are padded for recording give the tokens of a CPU."""
    code = """
import sys
sys.path.insert(0, "..")
from minipage import LLM, SamplingParams
llm = LLM(sys.argv[1], device=sys.argv[2], block_size=4, num_blocks=20, tensor_parallel_size=int(sys.argv[3]))
outputs = llm.generate([[5, 6, 7, 8, 9], [1, 2], [3]], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
print([output.outputs[0].token_ids for output in outputs])
"""
    alone, found = run(["-c", code, model(), "cpu", "1"], 1), run(["-c", code, model(), "cuda-sim", "2"])
    assert found.returncode == alone.returncode == 0, found.stderr
    assert found.stdout == alone.stdout and found.stdout.count(",") > 6


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("trouble", "device"), [("sum", "cpu"), ("padded-sum", "cpu"), ("layer", "reference")])
def test_a_step_that_fails_on_one_rank_fails_on_all(model: Any, trouble: str, device: str, rank: int) -> None:
    """Its requests end with an error that says what happened where, nobody waits, though the step may be padded, and the next
    requests are served."""
    keywords = {"model": model()} | TIGHT | {"device": device}
    with LLM(**keywords) as llm:
        [tokens, *_] = rank_program.survive(llm)
    done = run_program(2, trouble, str(rank), **keywords)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    error = "MemoryError: no room in a layer" if trouble == "layer" else "MemoryError: no room for a sum"
    expected = error if rank == 0 else f"RankError: rank 1 of 2 failed: {error}"
    assert sorted(map(str, results)) == sorted([expected, *[str(tokens)] * 4])
    assert results[0] == tokens and results[-1] == tokens  # it happened in between
    assert ("Traceback" in done.stderr) == (rank == 1)  # for whoever has to find out why


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_load_ends_all(model: Any, rank: int) -> None:
    """The one that failed says why, and so does rank 0."""
    done = run_program(2, "load", str(rank), model=model(), **TIGHT)
    assert done.returncode != 0
    assert "\nOSError: the disk is gone" in done.stderr
    assert ("RankError: rank 1 of 2 failed: OSError: the disk is gone" in done.stderr) == (rank == 1)


@pytest.mark.parametrize(
    ("different", "message"),
    [
        ("'num_blocks': 20 + rank", "rank 0 has num_blocks=20 and rank 1 21; all must be given the same"),
        ("'model': '/' * rank + keywords['model']", "rank 0 has model="),
    ],
)
def test_ranks_that_were_given_different_keywords_say_so(model: Any, different: str, message: str) -> None:
    """Nothing is loaded."""
    code = (
        "import json, sys; from mpi4py import MPI; from minipage import LLM; keywords = json.loads(sys.argv[1]);"
        f"rank = MPI.COMM_WORLD.Get_rank(); LLM(**(keywords | {{{different}}}))"
    )
    keywords = {"model": model(), "tensor_parallel_size": 2, "device": "cpu", "num_blocks": 20}
    done = run(["-c", f"import sys; sys.path.insert(0, '..'); {code}", json.dumps(keywords)])
    assert done.returncode != 0
    assert message in done.stderr


def test_a_program_on_all_ranks(model: Any) -> None:
    """Others than rank 0 never come back from ``LLM``, their exit code is 0, and there is no second LLM for them to serve."""
    code = """
import sys
sys.path.insert(0, "..")
from minipage import LLM, SamplingParams
keywords = {"device": "cpu", "num_blocks": 20, "tensor_parallel_size": 2}
print("before", flush=True)
with LLM(sys.argv[1], **keywords) as llm:
    [output] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
    print(len(output.outputs[0].token_ids), llm.engine.runner._device.num_threads, flush=True)
    for change in (llm.save_prefix_cache, llm.load_prefix_cache):
        try:
            change("cache.safetensors")
        except ValueError as error:
            print(error, flush=True)
try:
    LLM(sys.argv[1], **keywords)
except ValueError as error:
    print(error, flush=True)
"""
    done = run(["-c", code, model()])
    assert done.returncode == 0, done.stderr
    before, length, *errors = done.stdout.splitlines()
    assert before == "before" and done.others == ["before\n"]
    assert length == f"4 {max(1, physical_cores() // 2)}"  # ranks on the same cores share them
    assert [error.split(":")[0] for error in errors] == ["tensor_parallel_size=2"] * 3
    assert "neither saved nor loaded" in errors[0] and errors[1] == errors[0]
    assert "one LLM of several ranks a program" in errors[2]


def test_there_is_no_second_try_without_the_others(model: Any) -> None:
    """Where loading failed they have ended, and rank 0 says so rather than wait for them."""
    code = """
import sys
sys.path.insert(0, "..")
from minipage import LLM
for max_model_len in (5000, 100):
    try:
        LLM(sys.argv[1], device="cpu", num_blocks=20, max_model_len=max_model_len, tensor_parallel_size=2)
    except ValueError as error:
        print(error, flush=True)
"""
    done = run(["-c", code, model()])
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "max_model_len=5000" in first and "one LLM of several ranks a program" in second


def test_ctrl_c_is_for_rank_0(model: Any) -> None:
    """The terminal tells all processes, and the others go on to do what rank 0 makes of it."""
    code = """
import os, signal, sys
sys.path.insert(0, "..")
from mpi4py import MPI
from minipage import LLM, SamplingParams
_, other = MPI.COMM_WORLD.allgather(os.getpid())
llm = LLM(sys.argv[1], device="cpu", num_blocks=20, tensor_parallel_size=2)
for _ in range(2):
    [output] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
    print(len(output.outputs[0].token_ids), flush=True)
    os.kill(other, signal.SIGINT)
"""
    done = run(["-c", code, model()])
    assert (done.returncode, done.stdout) == (0, "4\n4\n"), done.stderr


@pytest.mark.parametrize("ending", ["raise KeyError('lost')", "sys.exit(3)", "os._exit(3)"])
def test_however_rank_0_ends_the_others_do_too(model: Any, ending: str) -> None:
    """An exception, an exit and a crash, all without a close."""
    code = (
        "import os, sys; sys.path.insert(0, '..'); from minipage import LLM;"
        "llm = LLM(sys.argv[1], device='cpu', num_blocks=20, tensor_parallel_size=2); llm.generate([[1, 2]], use_tqdm=False);"
        f"{ending}"
    )
    done = run(["-c", code, model()])
    assert done.returncode != 0


def test_the_command_line(model: Any, tmp_path: Path) -> None:
    """One rank prints; what only one rank could read is refused."""
    arguments = ["-m", "minipage", "generate", "-m", model(), "--device", "cpu", "--json", "--tensor-parallel-size=2"]
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_token_ids": [1, 2, 3]}\n{"prompt_token_ids": [4, 5]}\n')
    done = run([*arguments, "--num-blocks", "20", "--max-tokens", "3", "--file", str(file)])
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["prompt_token_ids"] for line in done.stdout.splitlines()] == [[1, 2, 3], [4, 5]]
    assert done.others == [""]
    bad = run([*arguments, "--file", str(file), "--quantization", "int8", "--num-blocks", "0"])
    assert bad.returncode == 2 and "num_blocks=0 is not allowed" in bad.stderr
    unfit = run([*arguments, "--file", str(file), "--max-model-len", "5000"])
    assert unfit.returncode == 2
    assert unfit.stderr.count("max_model_len=5000 is not allowed") == 1  # said by one rank for both
    refused = run(arguments)
    assert refused.returncode == 2
    assert "with --tensor-parallel-size give prompts as arguments or with --file" in refused.stderr


# ---- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 is not allowed; it must be an integer from 1 to 1024"),
        ({"tensor_parallel_size": 2}, "needs as many processes, and there are 1; allowed: 1, or .*mpiexec -n 2"),
    ],
)
def test_what_one_process_refuses(model: Any, keywords: dict[str, Any], message: str) -> None:
    """Before anything is loaded."""
    with pytest.raises(InvalidArgumentError, match=message):
        LLM(model(), device="cpu", **keywords)


def test_without_mpi(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra that brings it."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(InvalidArgumentError, match=r"tensor_parallel_size=2 needs MPI.*the extra minipage\[dist\]"):
        LLM(model(), device="cpu", tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("shape", "keywords", "message"),
    [
        ({"num_key_value_heads": 1}, {}, "the 1 key/value heads are not a multiple of it; this model allows 1$"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, {}, "the 3 key/value heads .*; this model allows 1, 3$"),
        ({"intermediate_size": 51}, {}, "the 51 columns of the MLP are not a multiple of it; this model allows 1$"),
        (
            {"intermediate_size": 96},
            {"quantization": "int8"},
            "each rank's 48 inputs of layers.0.down are not a multiple of 32, the size of a group of its kind, int8; .* 1$",
        ),
        (
            {"head_dim": 8},
            {"quantization": "int4"},
            "each rank's 16 inputs of layers.0.o are not a multiple of 32, the size of a group of its kind, int4; .* 1$",
        ),
    ],
)
def test_models_that_cannot_be_split(
    model: Any, shape: dict[str, Any], keywords: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names what does not divide, and the numbers of ranks that would."""
    monkeypatch.setattr("minipage.engine.loading.join_ranks", lambda size: Communicator())
    if "num_attention_heads" in shape:
        shape = shape | {"intermediate_size": 96}
    with pytest.raises(InvalidArgumentError, match=f"tensor_parallel_size=2 is not allowed: {message}"):
        LLM(model(**shape), device="cpu", tensor_parallel_size=2, **keywords)
