"""The C++ backend's quantized weights: published layouts → panels of codes and factors (csrc/abi.h, Quantized).

Codes take 4, 6 or 8 bits as they come: GGUF's Q2_K and Q3_K are kept in 4 bits, Q5_0, Q5_1, Q5_K and MXFP4 in 6;
no value changes. bfloat16 and float16 x is quantized to 16 bits a row and inputs are multiplied in integers;
`activations` "int8" makes that 8 bits. float32 x meets weights dequantized to float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from enum import IntEnum

import torch
from torch import Tensor

from kvern_kernels import reference, reference_quant
from kvern_kernels.cpu_base import aligned
from kvern_kernels.cpu_linear import (
    E4M3,
    QUANTIZED,
    PackedLinear,
    pack_codes,
    pack_linear,
    pack_panels,
    packed_linear,
)
from kvern_kernels.reference_gguf import gguf_codes, gguf_shape

_LONGEST_GROUP = 65_536  # 255 · 128 · group stays below 2^31


class _Kind(IntEnum):
    FLOAT_ZERO = 0
    FLOAT_MINIMUM = 1
    HALF_ZERO = 2
    HALF_ZEROS = 3
    HALF_MINIMUM = 4
    SUPER_MINIMUM = 5
    SUPER_ZERO = 6


class _Quantized(ctypes.Structure):
    _fields_ = [
        *[(name, c_void_p) for name in ("codes", "factors", "order")],
        *[(name, c_int64) for name in ("k", "group", "groups", "groups_per_super", "factor_bytes")],
        *[(name, c_int32) for name in ("bits", "kind", "zero", "activation_bits")],
    ]


class _Fp8(ctypes.Structure):
    _fields_ = [
        *[(name, c_void_p) for name in ("codes", "scales")],
        *[(name, c_int64) for name in ("k", "group", "groups")],
    ]


def pack_gguf(blocks: Tensor, kind: str, bias: Tensor | None = None) -> PackedLinear:
    """See reference.pack_gguf: every kind of GGUF_BLOCK_BYTES, as it is quantized."""
    gguf_shape(blocks, kind)
    parts = gguf_codes(blocks.contiguous(), kind)
    bits = 8 if kind == "Q8_0" else 4 if kind in ("Q4_0", "Q4_1", "Q4_K", "Q2_K", "Q3_K") else 6
    if parts.super_scale is None:
        factor_kind = _Kind.HALF_ZERO if parts.minimum is None else _Kind.HALF_MINIMUM
    else:
        factor_kind = _Kind.SUPER_ZERO if parts.minimum is None else _Kind.SUPER_MINIMUM
    factors = [parts.scale] + ([] if parts.minimum is None else [parts.minimum])
    supers = [x for x in (parts.super_scale, parts.super_minimum) if x is not None]
    return _packed(parts.codes, bits, parts.group, factor_kind, factors, bias, parts.zero, supers=supers)


def pack_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    bias: Tensor | None = None,
    bits: int = 4,
    zero_offset: int = 1,
) -> PackedLinear | reference.PackedLinear:
    """See reference_quant.pack_gptq. Inputs of a checkpoint quantized in another order are sorted by group."""
    codes, zeros = reference_quant.unpack_gptq(qweight, qzeros, bits, zero_offset)
    packed = _affine(codes, zeros, scales, g_idx, bits, bias)
    if packed is None:
        return reference_quant.pack_gptq(qweight, qzeros, scales, g_idx, bias, bits, zero_offset)
    return packed


def pack_awq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, bias: Tensor | None = None
) -> PackedLinear | reference.PackedLinear:
    """See reference_quant.pack_awq."""
    codes, zeros = reference_quant.unpack_awq(qweight, qzeros)
    packed = _affine(codes, zeros, scales, None, 4, bias)
    return reference_quant.pack_awq(qweight, qzeros, scales, bias) if packed is None else packed


def _affine(
    codes: Tensor, zeros: Tensor, scales: Tensor, g_idx: Tensor | None, bits: int, bias: Tensor | None
) -> PackedLinear | None:
    """codes [N, K] and zeros [N, G], scales [G, N]; None where the groups have no even length to run along k."""
    (_, k), groups = codes.shape, zeros.shape[1]
    group, order = -(-k // groups), None
    if g_idx is not None and g_idx.numel():
        order = torch.argsort(g_idx, stable=True).to(torch.int32)
        if not torch.equal(g_idx[order.long()].long(), torch.arange(k) // group):
            return None
        if torch.equal(order, torch.arange(k, dtype=torch.int32)):
            order = None
        else:
            codes = codes[:, order.long()]
    if groups > 1 and group % 16:
        return None
    if group * (groups - 1) >= k:
        return None
    scales = scales.t()
    half, zero = scales.half(), int(zeros[0, 0]) if zeros.numel() else 0
    exact = torch.equal(half.float(), scales.float())
    if exact and bool((zeros == zero).all()):
        return _packed(codes, bits, group, _Kind.HALF_ZERO, [half], bias, zero, order)
    if exact and int(zeros.max()) < 256:
        return _packed(codes, bits, group, _Kind.HALF_ZEROS, [half, zeros.to(torch.uint8)], bias, order=order)
    scales = scales.float()
    return _packed(
        codes, bits, group, _Kind.FLOAT_MINIMUM, [scales, -scales * zeros.float()], bias, order=order
    )


def pack_int8(
    weight: Tensor, scales: Tensor, bias: Tensor | None = None, activations: str | None = None
) -> PackedLinear | reference.PackedLinear:
    """See reference_quant.pack_int8; scales [N, G] of groups along k too."""
    n, k = weight.shape
    scales = scales.float().reshape(n, -1)
    groups = scales.shape[1]
    group = -(-k // max(groups, 1))
    if activations not in (None, "int8") or (groups > 1 and group % 16) or not k:
        return reference_quant.pack_int8(weight, scales, bias, activations)
    codes = weight.contiguous().view(torch.uint8) ^ 128
    bits = 8 if activations == "int8" else 16
    return _packed(codes, 8, group, _Kind.FLOAT_ZERO, [scales], bias, 128, activation_bits=bits)


def pack_fp8(
    weight: Tensor, scales: Tensor, bias: Tensor | None = None, activations: str | None = None
) -> PackedLinear | reference.PackedLinear:
    """See reference_quant.pack_fp8, which serves where x is to be quantized too.

    e4m3 weights stay as they are, one byte each, and meet bfloat16 x as bfloat16 (every code is one exactly), float32
    accumulation and, per group of inputs, one scale. NaN codes and e5m2 weights are kept scaled, in bfloat16.
    """
    blocked = reference_quant.fp8_is_blocked(weight, scales)
    if activations:
        return reference_quant.pack_fp8(weight, scales, bias, activations)
    plain = weight.dtype == torch.float8_e4m3fn and weight.device.type == "cpu" and weight.numel() > 0
    if not plain or bool((weight.view(torch.uint8) & 127 == 127).any()):
        return pack_linear(reference_quant.pack_fp8(weight, scales).weight.bfloat16(), bias)
    n, k = weight.shape
    padded = -(-k // 32) * 32
    group = 128 if blocked else padded
    if blocked:
        by_output = scales.float().repeat_interleave(128, 0)[:n]
    else:
        by_output = scales.float().reshape(-1, 1).expand(n, 1)
    laid = _by_panel(by_output).view(torch.float32).contiguous()
    panels = pack_panels(weight.contiguous())
    struct = _Fp8(panels.data_ptr(), laid.data_ptr(), padded, group, by_output.shape[1])
    return packed_linear(panels, E4M3, n, k, bias, ctypes.addressof(struct), (laid, struct))


def pack_mxfp4(blocks: Tensor, scales: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """See reference_quant.pack_mxfp4: twice the e2m1 values are integers from −12 to 12."""
    table = torch.tensor([int(2 * v) for v in reference_quant.E2M1], dtype=torch.uint8)
    table = torch.cat((12 + table, 12 - table))
    codes = table[torch.stack((blocks & 15, blocks >> 4), -1).flatten(1).int()]
    power = torch.exp2(scales.float() - 128)
    return _packed(codes, 6, reference_quant.MX_GROUP, _Kind.FLOAT_ZERO, [power], bias, 12)


def _packed(
    codes: Tensor,
    bits: int,
    group: int,
    kind: _Kind,
    factors: Sequence[Tensor],
    bias: Tensor | None,
    zero: int = 0,
    order: Tensor | None = None,
    activation_bits: int = 16,
    supers: Sequence[Tensor] = (),
) -> PackedLinear:
    """codes uint8 [N, K], factors [N, G] each, supers [N, S] each → panels."""
    n, k = codes.shape
    groups = factors[0].shape[1]
    if groups == 1:
        group = -(-k // 64) * 64
    if group > _LONGEST_GROUP:
        raise ValueError(f"{k} inputs share one scale: at most {_LONGEST_GROUP} can; use groups")
    padded, panels = groups * group, -(-n // 16)
    held = aligned(panels * 2 * padded * bits, torch.uint8)
    pack_codes(codes.contiguous(), bits, held, padded)
    columns = torch.cat([_by_panel(x) for x in factors], -1)
    per_super = 1
    if supers:
        heads = torch.cat([_by_panel(x) for x in supers], -1)
        per_super = groups // max(heads.shape[1], 1) or 1
        columns = torch.cat((heads, columns.unflatten(1, (-1, per_super)).flatten(2)), -1)
    columns = columns.flatten(1)
    laid = aligned(columns.numel(), torch.uint8)
    laid.copy_(columns.flatten())
    struct = _Quantized(
        *(held.data_ptr(), laid.data_ptr(), None if order is None else order.data_ptr()),
        *(padded, group, groups, per_super, columns.shape[1]),
        *(bits, kind, zero, activation_bits),
    )
    kept = (laid, struct) if order is None else (laid, struct, order)
    return packed_linear(held, QUANTIZED, n, k, bias, ctypes.addressof(struct), kept)


def _by_panel(x: Tensor) -> Tensor:
    """[N, C] → uint8 [⌈N/16⌉, C, bytes of 16]."""
    n, c = x.shape
    padded = torch.zeros(-(-n // 16) * 16, c, dtype=x.dtype)
    padded[:n] = x
    return padded.view(-1, 16, c).transpose(1, 2).contiguous().view(torch.uint8)
