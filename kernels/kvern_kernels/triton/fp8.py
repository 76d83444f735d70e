"""float8_e4m3fn without hardware for it: a byte is s eeee mmm, exponent bias 7, no infinities, NaN 0x7f.

A cache comes to a kernel as float8_e4m3fn where the chip converts it, else as the same bytes in uint8
(`Chip.native_fp8`); kernels look at the pointer's type. See "FP8 Formats for Deep Learning", 2022.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvern_kernels.triton.launch import chip

MAX = tl.constexpr(448.0)


@triton.jit
def widen(x, dtype: tl.constexpr):
    """x, of a cache's element type, as `dtype` (a float); bytes are e4m3fn."""
    if x.dtype == tl.uint8:
        bits = x.to(tl.uint16)
        # Exponent and mantissa where float16 has them; its bias is 15, so the value is 2^8 too small.
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        out = (half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(dtype)
    elif x.dtype == tl.float8e4nv:
        # Through float16, which is what hardware converts to.
        out = x.to(tl.float16).to(dtype)
    else:
        out = x.to(dtype)
    return out


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 x as a cache's element type; for fp8 saturated and rounded to nearest even."""
    if dtype == tl.uint8:
        size = tl.minimum(tl.abs(x), MAX)
        bits = size.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFFF + ((bits >> 20) & 1)  # to three bits of mantissa
        normal = (rounded >> 20) - (120 << 3)  # float32's bias is 120 more
        # Below 2^-6 steps are 2^-9, float32's own at 2^14, which therefore rounds for us.
        small = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        code = tl.where(size < 0.015625, small, normal)
        out = (code | ((x.to(tl.uint32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
    elif dtype == tl.float8e4nv:
        out = tl.minimum(tl.maximum(x, -MAX), MAX).to(tl.float8e4nv)
    else:
        out = x.to(dtype)
    return out


def as_kernels_take(cache: Tensor) -> Tensor:
    """`cache`, its float8_e4m3fn elements seen as bytes where the chip doesn't know them.

    Raises ValueError for another 8-bit float.
    """
    if cache.dtype == torch.float8_e4m3fn:
        return cache if chip().native_fp8 else cache.view(torch.uint8)
    if cache.dtype.itemsize == 1:
        raise ValueError(f"a KV cache of {cache.dtype} has no GPU kernel: use float8_e4m3fn or 16-bit floats")
    return cache
