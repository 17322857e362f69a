"""How many CPU threads a step uses: all for wide steps, for narrow ones what is fastest here.

A step of few tokens has hundreds of small parallel regions, each ended by a barrier. Which number
of threads is best depends on the machine, so it is measured once, at warm-up. And if another
process takes a core, every barrier waits for it: a step of the demo took 436 ms with two threads
and 59 with one beside one busy process on two cores, 24 and 27 without (2026-12-01). So while
narrow steps are far slower than they have been, they use fewer threads, and try again later.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

NARROW_TOKENS = 16
"""Steps of up to so many tokens are narrow: decode steps, and the next turn of a chat."""
NUM_TRIALS = 3
WORTH_MORE_THREADS = 0.95
"""More threads are taken only if they need less than this share of the time."""
SLOW_FACTOR = 5.0
"""So much slower than the fastest step of that many tokens: not a long context, but a barrier."""
NUM_SLOW_STEPS = 3
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 60.0


@dataclass(slots=True)
class _Pause:
    """A time with fewer threads; the next one is longer if it comes soon after."""

    length_s: float = FIRST_PAUSE_S
    until_s: float = -math.inf


class StepThreads:
    """Sets torch's threads before each step; on the step loop's thread only.

    The clock is an argument (seconds, any origin).
    """

    def __init__(self, num_threads: int) -> None:
        self.num_wide = self.num_narrow = num_threads
        self._num_best = num_threads  # for narrow steps on an idle machine
        self._fastest_s: dict[int, float] = {}  # by number of tokens
        self._num_slow = 0
        self._pause = _Pause()
        self._current = 0

    def use_for(self, num_tokens: int, now_s: float) -> None:
        """Set the threads for a step of `num_tokens` tokens."""
        if self.num_narrow < self._num_best and now_s >= self._pause.until_s:
            self.num_narrow, self._num_slow = self._num_best, 0
        self._set(self.num_narrow if num_tokens <= NARROW_TOKENS else self.num_wide)

    def note(self, num_tokens: int, step_s: float, now_s: float) -> bool:
        """A step of `num_tokens` took `step_s`; True if the next narrow ones use fewer threads."""
        if num_tokens > NARROW_TOKENS:
            return False
        fastest_s = self._fastest_s.setdefault(num_tokens, step_s)
        self._fastest_s[num_tokens] = min(fastest_s, step_s)
        is_slow = self.num_narrow > 1 and step_s > SLOW_FACTOR * fastest_s
        self._num_slow = self._num_slow + 1 if is_slow else 0
        if self._num_slow < NUM_SLOW_STEPS:
            return False
        is_soon = now_s - self._pause.until_s < self._pause.length_s
        length_s = self._pause.length_s * 2 if is_soon else FIRST_PAUSE_S
        self._pause.length_s = min(length_s, LONGEST_PAUSE_S)
        self._pause.until_s = now_s + self._pause.length_s
        self._num_slow = 0
        self.num_narrow = max(count for count in self._candidates() if count < self.num_narrow)
        return True

    @property
    def num_calibration_steps(self) -> int:
        """How often `calibrate` runs a step."""
        return NUM_TRIALS * len(self._candidates())

    def calibrate(self, time_step_s: Callable[[], float]) -> None:
        """Find `num_narrow`. `time_step_s` runs a narrow step and returns its seconds."""
        best, best_s = self.num_wide, float("inf")
        for count in self._candidates():
            self.num_narrow = self._num_best = count
            needed_s = min(time_step_s() for _ in range(NUM_TRIALS))
            if needed_s < best_s * WORTH_MORE_THREADS:
                best, best_s = count, needed_s
        self.num_narrow = self._num_best = best
        self._num_slow = 0

    def _candidates(self) -> list[int]:
        """1, 2, 4, … and all."""
        powers = {1 << bit for bit in range(self.num_wide.bit_length())}
        return sorted({count for count in powers if count < self.num_wide} | {self.num_wide})

    def _set(self, count: int) -> None:
        if count != self._current:
            torch.set_num_threads(count)
            self._current = count
