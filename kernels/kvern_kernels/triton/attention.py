"""Paged attention over mixed batches of prefill chunks and decode steps: plans and launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvern_kernels.attention_backends import sdpa_attention
from kvern_kernels.attention_options import AttentionOptions
from kvern_kernels.triton import fp8
from kvern_kernels.triton.attention_kernels import attention_kernel, combine_kernel
from kvern_kernels.triton.launch import (
    Chip,
    batch_invariant,
    cdiv,
    chip,
    dense,
    fusion_options,
    invariantly,
    launch,
    next_power_of_2,
)

LOG2_E = 1.4426950408889634
INVARIANT_SPLIT = 1024  # keys of a split in batch-invariant mode
_LEAST_SPLIT = 256  # fewer keys than this are not worth a program of their own
_MOST_WORKSPACE = 256 << 20  # bytes of partial results; beyond it splits run one after the other
_SHORT_WINDOW = 2048  # windows up to this leave a decode step too few keys to split


@dataclass(frozen=True, slots=True)
class Plan:
    """Tile sizes and splits of one call; a function of shapes, so that a CUDA graph may hold it.

    `splits` 0: the keys of a row are not cut.
    """

    rows: int  # of a program: queries times the heads of a group
    queries: int
    tile: int  # keys at a time
    splits: int
    split_len: int  # 0: each sequence is cut evenly
    parallel: bool
    num_warps: int
    num_stages: int


def plan(
    on: Chip,
    tokens: int,
    seqs: int,
    heads: int,
    kv_heads: int,
    dim: int,
    max_keys: int,
    window: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    invariant: bool,
) -> Plan:
    """How to cut the work of `tokens` queries of `seqs` sequences with at most `max_keys` keys each.

    In invariant mode nothing but whether splits run in parallel depends on the batch, and that doesn't
    change bits.
    """
    group, dim_pad = heads // kv_heads, next_power_of_2(dim)
    decode, amd, wide = tokens <= seqs, on.backend == "hip", dtype == torch.float32
    if invariant or not decode:
        rows = 32 if (amd or invariant) and dim_pad > 128 else 64
        if not (invariant or amd or wide) and int(on.arch) >= 90 and dim_pad <= 128 and tokens >= 128 * seqs:
            rows = 128
    else:
        rows = 16
    rows = max(rows, next_power_of_2(group))
    tile = 32 if dim_pad > 128 or wide or amd else 64
    by_bytes = cache_dtype.itemsize == 1 and not on.native_fp8
    # Splits one after the other keep two accumulators.
    crowded = not amd and (invariant or (by_bytes and rows >= 64))
    warps = 8 if rows * dim_pad > 64 * 128 or crowded else 4
    queries = rows // group
    programs = (tokens // queries + seqs) * kv_heads
    if invariant:
        splits, split_len = cdiv(max_keys, INVARIANT_SPLIT), INVARIANT_SPLIT
        parallel = decode and splits > 1
    else:
        wanted = cdiv(2 * on.processors, max(programs, 1))
        splits, split_len = min(wanted, cdiv(max_keys, _LEAST_SPLIT)), 0
        parallel = decode and splits > 1 and not 0 < window <= _SHORT_WINDOW
        splits = splits if parallel else 0
    if parallel and tokens * heads * splits * (dim + 2) * 4 > _MOST_WORKSPACE:
        parallel, splits = False, splits if invariant else 0
    return Plan(rows, queries, tile, splits, split_len, parallel, warps, 2)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    options: AttentionOptions,
    lse: Tensor | None = None,
    key_ends: Tensor | None = None,
) -> Tensor:
    """See reference.paged_attention. The cache is of q's dtype, another 16-bit float, or float8_e4m3fn.

    Rows behind query_start[S] (a CUDA graph's padding) are left unwritten. What sees keys after its own goes to
    torch's attention. Raises ValueError on shapes or dtypes that do not fit; ids and lengths lie on the device
    and are not checked.
    """
    if not options.causal or key_ends is not None:
        return sdpa_attention(
            *(q, k_cache, v_cache, block_tables, query_start, seq_lens, options, lse, key_ends)
        )
    window, softcap, alibi, sinks = options.window, options.softcap, options.alibi, options.sinks
    q = dense(q)
    tokens, heads, dim = q.shape
    kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    _check(q, k_cache, v_cache, block_tables, query_start, seq_lens, lse)
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    seqs, invariant = seq_lens.shape[0], batch_invariant()
    if tokens == 0 or seqs == 0:
        return out
    how = plan(
        *(chip(), tokens, seqs, heads, kv_heads, dim, block_tables.shape[1] * block_size, window),
        *(q.dtype, k_cache.dtype, invariant),
    )
    k_seen, v_seen = fp8.as_kernels_take(k_cache), fp8.as_kernels_take(v_cache)
    nothing = seq_lens  # an argument that the kernel doesn't look at
    parts, stats = out, nothing if lse is None else lse
    if how.parallel:
        parts = torch.empty((tokens, heads, how.splits, dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((tokens, heads, how.splits, 2), dtype=torch.float32, device=q.device)
    shape: dict[str, Any] = {"HEADS": heads, "D": dim, "D_PAD": next_power_of_2(dim), "TILE": how.tile}
    splits: dict[str, Any] = {"NUM_SPLITS": how.splits, "SPLIT_LEN": how.split_len}
    fusion = fusion_options(invariant)
    launch(
        *(attention_kernel, (tokens // how.queries + seqs, kv_heads, how.splits if how.parallel else 1)),
        *(q, k_seen, v_seen, block_tables, query_start, seq_lens),
        *(nothing if alibi is None else alibi, nothing if sinks is None else sinks, parts, stats),
        *(q.stride(0), q.stride(1), *k_seen.stride(), *v_seen.stride(), block_tables.stride(0), seqs),
        *(options.scale * options.k_scale * (1.0 if softcap > 0 else LOG2_E), softcap),
        *(options.v_scale, window),
        **shape,
        **splits,
        GROUP=heads // kv_heads,
        BLOCK_SIZE=block_size,
        BLOCK_Q=how.queries,
        BLOCK_M=how.rows,
        PARALLEL=how.parallel,
        SOFTCAP=softcap > 0,
        WINDOW=window > 0,
        ALIBI=alibi is not None,
        SINKS=sinks is not None,
        LSE=lse is not None,
        num_warps=how.num_warps,
        num_stages=how.num_stages,
        **fusion,
    )
    if how.parallel:
        heads_at_once = min(next_power_of_2(heads), max(1, 1024 // shape["D_PAD"]))
        launch(
            *(combine_kernel, (tokens, cdiv(heads, heads_at_once)), parts, stats, query_start, seq_lens),
            *(nothing if sinks is None else sinks, out, nothing if lse is None else lse, seqs),
            options.v_scale,
            **shape,
            **splits,
            HEADS_PAD=heads_at_once,
            SINKS=sinks is not None,
            LSE=lse is not None,
            num_warps=4,
            **fusion,
        )
    return out


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    lse: Tensor | None,
) -> None:
    heads, kv_heads = q.shape[1], k_cache.shape[1]
    if q.shape[2] != k_cache.shape[3] or heads % kv_heads or k_cache.shape != v_cache.shape:
        raise ValueError(
            f"paged_attention: q {tuple(q.shape)}, keys {tuple(k_cache.shape)} and values "
            f"{tuple(v_cache.shape)} do not fit: the head sizes must be equal and the query heads a multiple "
            "of the key heads"
        )
    for name, tensor in (
        ("block_tables", block_tables),
        ("query_start", query_start),
        ("seq_lens", seq_lens),
    ):
        if tensor.dtype != torch.int32 or (tensor.stride(-1) != 1 and tensor.numel() > 1):
            raise ValueError(f"paged_attention: {name} must be int32 and dense, not {tensor.dtype}")
    if lse is not None and (
        lse.dtype != torch.float32 or not lse.is_contiguous() or lse.shape != q.shape[:2]
    ):
        raise ValueError(f"paged_attention: lse must be dense float32 {tuple(q.shape[:2])}")


@triton.jit
def _merge_kernel(
    parts_ptr,  # [P, T, Hq, D]
    lses_ptr,  # float32 [P, T, Hq]
    out_ptr,  # [T, Hq, D]
    lse_ptr,  # float32 [T, Hq]
    rows,  # T * Hq
    PARTS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, D_PAD)
    there = row < rows
    mask = there[:, None] & (column < D)[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for part in range(PARTS):
        top = tl.maximum(top, tl.load(lses_ptr + part * rows + row, mask=there, other=float("-inf")))
    base = tl.where(top == float("-inf"), 0.0, top)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for part in range(PARTS):
        weight = tl.exp(tl.load(lses_ptr + part * rows + row, mask=there, other=float("-inf")) - base)
        has = mask & (weight > 0)[:, None]  # a part without keys may hold anything
        at = (part * rows + row)[:, None] * D + column[None, :]
        acc += weight[:, None] * tl.load(parts_ptr + at, mask=has, other=0.0).to(tl.float32)
        total += weight
    out = acc * tl.where(total > 0, 1.0 / total, 0.0)[:, None]
    tl.store(out_ptr + row[:, None] * D + column[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + row, base + tl.log(total), mask=there)


def merge_attention(parts: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """See reference.merge_attention."""
    parts, lses = parts.contiguous(), lses.contiguous()
    count, tokens, heads, dim = parts.shape
    out = torch.empty((tokens, heads, dim), dtype=parts.dtype, device=parts.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=parts.device)
    dim_pad = next_power_of_2(dim)
    at_once = max(1, 1024 // dim_pad)
    launch(
        *(_merge_kernel, (cdiv(tokens * heads, at_once),), parts, lses, out, lse, tokens * heads),
        PARTS=count,
        D=dim,
        D_PAD=dim_pad,
        ROWS=at_once,
    )
    return out, lse


def production() -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls whose compilations `aot` checks."""

    def call(
        tokens: int,
        seqs: int,
        heads: int = 32,
        kv_heads: int = 8,
        dim: int = 128,
        block_size: int = 16,
        cache: torch.dtype = torch.bfloat16,
        features: bool = False,
        **options: Any,
    ) -> Callable[[], object]:
        def meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        q = meta(tokens, heads, dim, dtype=torch.bfloat16)
        keys, values = (meta(1024, kv_heads, block_size, dim, dtype=cache) for _ in range(2))
        tables = meta(seqs, 32768 // block_size)
        more: dict[str, Any] = (
            {name: meta(heads, dtype=torch.float32) for name in ("alibi", "sinks")} if features else {}
        )
        lse = meta(tokens, heads, dtype=torch.float32) if features else None
        rules = AttentionOptions(dim**-0.5, **options, **more)
        return lambda: paged_attention(q, keys, values, tables, meta(seqs + 1), meta(seqs), rules, lse)

    e4m3 = torch.float8_e4m3fn
    yield "decode 32/8 heads of 128, split", call(8, 8)
    yield "decode, fp8 cache, blocks of 64, split", call(8, 8, block_size=64, cache=e4m3)
    yield (
        "decode 64/8 heads of 64, sinks, ALiBi, lse, window",
        call(256, 256, 64, dim=64, features=True, window=128),
    )
    yield "decode 16/1 heads of 80, split", call(64, 64, 16, 1, 80)
    yield "decode 8/4 heads of 256, soft cap, split", call(8, 8, 8, 4, 256, softcap=50.0)
    yield "prefill 32/8 heads of 128", call(2048, 8)
    yield "prefill, fp8 cache, blocks of 128", call(2048, 8, block_size=128, cache=e4m3)
    yield "batch-invariant decode", partial(invariantly, call(64, 64))
    yield "batch-invariant prefill", partial(invariantly, call(2048, 8))
    yield "batch-invariant prefill 8/4 heads of 256", partial(invariantly, call(2048, 8, 8, 4, 256))
    yield "prefill 8/4 heads of 256, soft cap, window", call(2048, 8, 8, 4, 256, window=4096, softcap=50.0)
    parts = torch.empty((4, 64, 32, 128), dtype=torch.bfloat16, device="meta")
    lses = torch.empty((4, 64, 32), dtype=torch.float32, device="meta")
    yield "merge of 4", lambda: merge_attention(parts, lses)
