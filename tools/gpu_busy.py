"""How busy a GPU is: as NVML tells while a block runs, and from a trace of its steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType

POLL_S = 0.05


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


def idle_share(spans: Sequence[tuple[int, int]]) -> float:
    """Of the time, what lies between the spans: (start, end) in ns of each step, sorted."""
    if len(spans) < 2:
        raise ValueError(f"{len(spans)} steps were traced")
    total = spans[-1][1] - spans[0][0]
    return sum(max(0, start - end) for (_, end), (start, _) in pairwise(spans)) / total
