"""ggml's block formats → floats, vectorised over blocks and bit for bit as ggml's own arithmetic in float32.

Each ``_q…`` function takes blocks [n, bytes of a block] uint8 and returns [n, elements of a block] float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvern_kernels.reference_gguf import dequantize_gguf

# Elements converted at a time: the temporaries stay in the cache.
_CHUNK = 1 << 18


def dequantize_into(blocks: Tensor, type_name: str, out: Tensor) -> None:
    """``blocks``: uint8, the tensor's bytes in order. ``out``: contiguous, any float dtype, any shape."""
    flat = out.view(-1)
    if type_name in _PLAIN:
        flat.copy_(blocks.view(_PLAIN[type_name]))
        return
    decode, elements, num_bytes = _BLOCKS[type_name]
    blocks = blocks.view(-1, num_bytes)
    step = _CHUNK // elements
    for start in range(0, len(blocks), step):
        part = decode(blocks[start : start + step]).view(-1)
        flat[start * elements : start * elements + len(part)].copy_(part)


def _half(blocks: Tensor, offset: int) -> Tensor:
    """The float16 at byte ``offset`` of each block, as [n, 1] float32."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[n, b] → [n, 2 b] float32: the low nibbles, then the high ones."""
    out = torch.empty(len(packed), 2 * packed.shape[1])
    out[:, : packed.shape[1]].copy_(packed & 15)
    out[:, packed.shape[1] :].copy_(packed >> 4)
    return out


def _fifth_bits(packed: Tensor) -> Tensor:
    """[n, 4] bytes holding a bit per element → [n, 32] float32 of 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = (packed.unsqueeze(-1) >> shifts) & 1
    return bits.flatten(1).float() * 16


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]) - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 6:]) + _fifth_bits(blocks[:, 2:6]) - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return (
        (_nibbles(blocks[:, 8:]) + _fifth_bits(blocks[:, 4:8])).mul_(_half(blocks, 0)).add_(_half(blocks, 2))
    )


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 6-bit scales and minima of the 8 sub-blocks of Q4_K and Q5_K: [n, 12] bytes → two [n, 8, 1] float32."""
    first, second, third = packed.split(4, dim=1)
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales.float().unsqueeze(-1), minima.float().unsqueeze(-1)


def _k_blocks(blocks: Tensor, quants: Tensor) -> Tensor:
    """Q4_K and Q5_K: ``quants`` [n, 8, 32] float32."""
    scales, minima = _k_scales(blocks[:, 4:16])
    scales = _half(blocks, 0).unsqueeze(-1) * scales
    minima = _half(blocks, 2).unsqueeze(-1) * minima
    return (scales * quants - minima).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    return _k_blocks(blocks, _nibbles(blocks[:, 16:].reshape(-1, 32)).view(-1, 8, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, 48:].reshape(-1, 32)).view(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    high = (blocks[:, 16:48].unsqueeze(1) >> shifts) & 1
    return _k_blocks(blocks, low + high.float() * 16)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 64)).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    quants = (low + high.float() * 16 - 32).view(-1, 16, 16)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return (scales.unsqueeze(-1) * quants).flatten(1)


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCKS: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "Q4_0": (_q4_0, 32, 18),
    "Q4_1": (_q4_1, 32, 20),
    "Q5_0": (_q5_0, 32, 22),
    "Q5_1": (_q5_1, 32, 24),
    "Q8_0": (_q8_0, 32, 34),
    "Q2_K": (partial(dequantize_gguf, kind="Q2_K"), 256, 84),
    "Q3_K": (partial(dequantize_gguf, kind="Q3_K"), 256, 110),
    "Q4_K": (_q4_k, 256, 144),
    "Q5_K": (_q5_k, 256, 176),
    "Q6_K": (_q6_k, 256, 210),
}
