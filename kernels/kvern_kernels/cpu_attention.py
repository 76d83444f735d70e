"""The C++ backend's paged cache: its memory, attention over it, and copies of its blocks."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvern_kernels import kv_cache, reference
from kvern_kernels.attention_options import AttentionOptions
from kvern_kernels.cpu_base import KV_TYPES, LIBRARY, TYPES, address_of, aligned, dense, threads

_attention, _copy = LIBRARY.kvern_attention, LIBRARY.kvern_copy_blocks


def new_kv_cache(
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    value_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See reference.new_kv_cache; in huge pages, since attention reads blocks in any order."""
    pair = []
    for dim, transposed in ((head_dim, True), (value_dim or head_dim, False)):
        sizes = (num_blocks, num_kv_heads, block_size, dim)
        memory = aligned(kv_cache.elements(*sizes, dtype), dtype)
        pair.append(kv_cache.shape_memory(memory, *sizes, transposed))
    return pair[0], pair[1]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    options: AttentionOptions,
    lse: Tensor | None = None,
    key_ends: Tensor | None = None,
) -> Tensor:
    """See reference.paged_attention. Raises ValueError when a length or block id is out of range."""
    type_ = TYPES.get(q.dtype)
    if type_ is None or k_cache.dtype not in KV_TYPES:
        return reference.paged_attention(
            *(q, k_cache, v_cache, block_tables, query_start, seq_lens, options, lse, key_ends)
        )
    q = dense(q)
    tokens, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    if dim != k_cache.shape[3] or heads % kv_heads:
        raise ValueError(
            f"paged_attention: q {tuple(q.shape)} and cache {tuple(k_cache.shape)} do not fit: the head sizes "
            "must be equal and the query heads a multiple of the key heads"
        )
    check_tables(block_tables, query_start, seq_lens)
    q_row, q_head, _ = q.stride()
    out = torch.empty((tokens, heads, v_cache.shape[3]), dtype=q.dtype)
    if lse is not None and (
        lse.dtype != torch.float32 or lse.shape != (tokens, heads) or not lse.is_contiguous()
    ):
        raise ValueError(
            f"lse must be float32 [{tokens}, {heads}] and dense, not {lse.dtype} {list(lse.shape)}"
        )
    status = _attention(
        *(threads(), q.data_ptr(), q_row, q_head, type_, out.data_ptr(), address_of(lse), tokens, heads),
        *(k_cache.data_ptr(), v_cache.data_ptr(), cache_layout(k_cache, v_cache), block_tables.data_ptr()),
        *(block_tables.stride(0), block_tables.shape[1], query_start.data_ptr(), seq_lens.data_ptr()),
        *(
            seq_lens.shape[0],
            options.scale * options.k_scale,
            options.v_scale,
            options.softcap,
            options.window,
        ),
        *(_per_head("alibi", options.alibi, heads), _per_head("sinks", options.sinks, heads)),
        *(options.causal, _key_ends(key_ends, tokens)),
    )
    if status:
        raise ValueError(
            f"paged_attention: query_start, seq_lens or block_tables reach outside q ({tokens} tokens), the table "
            f"({block_tables.shape[1]} blocks) or the cache ({k_cache.shape[0]} blocks of {k_cache.shape[2]})"
        )
    return out


def _per_head(name: str, x: Tensor | None, heads: int) -> int | None:
    if x is not None and (x.dtype != torch.float32 or x.shape != (heads,) or not x.is_contiguous()):
        raise ValueError(f"{name} must be float32 [{heads}] and dense, not {x.dtype} {list(x.shape)}")
    return address_of(x)


def _key_ends(x: Tensor | None, tokens: int) -> int | None:
    if x is not None and (x.dtype != torch.int32 or x.shape != (tokens,) or not x.is_contiguous()):
        raise ValueError(f"key_ends must be int32 [{tokens}] and dense, not {x.dtype} {list(x.shape)}")
    return address_of(x)


def copy_blocks(k_cache: Tensor, v_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """See reference.copy_blocks. Raises ValueError on a block id out of range."""
    sizes = [
        kv_cache.block_bytes(cache.shape[1], cache.shape[2], cache.shape[3], cache.dtype)
        for cache in (k_cache, v_cache)
    ]
    if [k_cache.stride(0) * k_cache.itemsize, v_cache.stride(0) * v_cache.itemsize] != sizes:
        return reference.copy_blocks(k_cache, v_cache, sources, targets)
    sources, targets = sources.contiguous(), targets.contiguous()
    status = _copy(
        *(k_cache.data_ptr(), v_cache.data_ptr(), *sizes, k_cache.shape[0]),
        *(sources.data_ptr(), targets.data_ptr(), sources.shape[0]),
    )
    if status:
        raise ValueError(f"copy_blocks: a block id is outside 0…{k_cache.shape[0] - 1}")
    return None


def check_tables(block_tables: Tensor, query_start: Tensor, seq_lens: Tensor) -> None:
    """Raises ValueError unless all three are int32 with a dense last dimension."""
    for name, tensor in (
        ("block_tables", block_tables),
        ("query_start", query_start),
        ("seq_lens", seq_lens),
    ):
        if tensor.dtype != torch.int32 or (tensor.stride(-1) != 1 and tensor.numel() > 1):
            raise ValueError(f"paged_attention: {name} must be int32 and dense, not {tensor.dtype}")


def cache_layout(k_cache: Tensor, v_cache: Tensor) -> ctypes.Array[ctypes.c_int64]:
    """Shape and strides of a cache for the library, kept on the tensor since they never change."""
    known = getattr(k_cache, "_kvern_layout", None)
    if known is not None and known[0] == v_cache.data_ptr():
        return known[1]
    if k_cache.shape[:3] != v_cache.shape[:3] or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"the key cache {tuple(k_cache.shape)} differs from the value cache {tuple(v_cache.shape)}"
        )
    values = [*k_cache.shape, v_cache.shape[3], KV_TYPES[k_cache.dtype], *k_cache.stride(), *v_cache.stride()]
    layout = (ctypes.c_int64 * len(values))(*values)
    k_cache._kvern_layout = (v_cache.data_ptr(), layout)  # type: ignore[attr-defined]
    return layout
