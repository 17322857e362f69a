"""How the on-demand expert kernels are launched: one table, by tokens and shape.

Torch-free. tools/bench_expert_kernels.py times `candidate_launches` and prints what belongs here.
The rules follow the best candidates for 1, 4, 8 and 64 tokens of two shapes on an H200 in bf16
(2026-12-01; E, K, C, F = 128, 8, 2048, 768 and 32, 4, 2880, 2880).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Literal

# The least that a card we serve on has for one program (sm_86, sm_89, sm_120: 99 KiB).
SHARED_BYTES = 99 * 1024
# The down product of few tokens may sum each one's experts itself. It then reads an expert of two
# tokens twice: worth the launch that it saves (2.5 µs at 4 TB/s) up to so many bytes.
FEW_TOKENS = 4
TOKEN_DOWN_EXTRA_BYTES = 10_000_000

Method = Literal["gemv", "dot", "token"]


@dataclass(frozen=True, slots=True)
class Work:
    """One of the two products of a step: `outputs` columns after the gate, `inputs` summed over.

    matrices: 2 where gate and up are read together, else 1.
    """

    num_tokens: int
    top_k: int
    num_experts: int
    inputs: int
    outputs: int
    matrices: int
    itemsize: int

    @property
    def num_pairs(self) -> int:
        return self.num_tokens * self.top_k

    @property
    def num_active(self) -> float:
        """Distinct experts, on average, when routing is uniform."""
        missed = (1 - self.top_k / self.num_experts) ** self.num_tokens
        return max(self.num_experts * (1 - missed), 1.0)


@dataclass(frozen=True, slots=True)
class Launch:
    """method: gemv and dot work on groups; token is the down product that sums over k.

    block_n outputs, block_k inputs at a time, block_m pairs (dot only), stages: tiles in flight
    through shared memory (1: through registers; token has no other way).
    """

    method: Method
    block_n: int
    block_k: int
    stages: int
    warps: int
    block_m: int = 16

    def shared_bytes(self, work: Work) -> int:
        """Shared memory of the tiles in flight."""
        if self.method != "dot" and self.stages == 1:
            return 0
        rows = work.matrices * self.block_n + self.block_m
        return self.stages * rows * self.block_k * work.itemsize


def choose_up(work: Work) -> Launch:
    """The launch of the first product, gate included."""
    return _gemv(work) if work.num_tokens == 1 else _dot(work)


def choose_down(work: Work, sums_over_k: bool) -> Launch:
    """The launch of the second product; sums_over_k: whether the method "token" is allowed."""
    if not sums_over_k or work.num_tokens > FEW_TOKENS:
        return _dot(work)
    matrix_bytes = work.inputs * work.outputs * work.itemsize
    extra_bytes = (work.num_pairs - work.num_active) * matrix_bytes
    is_worth = _has_short_rows(work) and extra_bytes <= TOKEN_DOWN_EXTRA_BYTES
    return _token(work) if work.num_tokens == 1 or is_worth else _dot(work)


def candidate_launches(work: Work, method: Method) -> list[Launch]:
    """What is worth timing for some work with this method; the choice of the table comes first."""
    chosen = {"gemv": _gemv, "dot": _dot, "token": _token}[method](work)
    if method == "dot":
        sizes = itertools.product((16, 32, 64), (64, 128, 256), (2, 3, 4, 6), (4, 8))
    else:
        stages = (1, 3) if method == "gemv" else (1,)
        blocks = [_lanes(work) * n for n in (1, 2, 4, 8)]
        sizes = itertools.product((1, 2, 4, 8), blocks, stages, (2, 4, 8))
    found = [Launch(method, n, k, s, w, chosen.block_m) for n, k, s, w in sizes]
    found = [launch for launch in found if launch != chosen and _is_sensible(launch, work)]
    return [chosen, *found]


def _gemv(work: Work) -> Launch:
    """A row of each matrix and program, in two tiles, of which every thread loads 16 bytes or more
    at once, so that x needs no exchange of layout."""
    lanes = _lanes(work)
    block_k = max(lanes, min(8 * lanes, _power_of_two(-(-work.inputs // 2))))
    return Launch("gemv", 1, block_k, 1, min(4, block_k // lanes))


def _token(work: Work) -> Launch:
    """Short rows: a warp for each choice. Long ones: two tiles, 16 loads a thread and tile."""
    choices, lanes = _power_of_two(work.top_k), _lanes(work)
    if _has_short_rows(work):
        block_n = min(8, max(1, 64 // choices)) if work.num_tokens == 1 else 2
        return Launch("token", block_n, lanes, 1, max(2, min(8, choices)))
    block_k = min(8 * lanes, _power_of_two(-(-work.inputs // 2)))
    while choices * block_k > 128 * lanes:
        block_k //= 2
    return Launch("token", 1, block_k, 1, max(2, choices * block_k // (16 * lanes)))


def _has_short_rows(work: Work) -> bool:
    return work.inputs <= 3 * _lanes(work)


def _dot(work: Work) -> Launch:
    """64 outputs a program, 36 KiB of weights in flight, as many pairs as most groups have."""
    block_m = 16
    while block_m < 64 and block_m < 2 * work.num_pairs / work.num_active:
        block_m *= 2
    block_k = 128 if work.matrices == 2 and work.inputs % 128 == 0 else 64
    launch = Launch("dot", 64, block_k, 256 // block_k, 4, block_m)
    while launch.shared_bytes(work) > SHARED_BYTES and launch.stages > 2:
        launch = replace(launch, stages=launch.stages - 1)
    while launch.shared_bytes(work) > SHARED_BYTES:
        launch = replace(launch, block_k=launch.block_k // 2)
    return launch


def _lanes(work: Work) -> int:
    """Weights that one warp loads at once, 16 bytes a thread."""
    return 32 * 16 // work.itemsize


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _is_sensible(launch: Launch, work: Work) -> bool:
    if launch.shared_bytes(work) > SHARED_BYTES or launch.block_k >= 2 * work.inputs:
        return False
    threads = 32 * launch.warps
    if launch.method == "dot":
        return 16 <= launch.block_n * launch.block_k * work.itemsize // threads <= 512
    rows = launch.block_n * work.matrices
    if launch.method == "token":
        rows *= _power_of_two(work.top_k)
    elif launch.block_k < launch.warps * _lanes(work):
        return False
    loads = rows * launch.block_k // (launch.warps * _lanes(work))
    return 1 <= loads <= 16
