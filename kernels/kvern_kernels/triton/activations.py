"""Gated activations: one program per row and tile of columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvern_kernels.triton.launch import cdiv, dense, launch, next_power_of_2


@triton.jit
def _gate_kernel(
    x_ptr,  # [T, 2I], gate then up
    out_ptr,  # [T, I]
    stride_xt,
    stride_ot,
    inner,  # I
    KIND: tl.constexpr,  # "silu", "gelu_tanh" or "swiglu_oai" (clamped)
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < inner
    gate = tl.load(x_ptr + row * stride_xt + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_xt + inner + column, mask=mask, other=0.0).to(tl.float32)
    if KIND == "swiglu_oai":
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        out = gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    elif KIND == "gelu_tanh":
        # tanh(z) = 1 - 2 / (e^2z + 1), which neither overflows to NaN nor needs a library.
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        out = gate * (1.0 - 1.0 / (tl.exp(2.0 * z) + 1.0)) * up
    else:
        out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * stride_ot + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(x: Tensor) -> Tensor:
    """See reference.silu_and_mul."""
    return _gated(x, "silu")


def gelu_and_mul(x: Tensor) -> Tensor:
    """See reference.gelu_and_mul."""
    return _gated(x, "gelu_tanh")


def swiglu_and_mul(x: Tensor) -> Tensor:
    """See reference.swiglu_and_mul."""
    return _gated(x, "swiglu_oai")


def _gated(x: Tensor, kind: str) -> Tensor:
    x = dense(x)
    rows, inner = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, inner), dtype=x.dtype, device=x.device)
    block = min(1024, next_power_of_2(inner))
    launch(
        *(_gate_kernel, (rows, cdiv(inner, block)), x, out, x.stride(0), out.stride(0), inner),
        KIND=kind,
        BLOCK=block,
    )
    return out


def production() -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls whose compilations `aot` checks."""
    x = torch.empty((16, 2 * 14336), dtype=torch.bfloat16, device="meta")
    yield "silu bf16", lambda: silu_and_mul(x)
    yield "gelu bf16", lambda: gelu_and_mul(x)
    yield "clamped swiglu bf16", lambda: swiglu_and_mul(x)
