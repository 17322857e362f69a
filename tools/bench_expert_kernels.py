#!/usr/bin/env python3
"""Time the expert kernels on this GPU, every launch worth trying, and check what they compute.

    python tools/bench_expert_kernels.py
    python tools/bench_expert_kernels.py --shapes qwen3 --tokens 1,8 --quick
    python tools/bench_expert_kernels.py --pass-tokens 8192

Each figure is one launch for one layer, from a CUDA graph over many layers with weights of their
own, so that none of them is in the cache. Routing is uniform. GB/s counts every weight that the
step needs once. The best launches belong in freetoken/kernels/expert_launches.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from statistics import median

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from freetoken.experts.bank import allocate_rows, row_views
from freetoken.experts.layout import ExpertLayout
from freetoken.kernels import reference_experts, triton_pass_experts
from freetoken.kernels import triton_on_demand as kernels
from freetoken.kernels.expert_inputs import ExpertMatrices, Groups, Routing
from freetoken.kernels.expert_launches import (
    Launch,
    Work,
    candidate_launches,
    choose_down,
    choose_up,
)
from freetoken.kernels.gates import GateKind
from freetoken.kernels.reference_experts import group_pairs

# Methods that read an expert again for each of its tokens are not tried beyond so many tokens.
FEW_TOKENS = 8
MAX_ERROR = 2e-2


@dataclass(frozen=True)
class Shape:
    """The experts of one layer; a gate whose columns are interleaved is gpt-oss' clamped one."""

    num_experts: int
    top_k: int
    hidden: int
    expert_hidden: int
    has_bias: bool = False
    interleaved: bool = False

    @property
    def gate(self) -> GateKind:
        if self.interleaved:
            return GateKind("swish", interleaved=True, alpha=1.702, limit=7.0, up_shift=1.0)
        return GateKind("swish")

    @property
    def layout(self) -> ExpertLayout:
        shapes: dict[str, tuple[int, ...]] = {
            "gate_up_proj": (2 * self.expert_hidden, self.hidden),
            "down_proj": (self.hidden, self.expert_hidden),
        }
        if self.has_bias:
            shapes |= {
                "gate_up_proj_bias": (2 * self.expert_hidden,),
                "down_proj_bias": (self.hidden,),
            }
        return ExpertLayout.plan(shapes, torch.bfloat16)


SHAPES = {
    "qwen3": Shape(128, 8, 2048, 768),
    "gpt-oss": Shape(32, 4, 2880, 2880, has_bias=True, interleaved=True),
}


@dataclass
class Layer:
    """One layer's share of the pool and one step's routing."""

    hidden: torch.Tensor
    routing: Routing
    groups: Groups
    act: torch.Tensor | None = None

    @property
    def num_active(self) -> int:
        return int(self.groups.num_active)


class Bench:
    """A pool with the experts of many layers."""

    def __init__(self, shape: Shape, max_layers: int) -> None:
        self.shape = shape
        row_bytes = shape.layout.row_bytes
        free, _ = torch.cuda.mem_get_info()
        self.num_layers = min(max_layers, int(0.6 * free) // (row_bytes * shape.num_experts))
        rows = allocate_rows(self.num_layers * shape.num_experts, row_bytes, "cuda")
        for part in rows.view(torch.bfloat16).split(256):
            part.normal_(std=0.02)
        self.matrices = ExpertMatrices.of(row_views(shape.layout, rows))

    def layers(self, num_tokens: int) -> list[Layer]:
        shape = self.shape
        torch.manual_seed(num_tokens)
        found = []
        for number in range(self.num_layers):
            first = number * shape.num_experts
            scores = torch.rand(num_tokens, shape.num_experts, device="cuda")
            weights, ids = scores.topk(shape.top_k)
            routing = Routing(ids, weights / weights.sum(1, keepdim=True))
            rows = torch.arange(first, first + shape.num_experts, device="cuda").int()
            groups = group_pairs(routing, shape.num_experts, rows)
            hidden = torch.randn(num_tokens, shape.hidden, device="cuda").bfloat16()
            found.append(Layer(hidden, routing, groups))
        for layer in found:
            layer.act = self.up(layer, None)
        return found

    def up(self, layer: Layer, launch: Launch | None) -> torch.Tensor:
        args = (layer.hidden, layer.routing, layer.groups, self.matrices, self.shape.gate)
        return kernels.up_product(*args, launch)

    def down(self, layer: Layer, launch: Launch) -> torch.Tensor:
        """The down product and the sum over k."""
        assert layer.act is not None
        if launch.method == "token":
            rows = layer.groups.rows
            return kernels.token_down(layer.act, layer.routing, rows, self.matrices, launch)
        args = (layer.act, layer.routing, layer.groups, self.matrices, launch)
        return kernels.combine(kernels.down_product(*args), layer.routing, len(layer.groups.rows))

    def whole(self, layer: Layer) -> torch.Tensor:
        args = (layer.hidden, layer.routing, layer.groups, self.matrices, self.shape.gate)
        return kernels.experts_on_demand(*args)


def time_us(compute: Callable[[Layer], torch.Tensor], layers: Sequence[Layer]) -> float:
    """Microseconds a layer, from a CUDA graph over all layers."""
    compute(layers[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            compute(layer)
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(layers))
    return median(times[2:])


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).abs().max() / expected.float().abs().max())


