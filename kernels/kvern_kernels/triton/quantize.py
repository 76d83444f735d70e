"""Activations to 8 bits, one scale a token or a token's 128 inputs: one program per scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvern_kernels import reference_quant
from kvern_kernels.triton.fp8 import narrow
from kvern_kernels.triton.launch import cdiv, chip, dense, interpreted, launch, next_power_of_2


@triton.jit
def _quantize_kernel(
    x_ptr,  # [T, K]
    q_ptr,  # [T, K], int8, or e4m3 also as bytes
    scale_ptr,  # float32 [T, groups]
    K,
    stride_xt,
    groups,
    group,  # inputs of a group
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * group
    last = tl.minimum(first + group, K)
    peak = 0.0
    broken = 0  # a maximum passes over what is not a number
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride_xt + at, mask=at < last, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.max(tl.abs(x), 0))
        broken = tl.maximum(broken, tl.max((x != x).to(tl.int32), 0))
    scale = tl.where(peak == 0.0, 1.0, tl.fdiv(peak, LARGEST))
    scale = tl.where(broken > 0, float("nan"), scale)
    tl.store(scale_ptr + row * groups + tl.program_id(1), scale)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride_xt + at, mask=at < last, other=0.0).to(tl.float32)
        part = tl.minimum(tl.maximum(tl.fdiv(x, scale), -LARGEST), LARGEST)
        if q_ptr.dtype.element_ty == tl.int8:
            # Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
            code = ((part + 12582912.0) - 12582912.0).to(tl.int8)
        else:
            code = narrow(part, q_ptr.dtype.element_ty)
        tl.store(q_ptr + row * K + at, code, mask=at < last)


def quantize_fp8(x: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """See reference_quant.quantize_fp8."""
    return _quantize(x, group, torch.float8_e4m3fn, reference_quant.FP8_MAX)


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """See reference_quant.quantize_int8."""
    return _quantize(x, 0, torch.int8, reference_quant.INT8_MAX)


def _quantize(x: Tensor, group: int, dtype: torch.dtype, largest: float) -> tuple[Tensor, Tensor]:
    x = dense(x)
    tokens, k = x.shape
    size = group or max(k, 1)
    groups = max(cdiv(k, size), 1)
    codes = torch.empty((tokens, k), dtype=dtype, device=x.device)
    scales = torch.empty((tokens, groups), dtype=torch.float32, device=x.device)
    # The interpreter does not carry into the exponent when it rounds.
    as_bytes = dtype != torch.int8 and (interpreted() or not chip().native_fp8)
    written = codes.view(torch.uint8) if as_bytes else codes
    launch(
        *(_quantize_kernel, (tokens, groups), x, written, scales, k, x.stride(0), groups, size),
        LARGEST=largest,
        BLOCK=min(next_power_of_2(size), 4096),
        num_warps=1 if size <= 512 else 4,
    )
    return codes, scales


def production() -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls whose compilations `aot` checks."""
    x = torch.empty((16, 7168), dtype=torch.bfloat16, device="meta")
    yield "int8", lambda: quantize_int8(x)
    yield "fp8 group", lambda: quantize_fp8(x, 128)
