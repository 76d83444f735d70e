"""Paged attention on the device: online softmax over tiles of keys, in splits of the context.

A program takes BLOCK_M rows: BLOCK_Q queries of one sequence times the GROUP query heads that share a
key head. It finds its sequence itself, so the grid depends on shapes only. Where a row's keys are cut
into splits, these are attended to in one program one after the other or in parallel programs whose
results `combine_kernel` merges: the same operations in the same order, so the same bits
(FlashAttention-2, arXiv 2307.08691; Flash-Decoding).
"""

# Arguments in all capitals are compile-time constants; scores are in base 2 throughout.

from __future__ import annotations

import triton
import triton.language as tl

from kvern_kernels.triton.fp8 import widen


@triton.jit
def _last_at_most(starts_ptr, count, wanted, BLOCK_Q: tl.constexpr):
    """The last sequence s whose first tile, starts[s] // BLOCK_Q + s (BLOCK_Q 0: starts[s]), is ≤ wanted."""
    low = 0
    high = count
    while low + 1 < high:
        middle = (low + high) // 2
        start = tl.load(starts_ptr + middle)
        if BLOCK_Q > 0:
            start = start // BLOCK_Q + middle
        if start <= wanted:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _split_length(length, NUM_SPLITS: tl.constexpr, SPLIT_LEN: tl.constexpr, TILE: tl.constexpr):
    """Keys of a split: SPLIT_LEN, or (0) what cuts this length into NUM_SPLITS of whole tiles."""
    if SPLIT_LEN > 0:
        keys = SPLIT_LEN
    else:
        keys = tl.maximum(tl.cdiv(tl.cdiv(length, NUM_SPLITS), TILE), 1) * TILE
    return keys


