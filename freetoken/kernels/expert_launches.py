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
    through shared memory (1: through registers).
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
    if work.num_tokens == 1:
        return _fit(Launch("gemv", 4, 1024, 1, 4), work)
    return _dot(work)


def choose_down(work: Work, sums_over_k: bool) -> Launch:
    """The launch of the second product; sums_over_k: whether the method "token" is allowed."""
    if sums_over_k and work.num_tokens <= TOKEN_DOWN_TOKENS:
        return _fit(Launch("token", 8, 256, 1, 4), work)
    return _dot(work)


def candidate_launches(work: Work, method: Method) -> list[Launch]:
    """What is worth timing for some work with this method."""
    if method == "dot":
        sizes = itertools.product((16, 32, 64), (64, 128, 256), (2, 3, 4, 6), (4, 8))
    else:
        sizes = itertools.product((1, 2, 4, 8, 16), (256, 512, 1024, 2048), (1, 3), (2, 4, 8))
    block_m = _dot(work).block_m
    found = [Launch(method, n, k, s, w, block_m) for n, k, s, w in sizes]
    return [launch for launch in found if _is_sensible(launch, work)]


def _dot(work: Work) -> Launch:
    """Tiles of weights of 16 to 32 KiB, as many pairs as most groups have."""
    block_m = 16
    while block_m < 64 and block_m < 2 * work.pairs_per_expert:
        block_m *= 2
    block_n = 32 if work.matrices == 2 else 64
    return _fit(Launch("dot", block_n, 128, 4, 4, block_m), work)


def _fit(launch: Launch, work: Work) -> Launch:
    """The launch with tiles no longer than the matrix, and within the shared memory of all cards."""
    while launch.block_k > 64 and launch.block_k >= 2 * work.inputs:
        launch = replace(launch, block_k=launch.block_k // 2)
    while launch.shared_bytes(work) > SHARED_BYTES and launch.stages > 2:
        launch = replace(launch, stages=launch.stages - 1)
    while launch.shared_bytes(work) > SHARED_BYTES:
        launch = replace(launch, block_k=launch.block_k // 2)
    return launch


def _is_sensible(launch: Launch, work: Work) -> bool:
    if launch.shared_bytes(work) > SHARED_BYTES or launch.block_k >= 2 * work.inputs:
        return False
    values = work.matrices * launch.block_n * launch.block_k // (32 * launch.warps)
    return 8 * work.matrices <= values <= (64 if launch.method != "dot" else 256)
