"""What quantized weights and activations mean, in plain torch.

`unpack_…` read published checkpoint layouts into integer codes; every backend packs from there.
`pack_…` keep a float32 matrix for `linear`. N outputs, K inputs, G groups along K, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvern_kernels.reference import PackedLinear

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INT8_MAX = 127.0
ACTIVATIONS = (None, "fp8", "int8")  # how x is quantized before the product: not at all, or per token
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of an int32 that holds output 8·i + j
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of the low three bits; the fourth is the sign
MX_GROUP = 32


def unpack_gptq(
    qweight: Tensor, qzeros: Tensor, bits: int = 4, zero_offset: int = 1
) -> tuple[Tensor, Tensor]:
    """GPTQ's int32 words → (codes uint8 [N, K], zeros uint8-valued int16 [N, G]).

    qweight [K·bits/32, N] holds consecutive inputs from the low bits up, qzeros [G, N·bits/32] consecutive
    outputs. Files of the original format store zero − 1, hence `zero_offset` 1; "gptq_v2" files 0.
    """
    if bits not in (4, 8):
        raise ValueError(f"GPTQ with {bits} bits is not supported: use 4 or 8")
    codes = _words(qweight.t().contiguous(), bits)
    zeros = _words(qzeros, bits).t().to(torch.int16) + zero_offset
    return codes, zeros.contiguous()


def unpack_awq(qweight: Tensor, qzeros: Tensor) -> tuple[Tensor, Tensor]:
    """AWQ's int32 words → (codes uint8 [N, K], zeros int16 [N, G]).

    qweight [K, N/8] and qzeros [G, N/8] hold eight outputs a word in the order 0, 2, 4, 6, 1, 3, 5, 7.
    """
    order = torch.tensor(AWQ_ORDER, device=qweight.device)
    codes, zeros = (
        _words(words, 4).unflatten(1, (-1, 8))[..., order].flatten(1).t().contiguous()
        for words in (qweight, qzeros)
    )
    return codes, zeros.to(torch.int16)


def _words(words: Tensor, bits: int) -> Tensor:
    """int32 [R, C] → its fields of `bits` bits, low ones first, uint8 [R, C·32/bits]."""
    if words.dtype != torch.int32:
        raise ValueError(f"packed weights must be int32, not {words.dtype}")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    fields = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return fields.to(torch.uint8).flatten(1)


def group_index(k: int, groups: int, g_idx: Tensor | None, device: torch.device | str = "cpu") -> Tensor:
    """The group of each input, int64 [K]: `g_idx` of a checkpoint quantized in another order, or K/G each."""
    if g_idx is not None and g_idx.numel():
        return g_idx.long()
    size = -(-k // groups)
    return torch.arange(k, device=device) // size


def pack_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    bias: Tensor | None = None,
    bits: int = 4,
    zero_offset: int = 1,
) -> PackedLinear:
    """Keep a GPTQ matrix (see unpack_gptq; scales [G, N], g_idx int32 [K] or None) for `linear`."""
    codes, zeros = unpack_gptq(qweight, qzeros, bits, zero_offset)
    return PackedLinear(_affine(codes, zeros, scales, g_idx), bias)


def pack_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Keep an AWQ matrix (see unpack_awq; scales [G, N]) for `linear`."""
    codes, zeros = unpack_awq(qweight, qzeros)
    return PackedLinear(_affine(codes, zeros, scales, None), bias)


def _affine(codes: Tensor, zeros: Tensor, scales: Tensor, g_idx: Tensor | None) -> Tensor:
    group = group_index(codes.shape[1], zeros.shape[1], g_idx, codes.device)
    return (codes.float() - zeros.float()[:, group]) * scales.float().t()[:, group]


def pack_int8(
    weight: Tensor, scales: Tensor, bias: Tensor | None = None, activations: str | None = None
) -> PackedLinear:
    """Keep int8 weight [N, K] with scales [N] (or [N, 1]) for `linear`; `activations` "int8" quantizes x too."""
    return PackedLinear(weight.float() * scales.float().reshape(-1, 1), bias, activations)


