"""Weights in the planes that `tiles` reads, made once at load from checkpoint layouts.

Codes stay as wide as they came; only their order changes, so that a row of one plane is read in
whole sectors and both nibbles of a byte meet neighbouring products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvern_kernels import reference_gguf, reference_quant
from kvern_kernels.triton.launch import cdiv, chip

PLANES = ("codes", "scales", "zeros", "factors")


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight matrix of `out_features` × `in_features`; the planes of each `kind` are listed in `tiles`.

    `order` int32 [K]: the input that each column takes, where a checkpoint was quantized in another
    order. `activations`: how x is quantized first. Planes may have a first axis of experts (`moe`).
    """

    kind: str
    out_features: int
    in_features: int
    codes: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None
    zeros: Tensor | None = None
    factors: Tensor | None = None
    order: Tensor | None = None
    group: int = 0
    zero: int = 0
    activations: str | None = None
    delta: Any = None  # see reference.PackedLinear

    @property
    def num_bytes(self) -> int:
        held = (self.codes, self.bias, self.scales, self.zeros, self.factors, self.order)
        return sum(plane.nbytes for plane in held if plane is not None)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def groups(self) -> int:
        """Groups along the inputs, the width of a row of `scales`."""
        return cdiv(self.in_features, self.group) if self.group else 1

    @property
    def num_warps(self) -> int:
        """Of a program with 64 rows: both halves of unpacked nibbles take the registers of 8."""
        return 4 if self.kind in ("plain", "int8", "fp8", "w8a8") else 8

    @property
    def columns(self) -> int:
        """Outputs of such a program; six bits from three planes need more addresses."""
        return 32 if self.kind == "q6_k" else 64


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Keep weight [N, K] and bias [N] for `linear`. No copy of a contiguous weight is made."""
    n, k = weight.shape
    return PackedLinear("plain", n, k, weight.contiguous(), bias)


def pack_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    bias: Tensor | None = None,
    bits: int = 4,
    zero_offset: int = 1,
) -> PackedLinear:
    """See reference_quant.pack_gptq. Columns are sorted by group; x is gathered in that order."""
    codes, zeros = reference_quant.unpack_gptq(qweight, qzeros, bits, zero_offset)
    k = codes.shape[1]
    size = cdiv(k, zeros.shape[1])
    order = None
    if g_idx is not None and g_idx.numel():
        index = g_idx.long()
        if not torch.equal(index, torch.arange(k, device=index.device) // size):
            if not torch.equal(index.sort().values, torch.arange(k, device=index.device) // size):
                # A shard of a reordered matrix: its groups are of any size.
                whole = reference_quant.pack_gptq(qweight, qzeros, scales, g_idx, bias, bits, zero_offset)
                return pack_linear(whole.weight.to(scales.dtype), bias)
            order = torch.argsort(index, stable=True)
            codes = codes[:, order]
            order = order.int()
    return _grouped(codes, zeros, scales.t().contiguous(), size, bits, bias, order)


def pack_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """See reference_quant.pack_awq."""
    codes, zeros = reference_quant.unpack_awq(qweight, qzeros)
    return _grouped(codes, zeros, scales.t().contiguous(), cdiv(codes.shape[1], zeros.shape[1]), 4, bias)


def _grouped(
    codes: Tensor,  # uint8 [N, K]
    zeros: Tensor,  # int16 [N, G]
    scales: Tensor,  # [N, G]
    size: int,
    bits: int,
    bias: Tensor | None,
    order: Tensor | None = None,
) -> PackedLinear:
    n, k = codes.shape
    middle = 1 << (bits - 1)
    symmetric = bool((zeros == middle).all())
    if bits == 8:
        signed = (codes.to(torch.int16) - 128).to(torch.int8)
        plane = None if symmetric else (zeros - 128).to(scales.dtype)
        return PackedLinear("int8", n, k, signed, bias, scales, plane, order=order, group=size)
    plane = None if symmetric else zeros.to(scales.dtype)
    return PackedLinear(
        "int4", n, k, pack_nibbles(codes), bias, scales, plane, order=order, group=size, zero=middle
    )


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes 0 … 15, uint8 [N, K] → uint8 [N, ⌈K/128⌉·64], each 128 inputs as `tiles` tells."""
    n, k = codes.shape
    padded = torch.zeros((n, cdiv(k, 128) * 128), dtype=torch.uint8, device=codes.device)
    padded[:, :k] = codes
    low, high = padded.view(n, -1, 2, 64).unbind(2)
    return (low | (high << 4)).flatten(1)


