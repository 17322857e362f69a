"""How busy a GPU is: as NVML tells while a block runs, and from a trace of what ran."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType

POLL_S = 0.05
MIN_GAP_NS = 4000
"""Kernels of one graph follow each other in 1 to 2 µs."""


class BusyMeter:
    """Samples the utilisation of GPU 0 from a thread of its own. Needs nvidia-ml-py."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        self._read = lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        self._samples: list[tuple[float, float]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> BusyMeter:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def share(self, busy_s: float) -> float:
        """Of the time, in the middle half of the last `busy_s` seconds in which anything ran."""
        end_s = max((at_s for at_s, share in self._samples if share > 0), default=0.0)
        first, last = end_s - 0.75 * busy_s, end_s - 0.25 * busy_s
        inside = [share for at_s, share in self._samples if first <= at_s <= last]
        if not inside:
            raise ValueError(f"no sample in {busy_s:.2f} s of {len(self._samples)}")
        return sum(inside) / len(inside)

    def _sample(self) -> None:
        while not self._is_over.wait(POLL_S):
            self._samples.append((time.monotonic(), self._read()))


def idle_shares(
    spans: Sequence[tuple[int, int]], min_gap_ns: int = MIN_GAP_NS
) -> tuple[float, float]:
    """(share of the time in which nothing ran for min_gap_ns or longer, as between steps; share in
    which nothing ran at all). spans: (start, end) in ns, sorted by start."""
    if not spans:
        raise ValueError("the trace is empty")
    long_ns = all_ns = 0
    first, busy_until = spans[0]
    for start, end in spans[1:]:
        gap = start - busy_until
        if gap > 0:
            all_ns += gap
            long_ns += gap if gap >= min_gap_ns else 0
        busy_until = max(busy_until, end)
    total = busy_until - first
    return long_ns / total, all_ns / total
