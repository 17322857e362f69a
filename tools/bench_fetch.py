#!/usr/bin/env python3
"""Times what an on-demand step adds to a layer, on the GPU of this machine: fetch and resolve.

    python tools/bench_fetch.py
    python tools/bench_fetch.py --row-mib 2.5 --json out.json

Gathers come first in every form that the kernels have, then the best of each over numbers of rows,
each compared with one copy of as many bytes and checked byte for byte. Times within a step are per
launch, of graphs of many launches.
"""

from __future__ import annotations

import argparse
import json
import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from freetoken.kernels import cuda_library, pinned, slot_tables
from freetoken.kernels.cuda_library import FETCH_TUNING, FetchTuning
from freetoken.kernels.slot_ops import build_queue, resolve
from freetoken.kernels.slot_tables import SlotTables

LAYERS, EXPERTS, TOP_K = 16, 128, 8
LAUNCHES = 100
REPEATS = 5
COUNTS = (4, 8, 16, 32, 64)
SWEEP_ROWS = 16
# (tables) → launches one gather of their list.
Gather = Callable[[SlotTables], None]


@dataclass(frozen=True, slots=True)
class Rate:
    """A gather of `rows` rows by a kernel. empty_us: a launch with nothing to fetch."""

    kernel: str
    rows: int
    gb_s: float
    ratio: float
    empty_us: float


@dataclass(frozen=True, slots=True)
class Time:
    """us: per launch, or per step if `what` says so."""

    what: str
    us: float


class Rows:
    """A bank of pinned rows as the worker has them, and a pool to gather into."""

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self._area = mmap.mmap(-1, num_rows * row_bytes)
        self.bank = torch.frombuffer(self._area, dtype=torch.uint8).view(num_rows, row_bytes)
        self.bank.view(torch.int64).random_()
        pinned.register(self.bank)
        self.pool = torch.zeros_like(self.bank, device="cuda")
        self.tables = slot_tables.allocate(1, num_rows, 1, 1, "cuda")
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0)).int()
        self.tables.fetch_experts.copy_(order)
        self.tables.fetch_rows.copy_(order.flip(0))

    def set_count(self, count: int) -> None:
        """How many rows the next gather copies."""
        self.tables.num_fetch.fill_(count)

    def check(self, count: int) -> bool:
        """Whether the pool has what a gather of `count` rows puts there; empties it."""
        rows = self.tables.fetch_rows[:count].long().cpu()
        experts = self.tables.fetch_experts[:count].long().cpu()
        expected = torch.zeros_like(self.pool)
        expected[rows.cuda()] = self.bank[experts].cuda()
        is_right = torch.equal(expected, self.pool)
        self.pool.zero_()
        return is_right

    def copy_rate(self, count: int) -> float:
        """Bytes/s of one copy of `count` rows."""
        source, target = self.bank[:count], self.pool[:count]
        seconds = best_s(lambda: target.copy_(source, non_blocking=True))
        self.pool.zero_()
        return source.nbytes / seconds


def kernels(rows: Rows, wide: bool) -> dict[str, Gather]:
    """All forms of the gather by name; without `wide` the one that is used of each."""
    from freetoken.kernels import triton_fetch

    found: dict[str, Gather] = {}
    library = cuda_library.load()
    if library is not None:
        tunings = [FETCH_TUNING]
        if wide:
            tunings = [
                FetchTuning(blocks, unroll, kib << 10)
                for unroll in (2, 4, 8)
                for blocks in (32, 64, 128, 256)
                for kib in (16, 32, 64)
            ]
        if torch.cuda.get_device_capability()[0] >= 9:
            stages = replace(FETCH_TUNING, unroll=0)
            tunings += [replace(stages, num_blocks=n) for n in ((8, 16, 32, 64) if wide else (16,))]
        for tuning in tunings:
            size = "stages" if tuning.unroll == 0 else f"{tuning.chunk_bytes >> 10} KiB"
            name = f"cuda, {tuning.num_blocks} blocks, unroll {tuning.unroll}, {size}"
            found[name] = partial(_gather_cuda, library, rows, tuning)
    choices = [(triton_fetch.PROGRAMS, triton_fetch.PIECE_WORDS, triton_fetch.NUM_WARPS)]
    if wide:
        choices = [(n, p, w) for n in (32, 64, 128) for p in (2048, 4096, 8192) for w in (4, 8)]
    for programs, words, warps in choices:
        name = f"triton, {programs} programs, {words >> 7} KiB, {warps} warps"
        found[name] = partial(_gather_triton, rows, programs, words, warps)
    return found


def _gather_cuda(
    library: cuda_library.CudaLibrary, rows: Rows, tuning: FetchTuning, tables: SlotTables
) -> None:
    lists = tables.fetch_experts, tables.fetch_rows, tables.num_fetch
    library.fetch_rows(rows.bank, rows.pool, *lists, tuning)


def _gather_triton(rows: Rows, programs: int, words: int, warps: int, tables: SlotTables) -> None:
    from freetoken.kernels import triton_fetch

    triton_fetch.fetch(
        rows.bank,
        rows.pool,
        tables.fetch_experts,
        tables.fetch_rows,
        tables.num_fetch,
        programs=programs,
        piece_words=words,
        num_warps=warps,
    )


def measure_gather(rows: Rows, name: str, gather: Gather, count: int, copy_rate: float) -> Rate:
    """Raises RuntimeError if a byte is wrong."""
    rows.set_count(count)
    seconds = best_s(lambda: gather(rows.tables))
    if not rows.check(count):
        raise RuntimeError(f"{name}: {count} rows are not what the bank holds")
    rate = count * rows.bank.shape[1] / seconds
    rows.set_count(0)
    empty_us = graph_us(lambda: gather(rows.tables), LAUNCHES)
    return Rate(name, count, rate / 1e9, rate / copy_rate, empty_us)


