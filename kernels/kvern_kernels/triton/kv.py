"""Moves in the paged cache: keys and values into their slots, blocks onto blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvern_kernels import reference
from kvern_kernels.triton import fp8
from kvern_kernels.triton.launch import cdiv, dense, launch, next_power_of_2


@triton.jit
def _store_kernel(
    k_ptr,  # [T, Hkv, D]
    v_ptr,
    slots_ptr,  # int64 [T]
    k_cache_ptr,  # [blocks, Hkv, block_size, D]
    v_cache_ptr,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_kb,
    stride_kch,
    stride_ks,
    stride_kd,
    stride_vb,
    stride_vch,
    stride_vs,
    stride_vd,
    inverse_k_scale,
    inverse_v_scale,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    column = tl.arange(0, D_PAD)
    mask = column < D
    k = tl.load(k_ptr + token * stride_kt + head * stride_kh + column, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + token * stride_vt + head * stride_vh + column, mask=mask, other=0.0).to(tl.float32)
    k_at = k_cache_ptr + block * stride_kb + head * stride_kch + offset * stride_ks + column * stride_kd
    v_at = v_cache_ptr + block * stride_vb + head * stride_vch + offset * stride_vs + column * stride_vd
    tl.store(k_at, fp8.narrow(k * inverse_k_scale, k_cache_ptr.dtype.element_ty), mask=mask)
    tl.store(v_at, fp8.narrow(v * inverse_v_scale, v_cache_ptr.dtype.element_ty), mask=mask)


def store_kv(
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """See reference.store_kv. Raises ValueError on shapes that do not fit; slots are not checked."""
    k, v = dense(k), dense(v)
    tokens, heads, dim = k.shape
    if k.shape != v.shape or (k_cache.shape[1], k_cache.shape[3]) != (heads, dim):
        raise ValueError(
            f"store_kv: k {tuple(k.shape)}, v {tuple(v.shape)} and cache {tuple(k_cache.shape)} do not fit"
        )
    keys, values = fp8.as_kernels_take(k_cache), fp8.as_kernels_take(v_cache)
    launch(
        _store_kernel,
        (tokens, heads),
        *(k, v, slot_mapping, keys, values, k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        *(*keys.stride(), *values.stride(), 1 / k_scale, 1 / v_scale),
        D=dim,
        D_PAD=next_power_of_2(dim),
        BLOCK_SIZE=k_cache.shape[2],
        num_warps=1,
    )


@triton.jit
def _copy_kernel(
    from_ptr,  # int32 [rows, words]
    to_ptr,
    from_index_ptr,  # int64 [n]; row i where not FROM_INDEX
    to_index_ptr,
    words,
    FROM_INDEX: tl.constexpr,
    TO_INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < words
    source, target = row, row
    if FROM_INDEX:
        source = tl.load(from_index_ptr + row)
    if TO_INDEX:
        target = tl.load(to_index_ptr + row)
    tl.store(
        to_ptr + target * words + column, tl.load(from_ptr + source * words + column, mask=mask), mask=mask
    )


def copy_blocks(k_cache: Tensor, v_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """See reference.copy_blocks; through a copy of the sources, as a block may be source and target."""
    caches = [_rows(cache) for cache in (k_cache, v_cache)]
    if any(rows is None for rows in caches):
        return reference.copy_blocks(k_cache, v_cache, sources, targets)
    sources, targets = sources.contiguous(), targets.contiguous()
    for rows in caches:
        assert rows is not None
        count, words = sources.shape[0], rows.shape[1]
        held = torch.empty((count, words), dtype=rows.dtype, device=rows.device)
        grid = (count, cdiv(words, 1024))
        launch(
            _copy_kernel,
            grid,
            rows,
            held,
            sources,
            sources,
            words,
            FROM_INDEX=True,
            TO_INDEX=False,
            BLOCK=1024,
        )
        launch(
            _copy_kernel,
            grid,
            held,
            rows,
            targets,
            targets,
            words,
            FROM_INDEX=False,
            TO_INDEX=True,
            BLOCK=1024,
        )
    return None


def _rows(cache: Tensor) -> Tensor | None:
    """A block a row, as 32-bit words (or bytes where those don't fit); None where blocks aren't dense."""
    if cache.shape[0] == 0 or cache.stride(0) != cache[0].numel():
        return None
    size = cache[0].numel() * cache.itemsize
    flat = torch.as_strided(cache, (cache.numel(),), (1,))
    return flat.view(torch.int32 if size % 4 == 0 else torch.uint8).view(cache.shape[0], -1)


def production() -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls whose compilations `aot` checks."""
    k = torch.empty((64, 8, 128), dtype=torch.bfloat16, device="meta")
    slots = torch.empty(64, dtype=torch.int64, device="meta")
    wide = torch.empty((1024, 8, 16, 128), dtype=torch.bfloat16, device="meta")
    narrow = torch.empty((1024, 8, 16, 128), dtype=torch.float8_e4m3fn, device="meta")
    yield "bf16 cache", lambda: store_kv(k, k, slots, wide, wide)
    yield "fp8 cache", lambda: store_kv(k, k, slots, narrow, narrow)
    yield "block copies", lambda: copy_blocks(wide, wide, slots, slots)
