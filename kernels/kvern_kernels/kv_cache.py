"""What a paged KV cache holds: its element types, its memory, and reading and writing it in plain torch.

A cache is a pair (keys [blocks, Hkv, block_size, D], values [blocks, Hkv, block_size, Dv]) of one dtype. Keys lie
transposed in memory, [blocks, Hkv, D, block_size], so that a vector register holds one component of many keys.

* float32, bfloat16, float16: as they are;
* float8_e4m3fn, float8_e5m2 (OCP FP8): rounded to nearest, saturated, without a scale;
* int8: round(x · 127 / max|x|), with a float32 scale max|x| / 127 for each token and head. The scales of a block and
  head, [block_size], lie right behind its codes, so that a block's bytes hold all that it means.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# By the names of --kv-cache-dtype.
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
_SCALE_BYTES = 4


def block_bytes(num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block of keys (or of values)."""
    per_token = head_dim * dtype.itemsize + (_SCALE_BYTES if dtype == torch.int8 else 0)
    return num_kv_heads * block_size * per_token


def shape_memory(
    memory: Tensor, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, transposed: bool
) -> Tensor:
    """`memory`, at least num_blocks * block_bytes of the cache's dtype in one row, as [blocks, Hkv, block_size, D]."""
    row = block_bytes(1, block_size, head_dim, memory.dtype) // memory.itemsize
    inner = (1, block_size) if transposed else (head_dim, 1)
    return memory.as_strided(
        (num_blocks, num_kv_heads, block_size, head_dim), (num_kv_heads * row, row, *inner)
    )


def scales(cache: Tensor) -> Tensor:
    """The float32 scales [blocks, Hkv, block_size] of an int8 cache, a view of its memory."""
    blocks, heads, block_size, dim = cache.shape
    start = (cache.storage_offset() + dim * block_size) // _SCALE_BYTES
    strides = (cache.stride(0) // _SCALE_BYTES, cache.stride(1) // _SCALE_BYTES, 1)
    with torch.no_grad():
        return torch.empty(0, device=cache.device).set_(
            cache.untyped_storage(), start, (blocks, heads, block_size), strides
        )


def read_blocks(cache: Tensor, blocks: Tensor) -> Tensor:
    """Blocks [n] of a cache as float32 [n, Hkv, block_size, D]."""
    if cache.dtype.itemsize == 1:
        found = cache.view(torch.uint8)[blocks].view(cache.dtype).float()
    else:
        found = cache[blocks].float()
    return found * scales(cache)[blocks].unsqueeze(-1) if cache.dtype == torch.int8 else found


def write_tokens(cache: Tensor, blocks: Tensor, offsets: Tensor, x: Tensor) -> None:
    """x [n, Hkv, D] float32 to the tokens at (blocks, offsets), int64 [n] each."""
    if cache.dtype == torch.int8:
        largest = x.abs().amax(-1)
        scales(cache)[blocks, :, offsets] = largest / 127 + (x * 0).sum(-1)
        factor = torch.where(largest > 0, 127 / largest, 0.0)
        x = (x * factor.unsqueeze(-1)).round().nan_to_num(0.0)
    elif cache.dtype.itemsize == 1:
        limit = torch.finfo(cache.dtype).max
        codes = x.clamp(-limit, limit).to(cache.dtype)
        # Indexed writes know no 8-bit floats; their bytes are as good.
        cache.view(torch.uint8)[blocks, :, offsets] = codes.view(torch.uint8)
        return
    cache[blocks, :, offsets] = x.to(cache.dtype)


def copy(cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Block sources[i] onto targets[i] (int64 [n]); all sources are read before any is written."""
    as_stored = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    as_stored[targets] = as_stored[sources]
    if cache.dtype == torch.int8:
        of = scales(cache)
        of[targets] = of[sources]


def elements(num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """How many elements of `dtype` the memory of a cache of keys (or of values) has."""
    return math.ceil(num_blocks * block_bytes(num_kv_heads, block_size, head_dim, dtype) / dtype.itemsize)
