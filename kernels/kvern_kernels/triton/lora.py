"""LoRA for many adapters at once: tokens grouped by adapter (`grouping`), then two grouped GEMMs.

The grouping is made once a step and serves every layer; its sizes follow from the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvern_kernels import reference_lora
from kvern_kernels.triton.grouping import Grouping, group_rows
from kvern_kernels.triton.launch import cdiv, chip, dense, launch, next_power_of_2
from kvern_kernels.triton.tiles import dot

BLOCK_ROWS = 16


@triton.jit
def _shrink_kernel(
    x_ptr,  # [T, K]
    a_ptr,  # [L, S, R, K]
    row_ptr,
    owner_ptr,
    out_ptr,  # float32 [T, S, R]
    T,
    K,
    R,
    S,
    stride_xt,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(0)
    adapter = tl.load(owner_ptr + block).to(tl.int64)
    if adapter < 0:
        return
    tokens = tl.load(row_ptr + block * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    m_mask = tokens < T
    rank = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    part = adapter * S + tl.program_id(2)
    a_row = (part * R + rank) * K
    acc = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_ptr + tokens[:, None] * stride_xt + k[None, :],
            mask=m_mask[:, None] & (k < K)[None, :],
            other=0.0,
        )
        a = tl.load(
            a_ptr + a_row[None, :] + k[:, None], mask=(rank < R)[None, :] & (k < K)[:, None], other=0.0
        )
        acc = dot(x, a.to(x.dtype), acc)
    at = out_ptr + (tokens[:, None] * S + tl.program_id(2)) * R + rank[None, :]
    tl.store(at, acc, mask=m_mask[:, None] & (rank < R)[None, :])


@triton.jit
def _expand_kernel(
    hidden_ptr,  # float32 [T, S, R]
    b_ptr,  # [L, N, R]
    scale_ptr,  # float32 [L]
    row_ptr,
    owner_ptr,
    out_ptr,  # [T, N]
    T,
    N,
    R,
    S,
    width0,  # of the slices; S of them count
    width1,
    width2,
    stride_ot,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    block = tl.program_id(0)
    adapter = tl.load(owner_ptr + block).to(tl.int64)
    if adapter < 0:
        return
    part = tl.program_id(2)
    width = tl.where(part == 0, width0, tl.where(part == 1, width1, width2))
    first = tl.where(part == 0, 0, tl.where(part == 1, width0, width0 + width1))
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = column < width
    column += first
    tokens = tl.load(row_ptr + block * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    m_mask = tokens < T
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for r0 in range(0, R, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        h = tl.load(
            hidden_ptr + (tokens[:, None] * S + part) * R + r[None, :],
            mask=m_mask[:, None] & (r < R)[None, :],
            other=0.0,
        )
        b = tl.load(
            b_ptr + (adapter * N + column)[None, :] * R + r[:, None],
            mask=n_mask[None, :] & (r < R)[:, None],
            other=0.0,
        )
        acc = dot(h.to(b.dtype), b, acc)
    at = out_ptr + tokens[:, None] * stride_ot + column[None, :]
    mask = m_mask[:, None] & n_mask[None, :]
    acc = tl.load(at, mask=mask, other=0.0).to(tl.float32) + acc * tl.load(scale_ptr + adapter)
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """The tokens of a step by adapter."""

    grouping: Grouping
    num_adapters: int


def lora_plan(indices: Tensor, num_adapters: int) -> LoraPlan:
    """See reference_lora.lora_plan."""
    ids = indices.to(torch.int32).unsqueeze(1)
    return LoraPlan(group_rows(ids, num_adapters, num_adapters, BLOCK_ROWS), num_adapters)


def lora_shrink(x: Tensor, a: Tensor, plan: LoraPlan) -> Tensor:
    """See reference_lora.lora_shrink."""
    x, a = dense(x), a.contiguous()
    tokens, k = x.shape
    _, slices, rank, width = a.shape
    if width != k:
        raise ValueError(f"lora_shrink: x has {k} features, the adapters take {width}")
    out = torch.empty((tokens, slices, rank), dtype=torch.float32, device=x.device)
    block = min(max(next_power_of_2(rank), 16), 32)
    grouping = plan.grouping
    launch(
        *(
            _shrink_kernel,
            (grouping.blocks, cdiv(rank, block), slices),
            x,
            a,
            grouping.rows,
            grouping.owners,
            out,
        ),
        *(tokens, k, rank, slices, x.stride(0)),
        BLOCK_T=BLOCK_ROWS,
        BLOCK_R=block,
        BLOCK_K=128 if x.element_size() <= 2 else 64,
        num_stages=_stages(),
    )
    return out


def lora_expand(
    hidden: Tensor, b: Tensor, scales: Tensor, plan: LoraPlan, out: Tensor, widths: Sequence[int]
) -> None:
    """See reference_lora.lora_expand; at most three slices."""
    reference_lora.check_expand(hidden, b, out, widths)
    if len(widths) > 3 or out.stride(-1) != 1:
        raise ValueError(f"lora_expand: {len(widths)} slices (limit 3) or rows of `out` that are not dense")
    b, hidden = b.contiguous(), hidden.contiguous()
    tokens, slices, rank = hidden.shape
    grouping = plan.grouping
    columns = 64
    launch(
        *(_expand_kernel, (grouping.blocks, cdiv(max(widths), columns), slices), hidden, b, scales),
        *(grouping.rows, grouping.owners, out, tokens, out.shape[1], rank, slices),
        *(*widths, *([0] * (3 - slices)), out.stride(0)),
        BLOCK_T=BLOCK_ROWS,
        BLOCK_N=columns,
        BLOCK_R=min(max(next_power_of_2(rank), 16), 64),
        num_stages=_stages(),
    )


def _stages() -> int:
    return 4 if chip().backend == "cuda" else 2


def production() -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls whose compilations `aot` checks."""

    def both(rank: int, widths: tuple[int, ...]) -> None:
        def of(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device="meta")

        rows = torch.empty(11 * BLOCK_ROWS, dtype=torch.int32, device="meta")
        plan = LoraPlan(Grouping(rows, rows[:11], BLOCK_ROWS, 64), 8)
        hidden = lora_shrink(of(64, 4096), of(8, len(widths), rank, 4096), plan)
        scales = torch.empty(8, device="meta")
        lora_expand(hidden, of(8, sum(widths), rank), scales, plan, of(64, sum(widths)), widths)

    yield "rank 256", lambda: both(256, (14336, 14336))
