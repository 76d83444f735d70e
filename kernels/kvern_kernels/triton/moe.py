"""Mixture of experts: rows grouped by expert, two grouped GEMMs with the gate between, a weighted sum.

The first GEMM computes a gate and its up side by side (columns alternate, so that one tile holds pairs) and
writes their product; the second writes each pair's output under its routing weight; the last kernel adds a
token's k outputs in their order. A token's bits depend on its own row only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvern_kernels import reference, reference_moe
from kvern_kernels.triton.gemm import example, quantized
from kvern_kernels.triton.grouping import Grouping, group_rows
from kvern_kernels.triton.launch import batch_invariant, cdiv, chip, dense, launch, next_power_of_2
from kvern_kernels.triton.packing import PackedLinear, stack
from kvern_kernels.triton.tiles import accumulate


@triton.jit
def gated(acc, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """acc [ROWS, 2 · COLUMNS], gate and up alternating → their gated product [ROWS, COLUMNS]."""
    gate, up = tl.split(tl.reshape(acc, (ROWS, COLUMNS, 2)))
    if KIND == "swiglu_oai":
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
        out = gate / (1.0 + tl.exp(-1.702 * gate)) * up
    elif KIND == "gelu":
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        out = gate * (1.0 - 1.0 / (tl.exp(2.0 * z) + 1.0)) * up
    else:
        out = gate / (1.0 + tl.exp(-gate)) * up
    return out


@triton.jit
def _expert_kernel(
    x_ptr,  # [rows of x, K]
    xs_ptr,  # float32 [rows of x, groups of x] or None
    w_ptr,  # planes of all experts
    s_ptr,
    z_ptr,
    d_ptr,
    order_ptr,
    bias_ptr,
    row_ptr,  # int32 [blocks · BLOCK_T]
    owner_ptr,  # int32 [blocks]
    pair_weight_ptr,  # float32 [pairs] or None
    out_ptr,  # [pairs, N]
    pairs,
    N,
    K,
    top_k,  # pairs of one row of x
    blocks,
    stride_xt,
    stride_xst,
    stride_ot,
    stride_we,
    stride_se,
    stride_ze,
    stride_de,
    stride_oe,
    stride_be,
    groups,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    ACTIVATION: tl.constexpr,  # None: w has N outputs, else 2N
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Blocks of one expert lie together and run together, sharing its weights.
    block = tl.program_id(0) % blocks
    expert = tl.load(owner_ptr + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(row_ptr + block * BLOCK_T + tl.arange(0, BLOCK_T))
    m_mask = pair < pairs
    x_row = (pair // top_k).to(tl.int64)
    first = (tl.program_id(0) // blocks) * BLOCK_N
    if ACTIVATION is None:
        rn = first + tl.arange(0, BLOCK_N)
        n_mask = rn < N
        acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    else:
        j = tl.arange(0, 2 * BLOCK_N)
        rn = first + j // 2
        n_mask = rn < N
        rn += (j % 2) * N
        acc = tl.zeros((BLOCK_T, 2 * BLOCK_N), tl.float32)
    xs_row = xs_ptr
    if xs_ptr is not None:
        xs_row = xs_ptr + x_row * stride_xst
    w_ptr += expert * stride_we
    if s_ptr is not None:
        s_ptr += expert * stride_se
    if z_ptr is not None:
        z_ptr += expert * stride_ze
    if d_ptr is not None:
        d_ptr += expert * stride_de
    if order_ptr is not None:
        order_ptr += expert * stride_oe
    acc = accumulate(
        acc,
        x_ptr,
        x_row * stride_xt,
        xs_row,
        m_mask,
        order_ptr,
        w_ptr,
        s_ptr,
        z_ptr,
        d_ptr,
        rn,
        n_mask,
        K,
        groups,
        KIND,
        GROUP,
        ZERO,
        BLOCK_K,
    )
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * stride_be + rn, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION is not None:
        acc = gated(acc, ACTIVATION, BLOCK_T, BLOCK_N)
    if pair_weight_ptr is not None:
        acc *= tl.load(pair_weight_ptr + pair, mask=m_mask, other=0.0)[:, None]
    column = first + tl.arange(0, BLOCK_N)
    at = out_ptr + pair.to(tl.int64)[:, None] * stride_ot + column[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=m_mask[:, None] & (column < N)[None, :])


@triton.jit
def _combine_kernel(
    part_ptr,  # [T, k, D]
    id_ptr,  # int32 [T, k]
    map_ptr,  # int32 [E] or None
    out_ptr,  # [T, D]
    D,
    E,
    top_k,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(top_k):
        pair = token * top_k + choice
        expert = tl.load(id_ptr + pair)
        kept = (expert >= 0) & (expert < E)
        if map_ptr is not None:
            kept = kept & (tl.load(map_ptr + expert, mask=kept, other=-1) >= 0)
        total += tl.load(part_ptr + pair * D + column, mask=(column < D) & kept, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * D + column, total.to(out_ptr.dtype.element_ty), mask=column < D)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The experts of one layer that this rank holds, one stack of planes for each projection."""

    gate_up: PackedLinear
    down: PackedLinear
    count: int
    activation: str

    @property
    def num_bytes(self) -> int:
        return self.gate_up.num_bytes + self.down.num_bytes


