"""The C++ backend's LoRA: each op is one call for all tokens and adapters (csrc/lora.h).

B is read with its outputs side by side: a `b` that is a transposed view of [L, R, N] costs no copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kvern_kernels import reference_lora
from kvern_kernels.cpu_base import LIBRARY, TYPES, dense, threads
from kvern_kernels.reference_lora import LoraPlan

_shrink, _expand = LIBRARY.kvern_lora_shrink, LIBRARY.kvern_lora_expand


def lora_plan(indices: Tensor, num_adapters: int) -> LoraPlan:
    """See reference_lora.lora_plan."""
    return LoraPlan(indices.int().contiguous(), num_adapters)


def lora_shrink(x: Tensor, a: Tensor, plan: LoraPlan) -> Tensor:
    """See reference_lora.lora_shrink. Raises ValueError on a wrong width."""
    if x.dtype not in TYPES or a.dtype not in TYPES:
        return reference_lora.lora_shrink(x, a, plan)
    x, a = dense(x), a.contiguous()
    tokens, k = x.shape
    adapters, slices, rank, width = a.shape
    if width != k or plan.indices.shape[0] != tokens:
        raise ValueError(
            f"lora_shrink: x {list(x.shape)} does not fit adapters of width {width} and a plan of "
            f"{plan.indices.shape[0]} tokens"
        )
    out = torch.empty(tokens, slices, rank)
    _shrink(
        *(threads(), x.data_ptr(), x.stride(0), TYPES[x.dtype]),
        *(a.data_ptr(), TYPES[a.dtype], plan.indices.data_ptr(), min(adapters, plan.num_adapters)),
        *(out.data_ptr(), tokens, slices * rank, k),
    )
    return out


def lora_expand(
    hidden: Tensor, b: Tensor, scales: Tensor, plan: LoraPlan, out: Tensor, widths: Sequence[int]
) -> None:
    """See reference_lora.lora_expand."""
    reference_lora.check_expand(hidden, b, out, widths)
    if b.dtype not in TYPES or out.dtype not in TYPES or out.stride(-1) != 1:
        return reference_lora.lora_expand(hidden, b, scales, plan, out, widths)
    tokens, slices, rank = hidden.shape
    hidden, scales = hidden.float().contiguous(), scales.float().contiguous()
    columns = b.transpose(1, 2).contiguous()
    adapters, n = columns.shape[0], columns.shape[2]
    _expand(
        *(threads(), hidden.data_ptr(), columns.data_ptr(), TYPES[b.dtype]),
        *(scales.data_ptr(), plan.indices.data_ptr(), min(adapters, plan.num_adapters)),
        *(out.data_ptr(), out.stride(0), TYPES[out.dtype], (ctypes.c_int64 * slices)(*widths)),
        *(tokens, slices, rank, n),
    )
    return None
