"""Python imports this by itself where its directory is on the path: gpu_server puts it there.

In a worker it waits for a file that says how many seconds to trace, then writes what ran on the
device: `[[start_ns, end_ns], …]`, sorted. The server itself knows nothing of it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

VARIABLE = "BENCH_TRACE_FILE"
POLL_S = 0.05


def watch(file: Path) -> None:
    go = file.with_suffix(".go")
    while not go.exists():
        time.sleep(POLL_S)
    seconds = float(go.read_text())
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as tracing:
        time.sleep(seconds)
    device = torch.device("cuda" if on_gpu else "cpu").type.upper()
    spans = [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in tracing.profiler.kineto_results.events()
        if event.device_type().name == device
    ]
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(sorted(spans)))
    partial.rename(file)


if VARIABLE in os.environ and "worker" in sys.orig_argv:
    threading.Thread(target=watch, args=(Path(os.environ[VARIABLE]),), daemon=True).start()
