"""GGUF's block formats (ggml/docs/gguf.md, ggml-common.h), dequantized in plain torch.

A row of K weights is a run of blocks; integers are little-endian and factors float16:

  Q4_0  32 weights: d, 16 bytes of nibbles, the low ones first; (q − 8)·d
  Q4_1  32 weights: d, m, 16 bytes of nibbles; q·d + m
  Q8_0  32 weights: d, 32 int8; q·d
  Q4_K  256 weights: d, dmin, 12 bytes with 8 scales and 8 minima of 6 bits, 128 bytes of nibbles (each 32 of
        them hold 64 weights, the low ones first); q·(d·scale) − dmin·minimum, for each 32
  Q6_K  256 weights: 128 bytes of low nibbles, 64 of high pairs, 16 int8 scales, d; (q − 32)·(d·scale), for each 16
"""

from __future__ import annotations

import torch
from torch import Tensor

GGUF_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34, "Q4_K": 144, "Q6_K": 210}


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
    n, k = gguf_shape(blocks, kind)
    each = blocks.reshape(-1, GGUF_BLOCK_BYTES[kind])
    if kind == "Q4_K":
        return _q4_k(each).view(n, k)
    if kind == "Q6_K":
        return _q6_k(each).view(n, k)
    scale = _halves(each[:, :2])
    if kind == "Q8_0":
        return (each[:, 2:].view(torch.int8).float() * scale).view(n, k)
    codes = _nibbles(each[:, -16:]).float()
    if kind == "Q4_0":
        return ((codes - 8) * scale).view(n, k)
    return (codes * scale + _halves(each[:, 2:4])).view(n, k)


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


def _q4_k(each: Tensor) -> Tensor:
    scales, minima = q4_k_scales(each[:, 4:16])
    scale = (_halves(each[:, :2]) * scales.float()).unsqueeze(-1)
    minimum = (_halves(each[:, 2:4]) * minima.float()).unsqueeze(-1)
    codes = _nibbles(each[:, 16:].unflatten(-1, (4, 32))).view(-1, 8, 32)
    return codes.float() * scale - minimum


def _q6_k(each: Tensor) -> Tensor:
    low = _nibbles(each[:, :128].unflatten(-1, (2, 64))).flatten(1)
    pairs = each[:, 128:192].unflatten(-1, (2, 1, 32))
    shifts = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8, device=each.device)
    high = ((pairs >> shifts) & 3).flatten(1)
    scale = _halves(each[:, 208:]) * each[:, 192:208].view(torch.int8).float()
    codes = (low | (high << 4)).float() - 32
    return codes.view(-1, 16, 16) * scale.unsqueeze(-1)


def _halves(field: Tensor) -> Tensor:
    """Two bytes a block, float16, as float32 [blocks, 1]."""
    return field.contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., b] → [..., 2b]: the low nibbles, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)
