"""scripts/bench_memory.py, run small: what it counts, models, claims and draws."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.talker import talker
from hypothesis import given, settings
from hypothesis import strategies as st

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.append(str(SCRIPTS))

from memory_bench import paper, plots, sharing, swapping  # noqa: E402
from memory_bench.contiguous import POLICIES, BuddyAllocator, ContiguousSystem, next_power_of_two  # noqa: E402
from memory_bench.paged import PagedSystem  # noqa: E402
from memory_bench.replay import KV_SLOTS, OPT_13B, Iteration, System, Usage, replay  # noqa: E402
from memory_bench.report import Row  # noqa: E402
from memory_bench.trace import ALPACA, SHAREGPT, Piece, TraceRequest, at_once, made_up  # noqa: E402
from memory_bench.waste import BLOCK_SIZES, Setting, waste  # noqa: E402


@pytest.fixture(scope="module")
def bench_memory() -> ModuleType:
    """The script as a module."""
    return importlib.import_module("bench_memory")


def request(prompt: int, output: int, arrival: float = 0.0) -> TraceRequest:
    return TraceRequest(arrival, (Piece(1, prompt),), output)


# ---- contiguous memory -----------------------------------------------------------------------------------------------


@given(num_slots=st.integers(1, 300), data=st.data())
@settings(max_examples=200, deadline=None)
def test_chunks_never_overlap(num_slots: int, data: st.DataObject) -> None:
    """Chunks of the buddy allocator are powers of two, aligned, apart from each other and in range; all free, all is as new."""
    allocator = BuddyAllocator(num_slots)
    taken: dict[int, int] = {}
    for _ in range(data.draw(st.integers(0, 30))):
        if taken and data.draw(st.booleans()):
            address = data.draw(st.sampled_from(sorted(taken)))
            allocator.free(address)
            del taken[address]
            continue
        size = next_power_of_two(data.draw(st.integers(1, num_slots)))
        address_or_none = allocator.allocate(size)
        if address_or_none is not None:
            assert address_or_none % size == 0 and address_or_none + size <= num_slots
            taken[address_or_none] = size
    places = sorted(taken.items())
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(places))
    for address in taken:
        allocator.free(address)
    largest = 1 << (num_slots.bit_length() - 1)
    assert allocator.allocate(largest) == 0


def test_seven_of_the_longest_fit_the_paper_s_gpu() -> None:
    """15,728 slots (table 1: 15.7K) hold 7 reservations of 2048, as figure 13 counts."""
    assert KV_SLOTS == 15_728
    allocator = BuddyAllocator(KV_SLOTS)
    assert [allocator.allocate(2048) is None for _ in range(8)] == [False] * 7 + [True]


def test_what_each_policy_reserves() -> None:
    """The paper's example: an output of 25 tokens gets 32 places from Pow2; Max gives all, the oracle what is needed."""
    reserved = {name: policy(request(100, 25), 2048) for name, policy in POLICIES.items()}
    assert reserved == {"static_max": 2048, "static_pow2": 132, "oracle": 125}


def test_a_step_of_contiguous_memory_by_hand() -> None:
    """A prompt of 3 and an output of 5 in 64 slots: 8 reserved for 3 + 8, of which 7 will be used, the rest is outside."""
    system = ContiguousSystem(64, POLICIES["static_pow2"], 32)
    system.add(request(3, 5))
    first = system.step()
    assert first is not None and first.num_tokens == 3
    assert first.usage[:5] == (3, 4, 4, 53, 1)
    rest = list(iter(system.step, None))
    assert [step.num_tokens for step in rest] == [1] * 4
    assert [len(step.finished) for step in rest] == [0, 0, 0, 1]


@pytest.mark.parametrize("name", ["paged", *POLICIES])
def test_every_slot_is_counted_once(name: str) -> None:
    """In every step the four uses add up to all slots, and no request is lost."""
    requests = at_once(made_up(ALPACA, 40, 256))
    system: System = PagedSystem(1000, 16) if name == "paged" else ContiguousSystem(1000, POLICIES[name], 256)
    for each in requests:
        system.add(each)
    steps = list(iter(system.step, None))
    assert all(sum(step.usage[:4]) == 1000 for step in steps)
    assert sorted(each for step in steps for each in step.finished) == sorted(requests)
    assert sum(step.num_tokens for step in steps) >= sum(each.num_tokens - 1 for each in requests)


# ---- sharing ---------------------------------------------------------------------------------------------------------