def work_of(shape: Shape, num_tokens: int, product: str) -> Work:
    sizes = (shape.hidden, shape.expert_hidden)
    inputs, outputs = sizes if product == "up" else reversed(sizes)
    matrices = 2 if product == "up" else 1
    return Work(num_tokens, shape.top_k, shape.num_experts, inputs, outputs, matrices, 2)


def launches_of(shape: Shape, num_tokens: int, product: str, quick: bool) -> list[Launch]:
    """The table's choice first."""
    work = work_of(shape, num_tokens, product)
    chosen = choose_up(work) if product == "up" else choose_down(work, sums_over_k=True)
    if quick:
        return [chosen]
    vector = "gemv" if product == "up" else "token"
    methods = (vector, "dot") if num_tokens <= FEW_TOKENS else ("dot",)
    found = [launch for method in methods for launch in candidate_launches(work, method)]
    return [chosen, *(launch for launch in found if launch != chosen)]


def compile_launch(shape: Shape, product: str, launch: Launch) -> None:
    """Put a kernel into Triton's cache on disk: run it with no group and no pair to compute."""
    rows = allocate_rows(1, shape.layout.row_bytes, "cuda")
    bench = Bench.__new__(Bench)
    bench.shape, bench.matrices = shape, ExpertMatrices.of(row_views(shape.layout, rows))
    ids = torch.full((1, shape.top_k), -1, device="cuda")
    routing = Routing(ids, torch.ones(1, shape.top_k, device="cuda"))
    groups = group_pairs(routing, shape.num_experts)
    hidden = torch.zeros(1, shape.hidden, device="cuda", dtype=torch.bfloat16)
    act = torch.zeros(shape.top_k, shape.expert_hidden, device="cuda", dtype=torch.bfloat16)
    layer = Layer(hidden, routing, groups, act)
    if product == "up":
        bench.up(layer, launch)
    else:
        bench.down(layer, launch)
    torch.cuda.synchronize()


def compile_all(jobs: Iterable[tuple[Shape, str, Launch]], num_processes: int) -> None:
    """Many kernels at once, in processes: Triton compiles one at a time in each."""
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        for result in [pool.submit(compile_launch, *job) for job in jobs]:
            result.result()


def bench_shape(name: str, options: argparse.Namespace, console: Console) -> bool:
    """Print one table; False if something was computed wrong."""
    bench = Bench(SHAPES[name], options.layers)
    title = f"{name}, bf16, {bench.num_layers} layers, {torch.cuda.get_device_name()}"
    table = Table(box=SIMPLE_HEAD, title=title)
    for heading in ("T", "distinct", "what", "µs", "GB/s", "launch", "error"):
        table.add_column(heading, justify="left" if heading in ("what", "launch") else "right")
    is_right = True
    for num_tokens in options.tokens:
        layers = bench.layers(num_tokens)
        distinct = sum(layer.num_active for layer in layers) / len(layers)
        for row in bench_step(bench, layers, distinct, options.quick):
            table.add_row(str(num_tokens), f"{distinct:.1f}", *row)
            is_right &= float(row[-1]) <= MAX_ERROR
    console.print(table)
    return is_right


