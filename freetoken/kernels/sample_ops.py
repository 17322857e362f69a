"""Choosing the best: a router's experts, and tokens. The reference on the CPU, Triton on a GPU.

Everything here can be captured in a CUDA graph.
"""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels import reference_sample, reference_topk
from freetoken.kernels.dispatch import use_triton


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of scores [T, E], falling, ties to the lowest index first.

    Returns values [T, k] in scores' type and ids [T, k] int64. NaN counts as the largest, as in
    torch. On a GPU E is at most 1024 and k at most 64.
    """
    if use_triton(scores):
        from freetoken.kernels import triton_topk

        return triton_topk.top_k(scores, k)
    return reference_topk.top_k(scores, k)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
) -> Tensor:
    """One token for each row: [n] int64, or −1 for a row with NaN or +inf, or with nothing finite.

    logits: [n, V] f32, not changed · temperature: [n] f32, below MIN_TEMPERATURE the row takes its
    likeliest token, the first of equals · top_k: [n] int32 (0: no limit) · top_p: [n] f32 (1: none)
    · min_p: [n] f32 (0: none) · uniforms: [n] f64 in [0, 1).

    The token is the first, in the order of ids, at which the running sum of the weights of the
    tokens that pass the filters exceeds uniform · their sum. Sets: reference_sample.keep.
    """
    if use_triton(logits):
        from freetoken.kernels import triton_sample

        return triton_sample.sample(logits, temperature, top_k, top_p, min_p, uniforms)
    return reference_sample.sample(logits, temperature, top_k, top_p, min_p, uniforms)
