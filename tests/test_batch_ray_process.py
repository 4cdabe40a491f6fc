"""scripts/batch_ray.py in one process, with a stand-in for Ray: rounds, tasks, files and what the command line refuses."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers.talker import talker

from minipage import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "batch_ray.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the talker."""
    return str(talker(tmp_path_factory.mktemp("talker")))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("batch_ray", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def lines_of(file: Path) -> list[str]:
    """The lines that are there whole."""
    return file.read_text().split("\n")[:-1] if file.exists() else []


def arguments(tmp_path: Path, num_prompts: int, **changes: Any) -> argparse.Namespace:
    """What the command line says, for a file of so many prompts."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"id": i, "prompt": "a>"}) + "\n" for i in range(num_prompts)))
    given = {
        "prompts": file,
        "results": tmp_path / "results.jsonl",
        "num_workers": 2,
        "cpus_per_worker": None,
        "gpus_per_worker": 0,
        "num_blocks": 9,
    }
    return argparse.Namespace(**(given | changes))


def test_what_a_worker_leaves_is_served_in_another_round(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As long as a round brings something; then it is an error, and what is there stays."""
    rounds: list[list[int]] = []

    def run_round(tasks: Sequence[Any], results: Any, args: Any, bar: Any) -> list[str]:
        rounds.append([task.id for task in tasks])
        for task in tasks[: len(tasks) // 2]:
            results.add({"id": task.id, "outputs": []})
        return ["its machine went away"]

    monkeypatch.setattr(script, "run_round", run_round)
    monkeypatch.setattr(script, "start_ray", lambda args: None)
    with pytest.raises(ValueError, match="1 of 5 prompts are left, and no worker served any"):
        script.run(arguments(tmp_path, 5))
    assert rounds == [[0, 1, 2, 3, 4], [2, 3, 4], [3, 4], [4]]
    assert "a worker ended: its machine went away" in capsys.readouterr().err
    assert [json.loads(line)["id"] for line in lines_of(tmp_path / "results.jsonl")] == [0, 1, 2, 3]
    script.Results(tmp_path / "results.jsonl").close()  # another job may write there now


class Handle:
    """An actor of :class:`FakeRay`: ``handle.method.remote(...)`` is a call."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.actor, name)
        return SimpleNamespace(remote=method, options=lambda **options: SimpleNamespace(remote=method))


class FakeRay(ModuleType):
    """As much of Ray as the script asks for, in this process; what would be a reference is the thing itself."""

    exceptions = SimpleNamespace(RayError=type("RayError", (Exception,), {}))

    def __init__(self) -> None:
        super().__init__("ray")
        self.alive: list[Handle] = []

    def remote(self, kind: type) -> Any:
        def start(*args: Any) -> Handle:
            self.alive.append(Handle(kind(*args)))
            return self.alive[-1]

        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=start))

    def wait(self, streams: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        return streams[:1], streams[1:]

    def get(self, value: Any) -> Any:
        return value

    def kill(self, actor: Handle) -> None:
        self.alive.remove(actor)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """What the script imports as Ray."""
    monkeypatch.setitem(sys.modules, "ray", fake := FakeRay())
    return fake


def test_a_round_ends_all_that_it_began(
    script: ModuleType, ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a worker fails the others go on, and none of them is left to hold what those of the next round need."""
    keywords: list[dict[str, Any]] = []

    class Worker:
        def __init__(self, model: str | None, given: dict[str, Any]) -> None:
            keywords.append(given)
            self.fails = len(keywords) == 1

        def serve(self, queue: Handle) -> Iterator[dict[str, Any]]:
            while tasks := queue.take.remote(1):
                yield {"id": tasks[0].id, "outputs": []}
                if self.fails:
                    raise ray.exceptions.RayError("its machine went away")

    monkeypatch.setattr(script, "Worker", Worker)
    given = arguments(tmp_path, 5, model=None)
    results = script.Results(given.results)
    tasks = script.read_tasks(given.prompts, SamplingParams())
    failures = script.run_round(tasks, results, given, SimpleNamespace(update=lambda: None))
    results.close()
    assert failures == ["its machine went away"] and ray.alive == []
    assert results.done == {0, 1, 2, 3, 4}
    assert [each["num_threads"] for each in keywords] == [2, 2]  # of the cluster's 4


def test_a_worker_serves_what_it_has_room_for(script: ModuleType, ray: FakeRay, model: str) -> None:
    """Ids of both types are apart, each result comes once, and what cannot be served is told."""
    asked: list[int] = []
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=1)
    tasks = [script.Task(name, "a>", None, params) for name in (1, "1", 2, "x")]
    tasks.insert(2, script.Task("long", "x" * 5000, None, SamplingParams()))
    left = list(tasks)

    def take(most: int) -> list[Any]:
        asked.append(most)
        part, left[:] = left[:most], left[most:]
        return part

    worker = script.Worker(model, {"device": "reference", "num_blocks": 16, "max_num_seqs": 3})
    found = list(worker.serve(SimpleNamespace(take=SimpleNamespace(remote=take))))
    worker._llm.close()
    assert asked[:2] == [3, 1]  # two are running, and one was refused
    assert sorted(map(repr, (each["id"] for each in found))) == sorted(repr(task.id) for task in tasks)
    for each in found:
        if each["id"] == "long":
            assert "max_model_len" in each["error"]
        else:
            [output] = json.loads(json.dumps(each))["outputs"]
            assert len(output["token_ids"]) == len(output["logprobs"]) == 3
            assert all(
                str(token) in entry for token, entry in zip(output["token_ids"], output["logprobs"], strict=True)
            )


def test_a_worker_is_one_process(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """A model among several is for mpiexec, and no option of this program."""
    with pytest.raises(SystemExit):
        script.main(["prompts.jsonl", "results.jsonl", "--tensor-parallel-size=2"])
    assert "unrecognized arguments: --tensor-parallel-size=2" in capsys.readouterr().err


def test_tasks_are_taken_once_and_by_fewer_at_the_end(script: ModuleType) -> None:
    """A worker gets half of its share of what is left, or as much as it has room for."""
    queue = script.Queue(range(100), 2)
    taken = []
    while part := queue.take(20):
        taken.append(part)
    assert [task for part in taken for task in part] == list(range(100))
    assert [len(part) for part in taken][:4] == [20, 20, 15, 12] and len(taken[-1]) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not JSON", "line 2: Expecting value"),
        ("[1]", r'line 2: an object with "id", "prompt" or "messages", and "params" is wanted'),
        ('{"id": 1, "prompt": "a", "max_tokens": 3}', "line 2: an object"),
        ('{"prompt": "a"}', "line 2: id None is not allowed; it must be a string or an integer"),
        ('{"id": true, "prompt": "a"}', "line 2: id True is not allowed"),
        ('{"id": 0, "prompt": "a"}', "line 2: id 0 is that of an earlier line, too"),
        ('{"id": 1}', 'line 2: one of "prompt", a string, and "messages", a list, is wanted'),
        ('{"id": 1, "prompt": "a", "messages": []}', 'line 2: one of "prompt"'),
        ('{"id": 1, "prompt": "a", "params": {"max_tokens": -1}}', "line 2: max_tokens is -1"),
        ('{"id": 1, "prompt": "a", "params": {"no": 1}}', "line 2: .*unexpected keyword argument 'no'"),
        ('{"id": 1, "prompt": "a", "params": 3}', "line 2: params 3 is not allowed"),
        ('{"id": 1, "prompt": "\udcff"}', "line 2: 'utf-8' codec can't decode byte 0xff"),
        ('{"id": 1, "prompt": ' + "[" * 100_000, "line 2: .*(recursion|[Ss]tack)"),
    ],
)
def test_bad_lines_are_named_before_anything_starts(
    script: ModuleType, line: str, message: str, tmp_path: Path
) -> None:
    """With the file and the number of the line."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"id": 0, "prompt": "a"}}\n{line}\n', errors="surrogateescape")
    with pytest.raises(ValueError, match=message):
        script.read_tasks(file, SamplingParams())


def test_a_result_without_its_newline_is_computed_again(script: ModuleType, tmp_path: Path) -> None:
    """A line that only lacks its end is dropped as any that was cut is, so that the next one does not join it."""
    file, whole = tmp_path / "results.jsonl", b'{"id": 1, "outputs": []}\n'
    for cut in range(1, len(whole)):
        file.write_bytes(whole.replace(b"1", b"0") + whole[:cut])
        results = script.Results(file)
        results.close()
        assert results.done == {0} and file.read_bytes() == whole.replace(b"1", b"0")


def test_the_file_of_results(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One job at a time writes it, nothing that is none of its own is overwritten, and no half of a result is one."""
    file = tmp_path / "results.jsonl"
    results = script.Results(file)
    results.add({"id": "a", "outputs": []})
    with pytest.raises(ValueError, match="is being written by another job"):
        script.Results(file)
    results.close()
    results = script.Results(file)
    assert results.done == {"a"}
    monkeypatch.setattr(script.os, "write", lambda file, line: len(line) - 1)
    with pytest.raises(OSError, match="no room for another result"):
        results.add({"id": "b", "outputs": []})
    assert results.done == {"a"}
    results.close()
    prompt = '{"id": 1, "prompt": "a"}'  # of a file that was given for both; its last line may lack an end
    for foreign in ("some text\n", "some text", "[1]\n", '{"name": 3}\n', prompt, prompt + "\n"):
        file.write_text(foreign)
        with pytest.raises(ValueError, match="line 1 is not a result of this program"):
            script.Results(file)
        assert file.read_text() == foreign


def test_what_the_command_line_refuses(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Ray is started; and what is missing where there is none."""
    for name, value in (("num_workers", 0), ("cpus_per_worker", 0), ("gpus_per_worker", -1)):
        with pytest.raises(ValueError, match=f"{name}={value} is not allowed"):
            script.run(arguments(tmp_path, 1, **{name: value}))
    unsized = arguments(tmp_path, 1)
    del unsized.num_blocks
    with pytest.raises(ValueError, match="give --kv-cache-memory or --num-blocks"):
        script.run(unsized)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"needs Ray, .* allowed: with minipage\[dist\]"):
        script.run(arguments(tmp_path, 1))
