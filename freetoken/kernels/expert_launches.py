"""How the on-demand expert kernels are launched: one table, by tokens and shape.

Torch-free. tools/bench_expert_kernels.py times `candidate_launches` and prints what belongs here.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Literal

# The least that a card we serve on has for one program (sm_86, sm_89, sm_120: 99 KiB).
SHARED_BYTES = 99 * 1024
# Up to so many tokens the down product sums each token's experts itself: an expert of two tokens is
# read twice, which costs less than the launch of another kernel.
TOKEN_DOWN_TOKENS = 4

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
    def pairs_per_expert(self) -> float:
        """Of an active expert, on average, when routing is uniform."""
        missed = (1 - self.top_k / self.num_experts) ** self.num_tokens
        return self.num_tokens * self.top_k / max(self.num_experts * (1 - missed), 1.0)


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
    if sums_over_k and work.num_tokens <= TOKEN_DOWN_TOKENS:
        return _token(work)
    return _dot(work)


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
    """Every thread loads 16 bytes of each row of a tile, so that x needs no exchange of layout."""
    padding = {}
    for warps in (4, 2, 1):
        block_k = warps * _lanes(work)
        padding[warps] = -(-work.inputs // block_k) * block_k - work.inputs
    warps = next((w for w in padding if padding[w] < 0.15 * work.inputs), 1)
    return Launch("gemv", 4, warps * _lanes(work), 1, warps)


def _token(work: Work) -> Launch:
    """A warp for each choice of a token; at most a dozen tiles, because their loop is unrolled."""
    choices = _power_of_two(work.top_k)
    block_n, block_k = 2, _lanes(work)
    while work.inputs > 12 * block_k and choices * block_n * block_k < 64 * 32 * 8:
        block_k *= 2
    warps = max(2, min(8, choices * block_k // _lanes(work)))
    return Launch("token", block_n, block_k, 1, warps)


def _dot(work: Work) -> Launch:
    """Tiles of weights of 16 KiB, as many pairs as most groups have."""
    block_m = 16
    while block_m < 64 and block_m < 2 * work.pairs_per_expert:
        block_m *= 2
    launch = Launch("dot", 32 if work.matrices == 2 else 64, 128, 4, 4, block_m)
    while launch.block_k > 64 and launch.block_k >= 2 * work.inputs:
        launch = replace(launch, block_k=launch.block_k // 2)
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
