"""The measurement: who takes turns with whom, and what becomes of the readings."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from minipage.errors import InvalidArgumentError
from minipage.weights.gguf import open_gguf

from . import processes
from .checkpoints import KINDS, gguf_of_kind, hugging_face_folder, weight_bytes
from .processes import OURS, EngineFailed, Side, Worker
from .report import Results
from .roof import ReadRoof
from .tasks import PROMPT, SHORT_CONTEXT, Settings, Task, decode_steps

SIXTEEN_BITS = ("bfloat16", "float16")
#: The number formats that a side is measured in: those that it has on a CPU.
KINDS_OF = {
    OURS: tuple(KINDS),
    "llama.cpp": tuple(KINDS),
    "transformers": ("float32", "bfloat16"),
    "ctranslate2": ("float32", "int8"),
}
#: These convert a Hugging Face folder; the others read a GGUF file of each format.
FOLDER_READERS = ("transformers", "ctranslate2")
PAUSE_S = 0.05  #: after a side's turn, for its threads to go to sleep


class Bench:
    """What was asked for (the options of bench_decode.py), and what was measured of it so far."""

    def __init__(self, args: argparse.Namespace, model: Path, sides: Sequence[Side]) -> None:
        self.args = args
        self.model = model
        self.sides = list(sides)
        self.results = Results()
        source = open_gguf(model)
        source.close()
        self.config = source.config
        for kind in args.kinds:
            for task in self.tasks(kind):
                if task.longest > (most := self.config["max_position_embeddings"]):
                    raise InvalidArgumentError(
                        f"{task.name} takes {task.longest} tokens; allowed: {most}, as the model takes"
                    )
        self.roof = ReadRoof(args.threads, (16 if args.quick else 512) << 20)

    def run(self) -> None:
        """Measure everything, number format by number format. Raises EngineFailed where minipage fails."""
        for kind in self.args.kinds:
            if "memory" in self.args.parts:
                for side in self.turns(kind, 0):
                    self.measure_memory(side, kind)
            with ExitStack() as stack:
                self.run_rounds(kind, stack)
            self.add_shares_of_roof(kind)

    def run_rounds(self, kind: str, stack: ExitStack) -> None:
        """All rounds of a format. ``stack`` closes the workers; the first round opens them and warms up, unmeasured."""
        tasks, workers = self.tasks(kind), dict[str, Worker]()
        for number in range(-1, self.args.rounds):
            say(f"{kind}: " + (f"round {number + 1} of {self.args.rounds}" if number >= 0 else "warming up"))
            if number >= 0:
                self.results.add("read_roof", OURS, self.roof.measure() / 1e9, "GB/s")
            for task in tasks:
                for side in self.turns(kind, number):
                    with self.turn_of(side, kind):
                        if side.name not in workers:
                            workers[side.name] = self.open(side, kind, tasks, stack)
                        self.measure(workers[side.name], kind, task, number)
            if "ttft" in self.args.parts:
                for side in self.turns(kind, number):
                    self.measure_first_token(side, kind, number)

    def open(self, side: Side, kind: str, tasks: Sequence[Task], stack: ExitStack) -> Worker:
        """A warm process for a side."""
        worker = stack.enter_context(Worker(side, self.settings(side, kind, tasks), self.environment(side)))
        say(f"{kind}: {worker.about}")
        return worker

    def measure(self, worker: Worker, kind: str, task: Task, number: int) -> None:
        """One task on one side."""
        timed = worker.run(task)
        if number >= 0:
            self.results.add(f"{task.name}/{kind}", worker.side.name, timed["tokens"] / timed["seconds"], "tok/s")

    def tasks(self, kind: str) -> tuple[Task, ...]:
        """What is asked of the warm workers of a format."""
        args, tasks = self.args, []
        if "prefill" in args.parts:
            tasks.append(Task(context=args.prefill))
        if "decode" in args.parts:
            tasks += [Task(batch, steps=2 if args.quick else decode_steps(batch)) for batch in args.batches]
        if "context" in args.parts and kind in SIXTEEN_BITS:
            tasks.append(Task(context=args.context, steps=2 if args.quick else 32))
        return tuple(tasks)

    def turns(self, kind: str, number: int) -> list[Side]:
        """The sides that have a format, in the order of a round: every other one begins with the last."""
        sides = [side for side in self.sides if kind in KINDS_OF[side.name]]
        return sides[::-1] if number % 2 else sides

    @contextmanager
    def turn_of(self, side: Side, kind: str) -> Iterator[None]:
        """A peer that fails in its turn is left out from there on; minipage must not fail."""
        try:
            yield
        except EngineFailed as error:
            if side.name == OURS:
                raise
            say(f"{kind}: {error}; left out from here on")
            self.sides.remove(side)
        time.sleep(PAUSE_S)

    def settings(self, side: Side, kind: str, tasks: Sequence[Task]) -> Settings:
        """What a side is opened with: the GGUF file of the format, or a folder in float32."""
        if side.name in FOLDER_READERS:
            path = hugging_face_folder(self.model, self.args.cache)
        else:
            path = gguf_of_kind(self.model, kind, self.args.cache)
        return Settings(str(path), kind, self.args.threads, tuple(tasks), self.args.device)

    def environment(self, side: Side) -> dict[str, str]:
        """The environment of a side's processes."""
        return processes.environment(side, self.args.passive_peers)

    def measure_first_token(self, side: Side, kind: str, number: int) -> None:
        """A process from its start to its first token."""
        command = processes.first_token_command(side, self.settings(side, kind, ()), PROMPT, self.args.llama_cli)
        with self.turn_of(side, kind):
            seconds = processes.seconds_to_first_token(command, self.environment(side), PROMPT)
            if number >= 0:
                self.results.add(f"ttft/{kind}", side.name, seconds, "s")

    def measure_memory(self, side: Side, kind: str) -> None:
        """The most that a process has resident that does one prefill, and decodes one sequence."""
        tasks = (Task(context=self.args.prefill), Task(steps=16))
        settings = self.settings(side, kind, tasks)
        with self.turn_of(side, kind), Worker(side, settings, self.environment(side)) as worker:
            peak = [worker.run(task)["peak_bytes"] for task in tasks][-1]
            self.results.add(f"memory/{kind}", side.name, peak / 2**20, "MiB")

    def add_shares_of_roof(self, kind: str) -> None:
        """Of decode at batch 1: the bytes that its steps have to read a second, by those that the machine can read."""
        roof = self.results.median("read_roof", OURS)
        for task in self.tasks(kind):
            if task.steps == 0 or task.batch != 1 or roof is None:
                continue
            num_bytes = weight_bytes(gguf_of_kind(self.model, kind, self.args.cache))
            if task.context != SHORT_CONTEXT:
                num_bytes += 2 * task.context * self.kv_numbers
            for side in self.turns(kind, 0):
                speed = self.results.median(f"{task.name}/{kind}", side.name)
                if speed is not None:
                    share = speed * num_bytes / 1e9 / roof
                    self.results.add(f"roof_share/{task.name}/{kind}", side.name, share, "fraction")

    @property
    def kv_numbers(self) -> int:
        """How many numbers the K and V of a token are, in all layers."""
        config = self.config
        return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])


def say(text: str) -> None:
    """Progress, for who waits."""
    print(text, file=sys.stderr, flush=True)
