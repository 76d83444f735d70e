"""Dense linear layers over every weight form of `tiles`: one persistent kernel.

A fixed number of programs walks over the output tiles, so a CUDA graph can hold the launch. An output is
summed over K in one order; in batch-invariant mode its tile is also the same for every T, so that its bits depend
neither on the other rows nor on how a prompt was chunked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kvern_kernels import reference
from kvern_kernels.triton.launch import Chip, batch_invariant, cdiv, chip, dense, launch, next_power_of_2
from kvern_kernels.triton.packing import PackedLinear
from kvern_kernels.triton.quantize import quantize_fp8, quantize_int8
from kvern_kernels.triton.tiles import accumulate


@triton.jit
def _linear_kernel(
    x_ptr,  # [T, K]
    xs_ptr,  # float32 [T, groups of x] or None
    w_ptr,
    s_ptr,
    z_ptr,
    d_ptr,
    order_ptr,
    bias_ptr,  # [N] or None
    out_ptr,  # [T, N]
    T,
    N,
    K,
    stride_xt,
    stride_xst,
    stride_ot,
    groups,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    row_tiles = tl.cdiv(T, BLOCK_T)
    tiles = row_tiles * tl.cdiv(N, BLOCK_N)
    # Tiles that run at one time share columns of weights: rows go fastest.
    for tile in range(tl.program_id(0), tiles, PROGRAMS):
        rows = (tile % row_tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
        rn = (tile // row_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
        m_mask, n_mask = rows < T, rn < N
        wide = rows.to(tl.int64)
        xs_row = xs_ptr
        if xs_ptr is not None:
            xs_row = xs_ptr + wide * stride_xst
        acc = accumulate(
            tl.zeros((BLOCK_T, BLOCK_N), tl.float32),
            x_ptr,
            wide * stride_xt,
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
            acc += tl.load(bias_ptr + rn, mask=n_mask, other=0.0).to(tl.float32)[None, :]
        at = out_ptr + wide[:, None] * stride_ot + rn[None, :]
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=m_mask[:, None] & n_mask[None, :])


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes at a time, and how."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def tile_for(rows: int, packed: PackedLinear, element_bytes: int, on: Chip, fixed: bool) -> Tile:
    """The tile for `rows` rows; `fixed`: that of any number of rows."""
    nvidia = on.backend == "cuda"
    tall = 64 if fixed else min(max(next_power_of_2(rows), 16), 128)
    depth = 128 if packed.kind == "w8a8" else 64 if element_bytes <= 2 else 32
    if tall < 64:
        # A few rows read all weights: narrow tiles keep every processor reading, far ahead.
        columns = 32 if packed.out_features <= 64 * on.processors else packed.columns
        return Tile(tall, columns, depth, 4, 5 if nvidia else 2)
    if tall == 64 or packed.kind not in ("plain", "w8a8") or element_bytes > 2:
        return Tile(64, packed.columns, depth, packed.num_warps, 3 if nvidia else 2)
    return Tile(128, 128, depth, 8, 3 if nvidia else 2)


def linear(x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [T, K] → x·Wᵀ + b, [T, N], in `out_dtype`, x's own by default. Raises ValueError on a wrong width."""
    if not isinstance(packed, PackedLinear):
        return reference.linear(x, packed, out_dtype)
    if x.shape[1] != packed.in_features:
        raise ValueError(f"linear: x has {x.shape[1]} features, the weights take {packed.in_features}")
    library = _library_serves(x, packed, out_dtype)
    out = F.linear(x, packed.codes, packed.bias) if library else _product(x, packed, out_dtype)
    if packed.delta is not None and packed.delta.active:
        packed.delta.add(x, out)
    return out


