"""GGUF's block formats (ggml/docs/gguf.md, ggml-common.h) as integer codes and factors, and dequantized, in torch.

A row of K weights is a run of blocks; integers are little-endian and factors float16:

  Q4_0  32 weights: d, 16 bytes of nibbles, the low ones first; (q − 8)·d
  Q4_1  32 weights: d, m, 16 bytes of nibbles; q·d + m
  Q5_0  32 weights: d, 4 bytes with a fifth bit each, nibbles; (q − 16)·d
  Q5_1  32 weights: d, m, fifth bits, nibbles; q·d + m
  Q8_0  32 weights: d, 32 int8; q·d
  Q2_K  256 weights: 16 bytes of scale (low nibble) and minimum, 64 bytes of pairs, d, dmin;
        q·(d·scale) − dmin·minimum, for each 16
  Q3_K  256 weights: 32 bytes of third bits, 64 of pairs, 12 with 16 scales of 6 bits, d; (q − 4)·(d·(scale − 32))
  Q4_K  256 weights: d, dmin, 12 bytes with 8 scales and 8 minima of 6 bits, 128 bytes of nibbles (each 32 of
        them hold 64 weights, the low ones first); q·(d·scale) − dmin·minimum, for each 32
  Q5_K  256 weights: as Q4_K, with 32 bytes of fifth bits before the nibbles
  Q6_K  256 weights: 128 bytes of low nibbles, 64 of high pairs, 16 int8 scales, d; (q − 32)·(d·scale), for each 16
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GGUF_BLOCK_BYTES = {
    "Q4_0": 18,
    "Q4_1": 20,
    "Q5_0": 22,
    "Q5_1": 24,
    "Q8_0": 34,
    "Q2_K": 84,
    "Q3_K": 110,
    "Q4_K": 144,
    "Q5_K": 176,
    "Q6_K": 210,
}


@dataclass(frozen=True, slots=True)
class GgufCodes:
    """A matrix [N, K] taken apart: w = scale·(code − zero), or scale·code + minimum, G groups and S super-blocks.

    `scale` and `minimum` are float16 [N, G], or bytes that multiply float16 `super_scale` and − `super_minimum` [N, S].
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None = None
    zero: int = 0
    super_scale: Tensor | None = None
    super_minimum: Tensor | None = None

    @property
    def group(self) -> int:
        """Weights that share a scale."""
        return self.codes.shape[1] // self.scale.shape[1]


def gguf_block_length(kind: str) -> int:
    """Weights of a block."""
    return 256 if kind.endswith("_K") else 32


def gguf_shape(blocks: Tensor, kind: str) -> tuple[int, int]:
    """(N, K) of GGUF `blocks`, uint8 [N, bytes of a row]. Raises ValueError for what isn't supported."""
    size = GGUF_BLOCK_BYTES.get(kind)
    if size is None:
        raise ValueError(f"GGUF type {kind} has no kernel: use one of {', '.join(GGUF_BLOCK_BYTES)}")
    if blocks.dtype != torch.uint8 or blocks.dim() != 2 or blocks.shape[1] % size:
        raise ValueError(
            f"{kind} blocks must be uint8 [N, multiple of {size}], not {blocks.dtype} {list(blocks.shape)}"
        )
    return blocks.shape[0], blocks.shape[1] // size * gguf_block_length(kind)


def dequantize_gguf(blocks: Tensor, kind: str) -> Tensor:
    """GGUF `blocks`, uint8 [N, bytes of a row] of a kind in GGUF_BLOCK_BYTES → float32 [N, K]."""
    parts = gguf_codes(blocks, kind)
    scale, minimum = parts.scale.float(), parts.minimum
    if parts.super_scale is not None:
        scale *= _spread(parts.super_scale, scale)
    if minimum is not None:
        minimum = minimum.float()
        if parts.super_minimum is not None:
            minimum *= -_spread(parts.super_minimum, minimum)
    codes = (parts.codes.float() - parts.zero).unflatten(1, (-1, parts.group)) * scale.unsqueeze(-1)
    return (codes if minimum is None else codes + minimum.unsqueeze(-1)).flatten(1)


