"""Rotary embedding, fused with the norm of query and key heads before it and the store of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvern_kernels.triton import fp8
from kvern_kernels.triton.launch import dense, launch, next_power_of_2


@triton.jit
def _rope_kernel(
    q_ptr,  # [T, Hq, D], rows and heads may be strided, as k and v
    k_ptr,  # [T, Hkv, D]
    v_ptr,
    positions_ptr,  # [T]
    cos_sin_ptr,  # float32 [max_positions, 2 * HALF]
    slots_ptr,  # int64 [T]
    q_norm_ptr,  # [D] where NORM
    k_norm_ptr,
    k_cache_ptr,  # [blocks, Hkv, block_size, D]
    v_cache_ptr,
    out_ptr,  # [T, Hq, D]
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_cos,
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
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
):
    """One program per token and head: the query heads, then the key heads with their values."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    pair = tl.arange(0, HALF_PAD)
    turned = pair < HALF
    first, second = pair, pair + HALF
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    rest = 2 * HALF + tl.arange(0, REST_PAD)
    kept = rest < D
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * stride_cos + pair, mask=turned, other=0.0)
    sin = tl.load(cos_sin_ptr + position * stride_cos + HALF + pair, mask=turned, other=0.0)
    if head < HEADS:
        x_ptr = q_ptr + token * stride_qt + head * stride_qh
        a, b, c = _normed(x_ptr, q_norm_ptr, first, second, rest, turned, kept, eps, D, Q_NORM)
        at = out_ptr + (token * HEADS + head) * D
        element = out_ptr.dtype.element_ty
        tl.store(at + first, (a * cos - b * sin).to(element), mask=turned)
        tl.store(at + second, (b * cos + a * sin).to(element), mask=turned)
        tl.store(at + rest, c.to(element), mask=kept)
    elif slot >= 0:
        kv_head = head - HEADS
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        x_ptr = k_ptr + token * stride_kt + kv_head * stride_kh
        a, b, c = _normed(x_ptr, k_norm_ptr, first, second, rest, turned, kept, eps, D, K_NORM)
        at = k_cache_ptr + block * stride_kb + kv_head * stride_kch + offset * stride_ks
        k_type = k_cache_ptr.dtype.element_ty
        left = fp8.narrow((a * cos - b * sin) * inverse_k_scale, k_type)
        right = fp8.narrow((b * cos + a * sin) * inverse_k_scale, k_type)
        tl.store(at + first * stride_kd, left, mask=turned)
        tl.store(at + second * stride_kd, right, mask=turned)
        tl.store(at + rest * stride_kd, fp8.narrow(c * inverse_k_scale, k_type), mask=kept)
        column = tl.arange(0, D_PAD)
        v = tl.load(v_ptr + token * stride_vt + kv_head * stride_vh + column, mask=column < D, other=0.0)
        v = fp8.narrow(v.to(tl.float32) * inverse_v_scale, v_cache_ptr.dtype.element_ty)
        at = v_cache_ptr + block * stride_vb + kv_head * stride_vch + offset * stride_vs
        tl.store(at + column * stride_vd, v, mask=column < D)


@triton.jit
def _normed(x_ptr, weight_ptr, first, second, rest, turned, kept, eps, D: tl.constexpr, NORM: tl.constexpr):
    """A head as float32: what is turned, in two halves, and the rest; after an RMS norm where NORM."""
    a = tl.load(x_ptr + first, mask=turned, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + second, mask=turned, other=0.0).to(tl.float32)
    c = tl.load(x_ptr + rest, mask=kept, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(a * a, 0) + tl.sum(b * b, 0) + tl.sum(c * c, 0)
        scale = 1.0 / tl.sqrt(squares / D + eps)
        a = a * scale * tl.load(weight_ptr + first, mask=turned, other=0.0).to(tl.float32)
        b = b * scale * tl.load(weight_ptr + second, mask=turned, other=0.0).to(tl.float32)
        c = c * scale * tl.load(weight_ptr + rest, mask=kept, other=0.0).to(tl.float32)
    return a, b, c


def rope_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """See reference.rope_and_store. Raises ValueError on shapes that do not fit; positions and slots lie on
    the device and are not checked.
    """
    q, k, v, cos_sin = dense(q), dense(k), dense(v), dense(cos_sin)
    tokens, heads, dim = q.shape
    half = cos_sin.shape[1] // 2
    if k.shape != v.shape or k.shape[2] != dim or (k_cache.shape[1], k_cache.shape[3]) != k.shape[1:]:
        raise ValueError(
            f"rope_and_store: shapes q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} and "
            f"cache {tuple(k_cache.shape)} do not fit"
        )
    if 2 * half > dim:
        raise ValueError(f"rope_and_store: {2 * half} rotary components do not fit in heads of {dim}")
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    keys, values = fp8.as_kernels_take(k_cache), fp8.as_kernels_take(v_cache)
    launch(
        _rope_kernel,
        (tokens, heads + k.shape[1]),
        *(q, k, v, positions, cos_sin, slot_mapping, cos_sin if q_norm is None else q_norm),
        *(cos_sin if k_norm is None else k_norm, keys, values, out, q.stride(0), q.stride(1)),
        *(k.stride(0), k.stride(1), v.stride(0), v.stride(1), cos_sin.stride(0)),
        *(*keys.stride(), *values.stride(), 1 / k_scale, 1 / v_scale, eps),
        HEADS=heads,
        D=dim,
        D_PAD=next_power_of_2(dim),
        HALF=half,
        HALF_PAD=next_power_of_2(half),
        REST_PAD=next_power_of_2(dim - 2 * half),
        BLOCK_SIZE=k_cache.shape[2],
        INTERLEAVED=interleaved,
        Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        num_warps=1,
    )
    return out


def rotary(x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False) -> Tensor:
    """See reference.rotary."""
    nothing = torch.empty((x.shape[0], 0, x.shape[2]), dtype=x.dtype, device=x.device)
    cache = torch.empty((1, 0, 1, x.shape[2]), dtype=x.dtype, device=x.device)
    return rope_and_store(x, nothing, nothing, positions, cos_sin, positions, cache, cache, interleaved)


def production() -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls whose compilations `aot` checks."""

    def call(
        dim: int, rotary_dim: int, norm: bool, cache: torch.dtype, **options: bool
    ) -> Callable[[], object]:
        def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        fused = meta(64, (32 + 2 * 8) * dim).unflatten(1, (-1, dim))
        table, weight = meta(4096, rotary_dim, dtype=torch.float32), meta(dim, dtype=torch.float32)
        ids = meta(64, dtype=torch.int64)
        q, k, v = fused.split_with_sizes([32, 8, 8], 1)
        keys, values = (meta(1024, 8, 16, dim, dtype=cache) for _ in range(2))
        norms = weight if norm else None
        return lambda: rope_and_store(q, k, v, ids, table, ids, keys, values, q_norm=norms, k_norm=norms)

    yield "heads of 128, norms", call(128, 128, True, torch.bfloat16)
    yield "heads of 128, fp8 cache", call(128, 128, False, torch.float8_e4m3fn)
    yield "heads of 80, 32 rotated", call(80, 32, False, torch.bfloat16)