def test_blocks_saved_by_hand() -> None:
    """Two samples of a prompt of 35 tokens with 20 of output share its two full blocks in every step but the prompt's own.

    The prompt's step has 3 blocks in one table. In step t of the other 19 the two tables have ceil((35 + t) / 16) blocks each.
    """
    system = PagedSystem(1024, 16, n=2)
    system.add(request(35, 20))
    steps = list(iter(system.step, None))
    entries = [3, *(2 * -(-(35 + t) // 16) for t in range(1, 20))]
    assert [step.usage.table_entries for step in steps] == entries
    assert [step.usage.held_blocks for step in steps] == [3, *(count - 2 for count in entries[1:])]


def test_more_samples_save_more() -> None:
    """And never more than the prompt's share of (n - 1) / n, by the definition of figure 15."""
    setting = Setting(made_up(SHAREGPT, 12, 512), KV_SLOTS, 512, "", "sharegpt")
    rows = list(sharing.parallel(setting))
    assert [row.name for row in rows] == [f"sharing/parallel/sharegpt/{n}" for n in (2, 4, 6)]
    assert rows[0].value < rows[1].value < rows[2].value
    assert rows[2].value == pytest.approx(rows[0].value * (5 / 6) / (1 / 2), rel=0.05)
    assert rows[0].reference == 0.162


def test_a_shared_prefix_is_held_once() -> None:
    """With a prefix of 341 tokens, most blocks are saved and several times as many requests run as without sharing."""
    values = {row.name: row.value for row in sharing.shared_prefix(400, KV_SLOTS, 0)}
    assert values["sharing/prefix/341"] > values["sharing/prefix/80"] > 0.4
    assert values["prefix/throughput_vs_oracle/341"] > values["prefix/throughput_vs_oracle/80"] > 1.5


# ---- the whole -------------------------------------------------------------------------------------------------------


def test_the_claims_hold_in_a_short_run() -> None:
    """What the paper says of ShareGPT-like lengths: over 96% useful, static 15 to 45%, twice the oracle's requests and four
    times those of reserving the maximum.
    """
    setting = Setting(made_up(SHAREGPT, 120, 2048), KV_SLOTS, 2048, "", "sharegpt")
    values = {row.name: row.value for row in waste(setting)}
    assert values["useful_kv/paged/16"] >= 0.96
    for name in POLICIES:
        assert 0.15 <= values[f"useful_kv/{name}"] <= 0.45
        assert sum(
            values[f"{kind}_kv/{name}"] for kind in ("useful", "reserved", "internal", "external")
        ) == pytest.approx(1)
    assert values["concurrency/static_max"] == pytest.approx(7)
    assert values["concurrency/vs_oracle"] >= 2 and values["concurrency/vs_max"] >= 4


def test_swapping_in_a_replay_moves_blocks_and_takes_time() -> None:
    """Where memory is short, the scheduler swaps; what it moves is counted, both ways, and slows the replay."""
    system = PagedSystem(640, 16, swap=True)
    for each in at_once(made_up(ALPACA, 40, 256)):
        system.add(each)
    steps = list(iter(system.step, None))
    counters = system.scheduler.counters
    assert counters.preemptions > 0 and counters.swapped_in_blocks == counters.swapped_out_blocks > 0
    assert sum(step.num_swapped_blocks for step in steps) == 2 * counters.swapped_out_blocks
    moving = next(step for step in steps if step.num_swapped_blocks)
    still = moving._replace(num_swapped_blocks=0)
    assert OPT_13B.seconds(moving, 16) > OPT_13B.seconds(still, 16)


def test_the_model_of_swapping_is_near_the_paper_s() -> None:
    """Within a tenth of figure 19a at every block size, and of the time to recompute within 15%."""
    rows = {row.name: row for row in swapping.modelled()}
    for size in BLOCK_SIZES:
        ratio = rows[f"swap_ms/modelled/{size}"].ratio
        assert ratio is not None and abs(ratio - 1) < 0.1
    assert rows["recompute_ms/modelled"].ratio == pytest.approx(1, abs=0.15)


class OneMoreEachStep:
    """Admits a request in each step, and ends it; the step's number is the number of useful slots."""

    def __init__(self) -> None:
        self.waiting: list[TraceRequest] = []
        self.steps = 0

    def add(self, item: TraceRequest) -> None:
        self.waiting.append(item)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def step(self) -> Iteration | None:
        if not self.waiting:
            return None
        self.steps += 1
        return Iteration(1, 0, 0, Usage(self.steps, 0, 0, 0, 1), [self.waiting.pop(0)])


@pytest.mark.parametrize(("skip", "mean"), [(0.5, 3.5), (0.25, 3.0), (0, 2.5)])
def test_a_replay_measures_what_comes_after_the_start(skip: float, mean: float) -> None:
    """Of four steps of equal length, each admitting one of four requests, those after ``skip`` of the requests."""
    measured = replay(OneMoreEachStep(), [request(1, 10)] * 4, skip=skip)
    step = OPT_13B.seconds(Iteration(1, 0, 0, Usage(0, 0, 0, 0, 0), ()), 16)
    assert measured.usage.useful == pytest.approx(mean)
    assert measured.finished == 4 - 4 * skip
    assert measured.throughput == pytest.approx(1 / step)
    assert measured.latencies[-1] == pytest.approx(4 * step / 10)


def test_a_replay_with_too_few_requests_says_so() -> None:
    """Instead of dividing by nothing."""
    with pytest.raises(ValueError, match="1 requests are too few"):
        replay(PagedSystem(1024, 16), [request(4, 2)])


def test_parts_on_a_model(bench_memory: ModuleType, tmp_path: Path, capsys: Any) -> None:
    """Beams and swaps run on a model of one's own; beams save something, and at most what all but one beam hold."""
    model = str(talker(tmp_path, max_position_embeddings=1024))
    options = ["--model", model, "--device", "reference", "--beam-requests", "1", "--requests", "40"]
    path = tmp_path / "rows.json"
    assert bench_memory.main(["--parts", "beams", "swap", *options, "--json", str(path)]) == 0
    rows = {row["name"]: row for row in json.loads(path.read_text())}
    for dataset, width in itertools.product(("alpaca", "sharegpt"), (2, 4, 6)):
        assert 0 < rows[f"sharing/beam/{dataset}/{width}"]["value"] < 1 - 1 / width
    assert all(rows[f"swap_ms/measured/{size}"]["value"] > 0 for size in BLOCK_SIZES)
    assert "sharing/beam/alpaca/4" in capsys.readouterr().out


def test_a_trace_file_from_end_to_end(bench_memory: ModuleType, tmp_path: Path, capsys: Any) -> None:
    """Its rows have no paper's figure beside them; what its prompts have in common is found in the prefix cache."""
    lines = [
        json.dumps({"timestamp": 400 * i, "input_length": 600, "output_length": 20, "hash_ids": [0, i + 1]})
        for i in range(80)
    ]
    path, out = tmp_path / "trace.jsonl", tmp_path / "rows.json"
    path.write_text("\n".join(lines))
    assert bench_memory.main(["--trace", str(path), "--parts", "waste", "prefix", "--json", str(out)]) == 0
    rows = {row["name"]: row for row in json.loads(out.read_text())}
    assert all(row["reference"] is None and row["ratio"] is None for row in rows.values())
    assert rows["prefix/hit_tokens"]["value"] == pytest.approx(79 / 80 * 512 / 600)
    assert "useful_kv/paged/16" in capsys.readouterr().out


def test_rows_are_written_as_promised(tmp_path: Path) -> None:
    """Objects with name, value, unit, reference and ratio; the ratio is to the reference."""
    report = importlib.import_module("memory_bench.report")
    rows = [Row("a/b", 3.0, "x", 2.0), Row("c", 0.5, "fraction")]
    report.write_json(rows, tmp_path / "rows.json")
    assert json.loads((tmp_path / "rows.json").read_text()) == [
        {"name": "a/b", "value": 3.0, "unit": "x", "reference": 2.0, "ratio": 1.5},
        {"name": "c", "value": 0.5, "unit": "fraction", "reference": None, "ratio": None},
    ]
    lines = report.table(rows).splitlines()
    assert lines[1].split() == ["a/b", "3.00x", "2.00x", "1.50"] and lines[2].split() == ["c", "50.0%"]


def all_rows() -> list[Row]:
    """A row of every name that plots use, with some value."""
    names = [f"{kind}_kv/{name}" for kind in ("useful", "reserved", "internal", "external") for name in POLICIES]
    for prefix in ("", "alpaca/"):
        names += [f"concurrency/{prefix}{name}" for name in ("paged", *POLICIES)]
        names += [f"{kind}/{prefix}paged/{size}" for kind in ("useful_kv", "concurrency") for size in BLOCK_SIZES]
    names += [f"sharing/{kind}/{dataset}/{n}" for kind, dataset in paper.SAVED for n in (2, 4, 6)]
    names += [f"swap_ms/{kind}/{size}" for kind in ("modelled", "measured") for size in BLOCK_SIZES]
    names += ["recompute_ms/modelled", "recompute_ms/measured"]
    return [Row(name, 0.2, "fraction", 0.3 if index % 2 else None) for index, name in enumerate(names)]


def test_plots_are_drawn_where_their_rows_are(tmp_path: Path) -> None:
    """Five PNG files from all rows, only one from those of sharing."""
    plots.draw(all_rows(), tmp_path / "all")
    drawn = sorted(path.name for path in (tmp_path / "all").iterdir())
    assert drawn == ["block_size.png", "concurrency.png", "sharing.png", "swap.png", "waste.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "all").iterdir())
    plots.draw([row for row in all_rows() if row.name.startswith("sharing")], tmp_path / "some")
    assert [path.name for path in (tmp_path / "some").iterdir()] == ["sharing.png"]