def bench_step(
    bench: Bench, layers: list[Layer], distinct: float, quick: bool
) -> Iterable[tuple[str, ...]]:
    """Rows of the table: the chosen and the best launch of each method, and the whole function."""
    shape, first = bench.shape, layers[0]
    bytes_of = {
        "up": 4 * shape.expert_hidden * shape.hidden,
        "down": 2 * shape.expert_hidden * shape.hidden,
    }
    expected = reference_experts.experts_on_demand(
        first.hidden, first.routing, first.groups, bench.matrices, shape.gate
    )
    for product, num_bytes in bytes_of.items():
        compute = bench.up if product == "up" else bench.down
        launches = launches_of(shape, len(first.hidden), product, quick)
        right = expected if product == "down" else bench.up(first, launches[0])
        timed = []
        for launch in launches:
            error = relative_error(compute(first, launch), right)
            timed.append((time_us(lambda layer: compute(layer, launch), layers), error, launch))  # noqa: B023
        chosen = timed[0]
        best = {t[2].method: t for t in sorted(timed, key=lambda t: -t[0])}
        worst = max(error for _, error, _ in timed)
        yield row_of(f"{product}, table", *chosen, distinct * num_bytes)
        for method, (us, _, launch) in sorted(best.items()):
            if not quick:
                yield row_of(f"{product}, best {method}", us, worst, launch, distinct * num_bytes)
    error = relative_error(bench.whole(first), expected)
    total = distinct * sum(bytes_of.values())
    yield row_of("whole", time_us(bench.whole, layers), error, None, total)


def row_of(
    what: str, us: float, error: float, launch: Launch | None, num_bytes: float
) -> tuple[str, ...]:
    text = ""
    if launch is not None:
        text = " ".join(f"{key}={value}" for key, value in asdict(launch).items())
    return what, f"{us:.1f}", f"{num_bytes / us / 1000:.0f}", text, f"{error:.1e}"


def bench_pass(name: str, num_tokens: int, console: Console) -> None:
    """Milliseconds of a chunk, by the library's product and by our own."""
    bench = Bench(SHAPES[name], 1)
    (layer,) = bench.layers(num_tokens)
    shape = bench.shape
    args = (layer.hidden, layer.routing, bench.matrices, shape.gate)
    flops = 6 * num_tokens * shape.top_k * shape.hidden * shape.expert_hidden
    expected = None
    probe = triton_pass_experts.has_fast_grouped_mm
    for way in ("library", "tiles"):
        if way == "library" and not probe(layer.hidden, bench.matrices.up, bench.matrices.down):
            continue
        triton_pass_experts.has_fast_grouped_mm = probe if way == "library" else lambda *_: False
        result = triton_pass_experts.experts_in_pass(*args)
        us = time_us(lambda _: triton_pass_experts.experts_in_pass(*args), [layer])
        error = 0.0 if expected is None else relative_error(result, expected)
        expected = result
        rate = flops / us / 1e6
        console.print(
            f"{name} pass T={num_tokens} {way}: {us / 1000:.2f} ms {rate:.0f} TFLOP/s", end=""
        )
        console.print(f" error {error:.1e}")
    triton_pass_experts.has_fast_grouped_mm = probe


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if not torch.cuda.is_available():
        print("bench_expert_kernels: error: no GPU", file=sys.stderr)
        return 1
    console = Console()
    console.width = max(console.width, 150)
    jobs = {
        (SHAPES[name], product, launch)
        for name in options.shapes
        for product in ("up", "down")
        for num_tokens in options.tokens
        for launch in launches_of(SHAPES[name], num_tokens, product, options.quick)
    }
    compile_all(jobs, options.processes)
    is_right = True
    for name in options.shapes:
        is_right &= bench_shape(name, options, console)
        torch.cuda.empty_cache()
        if options.pass_tokens:
            bench_pass(name, options.pass_tokens, console)
            torch.cuda.empty_cache()
    return 0 if is_right else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = lambda text: text.split(",")  # noqa: E731
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--shapes", type=names, default=list(SHAPES), help="comma-separated")
    parser.add_argument("--tokens", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--layers", type=int, default=12, help="layers with weights of their own")
    parser.add_argument("--quick", action="store_true", help="only the launches of the table")
    parser.add_argument("--pass-tokens", type=int, default=0, help="time a chunk of a pass as well")
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1))
    return parser


if __name__ == "__main__":
    sys.exit(main())
