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
    rows_ptr, active_ptr, num_active_ptr, offsets_ptr, pairs_ptr,
    PAIRS_PER_X: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out[pair] = gate(W[row] · x[pair // PAIRS_PER_X] + bias[row]) for each pair of each group.

    Multiply and add on the vector units, one pair at a time: for groups of one or two.
    grid: (tiles of OUT, groups). OUT counts columns of `out`, after the gate.
    """
    group = tl.program_id(1)
    num_active = tl.load(num_active_ptr)
    expert = tl.load(active_ptr + group)
    first = tl.load(offsets_ptr + group)
    last = tl.load(offsets_ptr + group + 1)
    if group >= num_active:
        return
    row = tl.load(rows_ptr + expert).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    gate_n, up_n = _weight_rows(n, OUT, GATED, INTERLEAVED)
    gate_ptr = w_ptr + row * w_stride + gate_n[:, None] * IN + k[None, :]
    up_ptr = w_ptr + row * w_stride + up_n[:, None] * IN + k[None, :]
    for i in range(first, last):
        pair = tl.load(pairs_ptr + i).to(tl.int64)
        x_row = x_ptr + (pair // PAIRS_PER_X) * x_stride
        gate = tl.zeros((BN, BK), tl.float32)
        up = tl.zeros((BN, BK), tl.float32)
        for start in tl.range(0, IN, BK, num_stages=STAGES):
            in_row = start + k < IN
            inside = (n < OUT)[:, None] & in_row[None, :]
            x = tl.load(x_row + start + k, mask=in_row, other=0.0).to(tl.float32)
            x = tl.broadcast_to(x[None, :], (BN, BK))
            w = tl.load(gate_ptr + start, mask=inside, other=0.0, eviction_policy="evict_first")
            gate = tl.fma(w.to(tl.float32), x, gate)
            if GATED:
                w = tl.load(up_ptr + start, mask=inside, other=0.0, eviction_policy="evict_first")
                up = tl.fma(w.to(tl.float32), x, up)
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
    rows_ptr, active_ptr, num_active_ptr, offsets_ptr, pairs_ptr,
    PAIRS_PER_X: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Like group_gemv_kernel on the matrix units, BM pairs at a time, the weights as left operand.

    Loads run STAGES − 1 tiles ahead through shared memory.
    """
    group = tl.program_id(1)
    num_active = tl.load(num_active_ptr)
    expert = tl.load(active_ptr + group)
    first = tl.load(offsets_ptr + group)
    last = tl.load(offsets_ptr + group + 1)
    if group >= num_active:
        return
    row = tl.load(rows_ptr + expert).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    gate_n, up_n = _weight_rows(n, OUT, GATED, INTERLEAVED)
    gate_ptr = w_ptr + row * w_stride + gate_n[:, None] * IN + k[None, :]
    up_ptr = w_ptr + row * w_stride + up_n[:, None] * IN + k[None, :]
    for i in range(first, last, BM):
        m = i + tl.arange(0, BM)
        pair = tl.load(pairs_ptr + m, mask=m < last, other=0).to(tl.int64)
        x_cols = x_ptr + (pair // PAIRS_PER_X)[None, :] * x_stride + k[:, None]
        gate = tl.zeros((BN, BM), tl.float32)
        up = tl.zeros((BN, BM), tl.float32)
        for start in tl.range(0, IN, BK, num_stages=STAGES):
            in_row = start + k < IN
            inside = (n < OUT)[:, None] & in_row[None, :]
            x = tl.load(x_cols + start, mask=(m < last)[None, :] & in_row[:, None], other=0.0)
            w = tl.load(gate_ptr + start, mask=inside, other=0.0)
            gate = tl.dot(w, x, gate, input_precision="ieee")
            if GATED:
                w = tl.load(up_ptr + start, mask=inside, other=0.0)
                up = tl.dot(w, x, up, input_precision="ieee")
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
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out[t] = Σ over k of weights[t, k] · (W[rows[ids[t, k]]] · act[t·K + k] + bias), in one launch.

    grid: (tiles of OUT, tokens). An expert of two tokens is read twice: for few tokens.
    """
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    total = tl.zeros((BN, BK), tl.float32)
    bias = tl.zeros((BN,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        expert = _expert_of(ids_ptr, pair, token, num_tokens_ptr, num_experts, HAS_NUM_TOKENS)
        row = tl.load(rows_ptr + tl.maximum(expert, 0)).to(tl.int64)
        weight = tl.load(weights_ptr + pair, mask=expert >= 0, other=0.0).to(tl.float32)
        w_row = w_ptr + row * w_stride + n[:, None] * IN + k[None, :]
        num_in = tl.where(expert >= 0, IN, 0)  # nothing is read for a skipped pair
        for start in tl.range(0, IN, BK, num_stages=STAGES):
            in_row = start + k < num_in
            x = tl.load(act_ptr + pair * IN + start + k, mask=in_row, other=0.0)
            x = tl.broadcast_to((x.to(tl.float32) * weight)[None, :], (BN, BK))
            inside = (n < OUT)[:, None] & in_row[None, :]
            w = tl.load(w_row + start, mask=inside, other=0.0, eviction_policy="evict_first")
            total = tl.fma(w.to(tl.float32), x, total)
        if HAS_BIAS:
            inside = n < tl.where(expert >= 0, OUT, 0)
            part = tl.load(bias_ptr + row * bias_stride + n, mask=inside, other=0.0)
            bias += weight * part.to(tl.float32)
    value = tl.sum(total, axis=1) + bias
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
        expert = _expert_of(ids_ptr, pair, token, num_tokens_ptr, num_experts, HAS_NUM_TOKENS)
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
def _weight_rows(n, OUT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rows of the up matrix that hold gate and up of output n."""
    if GATED:
        if INTERLEAVED:
            return 2 * n, 2 * n + 1
        else:
            return n, n + OUT
    else:
        return n, n


@triton.jit
def _expert_of(ids_ptr, pair, token, num_tokens_ptr, num_experts, HAS_NUM_TOKENS: tl.constexpr):
    """The expert of a pair as int64, −1 if the pair is to be skipped."""
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    kept = (expert >= 0) & (expert < num_experts)
    if HAS_NUM_TOKENS:
        kept = kept & (token < tl.load(num_tokens_ptr))
    return tl.where(kept, expert, -1)
