"""Kernels of the on-demand experts: grouped products through row pointers, and the final sum.

A group is an active expert and its token-expert pairs. Every program owns BN outputs of one group
and streams their weights once for BM tokens. Nothing is summed across programs, so a result does
not depend on timing. Weights are read through (row stride, row number), both 64 bits wide.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.triton_gates import gate_value


@triton.jit
def group_gemv_kernel(
    x_ptr, x_stride, w_ptr, w_stride, bias_ptr, bias_stride, out_ptr,
    rows_ptr, active_ptr, offsets_ptr, pairs_ptr,
    PAIRS_PER_X: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out[pair] = gate(W[row] · x[pair // PAIRS_PER_X] + bias[row]) for each pair of each group.

    Multiply and add on the vector units, one pair at a time: for groups of one or two.
    grid: (tiles of OUT, groups). OUT counts columns of `out`, after the gate.
    """
    row, first, last = _group(tl.program_id(1), rows_ptr, active_ptr, offsets_ptr)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    gate_n, up_n = weight_rows(n, OUT, GATED, INTERLEAVED)
    gate_ptr = w_ptr + row * w_stride + gate_n[:, None] * IN + k[None, :]
    up_ptr = w_ptr + row * w_stride + up_n[:, None] * IN + k[None, :]
    EVEN: tl.constexpr = IN % BK == 0 and OUT % BN == 0
    for i in range(first, last):
        pair = tl.load(pairs_ptr + i).to(tl.int64)
        x_row = x_ptr + (pair // PAIRS_PER_X) * x_stride + k
        gate = tl.zeros((BN, BK), tl.float32)
        up = tl.zeros((BN, BK), tl.float32)
        for start in tl.range(0, IN, BK, num_stages=STAGES):
            x = tl.load(x_row + start, mask=start + k < IN, other=0.0).to(tl.float32)
            x = tl.broadcast_to(x[None, :], (BN, BK))
            inside = (n < OUT)[:, None] & (start + k < IN)[None, :]
            w = _load(gate_ptr + start, inside, EVEN)
            if GATED:
                w_up = _load(up_ptr + start, inside, EVEN)
                up = tl.fma(w_up.to(tl.float32), x, up)
            gate = tl.fma(w.to(tl.float32), x, gate)
        gate_sum = tl.sum(gate, axis=1)
        up_sum = tl.sum(up, axis=1)
        if HAS_BIAS:
            bias_row = bias_ptr + row * bias_stride
            gate_sum += tl.load(bias_row + gate_n, mask=n < OUT, other=0.0).to(tl.float32)
            if GATED:
                up_sum += tl.load(bias_row + up_n, mask=n < OUT, other=0.0).to(tl.float32)
        value = gate_value(gate_sum, up_sum, ACTIVATION, GATED, ALPHA, LIMIT, UP_SHIFT)
        tl.store(out_ptr + pair * OUT + n, value.to(out_ptr.dtype.element_ty), mask=n < OUT)


@triton.jit
def group_dot_kernel(
    x_ptr, x_stride, w_ptr, w_stride, bias_ptr, bias_stride, out_ptr,
    rows_ptr, active_ptr, offsets_ptr, pairs_ptr,
    PAIRS_PER_X: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Like group_gemv_kernel on the matrix units, BM pairs at a time, the weights as left operand.

    Loads run STAGES − 1 tiles ahead through shared memory.
    """
    row, first, last = _group(tl.program_id(1), rows_ptr, active_ptr, offsets_ptr)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    gate_n, up_n = weight_rows(n, OUT, GATED, INTERLEAVED)
    gate_ptr = w_ptr + row * w_stride + gate_n[:, None] * IN + k[None, :]
    up_ptr = w_ptr + row * w_stride + up_n[:, None] * IN + k[None, :]
    EVEN: tl.constexpr = IN % BK == 0 and OUT % BN == 0
    for i in range(first, last, BM):
        m = i + tl.arange(0, BM)
        pair = tl.load(pairs_ptr + m, mask=m < last, other=0).to(tl.int64)
        x_cols = x_ptr + (pair // PAIRS_PER_X)[None, :] * x_stride + k[:, None]
        gate = tl.zeros((BN, BM), tl.float32)
        up = tl.zeros((BN, BM), tl.float32)
        for start in tl.range(0, IN, BK, num_stages=STAGES):
            x_inside = (m < last)[None, :] & (start + k < IN)[:, None]
            x = tl.load(x_cols + start, mask=x_inside, other=0.0)
            inside = (n < OUT)[:, None] & (start + k < IN)[None, :]
            w = _load(gate_ptr + start, inside, EVEN)
            gate = tl.dot(w, x, gate, input_precision="ieee")
            if GATED:
                w_up = _load(up_ptr + start, inside, EVEN)
                up = tl.dot(w_up, x, up, input_precision="ieee")
        if HAS_BIAS:
            bias_row = bias_ptr + row * bias_stride
            gate += tl.load(bias_row + gate_n, mask=n < OUT, other=0.0).to(tl.float32)[:, None]
            if GATED:
                up += tl.load(bias_row + up_n, mask=n < OUT, other=0.0).to(tl.float32)[:, None]
        value = gate_value(gate, up, ACTIVATION, GATED, ALPHA, LIMIT, UP_SHIFT)
        tl.store(
            out_ptr + pair[None, :] * OUT + n[:, None],
            value.to(out_ptr.dtype.element_ty),
            mask=(m < last)[None, :] & (n < OUT)[:, None],
        )


@triton.jit
def token_down_kernel(
    act_ptr, w_ptr, w_stride, bias_ptr, bias_stride, out_ptr,
    ids_ptr, weights_ptr, rows_ptr, num_tokens_ptr, num_experts,
    TOP_K: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NUM_TOKENS: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[t] = Σ over k of weights[t, k] · (W[rows[ids[t, k]]] · act[t·K + k] + bias), in one.

    All choices of a token are one tile [BC ≥ TOP_K, BN, BK], so that their weights are in flight
    together. grid: (tiles of OUT, tokens). An expert of two tokens is read twice: for few tokens.
    """
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    choice = tl.arange(0, BC)
    k = tl.arange(0, BK)
    pair = token * TOP_K + choice
    expert = _expert_of(
        ids_ptr, pair, choice < TOP_K, token, num_tokens_ptr, num_experts, HAS_NUM_TOKENS
    )
    row = tl.load(rows_ptr + expert, mask=expert >= 0, other=0).to(tl.int64)
    weight = tl.load(weights_ptr + pair, mask=expert >= 0, other=0.0).to(tl.float32)
    w_tile = w_ptr + (row * w_stride)[:, None, None] + n[None, :, None] * IN + k[None, None, :]
    x_tile = act_ptr + pair[:, None] * IN + k[None, :]
    total = tl.zeros((BC, BN, BK), tl.float32)
    for start in tl.static_range(0, IN, BK):
        x_inside = (expert >= 0)[:, None] & (start + k < IN)[None, :]
        x = tl.load(x_tile + start, mask=x_inside, other=0.0).to(tl.float32) * weight[:, None]
        inside = (n < OUT)[None, :, None] & x_inside[:, None, :]
        w = tl.load(w_tile + start, mask=inside, other=0.0, eviction_policy="evict_first")
        total = tl.fma(w.to(tl.float32), tl.broadcast_to(x[:, None, :], (BC, BN, BK)), total)
    value = tl.sum(tl.sum(total, axis=2), axis=0)
    if HAS_BIAS:
        inside = (n < OUT)[:, None] & (expert >= 0)[None, :]
        bias_tile = bias_ptr + (row * bias_stride)[None, :] + n[:, None]
        bias = tl.load(bias_tile, mask=inside, other=0.0).to(tl.float32)
        value += tl.sum(bias * weight[None, :], axis=1)
    tl.store(out_ptr + token * OUT + n, value.to(out_ptr.dtype.element_ty), mask=n < OUT)


@triton.jit
def combine_kernel(
    y_ptr, place_ptr, bias_ptr, bias_stride, out_ptr, ids_ptr, weights_ptr, num_tokens_ptr,
    num_experts,
    TOP_K: tl.constexpr, OUT: tl.constexpr, HAS_PLACE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_NUM_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t] = Σ over k, in order, of weights[t, k] · (y[place[t·K + k]] + bias[ids[t, k]]).

    Without `place`, y is in the order of pairs. Skipped pairs are not read. grid: (tokens, tiles).
    """
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        expert = _expert_of(ids_ptr, pair, None, token, num_tokens_ptr, num_experts, HAS_NUM_TOKENS)
        inside = n < tl.where(expert >= 0, OUT, 0)
        weight = tl.load(weights_ptr + pair, mask=expert >= 0, other=0.0).to(tl.float32)
        source = pair
        if HAS_PLACE:
            source = tl.load(place_ptr + pair).to(tl.int64)
        y = tl.load(y_ptr + source * OUT + n, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            y += tl.load(bias_ptr + expert * bias_stride + n, mask=inside, other=0.0).to(tl.float32)
        total += weight * y
    tl.store(out_ptr + token * OUT + n, total.to(out_ptr.dtype.element_ty), mask=n < OUT)


@triton.jit
def _group(group, rows_ptr, active_ptr, offsets_ptr):
    """Row of weights of a group, and its range of `pairs`: empty behind the last active expert.

    The range depends on the row, so that both are loaded at once and not one after the other.
    """
    first = tl.load(offsets_ptr + group)
    last = tl.load(offsets_ptr + group + 1)
    row = tl.load(rows_ptr + tl.load(active_ptr + group)).to(tl.int64)
    return row, first, tl.where(row >= 0, last, first)


@triton.jit
def weight_rows(n, OUT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rows of the up matrix that hold gate and up of output n."""
    if GATED:
        if INTERLEAVED:
            return 2 * n, 2 * n + 1
        else:
            return n, n + OUT
    else:
        return n, n


@triton.jit
def _load(ptr, inside, EVEN: tl.constexpr):
    """A tile of weights, each read once; EVEN: all of it is inside the matrix."""
    if EVEN:
        return tl.load(ptr, eviction_policy="evict_first")
    else:
        return tl.load(ptr, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _expert_of(
    ids_ptr, pair, mask, token, num_tokens_ptr, num_experts, HAS_NUM_TOKENS: tl.constexpr
):
    """The expert of a pair, or of several of one token, as int64; −1 if it is to be skipped."""
    if mask is None:
        expert = tl.load(ids_ptr + pair).to(tl.int64)
    else:
        expert = tl.load(ids_ptr + pair, mask=mask, other=-1).to(tl.int64)
    limit = num_experts
    if HAS_NUM_TOKENS:
        limit = tl.where(token < tl.load(num_tokens_ptr), num_experts, 0)
    return tl.where((expert >= 0) & (expert < limit), expert, -1)
