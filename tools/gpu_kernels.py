#!/usr/bin/env python3
"""How fast the link and the slot kernels of a GPU are, measured in this process; JSON on stdout.

  python tools/gpu_kernels.py --experts 128 --row-bytes 9437184 --top-k 8

copy_gb_s    a layer's bank, pinned, by the copy engine
gather_gb_s  the same bytes by the fetch kernel, rows in another order
empty_us     a fetch with nothing to fetch, in a CUDA graph, per layer
resolve_us, queue_us  the slot tables, likewise; resolve for one token whose experts all hit
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from statistics import median

import torch

from freetoken.kernels import cuda_library, slot_tables
from freetoken.kernels.slot_ops import build_queue, fetch, resolve

NUM_LAYERS = 16
NUM_CALLS = 64  # in one graph
TRIES = 7


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if not torch.cuda.is_available():
        print("gpu_kernels: error: torch finds no GPU", file=sys.stderr)
        return 1
    print(json.dumps(measure(options.experts, options.row_bytes, options.top_k)))
    return 0


@torch.inference_mode()
def measure(num_experts: int, row_bytes: int, top_k: int) -> dict[str, float | str]:
    """Figures by name. Takes twice a layer's bank of pinned and of device memory at most."""
    bank = torch.zeros(num_experts, row_bytes, dtype=torch.uint8).pin_memory()
    rows = torch.zeros(2 * num_experts, row_bytes, dtype=torch.uint8, device="cuda")
    tables = slot_tables.allocate(NUM_LAYERS, num_experts, num_experts, top_k, "cuda")
    total = bank.nbytes
    copy_us = _time_us(lambda: rows[:num_experts].copy_(bank, non_blocking=True))
    order = [*range(0, num_experts, 2), *range(1, num_experts, 2)]
    tables.fetch_experts.copy_(torch.tensor(order, dtype=torch.int32))
    tables.fetch_rows.copy_(torch.arange(num_experts, dtype=torch.int32))
    tables.num_fetch.fill_(num_experts)
    gather_us = _time_us(lambda: fetch(bank, rows, tables))
    tables.num_fetch.zero_()
    empty_us = _time_graph_us(lambda: fetch(bank, rows, tables))
    slot_tables.clear(tables)
    ids = torch.arange(top_k, device="cuda")[None]
    resolve(tables, ids, None, 0)
    return {
        "device": torch.cuda.get_device_name(),
        "fetch": "triton" if cuda_library.load() is None else "cuda",
        "copy_gb_s": total / copy_us / 1e3,
        "gather_gb_s": total / gather_us / 1e3,
        "empty_us": empty_us,
        "resolve_us": _time_graph_us(lambda: resolve(tables, ids, None, 0)),
        "queue_us": _time_graph_us(lambda: build_queue(tables)),
    }


def _time_graph_us(run: Callable[[], object]) -> float:
    """Of one of NUM_CALLS calls that follow each other in a graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NUM_CALLS):
            run()
    return _time_us(graph.replay) / NUM_CALLS


def _time_us(run: Callable[[], object]) -> float:
    """The median of some tries, after one that is not counted."""
    run()
    times = []
    for _ in range(TRIES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return median(times)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, default=128, help="of a layer")
    parser.add_argument("--row-bytes", type=int, default=9437184, help="of one expert")
    parser.add_argument("--top-k", type=int, default=8)
    return parser


if __name__ == "__main__":
    sys.exit(main())