def pack_fp8(
    weight: Tensor, scales: Tensor, bias: Tensor | None = None, activations: str | None = None
) -> PackedLinear:
    """Keep an e4m3 weight [N, K] for `linear`; `activations` "fp8" quantizes x too.

    `scales` multiply: one number (a scalar or [1]), one an output ([N] or [N, 1]), or one a block of
    128×128 ([⌈N/128⌉, ⌈K/128⌉]); x is then quantized per token, or per token and 128 inputs.
    """
    n, k = weight.shape
    wide = weight.float()
    if fp8_is_blocked(weight, scales):
        spread = scales.float().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        return PackedLinear(wide * spread, bias, activations and "fp8_group")
    return PackedLinear(wide * scales.float().reshape(-1, 1), bias, activations)


def fp8_is_blocked(weight: Tensor, scales: Tensor) -> bool:
    """Whether `scales` go by blocks of 128×128. Raises ValueError on a shape that doesn't fit the weight."""
    n, k = weight.shape
    if scales.numel() == 1 or tuple(scales.shape) in ((n,), (n, 1)):
        return False
    if tuple(scales.shape) != (-(-n // 128), -(-k // 128)):
        raise ValueError(
            f"fp8 scales {list(scales.shape)} do not fit a weight of {n} outputs and {k} inputs: give one scale, "
            f"one an output, or one a 128×128 block, {[-(-n // 128), -(-k // 128)]}"
        )
    return True


def pack_mxfp4(blocks: Tensor, scales: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Keep an MXFP4 matrix for `linear` (OCP Microscaling Formats 1.0): uint8 blocks [N, K/2] with two e2m1
    codes a byte, the low nibble first, and scales uint8 [N, K/32], the power of two 2^(s − 127).
    """
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
    table = torch.tensor(E2M1 + tuple(-v for v in E2M1), device=blocks.device)
    power = torch.exp2(scales.float() - 127).repeat_interleave(MX_GROUP, 1)
    return PackedLinear(table[codes.long()] * power, bias)


def quantize_fp8(x: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """x [T, K] → (e4m3 codes [T, K], scales float32 [T, ⌈K/group⌉]); group 0: one scale a token.

    A scale is the largest magnitude ÷ 448 (1 where all are zero): x ≈ codes · scale.
    """
    parts, scales = _scaled(x, group, FP8_MAX)
    return parts.clamp(-FP8_MAX, FP8_MAX).to(FP8), scales


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] → (int8 codes [T, K], scales float32 [T, 1]), the largest magnitude of a token ÷ 127."""
    parts, scales = _scaled(x, 0, INT8_MAX)
    return parts.round().nan_to_num(0.0).clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scales


def _scaled(x: Tensor, group: int, largest: float) -> tuple[Tensor, Tensor]:
    """(x ÷ scale, scales) in float32."""
    tokens, k = x.shape
    size = group or max(k, 1)
    count = max(-(-k // size), 1)
    padded = torch.zeros(tokens, count * size, device=x.device)
    padded[:, :k] = x
    parts = padded.view(tokens, count, size)
    peak = parts.abs().amax(-1)
    scales = torch.where(peak == 0, torch.ones_like(peak), peak / largest)
    return (parts / scales.unsqueeze(-1)).flatten(1)[:, :k], scales


def requantized(x: Tensor, activations: str | None) -> Tensor:
    """x [T, K] as the product sees it, float32: quantized and back."""
    if activations is None:
        return x.float()
    if activations == "int8":
        codes, scales = quantize_int8(x)
        return codes.float() * scales
    if activations not in ("fp8", "fp8_group"):
        raise ValueError(f"unknown activation quantization {activations!r}: use None, 'fp8' or 'int8'")
    group = 128 if activations == "fp8_group" else 0
    codes, scales = quantize_fp8(x, group)
    spread = scales.repeat_interleave(group, 1)[:, : x.shape[1]] if group else scales
    return codes.float() * spread
