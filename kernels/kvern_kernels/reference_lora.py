"""What LoRA ops mean, in plain torch: y += B·(A·x)·scale, each token under its own adapter (arXiv 2106.09685).

T tokens, L adapters held, S slices of a fused projection (q, k, v: 3; gate, up: 2; else 1), R the largest rank
(smaller ones are padded with zeros).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """Which adapter each token of a step takes; made once a step and used by all layers."""

    indices: Tensor
    num_adapters: int


def lora_plan(indices: Tensor, num_adapters: int) -> LoraPlan:
    """Prepare a step whose token t takes adapter indices[t], int32 [T]; −1 (or one not in 0 … L−1): none."""
    return LoraPlan(indices, num_adapters)


def lora_shrink(x: Tensor, a: Tensor, plan: LoraPlan) -> Tensor:
    """x [T, K], a [L, S, R, K] → A·x of each token's adapter, float32 [T, S, R]; rows without one are undefined."""
    out = torch.zeros(x.shape[0], *a.shape[1:3], device=x.device)
    for adapter in range(plan.num_adapters):
        rows = (plan.indices == adapter).nonzero().flatten()
        out[rows] = torch.einsum("tk,srk->tsr", x[rows].float(), a[adapter].float())
    return out


def lora_expand(
    hidden: Tensor, b: Tensor, scales: Tensor, plan: LoraPlan, out: Tensor, widths: Sequence[int]
) -> None:
    """Add B·hidden·scale of each token's adapter to out [T, N] in place; tokens without one stay untouched.

    hidden [T, S, R] comes from lora_shrink; b [L, N, R], whose slice s is the `widths[s]` outputs after those
    of the slices before it, Σ widths = N; scales float32 [L].
    """
    check_expand(hidden, b, out, widths)
    for adapter in range(plan.num_adapters):
        rows = (plan.indices == adapter).nonzero().flatten()
        parts = b[adapter].float().split(list(widths))
        added = torch.cat([hidden[rows, s].float() @ part.t() for s, part in enumerate(parts)], -1)
        out[rows] = (out[rows].float() + added * scales[adapter].float()).to(out.dtype)


def check_expand(hidden: Tensor, b: Tensor, out: Tensor, widths: Sequence[int]) -> None:
    """Raises ValueError on slices that don't fit."""
    if len(widths) != hidden.shape[1] or sum(widths) != b.shape[1] or b.shape[1] != out.shape[1]:
        raise ValueError(
            f"lora_expand: slices {list(widths)} do not fit hidden {list(hidden.shape)}, b {list(b.shape)} and "
            f"out {list(out.shape)}"
        )