def _product(x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None) -> Tensor:
    values, scales = quantized(dense(x), packed.activations)
    tokens, n = x.shape[0], packed.out_features
    out = torch.empty((tokens, n), dtype=out_dtype or x.dtype, device=x.device)
    on = chip()
    tile = tile_for(tokens, packed, values.element_size(), on, batch_invariant())
    programs = min(cdiv(tokens, tile.rows) * cdiv(n, tile.columns), on.processors)
    launch(
        *(
            _linear_kernel,
            (programs,),
            values,
            scales,
            packed.codes,
            packed.scales,
            packed.zeros,
            packed.factors,
        ),
        *(packed.order, packed.bias, out, tokens, n, packed.in_features),
        *(values.stride(0), 0 if scales is None else scales.stride(0), out.stride(0), packed.groups),
        KIND=packed.kind,
        GROUP=packed.group,
        ZERO=packed.zero,
        BLOCK_T=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        PROGRAMS=programs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _library_serves(x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None) -> bool:
    """cuBLAS (or rocBLAS) is the better kernel for plain weights, but promises no bits."""
    same = packed.codes.dtype == x.dtype == (out_dtype or x.dtype)
    bias = packed.bias is None or packed.bias.dtype == x.dtype
    return packed.kind == "plain" and x.is_cuda and same and bias and not batch_invariant()


def quantized(x: Tensor, activations: str | None) -> tuple[Tensor, Tensor | None]:
    """x as the product takes it, and its scales if it was quantized."""
    if activations is None:
        return x, None
    return (
        quantize_int8(x)
        if activations == "int8"
        else quantize_fp8(x, 128 if activations == "fp8_group" else 0)
    )


KINDS = (
    *("plain", "int8", "fp8", "int4", "mxfp4", "q4_k", "q6_k"),
    *("w8a8 int8", "w8a8 fp8"),
)


def example(kind: str, n: int, k: int, experts: int = 0) -> PackedLinear:
    """A matrix of one of KINDS without values, as `packing` lays it out; with `experts`, a stack of them."""
    half, byte, signed, fp8 = torch.float16, torch.uint8, torch.int8, torch.float8_e4m3fn

    def plane(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty((*([experts] if experts else []), *shape), dtype=dtype, device="meta")

    def of(kind: str, codes: torch.dtype, *planes: Tensor, **options: Any) -> PackedLinear:
        return with_planes(PackedLinear(kind, n, k, plane(codes, n, k), **options), *planes)

    def nibbles(kind: str, *planes: Tensor, **options: Any) -> PackedLinear:
        return with_planes(PackedLinear(kind, n, k, plane(byte, n, cdiv(k, 128) * 64), **options), *planes)

    def with_planes(
        packed: PackedLinear,
        scales: Tensor | None = None,
        zeros: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> PackedLinear:
        return replace(packed, scales=scales, zeros=zeros, factors=factors)

    channel, blocks = plane(torch.float32, n), plane(torch.float32, cdiv(n, 128), cdiv(k, 128))
    made = {
        "plain": lambda: of("plain", torch.bfloat16),
        "int8": lambda: of("int8", signed, channel),
        "fp8": lambda: of("fp8", byte, blocks, group=128),
        "w8a8 int8": lambda: of("w8a8", signed, channel, activations="int8"),
        "w8a8 fp8": lambda: of("w8a8", fp8, blocks, group=128, activations="fp8_group"),
        "int4": lambda: nibbles("int4", plane(half, n, k // 128), plane(half, n, k // 128), group=128),
        "mxfp4": lambda: nibbles("mxfp4", plane(byte, n, k // 32), group=32),
        "q4_k": lambda: nibbles(
            "q4_k",
            *(plane(byte, n, k // 32), plane(byte, n, k // 32), plane(half, n, 2, k // 256)),
            group=32,
        ),
        "q6_k": lambda: nibbles(
            "q6_k",
            *(plane(signed, n, k // 16), plane(byte, n, k // 4), plane(half, n, k // 256)),
            group=16,
        ),
    }
    return made[kind]()


def production() -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls whose compilations `aot` checks."""
    for kind in KINDS:
        packed = example(kind, 4096, 14336)
        for rows in (16, 4096) if kind in ("plain", "int4") else (4096,):
            x = torch.empty((rows, 14336), dtype=torch.bfloat16, device="meta")
            yield f"{kind}, {rows} rows", partial(_linear_where_it_runs, x, packed)


def _linear_where_it_runs(x: Tensor, packed: PackedLinear) -> None:
    if packed.codes.dtype != torch.float8_e4m3fn or chip().native_fp8:  # else `packing` takes bytes
        linear(x, packed)
