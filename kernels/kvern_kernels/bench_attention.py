"""Attention for `kvern bench kernels`: decode steps at 8k keys, and prefill, in the head shapes of two models.

torch's own op is scaled_dot_product_attention over bfloat16 keys that lie one after the other, without a block table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

import kvern_kernels as kernels
from kvern_kernels import kv_cache
from kvern_kernels.bench import COLD_BYTES, Case, Run

HEADS = {"Qwen3-0.6B": (16, 8, 128), "SmolLM2-135M": (9, 3, 64)}  # query heads, key heads, head size
CACHES = ("bf16", "fp8", "int8")
KEYS, BATCHES, PROMPTS, BLOCK_SIZE = 8192, (1, 8), (1024, 4096), 16


def attention_cases() -> Iterator[Case]:
    for (model, (heads, kv_heads, dim)), cache, batch in itertools.product(HEADS.items(), CACHES, BATCHES):
        dtype = kv_cache.DTYPES[cache]
        yield Case(
            kernel=f"attention decode {cache}",
            shape=f"{model} {batch}x{KEYS}",
            bytes=2 * batch * kv_cache.block_bytes(kv_heads, KEYS, dim, dtype),
            operations=4 * batch * KEYS * heads * dim,
            rate="bfloat16",
            prepare=partial(_prepare, heads, kv_heads, dim, dtype, batch, 1, KEYS),
        )
    for (model, (heads, kv_heads, dim)), tokens in itertools.product(HEADS.items(), PROMPTS):
        yield Case(
            kernel="attention prefill bf16",
            shape=f"{model} {tokens}",
            bytes=2 * tokens * (heads + kv_heads) * dim * 2,
            operations=2 * tokens * (tokens + 1) * heads * dim,
            rate="bfloat16",
            prepare=partial(_prepare, heads, kv_heads, dim, torch.bfloat16, 1, tokens, tokens),
        )


def _prepare(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, batch: int, queries: int, keys: int
) -> tuple[Run, Run]:
    """Blocks in any order, as many copies of the cache as fit no processor's cache."""
    blocks = batch * keys // BLOCK_SIZE
    options = kernels.AttentionOptions(dim**-0.5)
    lengths = torch.full((batch,), keys, dtype=torch.int32)
    starts = torch.arange(batch + 1, dtype=torch.int32) * queries
    at = torch.arange(blocks * BLOCK_SIZE)
    copies = []
    for _ in range(1 if queries > 1 else 2 + COLD_BYTES // (4 * blocks * BLOCK_SIZE * kv_heads * dim)):
        pair = kernels.new_kv_cache(
            blocks, kv_heads, BLOCK_SIZE, dim, dtype, device=torch.get_default_device()
        )
        for cache in pair:
            kv_cache.write_tokens(
                cache, at // BLOCK_SIZE, at % BLOCK_SIZE, torch.randn(len(at), kv_heads, dim)
            )
        copies.append((*pair, torch.randperm(blocks).int().view(batch, -1)))
    q = torch.randn(batch * queries, heads, dim).bfloat16()
    ours = itertools.cycle(copies)
    theirs = itertools.cycle(
        [torch.randn(2, batch, kv_heads, keys, dim).bfloat16() for _ in range(min(len(copies), 3))]
    )
    plain_q = q.view(batch, queries, heads, dim).transpose(1, 2)

    def run() -> torch.Tensor:
        k, v, tables = next(ours)
        return kernels.paged_attention(q, k, v, tables, starts, lengths, options)

    def plain() -> torch.Tensor:
        k, v = next(theirs)
        return F.scaled_dot_product_attention(plain_q, k, v, is_causal=queries > 1, enable_gqa=True)

    return run, plain