def _spread(factor: Tensor, like: Tensor) -> Tensor:
    return factor.float().repeat_interleave(like.shape[1] // factor.shape[1], 1)


def gguf_codes(blocks: Tensor, kind: str) -> GgufCodes:
    """GGUF `blocks`, uint8 [N, bytes of a row] of a kind in GGUF_BLOCK_BYTES → its codes and factors."""
    n, _ = gguf_shape(blocks, kind)
    each = blocks.reshape(-1, GGUF_BLOCK_BYTES[kind])

    def row(x: Tensor) -> Tensor:
        return x.reshape(n, -1)

    def half(at: int) -> Tensor:
        return row(each[:, at : at + 2].contiguous().view(torch.float16))

    match kind:
        case "Q8_0":
            return GgufCodes(row(each[:, 2:] ^ 128), half(0), zero=128)
        case "Q4_0":
            return GgufCodes(row(_nibbles(each[:, 2:])), half(0), zero=8)
        case "Q4_1":
            return GgufCodes(row(_nibbles(each[:, 4:])), half(0), half(2))
        case "Q5_0":
            return GgufCodes(row(_nibbles(each[:, 6:]) | _fifths(each[:, 2:6])), half(0), zero=16)
        case "Q5_1":
            return GgufCodes(row(_nibbles(each[:, 8:]) | _fifths(each[:, 4:8])), half(0), half(2))
        case "Q2_K":
            scales, codes = each[:, :16], _pairs(each[:, 16:80])
            factors = row(scales & 15), row(scales >> 4)
            return GgufCodes(row(codes), *factors, super_scale=half(80), super_minimum=half(82))
        case "Q3_K":
            high = (each[:, None, :32] >> _shifts(each, 8, 1)) & 1
            codes = _pairs(each[:, 32:96]) | (high.flatten(1) << 2)
            scales = row(_q3_k_scales(each[:, 96:108]))
            return GgufCodes(row(codes), scales, zero=4, super_scale=half(108))
        case "Q4_K" | "Q5_K":
            codes = _nibbles(each[:, -128:].unflatten(-1, (4, 32))).flatten(1)
            if kind == "Q5_K":
                codes = codes | (((each[:, None, 16:48] >> _shifts(each, 8, 1)) & 1) << 4).flatten(1)
            scales, minima = q4_k_scales(each[:, 4:16])
            return GgufCodes(row(codes), row(scales), row(minima), super_scale=half(0), super_minimum=half(2))
        case _:  # Q6_K
            low = _nibbles(each[:, :128].unflatten(-1, (2, 64))).flatten(1)
            codes = low | (_pairs(each[:, 128:192]) << 4)
            scales = row(each[:, 192:208].contiguous().view(torch.int8))
            return GgufCodes(row(codes), scales, zero=32, super_scale=half(208))


def q4_k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 12 scale bytes of Q4_K blocks, uint8 [..., 12] → (scales, minima), uint8 [..., 8] each.

    Bytes 0–3 and 4–7 hold the first four scales and minima in their low 6 bits; bytes 8–11 the low nibbles
    of the other four, whose two high bits are the high bits of the first eight bytes.
    """
    scales, minima, both = packed.unflatten(-1, (3, 4)).unbind(-2)
    return (
        torch.cat((scales & 63, (both & 15) | (scales >> 6 << 4)), -1),
        torch.cat((minima & 63, (both >> 4) | (minima >> 6 << 4)), -1),
    )


def _q3_k_scales(packed: Tensor) -> Tensor:
    """The 12 scale bytes of Q3_K blocks → int8 [blocks, 16]: low nibbles in the first 8, high pairs in the last 4."""
    low = torch.cat((packed[:, :8] & 15, packed[:, :8] >> 4), 1)
    high = ((packed[:, None, 8:] >> _shifts(packed, 4, 2)) & 3).flatten(1)
    return (low | (high << 4)).to(torch.int8) - 32


def _shifts(like: Tensor, count: int, step: int) -> Tensor:
    return torch.arange(0, count * step, step, dtype=torch.uint8, device=like.device).view(-1, 1)


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., b] → [..., 2b]: the low nibbles, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _pairs(packed: Tensor) -> Tensor:
    """uint8 [blocks, 64] → pairs of bits [blocks, 256]: of each half's 32 bytes the lowest pairs first."""
    return ((packed.unflatten(-1, (2, 1, 32)) >> _shifts(packed, 4, 2)) & 3).flatten(1)


def _fifths(packed: Tensor) -> Tensor:
    """uint8 [blocks, 4], a bit a weight → [blocks, 32], 0 or 16."""
    bits = (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return bits.flatten(1) << 4