@triton.jit
def _merge(acc, top, total, other_acc, other_top, other_total):
    """Two partial softmaxes as one: weighted sums [M, D], largest scores [M], sums of exponentials [M]."""
    new_top = tl.maximum(top, other_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    ours, theirs = tl.exp2(top - base), tl.exp2(other_top - base)
    acc = acc * ours[:, None] + other_acc * theirs[:, None]
    return acc, new_top, total * ours + other_total * theirs


@triton.jit
def _finish(acc, top, total, sink, v_scale, SINKS: tl.constexpr):
    """(output rows, natural log-sum-exp); a row that saw nothing gets zeros and -inf."""
    if SINKS:
        new_top = tl.maximum(top, sink)
        ours = tl.exp2(top - new_top)
        acc = acc * ours[:, None]
        total = total * ours + tl.exp2(sink - new_top)
        top = new_top
    inverse = tl.where(total > 0, v_scale / total, 0.0)
    return acc * inverse[:, None], (top + tl.log2(total)) * 0.6931471805599453


@triton.jit
def attention_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [blocks, Hkv, block_size, D], as v
    v_ptr,
    tables_ptr,  # int32 [S, max_blocks]
    query_start_ptr,  # int32 [S + 1]
    lens_ptr,  # int32 [S]
    alibi_ptr,  # float32 [Hq], or anything
    sinks_ptr,
    out_ptr,  # [T, Hq, D]; with parallel splits float32 [T, Hq, NUM_SPLITS, D] of weighted sums
    lse_ptr,  # float32 [T, Hq], or anything; with parallel splits [T, Hq, NUM_SPLITS, 2] of (top, total)
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_vd,
    stride_ts,
    num_seqs,
    scale,  # with log2(e) in it
    softcap,
    v_scale,
    window,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,  # 0: no splits; else of the parallel ones
    SPLIT_LEN: tl.constexpr,
    PARALLEL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    seq = _last_at_most(query_start_ptr, num_seqs, tile, BLOCK_Q)
    start = tl.load(query_start_ptr + seq)
    count = tl.load(query_start_ptr + seq + 1) - start
    first = (tile - start // BLOCK_Q - seq) * BLOCK_Q
    if first >= count:
        return
    length = tl.load(lens_ptr + seq)

    row = tl.arange(0, BLOCK_M)
    query = first + row // GROUP
    head = kv_head.to(tl.int32) * GROUP + row % GROUP
    used = (row < BLOCK_Q * GROUP) & (query < count)
    token = (start + query).to(tl.int64)
    position = length - count + query
    column = tl.arange(0, D_PAD)
    q = tl.load(
        q_ptr + token[:, None] * stride_qt + head[:, None] * stride_qh + column[None, :],
        mask=used[:, None] & (column < D)[None, :],
        other=0.0,
    )
    slope = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slope = tl.load(alibi_ptr + head, mask=used, other=0.0) * 1.4426950408889634

    # The keys that any row of this tile sees.
    end = length - count + tl.minimum(first + BLOCK_Q, count)
    begin = 0
    if WINDOW:
        begin = tl.maximum(length - count + first - window + 1, 0) // TILE * TILE

    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if NUM_SPLITS == 0:
        split_len = end
        split = 0
        last = 1
    else:
        split_len = _split_length(length, NUM_SPLITS, SPLIT_LEN, TILE)
        if PARALLEL:
            split = tl.program_id(2)
            last = split + 1
            if split * split_len >= length:
                return  # combine_kernel looks at those below the length only
        else:
            split = begin // split_len
            last = tl.cdiv(end, split_len)
    for part in range(split, last):
        part_acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
        part_top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        part_total = tl.zeros([BLOCK_M], tl.float32)
        low = tl.maximum(begin, part * split_len)
        high = tl.minimum(end, (part + 1) * split_len)
        for at in range(low, high, TILE):
            key = at + tl.arange(0, TILE)
            there = key < high
            block = tl.load(tables_ptr + seq * stride_ts + key // BLOCK_SIZE, mask=there, other=0).to(
                tl.int64
            )
            slot = key % BLOCK_SIZE
            k = tl.load(
                k_ptr
                + kv_head * stride_kh
                + column[:, None] * stride_kd
                + (block * stride_kb + slot * stride_ks)[None, :],
                mask=there[None, :] & (column < D)[:, None],
                other=0.0,
            )
            score = tl.dot(q, widen(k, q.dtype), input_precision="ieee") * scale
            if SOFTCAP:
                # tanh(z) = 1 - 2 / (e^2z + 1); scale carries no log2(e) then.
                z = score / softcap
                score = softcap * (1.0 - 2.0 / (tl.exp2(z * 2.8853900817779268) + 1.0)) * 1.4426950408889634
            if ALIBI:
                score += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
            seen = there[None, :] & (key[None, :] <= position[:, None])
            if WINDOW:
                seen = seen & (key[None, :] > position[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
            new_top = tl.maximum(part_top, tl.max(score, 1))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(score - base[:, None])
            shrink = tl.exp2(part_top - base)
            v = tl.load(
                v_ptr
                + kv_head * stride_vh
                + column[None, :] * stride_vd
                + (block * stride_vb + slot * stride_vs)[:, None],
                mask=there[:, None] & (column < D)[None, :],
                other=0.0,
            )
            part_acc = part_acc * shrink[:, None]
            part_acc = tl.dot(weight.to(q.dtype), widen(v, q.dtype), part_acc, input_precision="ieee")
            part_total = part_total * shrink + tl.sum(weight, 1)
            part_top = new_top
        if NUM_SPLITS == 0 or PARALLEL:
            acc, top, total = part_acc, part_top, part_total
        else:
            acc, top, total = _merge(acc, top, total, part_acc, part_top, part_total)

    at_row = token * HEADS + head
    if PARALLEL:
        at_split = at_row * NUM_SPLITS + tl.program_id(2)
        tl.store(
            out_ptr + at_split[:, None] * D + column[None, :], acc, mask=used[:, None] & (column < D)[None, :]
        )
        tl.store(lse_ptr + at_split * 2, top, mask=used)
        tl.store(lse_ptr + at_split * 2 + 1, total, mask=used)
    else:
        sink = top
        if SINKS:
            sink = tl.load(sinks_ptr + head, mask=used, other=0.0).to(tl.float32) * 1.4426950408889634
        out, lse = _finish(acc, top, total, sink, v_scale, SINKS)
        tl.store(
            out_ptr + at_row[:, None] * D + column[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=used[:, None] & (column < D)[None, :],
        )
        if LSE:
            tl.store(lse_ptr + at_row, lse, mask=used)


@triton.jit
def combine_kernel(
    part_ptr,  # float32 [T, Hq, NUM_SPLITS, D]
    stats_ptr,  # float32 [T, Hq, NUM_SPLITS, 2]
    query_start_ptr,
    lens_ptr,
    sinks_ptr,
    out_ptr,  # [T, Hq, D]
    lse_ptr,
    num_seqs,
    v_scale,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
):
    """Merge the parallel splits of one token, HEADS_PAD heads at a time, in their order."""
    token = tl.program_id(0)
    seq = _last_at_most(query_start_ptr, num_seqs, token, 0)
    if token >= tl.load(query_start_ptr + seq + 1):
        return  # padding behind the last sequence
    split_len = _split_length(tl.load(lens_ptr + seq), NUM_SPLITS, SPLIT_LEN, TILE)
    head = tl.program_id(1) * HEADS_PAD + tl.arange(0, HEADS_PAD)
    used = head < HEADS
    column = tl.arange(0, D_PAD)
    mask = used[:, None] & (column < D)[None, :]
    acc = tl.zeros([HEADS_PAD, D_PAD], tl.float32)
    top = tl.full([HEADS_PAD], float("-inf"), tl.float32)
    total = tl.zeros([HEADS_PAD], tl.float32)
    at_row = token.to(tl.int64) * HEADS + head
    for split in range(tl.cdiv(tl.load(lens_ptr + seq), split_len)):
        at = at_row * NUM_SPLITS + split
        part_acc = tl.load(part_ptr + at[:, None] * D + column[None, :], mask=mask, other=0.0)
        part_top = tl.load(stats_ptr + at * 2, mask=used, other=float("-inf"))
        part_total = tl.load(stats_ptr + at * 2 + 1, mask=used, other=0.0)
        acc, top, total = _merge(acc, top, total, part_acc, part_top, part_total)
    sink = top
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=used, other=0.0).to(tl.float32) * 1.4426950408889634
    out, lse = _finish(acc, top, total, sink, v_scale, SINKS)
    tl.store(out_ptr + at_row[:, None] * D + column[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    if LSE:
        tl.store(lse_ptr + at_row, lse, mask=used)
