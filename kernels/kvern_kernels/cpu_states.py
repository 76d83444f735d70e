"""The C++ backend's ops on per-sequence states (csrc/states.cpp)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvern_kernels.cpu_base import LIBRARY, threads
from kvern_kernels.reference_states import MAX_CONV_WIDTH


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    query_start: Tensor,
    rows: Tensor,
    fresh: Tensor,
) -> Tensor:
    """See reference_states.causal_conv. Raises ValueError where widths or rows don't fit."""
    width, channels = weight.shape
    if width > MAX_CONV_WIDTH or states.shape[1:] != (width - 1, channels):
        raise ValueError(
            f"a convolution of width {width} (at most {MAX_CONV_WIDTH}) on states {tuple(states.shape)}"
        )
    out = torch.empty(x.shape)
    LIBRARY.kvern_causal_conv(
        threads(),
        *(_at(x), x.stride(0), _at(weight), None if bias is None else _at(bias), channels, width),
        *_states(states, query_start, rows, fresh, out),
    )
    return out


def mamba_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    states: Tensor,
    query_start: Tensor,
    rows: Tensor,
    fresh: Tensor,
) -> Tensor:
    """See reference_states.mamba_scan."""
    heads, size = x.shape[1:]
    groups, width = b.shape[1:]
    out = torch.empty(x.shape)
    LIBRARY.kvern_mamba_scan(
        threads(),
        *(part for tensor in (x, dt, b, c) for part in (_at(tensor), tensor.stride(0))),
        *(_at(a), _at(d), _at(dt_bias), *dt_limit, heads, groups, size, width),
        *_states(states, query_start, rows, fresh, out),
    )
    return out


def gated_delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    rate: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    query_start: Tensor,
    rows: Tensor,
    fresh: Tensor,
) -> Tensor:
    """See reference_states.gated_delta_scan."""
    out = torch.empty(v.shape)
    LIBRARY.kvern_gated_delta_scan(
        threads(),
        *(part for tensor in (q, k, v, a, b) for part in (_at(tensor), tensor.stride(0))),
        *(_at(rate), _at(dt_bias), k.shape[1], v.shape[1], k.shape[2], v.shape[2]),
        *_states(states, query_start, rows, fresh, out),
    )
    return out


def _at(x: Tensor) -> int:
    """The address of float32 rows whose inner axes lie together."""
    if x.dtype != torch.float32 or not (x.is_contiguous() or x[:1].is_contiguous()):
        raise ValueError(f"float32 with contiguous rows is wanted, got {x.dtype} with strides {x.stride()}")
    return x.data_ptr()


def _states(states: Tensor, query_start: Tensor, rows: Tensor, fresh: Tensor, out: Tensor) -> tuple[Any, ...]:
    if len(rows) and int(rows.max()) >= states.shape[0]:
        raise ValueError(f"row {int(rows.max())} of {states.shape[0]} states")
    if not states.is_contiguous() or rows.dtype != torch.int64 or fresh.dtype != torch.bool:
        raise ValueError("states must be contiguous, rows int64 and fresh bool")
    pointers = (query_start.data_ptr(), rows.data_ptr(), fresh.data_ptr(), out.data_ptr())
    return states.data_ptr(), len(rows), *pointers