def pack_experts(
    gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear], activation: str = "silu"
) -> PackedExperts:
    """See reference_moe.pack_experts."""
    reference_moe.check_experts(gate_up, down, activation)
    return PackedExperts(stack(gate_up), stack(down), len(gate_up), activation)


def fused_moe(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    experts: PackedExperts,
    expert_map: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """See reference_moe.fused_moe."""
    if not isinstance(experts, PackedExperts):
        return reference.fused_moe(x, weights, ids, experts, expert_map, counts)
    if x.shape[1] != experts.gate_up.in_features or ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"fused_moe: x {list(x.shape)}, weights {list(weights.shape)} and ids {list(ids.shape)} do not fit "
            f"each other or experts of {experts.gate_up.in_features} features"
        )
    x, ids = dense(x), ids.to(torch.int32).contiguous()
    tokens, top_k = ids.shape
    total = experts.count if expert_map is None else expert_map.shape[0]
    grouping = group_rows(
        ids, total, experts.count, block_rows(ids.numel(), experts.count), expert_map, counts
    )
    inner = _grouped(x, experts.gate_up, grouping, top_k, experts.activation, None)
    parts = _grouped(inner, experts.down, grouping, 1, None, weights.float().contiguous())
    return _combine(parts.view(tokens, top_k, parts.shape[1]), ids, expert_map, total)


def _combine(parts: Tensor, ids: Tensor, expert_map: Tensor | None, total: int) -> Tensor:
    """parts [T, k, D] of the experts held here, added per token → [T, D]."""
    tokens, top_k, width = parts.shape
    out = torch.empty((tokens, width), dtype=parts.dtype, device=parts.device)
    block = min(1024, next_power_of_2(width))
    launch(
        *(_combine_kernel, (tokens, cdiv(width, block)), parts, ids, expert_map, out, width, total, top_k),
        BLOCK=block,
    )
    return out


def block_rows(pairs: int, held: int) -> int:
    """Rows of a block: about what an expert gets, so that few are padding; 64 if batches may not matter."""
    if batch_invariant():
        return 64
    return min(max(next_power_of_2(cdiv(pairs, held)), 16), 64)


def _grouped(
    x: Tensor,
    packed: PackedLinear,
    grouping: Grouping,
    top_k: int,
    activation: str | None,
    weights: Tensor | None,
) -> Tensor:
    """Each pair's row of x through its expert's matrix: [pairs, N]; rows of absent experts are not written."""
    n = packed.out_features // (1 if activation is None else 2)
    out = torch.empty((grouping.pairs, n), dtype=x.dtype, device=x.device)
    values, scales = quantized(x, packed.activations)
    nvidia = chip().backend == "cuda"
    columns = packed.columns // (1 if activation is None else 2)
    depth = 128 if packed.kind == "w8a8" else 64 if values.element_size() <= 2 else 32
    planes = (packed.codes, packed.scales, packed.zeros, packed.factors, packed.order, packed.bias)
    launch(
        *(_expert_kernel, (grouping.blocks * cdiv(n, columns),), values, scales, *planes),
        *(grouping.rows, grouping.owners, weights, out),
        *(grouping.pairs, n, packed.in_features, top_k, grouping.blocks),
        *(values.stride(0), 0 if scales is None else scales.stride(0), out.stride(0)),
        *(0 if plane is None else plane.stride(0) for plane in planes),
        packed.groups,
        KIND=packed.kind,
        GROUP=packed.group,
        ZERO=packed.zero,
        ACTIVATION=activation,
        BLOCK_T=grouping.block,
        BLOCK_N=columns,
        BLOCK_K=depth,
        num_warps=packed.num_warps if grouping.block >= 64 else 4,
        num_stages=3 if nvidia else 2,
    )
    return out


def production() -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls whose compilations `aot` checks."""
    for kind in ("plain", "int4", "w8a8 fp8"):
        yield f"{kind}, gate_up", partial(_example, kind, 4096, 7168, "silu", 64)
    yield "int4, down, 16 rows", partial(_example, "int4", 7168, 2048, None, 16)
    parts = torch.empty((16, 8, 7168), dtype=torch.bfloat16, device="meta")
    ids = torch.empty((16, 8), dtype=torch.int32, device="meta")
    yield "combine", lambda: _combine(parts, ids, ids[0], 256)


def _example(kind: str, n: int, k: int, activation: str | None, block: int) -> None:
    packed = example(kind, n, k, experts=32)
    if packed.codes.dtype == torch.float8_e4m3fn and not chip().native_fp8:
        return  # `packing` takes bytes there
    x = torch.empty((256, k), dtype=torch.bfloat16, device="meta")
    rows = torch.empty(64 * block, dtype=torch.int32, device="meta")
    weights = None if activation else torch.empty(256 * 8, device="meta")
    _grouped(x, packed, Grouping(rows, rows[:64], block, 256 * 8), 8, activation, weights)
