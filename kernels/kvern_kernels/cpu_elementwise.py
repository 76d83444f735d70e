"""The C++ backend's ops on rows: norms, gated activations, and the rotary embedding that fills the cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvern_kernels import reference
from kvern_kernels.cpu_attention import cache_layout
from kvern_kernels.cpu_base import KV_TYPES, LIBRARY, TYPES, address_of, dense, threads

_norm, _gate, _rope = LIBRARY.kvern_norm, LIBRARY.kvern_gate, LIBRARY.kvern_rope_and_store
ACTIVATIONS = {"silu": 0, "gelu": 1, "swiglu_oai": 2}  # csrc/abi.h


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See reference.rms_norm."""
    x_type, weight_type = TYPES.get(x.dtype), TYPES.get(weight.dtype)
    if x_type is None or weight_type is None or x.dim() != 2:
        return reference.rms_norm(x, weight, eps)
    x = dense(x)
    rows, dim = x.shape
    _check_width("rms_norm", weight, dim)
    out = torch.empty((rows, dim), dtype=x.dtype)
    _norm(
        *(threads(), x.data_ptr(), x.stride(0), None, 0, x_type),
        *(weight.data_ptr(), weight_type, out.data_ptr(), None, rows, dim, eps),
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See reference.add_rms_norm."""
    x_type, weight_type = TYPES.get(x.dtype), TYPES.get(weight.dtype)
    if x_type is None or weight_type is None or x.dtype != residual.dtype or x.dim() != 2:
        return reference.add_rms_norm(x, residual, weight, eps)
    x, residual = dense(x), dense(residual)
    rows, dim = x.shape
    _check_width("add_rms_norm", weight, dim)
    if residual.shape != x.shape:
        raise ValueError(f"add_rms_norm: residual {tuple(residual.shape)} is not like x {tuple(x.shape)}")
    out = torch.empty((rows, dim), dtype=x.dtype)
    total = torch.empty((rows, dim), dtype=x.dtype)
    _norm(
        *(threads(), x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0), x_type),
        *(weight.data_ptr(), weight_type, out.data_ptr(), total.data_ptr(), rows, dim, eps),
    )
    return out, total


def silu_and_mul(x: Tensor) -> Tensor:
    """See reference.silu_and_mul."""
    return _gated(x, "silu", reference.silu_and_mul)


def gelu_and_mul(x: Tensor) -> Tensor:
    """See reference.gelu_and_mul."""
    return _gated(x, "gelu", reference.gelu_and_mul)


def swiglu_and_mul(x: Tensor) -> Tensor:
    """See reference.swiglu_and_mul."""
    return _gated(x, "swiglu_oai", reference.swiglu_and_mul)


def _gated(x: Tensor, activation: str, plain: Callable[[Tensor], Tensor]) -> Tensor:
    x_type = TYPES.get(x.dtype)
    if x_type is None or x.dim() != 2:
        return plain(x)
    x = dense(x)
    rows, inner = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, inner), dtype=x.dtype)
    _gate(threads(), x.data_ptr(), x.stride(0), x_type, out.data_ptr(), rows, inner, ACTIVATIONS[activation])
    return out


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
    """See reference.rope_and_store. Raises ValueError on a position or slot out of range."""
    type_ = TYPES.get(q.dtype)
    norm_type = 0 if q_norm is None else TYPES.get(q_norm.dtype)
    same = q.dtype == k.dtype == v.dtype and (q_norm is None) == (k_norm is None)
    if q_norm is not None and k_norm is not None:
        same = same and q_norm.dtype == k_norm.dtype
    same = same and k_scale == v_scale == 1.0
    if type_ is None or norm_type is None or not same or k_cache.dtype not in KV_TYPES or q.shape[2] > 1024:
        return reference.rope_and_store(
            *(q, k, v, positions, cos_sin, slot_mapping, k_cache, v_cache, interleaved, q_norm, k_norm, eps),
            *(k_scale, v_scale),
        )
    q, k, v = dense(q), dense(k), dense(v)
    tokens, heads, dim = q.shape
    cached = [(cache.shape[1], cache.shape[3]) for cache in (k_cache, v_cache)]
    if k.shape[2] != dim or len(k) != len(v) or [k.shape[1:], v.shape[1:]] != cached:
        raise ValueError(
            f"rope_and_store: shapes q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} and "
            f"cache {tuple(k_cache.shape)}, {tuple(v_cache.shape)} do not fit"
        )
    q_row, q_head, _ = q.stride()
    k_row, k_head, _ = k.stride()
    v_row, v_head, _ = v.stride()
    cos_sin, slot_mapping = cos_sin.contiguous(), slot_mapping.contiguous()
    out = torch.empty((tokens, heads, dim), dtype=q.dtype)
    status = _rope(
        *(threads(), q.data_ptr(), q_row, q_head, k.data_ptr(), k_row, k_head, v.data_ptr(), v_row, v_head),
        *(type_, out.data_ptr(), tokens, heads, positions.data_ptr(), positions.dtype == torch.int64),
        *(cos_sin.data_ptr(), cos_sin.shape[0], cos_sin.shape[1], slot_mapping.data_ptr()),
        *(k_cache.data_ptr(), v_cache.data_ptr(), cache_layout(k_cache, v_cache), interleaved),
        *(address_of(q_norm), address_of(k_norm)),
        *(norm_type, eps),
    )
    if status:
        raise ValueError(
            f"rope_and_store: a position is outside 0…{cos_sin.shape[0] - 1} or a slot outside the cache of "
            f"{k_cache.shape[0]} blocks of {k_cache.shape[2]}"
        )
    return out


def _check_width(op: str, weight: Tensor, dim: int) -> None:
    if weight.shape[0] != dim or weight.stride(0) != 1:
        raise ValueError(f"{op}: weight {tuple(weight.shape)} must be dense and of x's width, {dim}")
