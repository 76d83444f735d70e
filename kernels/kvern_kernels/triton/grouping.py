"""Rows sorted by the group (expert, adapter) that serves them, in blocks of one group each, without a look
from the host: sizes are bounds that follow from shapes, so that a CUDA graph can hold what comes after.

  rows    int32 [blocks · B]: the pairs (token · k + choice) of each block, `pairs` where it has no more
  owners  int32 [blocks]: the group's place among those held here, −1 for blocks that are not needed

The order within a group is that of the pairs: nothing here depends on timing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvern_kernels.triton.launch import cdiv, launch, next_power_of_2

CHUNK = 64  # pairs that one program compares with each other


@triton.jit
def _rank_kernel(
    id_ptr,  # int32 [pairs]
    rank_ptr,  # int32 [pairs]: earlier pairs of the chunk with the same id
    chunk_ptr,  # int32 [chunks, G], zeros: pairs of the chunk with each id
    pairs,
    G,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    other = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(id_ptr + at, mask=at < pairs, other=-1)
    same = ids[:, None] == tl.load(id_ptr + other, mask=other < pairs, other=-1)[None, :]
    rank = tl.sum((same & (other[None, :] < at[:, None])).to(tl.int32), 1)
    count = tl.sum(same.to(tl.int32), 1)
    tl.store(rank_ptr + at, rank, mask=at < pairs)
    # Pairs of one id all write the same number.
    tl.store(chunk_ptr + chunk * G + ids, count, mask=(at < pairs) & (ids >= 0) & (ids < G))


@triton.jit
def _offset_kernel(
    chunk_ptr,  # int32 [chunks, G]: counts, which become the pairs of earlier chunks
    map_ptr,  # int32 [G] or None: a group's place here, or -1
    count_ptr,  # int32 [G] or None: grows by the pairs of each group
    start_ptr,  # int32 [G]: where a group's rows begin
    owner_ptr,  # int32 [blocks]
    chunks,
    blocks,
    G,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,  # G padded to a power of 2
    STEP: tl.constexpr,
):
    group = tl.arange(0, GROUPS)
    here = group < G
    total = tl.zeros((GROUPS,), tl.int32)
    for first in range(0, chunks, STEP):
        chunk = first + tl.arange(0, STEP)
        at = chunk_ptr + chunk[:, None] * G + group[None, :]
        mask = (chunk < chunks)[:, None] & here[None, :]
        counts = tl.load(at, mask=mask, other=0)
        tl.store(at, total[None, :] + tl.cumsum(counts, 0) - counts, mask=mask)
        total += tl.sum(counts, 0)
    if count_ptr is not None:
        tl.store(count_ptr + group, tl.load(count_ptr + group, mask=here, other=0) + total, mask=here)
    needed = (total + BLOCK - 1) // BLOCK
    if map_ptr is not None:
        needed = tl.where(tl.load(map_ptr + group, mask=here, other=-1) >= 0, needed, 0)
    ends = tl.cumsum(needed, 0)
    tl.store(start_ptr + group, (ends - needed) * BLOCK, mask=here)
    last = tl.sum(needed, 0)
    for first in range(0, blocks, STEP):
        block = first + tl.arange(0, STEP)
        owner = tl.sum((ends[None, :] <= block[:, None]).to(tl.int32), 1)
        used = block < last
        if map_ptr is not None:
            owner = tl.load(map_ptr + owner, mask=used, other=-1)
        tl.store(owner_ptr + block, tl.where(used, owner, -1), mask=block < blocks)


@triton.jit
def _place_kernel(
    id_ptr,
    rank_ptr,
    chunk_ptr,
    map_ptr,
    start_ptr,
    row_ptr,  # int32 [blocks · BLOCK]
    pairs,
    G,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(id_ptr + at, mask=at < pairs, other=-1)
    kept = (ids >= 0) & (ids < G)
    if map_ptr is not None:
        kept = kept & (tl.load(map_ptr + ids, mask=kept, other=-1) >= 0)
    place = tl.load(start_ptr + ids, mask=kept, other=0)
    place += tl.load(chunk_ptr + chunk * G + ids, mask=kept, other=0)
    place += tl.load(rank_ptr + at, mask=kept, other=0)
    tl.store(row_ptr + place, at, mask=kept)


@dataclass(frozen=True, slots=True)
class Grouping:
    """See the module. `block` is B."""

    rows: Tensor
    owners: Tensor
    block: int
    pairs: int

    @property
    def blocks(self) -> int:
        return self.owners.shape[0]


def group_rows(
    ids: Tensor,
    groups: int,
    held: int,
    block: int,
    placed: Tensor | None = None,
    counts: Tensor | None = None,
) -> Grouping:
    """ids int32 [T, k] (others than 0 … groups−1 are left out) → their Grouping in blocks of `block` rows.

    `placed` int32 [groups] gives a group's place among the `held` ones, −1 for one that isn't; `counts`
    int32 [groups] grows by the pairs of each group.
    """
    pairs = ids.numel()
    # Each block but one a group is full.
    blocks = (pairs + min(held, pairs) * (block - 1)) // block
    chunks = cdiv(pairs, CHUNK)
    options: dict[str, Any] = {"dtype": torch.int32, "device": ids.device}
    rows = torch.full((blocks * block,), pairs, **options)
    owners = torch.empty(blocks, **options)
    if pairs == 0:
        return Grouping(rows, owners, block, pairs)
    rank, start = torch.empty(pairs, **options), torch.empty(groups, **options)
    chunk_counts = torch.zeros((chunks, groups), **options)
    ids = ids.contiguous()
    width = next_power_of_2(groups)
    launch(_rank_kernel, (chunks,), ids, rank, chunk_counts, pairs, groups, CHUNK=CHUNK)
    launch(
        *(_offset_kernel, (1,), chunk_counts, placed, counts, start, owners, chunks, blocks, groups),
        BLOCK=block,
        GROUPS=width,
        STEP=min(max(4096 // width, 2), 64),
    )
    launch(_place_kernel, (chunks,), ids, rank, chunk_counts, placed, start, rows, pairs, groups, CHUNK=CHUNK)
    return Grouping(rows, owners, block, pairs)


def production() -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls whose compilations `aot` checks."""
    ids = torch.empty((4096, 8), dtype=torch.int32, device="meta")
    placed = torch.empty(256, dtype=torch.int32, device="meta")
    yield "256 experts", lambda: group_rows(ids, 256, 32, 64, placed, placed)