def pack_int8(
    weight: Tensor, scales: Tensor, bias: Tensor | None = None, activations: str | None = None
) -> PackedLinear:
    """See reference_quant.pack_int8."""
    n, k = weight.shape
    spread = scales.float().reshape(-1).expand(n).contiguous()
    kind = "w8a8" if activations else "int8"
    return PackedLinear(kind, n, k, weight.contiguous(), bias, spread, activations=activations)


def pack_fp8(
    weight: Tensor, scales: Tensor, bias: Tensor | None = None, activations: str | None = None
) -> PackedLinear:
    """See reference_quant.pack_fp8. Where the chip lacks e4m3 products, x is not quantized."""
    n, k = weight.shape
    blocked = reference_quant.fp8_is_blocked(weight, scales)
    wide = scales.float()
    wide = wide.contiguous() if blocked else wide.reshape(-1).expand(n).contiguous()
    group = 128 if blocked else 0
    if activations and chip().native_fp8:
        scheme = "fp8_group" if blocked else "fp8"
        return PackedLinear("w8a8", n, k, weight.contiguous(), bias, wide, group=group, activations=scheme)
    return PackedLinear("fp8", n, k, weight.contiguous().view(torch.uint8), bias, wide, group=group)


def pack_mxfp4(blocks: Tensor, scales: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """See reference_quant.pack_mxfp4."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
    n, k = codes.shape
    return PackedLinear("mxfp4", n, k, pack_nibbles(codes), bias, scales.contiguous(), group=32)


def pack_gguf(blocks: Tensor, kind: str, bias: Tensor | None = None) -> PackedLinear:
    """See reference.pack_gguf."""
    n, k = reference_gguf.gguf_shape(blocks, kind)
    size, length = reference_gguf.GGUF_BLOCK_BYTES[kind], reference_gguf.gguf_block_length(kind)
    each = blocks.reshape(n, k // length, size)
    if kind == "Q4_K":
        return _q4_k(each, n, k, bias)
    if kind == "Q6_K":
        return _q6_k(each, n, k, bias)
    scales = _halves(each, 0, 2)[..., 0]
    if kind == "Q8_0":
        codes = each[..., 2:].contiguous().view(torch.int8).view(n, k)
        return PackedLinear("int8", n, k, codes, bias, scales, group=32)
    nibbles = each[..., -16:]
    codes = pack_nibbles(torch.cat((nibbles & 15, nibbles >> 4), -1).view(n, k))
    if kind == "Q4_0":
        return PackedLinear("int4", n, k, codes, bias, scales, group=32, zero=8)
    return PackedLinear("offset4", n, k, codes, bias, scales, _halves(each, 2, 4)[..., 0], group=32)


def _halves(each: Tensor, start: int, stop: int) -> Tensor:
    """float16 fields at bytes start … stop of each block."""
    return each[..., start:stop].contiguous().view(torch.float16).contiguous()


def _q4_k(each: Tensor, n: int, k: int, bias: Tensor | None) -> PackedLinear:
    factors = _halves(each, 0, 4).transpose(1, 2).contiguous()
    scales, minima = reference_gguf.q4_k_scales(each[..., 4:16])
    nibbles = each[..., 16:].unflatten(-1, (4, 32))
    codes = torch.cat((nibbles & 15, nibbles >> 4), -1).reshape(n, k)
    planes = scales.reshape(n, k // 32), minima.reshape(n, k // 32), factors
    return PackedLinear("q4_k", n, k, pack_nibbles(codes), bias, *planes, group=32)


def _q6_k(each: Tensor, n: int, k: int, bias: Tensor | None) -> PackedLinear:
    low = each[..., :128].reshape(n, k // 2)
    high = each[..., 128:192].reshape(n, k // 4)
    scales = each[..., 192:208].contiguous().view(torch.int8).reshape(n, k // 16)
    factors = _halves(each, 208, 210).reshape(n, k // 256)
    return PackedLinear("q6_k", n, k, low, bias, scales, high, factors, group=16)


def stack(packed: Sequence[PackedLinear]) -> PackedLinear:
    """Matrices of one kind, shape and grouping as one with an axis of experts before each plane."""
    first = packed[0]
    merged: dict[str, Any] = {}
    for name in (*PLANES, "bias", "order"):
        planes = [getattr(one, name) for one in packed]
        if name == "zeros" and any(plane is None for plane in planes) != all(
            plane is None for plane in planes
        ):
            # Some experts are symmetric, some aren't.
            like = next(plane for plane in planes if plane is not None)
            middle = float(first.zero)
            planes = [torch.full_like(like, middle) if plane is None else plane for plane in planes]
        merged[name] = None if planes[0] is None else torch.stack(planes)
    return replace(first, **merged)
