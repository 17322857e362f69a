"""Python imports this by itself where its directory is on the path: gpu_server puts it there.

In a worker it waits for a file that says how many seconds to trace, then writes when the device
ran CUDA graphs, each of which is a step on demand: `[[start_ns, end_ns], …]`, sorted. Events stand
around each replay, which costs a step two microseconds; a profiler would slow it by a tenth. The
server itself knows nothing of it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

VARIABLE = "BENCH_TRACE_FILE"
POLL_S = 0.05


def watch(file: Path) -> None:
    go = file.with_suffix(".go")
    while not go.exists():
        time.sleep(POLL_S)
    spans = trace(float(go.read_text()))
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(spans))
    partial.rename(file)


def trace(seconds: float) -> list[tuple[int, int]]:
    import torch

    events: list[Any] = []
    replay = torch.cuda.CUDAGraph.replay

    def mark() -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        events.append(event)

    def marked(graph: torch.cuda.CUDAGraph) -> None:
        mark()
        replay(graph)
        mark()

    torch.cuda.CUDAGraph.replay = marked
    time.sleep(seconds)
    torch.cuda.CUDAGraph.replay = replay
    time.sleep(POLL_S)  # a step may be on its way
    torch.cuda.synchronize()
    first = events[0] if events else None
    times_ns = [round(first.elapsed_time(event) * 1e6) for event in events[: len(events) // 2 * 2]]
    return list(zip(times_ns[::2], times_ns[1::2], strict=True))


if VARIABLE in os.environ and "worker" in sys.orig_argv and "--stand-by" not in sys.orig_argv:
    threading.Thread(target=watch, args=(Path(os.environ[VARIABLE]),), daemon=True).start()
