"""The inner product of GEMM kernels: rows of x times a tile of outputs, whatever form the weights have.

`accumulate` walks over K in one fixed order, so that an output's bits depend on its row alone. Forms of a
weight matrix (KIND), in planes that `packing` makes; a row is one output:

  plain   w [N, K] in x's dtype or wider
  int8    w int8 [N, K]; s [N, groups], z [N, groups] or None: (w − z) · s; GROUP 0: one scale an output
  fp8     w e4m3 as bytes [N, K]; s [N] (GROUP 0) or [⌈N/128⌉, ⌈K/128⌉] (GROUP 128)
  int4    w nibbles; s, z as int8's, z None: ZERO;  offset4: w · s + z
  q4_k    w nibbles; s, z bytes [N, K/32] scale and minimum, d [N, 2, K/256] their factors
  q6_k    w low nibbles; z high pairs of bits [N, K/4]; s int8 [N, K/16], d [N, K/256]
  mxfp4   w nibbles, e2m1; s bytes [N, K/32], e8m0
  w8a8    both x and w int8 or e4m3; xs [T, 1 or ⌈K/128⌉], s as fp8's

Nibbles: of each 128 inputs byte j holds number j in its low and number j + 64 in its high half, so that
one load serves two products and nothing is shuffled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvern_kernels.triton.fp8 import widen
from kvern_kernels.triton.launch import interpreted

INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def dot(a, b, acc):
    """acc + a·b. The interpreter keeps bfloat16 as integers and would multiply those."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _small_to_float(code):
    """Integers 0 … 2^23 − 1 → float32, by an OR and a subtraction: conversions run at a quarter of their rate."""
    return (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _group_values(ptr, rn, n_mask, k0, groups, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """Values [N, groups] for inputs k0 … k0 + WIDTH: [1, BN] where one group has them all, else [WIDTH, BN]."""
    if GROUP % WIDTH == 0:
        group = (k0 + tl.zeros((1,), tl.int32)) // GROUP
    else:
        group = (k0 + tl.arange(0, WIDTH)) // GROUP
    at = rn.to(tl.int64)[None, :] * groups + group[:, None]
    return tl.load(ptr + at, mask=n_mask[None, :] & (group < groups)[:, None], other=0)


@triton.jit
def _load_x(x_ptr, x_row, m_mask, order_ptr, k, K):
    """x [BM, BK] of inputs `k`, taken in the weight's own order if it has one."""
    k_mask = k < K
    if order_ptr is not None:
        k = tl.load(order_ptr + k, mask=k_mask, other=0)
    return tl.load(x_ptr + x_row[:, None] + k[None, :], mask=m_mask[:, None] & k_mask[None, :], other=0.0)


@triton.jit
def _nibble_values(
    code,  # int32 [64, BN]
    s_ptr,
    z_ptr,
    d_ptr,
    rn,
    n_mask,
    k0,  # the first of the 64 inputs
    K,
    groups,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
):
    """Codes → float32 weights [64, BN]."""
    if KIND == "mxfp4":
        half = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.uint16).to(tl.float16, bitcast=True)
        exponent = _group_values(s_ptr, rn, n_mask, k0, groups, 32, 64).to(tl.int32)
        w = half.to(tl.float32) * 16384.0 * (exponent << 23).to(tl.float32, bitcast=True)
    elif KIND == "q6_k":
        j = tl.arange(0, 64)
        at = rn.to(tl.int64)[None, :] * (K // 4) + (k0 // 128) * 32 + (j % 32)[:, None]
        high = tl.load(z_ptr + at, mask=n_mask[None, :], other=0).to(tl.int32)
        shift = ((k0 % 128) // 32 + j // 32) * 2
        six = code | (((high >> shift[:, None]) & 3) << 4)
        scale = _group_values(s_ptr, rn, n_mask, k0, K // 16, 16, 64).to(tl.float32)
        factor = _group_values(d_ptr, rn, n_mask, k0, K // 256, 256, 64).to(tl.float32)
        w = (_small_to_float(six) - 32.0) * (scale * factor)
    elif KIND == "q4_k":
        scale = _group_values(s_ptr, rn, n_mask, k0, K // 32, 32, 64).to(tl.float32)
        minimum = _group_values(z_ptr, rn, n_mask, k0, K // 32, 32, 64).to(tl.float32)
        factor = _group_values(d_ptr, rn * 2, n_mask, k0, K // 256, 256, 64).to(tl.float32)
        down = _group_values(d_ptr, rn * 2 + 1, n_mask, k0, K // 256, 256, 64).to(tl.float32)
        w = _small_to_float(code) * (scale * factor) - minimum * down
    else:
        scale = _group_values(s_ptr, rn, n_mask, k0, groups, GROUP, 64).to(tl.float32)
        w = _small_to_float(code)
        if KIND == "offset4":
            w = w * scale + _group_values(z_ptr, rn, n_mask, k0, groups, GROUP, 64).to(tl.float32)
        elif z_ptr is None:
            w = (w - ZERO) * scale
        else:
            w = (w - _group_values(z_ptr, rn, n_mask, k0, groups, GROUP, 64).to(tl.float32)) * scale
    return w


@triton.jit
def _accumulate_nibbles(
    acc,
    x_ptr,
    x_row,
    m_mask,
    order_ptr,
    w_ptr,
    s_ptr,
    z_ptr,
    d_ptr,
    rn,
    n_mask,
    K,
    groups,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
):
    j = tl.arange(0, 64)
    units = tl.cdiv(K, 128)
    w_row = rn.to(tl.int64) * (units * 64)
    for unit in range(units):
        packed = tl.load(w_ptr + w_row[None, :] + unit * 64 + j[:, None], mask=n_mask[None, :], other=0)
        for half in tl.static_range(2):
            k0 = unit * 128 + half * 64
            x = _load_x(x_ptr, x_row, m_mask, order_ptr, k0 + j, K)
            code = (packed.to(tl.int32) >> (4 * half)) & 15
            w = _nibble_values(code, s_ptr, z_ptr, d_ptr, rn, n_mask, k0, K, groups, KIND, GROUP, ZERO)
            acc = dot(x, w.to(x.dtype), acc)
    return acc


@triton.jit
def _accumulate_wide(
    acc,
    x_ptr,
    x_row,
    m_mask,
    order_ptr,
    w_ptr,
    s_ptr,
    z_ptr,
    rn,
    n_mask,
    K,
    groups,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    w_row = rn.to(tl.int64) * K
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        x = _load_x(x_ptr, x_row, m_mask, order_ptr, k, K)
        w = tl.load(w_ptr + w_row[None, :] + k[:, None], mask=n_mask[None, :] & (k < K)[:, None], other=0)
        if KIND == "fp8":
            w = widen(w, tl.float32)
            if GROUP > 0:
                w = w * _group_values(s_ptr, rn // GROUP, n_mask, k0, groups, GROUP, BLOCK_K)
        elif KIND == "int8":
            w = w.to(tl.float32)
            if GROUP > 0:
                if z_ptr is not None:
                    w = w - _group_values(z_ptr, rn, n_mask, k0, groups, GROUP, BLOCK_K).to(tl.float32)
                w = w * _group_values(s_ptr, rn, n_mask, k0, groups, GROUP, BLOCK_K).to(tl.float32)
        acc = dot(x, w.to(x.dtype), acc)
    if KIND != "plain" and GROUP == 0:
        acc = acc * tl.load(s_ptr + rn, mask=n_mask, other=0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _accumulate_w8a8(
    acc,
    x_ptr,
    x_row,
    xs_row,  # pointers [BM] to the rows' scales
    m_mask,
    w_ptr,
    s_ptr,
    rn,
    n_mask,
    K,
    groups,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    w_row = rn.to(tl.int64) * K
    if GROUP > 0:
        for block in range(tl.cdiv(K, GROUP)):
            k = block * GROUP + tl.arange(0, GROUP)
            x = _load_x(x_ptr, x_row, m_mask, None, k, K)
            w = tl.load(
                w_ptr + w_row[None, :] + k[:, None], mask=n_mask[None, :] & (k < K)[:, None], other=0.0
            )
            xs = tl.load(xs_row + block, mask=m_mask, other=0.0)
            ws = tl.load(s_ptr + (rn // GROUP) * groups + block, mask=n_mask, other=0.0)
            acc += tl.dot(x, w) * (xs[:, None] * ws[None, :])
    else:
        total = acc.to(tl.int32) if w_ptr.dtype.element_ty == tl.int8 else acc
        for k0 in range(0, K, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            x = _load_x(x_ptr, x_row, m_mask, None, k, K)
            w = tl.load(
                w_ptr + w_row[None, :] + k[:, None], mask=n_mask[None, :] & (k < K)[:, None], other=0.0
            )
            total = tl.dot(x, w, total, out_dtype=total.dtype)
        xs = tl.load(xs_row, mask=m_mask, other=0.0)
        ws = tl.load(s_ptr + rn, mask=n_mask, other=0.0)
        acc = total.to(tl.float32) * (xs[:, None] * ws[None, :])
    return acc


@triton.jit
def accumulate(
    acc,  # float32 [BM, BN], zeros
    x_ptr,
    x_row,  # int64 [BM]: where each row of x begins
    xs_row,  # pointers [BM] to a row's scales (w8a8), else unused
    m_mask,
    order_ptr,  # int32 [K] or None: the input that each column of w takes
    w_ptr,
    s_ptr,
    z_ptr,
    d_ptr,
    rn,  # int32 [BN]: outputs
    n_mask,
    K,
    groups,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x·wᵀ of the rows and outputs, float32 [BM, BN], scales applied."""
    if KIND == "w8a8":
        acc = _accumulate_w8a8(
            *(acc, x_ptr, x_row, xs_row, m_mask, w_ptr, s_ptr, rn, n_mask, K, groups, GROUP, BLOCK_K)
        )
    elif KIND == "plain" or KIND == "int8" or KIND == "fp8":
        acc = _accumulate_wide(
            *(acc, x_ptr, x_row, m_mask, order_ptr, w_ptr, s_ptr, z_ptr, rn, n_mask, K, groups),
            *(KIND, GROUP, BLOCK_K),
        )
    else:
        acc = _accumulate_nibbles(
            *(acc, x_ptr, x_row, m_mask, order_ptr, w_ptr, s_ptr, z_ptr, d_ptr, rn, n_mask, K, groups),
            *(KIND, GROUP, ZERO),
        )
    return acc
