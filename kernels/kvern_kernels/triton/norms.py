"""RMS norm, with the residual added before it, and LayerNorm: one program per row, in one pass.

Gemma's norms, whose weights are stored less 1, come with the 1 added (float32 weights serve any x).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvern_kernels.triton.launch import dense, launch, next_power_of_2


@triton.jit
def _norm_kernel(
    x_ptr,  # [T, D]
    residual_ptr,  # [T, D] where ADD
    weight_ptr,  # [D]
    bias_ptr,  # [D] where BIAS
    out_ptr,  # [T, D]
    total_ptr,  # [T, D] where ADD
    stride_x,
    stride_residual,
    dim,
    eps,
    ADD: tl.constexpr,
    CENTER: tl.constexpr,  # LayerNorm
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < dim
    x = tl.load(x_ptr + row * stride_x + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * stride_residual + column, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * dim + column, rounded, mask=mask)
        x = rounded.to(tl.float32)  # what a norm of the stored sum would see
    if CENTER:
        x = tl.where(mask, x - tl.sum(x, 0) / dim, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / dim + eps)
    out = x * scale * tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        out += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * dim + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See reference.rms_norm."""
    return _norm(x, None, weight, None, eps, center=False)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See reference.add_rms_norm."""
    return _norm(x, residual, weight, None, eps, center=False)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See reference.layer_norm."""
    return _norm(x, None, weight, bias, eps, center=True)[0]


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, center: bool
) -> tuple[Tensor, Tensor]:
    dim = x.shape[-1]
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (tensor.shape != (dim,) or (dim > 1 and tensor.stride(0) != 1)):
            raise ValueError(f"norm: {name} {tuple(tensor.shape)} must be dense and of x's width, {dim}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"norm: residual {residual.dtype} {tuple(residual.shape)} is not like x, {x.dtype} {tuple(x.shape)}"
        )
    rows = dense(x if x.dim() == 2 else x.reshape(-1, dim))
    added = rows if residual is None else dense(residual.reshape(-1, dim))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    block = next_power_of_2(dim)
    launch(
        _norm_kernel,
        (rows.shape[0],),
        *(rows, added, weight, weight if bias is None else bias, out, total),
        *(rows.stride(0), added.stride(0), dim, eps),
        ADD=residual is not None,
        CENTER=center,
        BIAS=bias is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out, total


def production() -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls whose compilations `aot` checks."""
    x = torch.empty((64, 8192), dtype=torch.bfloat16, device="meta")
    weight = torch.empty(8192, dtype=torch.float32, device="meta")
    yield "RMS norm of 8192", lambda: rms_norm(x, weight, 1e-6)
    yield "residual and RMS norm of 8192", lambda: add_rms_norm(x, x, weight, 1e-6)
    yield "LayerNorm of 8192", lambda: layer_norm(x, weight, weight, 1e-5)
