#!/usr/bin/env python3
"""Complete a file of prompts on many machines: a Ray job in which each worker has an engine of its own.

    python scripts/batch_ray.py prompts.jsonl results.jsonl --num-workers 2 --kv-cache-memory 1GiB
    python scripts/batch_ray.py prompts.jsonl results.jsonl --address auto --num-workers 16 --gpus-per-worker 1 -m org/name

A line of the first file is an object with "id" (a string or an integer, each once), "prompt" or "messages", and, where it is to
differ from the options of the command line, "params", fields of SamplingParams. A line of the second file is the result of one
prompt, with its "id", in the order in which they are done; what cannot be served has an "error" in place of "outputs".

The job may be ended at any time, by any means. Started again, it computes what has no result yet.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the clone that this file is in, if it is in one

from tqdm import tqdm

from minipage import SamplingParams
from minipage.cli.console import run_guarded
from minipage.cli.options import add_engine_options, add_sampling_options, engine_keywords, sampling_params
from minipage.config import EngineConfig

AT_ONCE = 256  #: prompts that a worker has in its engine, if it is not told max_num_seqs
BEGINNING = b'{"id": '  #: of a line of results
Id = str | int


class Task(NamedTuple):
    """A line of the file of prompts."""

    id: Id
    prompt: str | None
    messages: list[dict[str, Any]] | None
    params: SamplingParams


# ---- files -----------------------------------------------------------------------------------------------------------


def read_tasks(file: Path, defaults: SamplingParams) -> list[Task]:
    """All lines of the file; ValueError names the first that is not as it should be."""
    tasks: dict[Id, Task] = {}
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    task = parse_task(line.decode(), defaults)
                    if task.id in tasks:
                        raise ValueError(f"id {task.id!r} is that of an earlier line, too; ids must be different")
                except (TypeError, ValueError, RecursionError) as error:
                    raise ValueError(f"{file}, line {number}: {error}") from error
                tasks[task.id] = task
    return list(tasks.values())


def parse_task(line: str, defaults: SamplingParams) -> Task:
    """A line as a task; ``defaults`` are the parameters that it does not name. ValueError or TypeError says what is wrong."""
    fields = json.loads(line)
    if not isinstance(fields, dict) or not set(fields) <= {"id", "prompt", "messages", "params"}:
        raise ValueError(
            f'an object with "id", "prompt" or "messages", and "params" is wanted, not {line.strip()[:80]}'
        )
    own_id, prompt, messages = fields.get("id"), fields.get("prompt"), fields.get("messages")
    if not isinstance(own_id, Id) or isinstance(own_id, bool):
        raise ValueError(f"id {own_id!r} is not allowed; it must be a string or an integer")
    if isinstance(prompt, str) == isinstance(messages, list):
        raise ValueError('one of "prompt", a string, and "messages", a list, is wanted')
    params = fields.get("params", {})
    if not isinstance(params, dict):
        raise ValueError(f"params {params!r} is not allowed; it must be an object of fields of SamplingParams")
    return Task(own_id, prompt, messages, dataclasses.replace(defaults, **params))


def id_of_result(line: bytes) -> Id:
    """The id in a line of results; ValueError where it is no JSON, TypeError where it is something else, such as a prompt."""
    fields = json.loads(line)
    if not isinstance(fields, dict) or not {"outputs", "error"} & fields.keys() or not isinstance(fields.get("id"), Id):
        raise TypeError("not an object with an id, and outputs or an error")
    own_id: Id = fields["id"]
    return own_id


class Results:
    """The file of results, held open and locked; what ``done`` lists is in it."""

    def __init__(self, path: Path) -> None:
        """Drops a last line that was begun and not finished. ValueError where another job has the file, or it is none of ours."""
        self.done: set[Id] = set()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._read(path)
        except BaseException:
            self.close()
            raise

    def _read(self, path: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"{path} is being written by another job; wait for it, or name another file") from error
        size = 0
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                is_cut = not line.endswith(b"\n")
                try:
                    own_id = id_of_result(line)
                except (ValueError, TypeError, RecursionError) as error:
                    if is_cut and isinstance(error, ValueError) and line[: len(BEGINNING)] == BEGINNING[: len(line)]:
                        break
                    raise ValueError(f"{path}, line {number} is not a result of this program: {line[:80]!r}") from error
                if is_cut:
                    break
                size += len(line)
                self.done.add(own_id)
        os.ftruncate(self._file, size)

    def add(self, result: dict[str, Any]) -> None:
        """Append a result, so that whoever reads the file finds it whole or, but for its end, not at all."""
        line = json.dumps(result).encode() + b"\n"
        if os.write(self._file, line) != len(line):
            raise OSError("there is no room for another result")
        self.done.add(result["id"])

    def close(self) -> None:
        """Let others write."""
        os.close(self._file)


# ---- Ray: what runs elsewhere ----------------------------------------------------------------------------------------


class Queue:
    """The tasks that no worker has taken; one for all workers."""

    def __init__(self, tasks: Sequence[Task], num_workers: int) -> None:
        self._tasks = list(reversed(tasks))
        self._num_workers = num_workers

    def take(self, most: int) -> list[Task]:
        """Some tasks, none where all are taken. What one call gets becomes less towards the end, so that all workers end
        at about the same time.
        """
        fair = -(-len(self._tasks) // (2 * self._num_workers))
        return [self._tasks.pop() for _ in range(min(most, fair))]


class Worker:
    """An engine that serves tasks."""

    def __init__(self, model: str | None, keywords: dict[str, Any]) -> None:
        from minipage import LLM

        self._llm = LLM(model, **keywords)
        self._at_once = keywords.get("max_num_seqs", AT_ONCE)

    def serve(self, queue: Any) -> Iterator[dict[str, Any]]:
        """Take tasks from the queue until there are no more, and yield the results, each as soon as it is there."""
        import ray

        engine = self._llm.engine
        running: dict[str, Id] = {}
        finished: list[Any] = []
        is_open = True
        while is_open or running:
            if is_open and len(running) < self._at_once:
                tasks = ray.get(queue.take.remote(self._at_once - len(running)))
                is_open = bool(tasks)
                for task in tasks:
                    name = json.dumps(task.id)
                    try:
                        request = engine.prepare(name, self._prompt(task), task.params)
                        engine.submit(request, on_output=finished.append, final_only=True)
                    except ValueError as error:
                        yield {"id": task.id, "error": str(error)}
                    else:
                        running[name] = task.id
            engine.step()
            ready, finished[:] = list(finished), []
            for output in ready:
                yield {"id": running.pop(output.request_id)} | result_of(output)

    def _prompt(self, task: Task) -> Any:
        from minipage.text.chat import encode_chat, render_chat

        if task.messages is None:
            return task.prompt
        tokenizer = self._llm.engine.tokenizer
        if tokenizer is None:
            raise ValueError('"messages" need a model with a tokenizer')
        ids = encode_chat(tokenizer, task.messages)
        return {"prompt": render_chat(tokenizer, task.messages), "prompt_token_ids": ids}


def result_of(output: Any) -> dict[str, Any]:
    """What is kept of a RequestOutput."""
    names = ("index", "text", "token_ids", "finish_reason", "cumulative_logprob", "logprobs")
    outputs = [{name: dataclasses.asdict(completion)[name] for name in names} for completion in output.outputs]
    return {"num_prompt_tokens": len(output.prompt_token_ids), "outputs": outputs}


# ---- the job ---------------------------------------------------------------------------------------------------------


def run_round(tasks: Sequence[Task], results: Results, args: argparse.Namespace, bar: Any) -> list[str]:
    """Have all tasks served by new workers, and write what they yield; returns what workers failed of."""
    import ray

    keywords = engine_keywords(args)
    cpus = args.cpus_per_worker or max(1, int(ray.cluster_resources().get("CPU", 1)) // args.num_workers)
    keywords.setdefault("num_threads", cpus)
    new_worker = ray.remote(Worker).options(num_cpus=cpus, num_gpus=args.gpus_per_worker)
    num_workers = min(args.num_workers, len(tasks))
    queue = ray.remote(Queue).options(num_cpus=0).remote(tasks, num_workers)
    workers = [new_worker.remote(args.model, keywords) for _ in range(num_workers)]
    streams = [worker.serve.options(num_returns="streaming").remote(queue) for worker in workers]
    failures = []
    while streams:
        [stream], _ = ray.wait(streams, num_returns=1)
        try:
            results.add(ray.get(next(stream)))
            bar.update()
        except StopIteration:
            streams.remove(stream)
        except ray.exceptions.RayError as error:  # the worker's own error, or its end, or its machine's
            streams.remove(stream)
            failures.append(str(error))
    for actor in (*workers, queue):
        ray.kill(actor)
    return failures


def run(args: argparse.Namespace) -> int:
    """Serve what has no result yet, in rounds for as long as they bring any: a worker that ended left what it had taken."""
    config = EngineConfig(**engine_keywords(args))
    for name, least in (("num_workers", 1), ("cpus_per_worker", 1), ("gpus_per_worker", 0)):
        if (value := getattr(args, name)) is not None and value < least:
            raise ValueError(f"{name}={value} is not allowed; it must be at least {least}")
    if args.num_workers > 1 and not args.gpus_per_worker and config.num_blocks is config.kv_cache_memory is None:
        raise ValueError(
            "give --kv-cache-memory or --num-blocks: workers of one machine would each take half of its memory"
        )
    tasks, results = read_tasks(args.prompts, sampling_params(args)), Results(args.results)
    left = [task for task in tasks if task.id not in results.done]
    try:
        with tqdm(total=len(tasks), initial=len(tasks) - len(left), desc="Prompts", disable=None) as bar:
            if left:
                start_ray(args)
            while left:
                failures = run_round(left, results, args, bar)
                before, left = left, [task for task in left if task.id not in results.done]
                for failure in failures:
                    bar.write(f"batch_ray.py: a worker ended: {failure.strip()}", file=sys.stderr)
                if len(left) == len(before):
                    raise ValueError(
                        f"{len(left)} of {len(tasks)} prompts are left, and no worker served any; see above why"
                    )
    finally:
        results.close()
    return 0


def start_ray(args: argparse.Namespace) -> None:
    """Join the cluster at ``--address``, or start one of this machine."""
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            f"this program needs Ray, which cannot be imported ({error}); allowed: with minipage[dist]"
        ) from error
    paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, paths))}}
    own = {} if args.address else {"include_dashboard": False}
    ray.init(address=args.address, runtime_env=environment, log_to_driver=args.verbose, logging_level="WARNING", **own)


def main(argv: Sequence[str] | None = None) -> int:
    """Read the arguments and run; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Complete a file of prompts on many machines, with Ray.",
        epilog="What files hold is at the top of this one.",
    )
    parser.add_argument("prompts", type=Path, help="JSON lines with an id and a prompt each")
    parser.add_argument(
        "results", type=Path, help="where a line is appended for each; what is there is not computed again"
    )
    parser.add_argument("--num-workers", type=int, default=1, metavar="N", help="engines (default: 1)")
    parser.add_argument("--cpus-per-worker", type=int, metavar="N", help="default: an even share of the cluster's")
    parser.add_argument("--gpus-per-worker", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument(
        "--address", help='of a Ray cluster, such as "auto" on one of its machines; default: this machine alone'
    )
    add_sampling_options(parser)
    add_engine_options(parser, without=("tensor_parallel_size",))  # a worker is one process
    args = parser.parse_args(argv)
    return run_guarded("batch_ray.py", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