def best_s(launch: Callable[[], object]) -> float:
    """Seconds of the fastest of some launches, after one that is not counted."""
    launch()
    times_ms = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        launch()
        end.record()
        end.synchronize()
        times_ms.append(start.elapsed_time(end))
    return min(times_ms) / 1e3


def graph_us(launch: Callable[[], object], launches: int) -> float:
    """Microseconds per launch in a graph of `launches` of them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            launch()
    return best_s(graph.replay) * 1e6 / launches


def time_resolve(num_tokens: int) -> list[Time]:
    """A resolve of `num_tokens` tokens in a step of 16 layers: all hits, and all misses."""
    num_tokens_on_device = torch.tensor([num_tokens], dtype=torch.int32, device="cuda")
    generator = torch.Generator(device="cuda").manual_seed(0)
    scores = torch.rand(num_tokens, EXPERTS, generator=generator, device="cuda")
    ids = scores.topk(TOP_K).indices

    def all_layers(tables: SlotTables) -> None:
        for layer in range(LAYERS):
            resolve(tables, ids, num_tokens_on_device, layer)

    roomy = slot_tables.allocate(LAYERS, EXPERTS, LAYERS * EXPERTS, ids.numel(), "cuda")
    hits_us = graph_us(lambda: all_layers(roomy), 6) / LAYERS
    # Each step asks for the experts behind those of the step before: hits are rare.
    tight = slot_tables.allocate(LAYERS, EXPERTS, LAYERS * EXPERTS // 4, ids.numel(), "cuda")

    def next_ids() -> None:
        ids.add_(TOP_K).remainder_(EXPERTS)

    def step() -> None:
        next_ids()
        all_layers(tight)
        build_queue(tight)

    def rest() -> None:
        next_ids()
        build_queue(tight)

    rest_us = graph_us(rest, 6)
    graph_us(step, 20)
    tight.counters.zero_()
    step_us = graph_us(step, 6)
    hits, misses, _, bypassed = tight.counters.tolist()
    missed = f"{misses / (hits + misses):.0%} missing, {bypassed / max(1, misses):.0%} of it bypass"
    return [
        Time(f"resolve, {num_tokens} tokens, all hit", hits_us),
        Time(f"resolve, {num_tokens} tokens, {missed}", (step_us - rest_us) / LAYERS),
    ]


def time_build_queue(num_slots: int) -> Time:
    """With slots taken by experts of many layers."""
    num_layers = -(-4 * num_slots // EXPERTS)
    tables = slot_tables.allocate(num_layers, EXPERTS, num_slots, TOP_K, "cuda")
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randperm(num_layers * EXPERTS, generator=generator)[:num_slots]
    tables.owner.copy_(numbers.int())
    tables.priority.random_(0, 1 << 26)
    return Time(f"build_queue, {num_slots} slots", graph_us(lambda: build_queue(tables), 20))


def print_rates(rates: Sequence[Rate], console: Console, title: str) -> None:
    table = Table(box=SIMPLE_HEAD, title=title)
    table.add_column("kernel", no_wrap=True)
    for column in ("rows", "GB/s", "÷ copy", "empty µs"):
        table.add_column(column, justify="right", no_wrap=True)
    for rate in rates:
        numbers = (f"{rate.gb_s:.1f}", f"{rate.ratio:.3f}", f"{rate.empty_us:.2f}")
        table.add_row(rate.kernel, str(rate.rows), *numbers)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if not torch.cuda.is_available():
        print("bench_fetch: error: no GPU", file=sys.stderr)
        return 1
    row_bytes = round(options.row_mib * 2**20) // 256 * 256
    console = Console()
    console.width = max(console.width, 100)
    rows = Rows(max(COUNTS), row_bytes)
    copies = {count: rows.copy_rate(count) for count in COUNTS}
    copy_rate = copies[max(COUNTS)]
    library = cuda_library.load()
    console.print(f"{torch.cuda.get_device_name()}, library: {library and library.path}")
    console.print(f"one copy, GB/s: {[f'{n}: {rate / 1e9:.1f}' for n, rate in copies.items()]}")
    measure = partial(measure_gather, rows, copy_rate=copy_rate)
    sweep = [measure(name, one, SWEEP_ROWS) for name, one in kernels(rows, wide=True).items()]
    sweep.sort(key=lambda rate: -rate.gb_s)
    print_rates(sweep[: options.best], console, f"the best of {len(sweep)} forms")
    used = kernels(rows, wide=False)
    rates = [measure(name, one, count) for name, one in used.items() for count in COUNTS]
    print_rates(rates, console, "as used (stages: for comparison)")
    times = [time for num_tokens in (1, 8, 64) for time in time_resolve(num_tokens)]
    times += [time_build_queue(num_slots) for num_slots in (512, 1024, 2048, 4096, 16384)]
    for time in times:
        console.print(f"{time.us:8.2f} µs  {time.what}", highlight=False)
    if options.json:
        result = {
            "copy_gb_s": {count: rate / 1e9 for count, rate in copies.items()},
            "sweep": [asdict(rate) for rate in sweep],
            "rates": [asdict(rate) for rate in rates],
            "times": [asdict(time) for time in times],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--row-mib", type=float, default=9.0, help="of an expert (default: 9, i.e. 9.4 MB)")
    add("--best", type=int, default=12, help="forms of the gather to print")
    add("--json", type=Path, metavar="FILE", help="write all values")
    return parser


if __name__ == "__main__":
    sys.exit(main())
