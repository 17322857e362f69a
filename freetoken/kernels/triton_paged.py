"""The two kernels of paged attention, launched by triton_attention.py.

Programs without work leave at once: those of padding, of shares that a short row does not have, and
of tokens for which another speaks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.triton_softmax import LOG2E, softmax_step, to_scores


# What differs between two numbers of tokens is no constant: each constant is compiled apart.
@triton.jit(do_not_specialize=["total", "num_splits"])
def share_kernel(
    query,
    k_pool,
    v_pool,
    page_table,
    rows,
    positions,
    num_tokens,
    sinks,
    shares,
    lse,
    total,
    num_splits,
    scaling,
    softcap,
    q_stride,
    q_head_stride,
    k_page_stride,
    k_slot_stride,
    k_head_stride,
    v_page_stride,
    v_slot_stride,
    v_head_stride,
    table_stride,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    S: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Line m of the query tile is token m // HEADS and head m % HEADS of the program's.

    With one split, not IS_SPLIT, `shares` is the output [T, H, DV] itself and `lse` is None. Else
    shares [T, H, num_splits, DV] f32 are normalised, and lse [T, H, num_splits] is the base-2
    logarithm of their weight, -inf for none.
    """
    token = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // tiles
    split = tl.program_id(2)

    line = tl.arange(0, BLOCK_M)
    peer = line // HEADS
    group_head = (tl.program_id(1) % tiles) * HEADS + line % HEADS
    head = kv_head * GROUP + group_head
    dv = tl.arange(0, BLOCK_DV)
    line_out = ((token + peer) * H + head) * num_splits + split
    place_out = shares + line_out[:, None] * DV + dv[None, :]
    is_head = (peer < TOKENS) & (group_head < GROUP)

    # Everything that depends on the token alone is on its way before the first branch.
    limit = total.to(tl.int64)
    ahead = token + tl.arange(0, TOKENS)
    row = tl.load(rows + token).to(tl.int64)
    before = tl.load(rows + token - 1, mask=token % TOKENS > 0, other=-1)
    ahead_rows = tl.load(rows + ahead, mask=ahead < limit, other=-1)
    position = tl.load(positions + token + peer, mask=is_head & (token + peer < limit), other=-1)
    dk = tl.arange(0, BLOCK_DK)
    place = query + (token + peer)[:, None] * q_stride + head[:, None] * q_head_stride + dk[None, :]
    q = tl.load(
        place, mask=(is_head & (token + peer < limit))[:, None] & (dk < DK)[None, :], other=0.0
    )

    if num_tokens is not None:
        limit = tl.minimum(limit, tl.load(num_tokens).to(tl.int64))
    if token >= limit:
        if not IS_SPLIT:
            zeros = tl.zeros([BLOCK_M, BLOCK_DV], shares.dtype.element_ty)
            tl.store(place_out, zeros, mask=(is_head & (peer == 0))[:, None] & (dv < DV)[None, :])
        return
    # The first token of a row in each aligned group of TOKENS speaks for those that follow it.
    if before == row:
        return
    follows = (ahead_rows == row) & (ahead < limit) & (ahead // TOKENS == token // TOKENS)
    count = tl.min(tl.where(follows, limit, ahead), axis=0) - token

    is_line = is_head & (peer < count)
    position = tl.where(is_line, position, -1).to(tl.int32)
    high = tl.max(position, axis=0) + 1
    low = 0
    if WINDOW > 0:
        first = tl.min(tl.where(is_line, position, high), axis=0)
        low = tl.maximum(first - WINDOW + 1, 0)
    share = tl.cdiv(tl.cdiv(high - low, num_splits), BLOCK_N) * BLOCK_N
    start = low + split * share
    end = tl.minimum(start + share, high)
    if IS_SPLIT and start >= end:
        tl.store(lse + line_out, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=is_line)
        return

    q = q.to(k_pool.dtype.element_ty)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    pages_of_row = page_table + row * table_stride
    k_pool += kv_head * k_head_stride
    v_pool += kv_head * v_head_stride
    for n in range(start, end, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        is_key = key < end
        page = tl.load(pages_of_row + key // S, mask=is_key, other=0).to(tl.int64)
        k_slot = page * k_page_stride + (key % S) * k_slot_stride
        v_slot = page * v_page_stride + (key % S) * v_slot_stride
        k = tl.load(
            k_pool + k_slot[:, None] + dk[None, :],
            mask=is_key[:, None] & (dk < DK)[None, :],
            other=0.0,
        )
        v = tl.load(
            v_pool + v_slot[:, None] + dv[None, :],
            mask=is_key[:, None] & (dv < DV)[None, :],
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = to_scores(scores, scaling, softcap, HAS_CAP)
        sees = is_key[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            sees &= key[None, :] > position[:, None] - WINDOW
        scores = tl.where(sees, scores, float("-inf"))
        p, shrink, m = softmax_step(scores, m)
        weight = weight * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")

    out_mask = is_line[:, None] & (dv < DV)[None, :]
    if not IS_SPLIT:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=is_line, other=0.0).to(tl.float32) * LOG2E
            # m is finite: a token sees itself.
            weight += tl.exp2(sink - tl.where(is_line, m, 0.0))
        acc = acc / tl.where(weight > 0, weight, 1.0)[:, None]
        tl.store(place_out, acc.to(shares.dtype.element_ty), mask=out_mask)
    else:
        some = weight > 0
        acc = acc / tl.where(some, weight, 1.0)[:, None]
        log = tl.where(some, m + tl.log2(tl.where(some, weight, 1.0)), float("-inf"))
        tl.store(place_out, acc, mask=out_mask)
        tl.store(lse + line_out, log, mask=is_line)


@triton.jit(do_not_specialize=["num_splits"])
def join_kernel(
    shares,
    lse,
    num_tokens,
    sinks,
    out,
    num_splits,
    H: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dv = tl.arange(0, BLOCK_DV)
    split = tl.arange(0, BLOCK_SPLITS)
    line = token * H + head
    place_out = out + line * DV + dv
    log = tl.load(lse + line * num_splits + split, mask=split < num_splits, other=float("-inf"))
    is_padding = False
    if num_tokens is not None:
        is_padding = token >= tl.load(num_tokens)
    if is_padding:
        tl.store(place_out, tl.zeros([BLOCK_DV], out.dtype.element_ty), mask=dv < DV)
        return
    m = tl.max(log, axis=0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        m = tl.maximum(m, sink)
    weight = tl.exp2(log - m)
    total = tl.sum(weight, axis=0)
    if sinks is not None:
        total += tl.exp2(sink - m)
    part = tl.load(
        shares + (line * num_splits + split)[:, None] * DV + dv[None, :],
        mask=(log > float("-inf"))[:, None] & (dv < DV)[None, :],
        other=0.0,
    )
    joined = tl.sum(part * weight[:, None], axis=0) / total
    tl.store(place_out, joined.to(out.dtype.element_ty), mask=dv < DV)
