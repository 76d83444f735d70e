"""What mixture-of-experts ops mean, in plain torch. T tokens, E experts, k chosen a token, D model width,
I inner width of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kvern_kernels
from kvern_kernels.reference import PackedLinear

SCORING = ("softmax", "sigmoid")
ACTIVATIONS = ("silu", "gelu", "swiglu_oai")


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The experts of one layer that this rank holds: their fused gate and up projections, and down."""

    gate_up: tuple[PackedLinear, ...]
    down: tuple[PackedLinear, ...]
    activation: str

    @property
    def num_bytes(self) -> int:
        return sum(packed.num_bytes for packed in (*self.gate_up, *self.down))


def pack_experts(
    gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear], activation: str = "silu"
) -> PackedExperts:
    """Join the experts of a layer for `fused_moe`; each was packed by any pack_… op, all of one kind.

    gate_up[e] has 2I outputs, the gate's I first; down[e] takes I inputs. `activation`: "silu" or "gelu"
    (tanh form) of the gate times up, or "swiglu_oai", gpt-oss's clamped form:
    min(g, 7) · sigmoid(1.702 · min(g, 7)) · (clamp(u, ±7) + 1).
    """
    check_experts(gate_up, down, activation)
    return PackedExperts(tuple(gate_up), tuple(down), activation)


def check_experts(gate_up: Sequence[Any], down: Sequence[Any], activation: str) -> None:
    """Raises ValueError unless the projections, of any backend's PackedLinear, belong together."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown expert activation {activation!r}: use one of {', '.join(ACTIVATIONS)}")
    if not gate_up or len(gate_up) != len(down):
        raise ValueError(
            f"{len(gate_up)} gate_up and {len(down)} down projections: give one of each an expert"
        )
    shapes = {
        (a.out_features, a.in_features, b.out_features, b.in_features)
        for a, b in zip(gate_up, down, strict=True)
    }
    two_i, d, d_out, i = next(iter(shapes))
    if len(shapes) > 1 or two_i != 2 * i or d_out != d:
        raise ValueError(f"expert projections do not fit each other: (2I, D, D, I) is {sorted(shapes)}")


def moe_route(
    logits: Tensor,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Router logits [T, E] → (weights float32 [T, k], expert ids int32 [T, k]), best first.

    Scores are the softmax over experts or the sigmoid. Experts are chosen by score + `bias` [E] (DeepSeek-V3,
    arXiv 2412.19437 §2.1.2), equal ones by the lower id, among the `top_groups` of `num_groups` equal groups
    (0 < top_groups): a group's rank is its best score, or with a bias the sum of its two best. Weights are the
    scores without the bias, divided by their sum if `renormalize`, times `scale`.
    """
    check_route(logits.shape[1], top_k, scoring, num_groups, top_groups)
    wide = logits.float()
    scores = wide.softmax(-1) if scoring == "softmax" else sigmoid(wide)
    choice = scores if bias is None else scores + bias.float()
    if num_groups > 1:
        grouped = choice.unflatten(1, (num_groups, -1))
        best = grouped.sort(-1, descending=True).values
        rank = best[..., 0] if bias is None else best[..., :2].sum(-1)
        kept = torch.sort(rank, dim=-1, descending=True, stable=True).indices[:, :top_groups]
        dropped = torch.ones_like(rank, dtype=torch.bool).scatter(1, kept, False)
        choice = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(1)
    ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
    return weights * scale, ids.int()


def check_route(experts: int, top_k: int, scoring: str, num_groups: int, top_groups: int) -> None:
    """Raises ValueError on arguments that moe_route can't follow."""
    if scoring not in SCORING:
        raise ValueError(f"unknown router scoring {scoring!r}: use one of {', '.join(SCORING)}")
    if num_groups < 1 or experts % num_groups or not 1 <= top_groups <= num_groups:
        raise ValueError(f"{top_groups} of {num_groups} groups do not divide {experts} experts")
    if not 1 <= top_k <= experts // num_groups * top_groups:
        raise ValueError(f"cannot choose {top_k} of {experts // num_groups * top_groups} experts")


def fused_moe(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    experts: PackedExperts,
    expert_map: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """x [T, D] through each token's chosen experts, their outputs added under `weights` [T, k] → [T, D].

    `ids` int32 [T, k] are the model's expert ids; one outside 0 … E−1 (padding) is skipped. `expert_map`
    int32 [E] gives each id's place among `experts`, or −1 for an expert that another rank holds, which adds
    nothing here. `counts` int32 [E] grows by the pairs that chose each id, wherever it is held.
    """
    total = len(experts.gate_up) if expert_map is None else expert_map.shape[0]
    valid = (ids >= 0) & (ids < total)
    if counts is not None:
        counts += torch.bincount(ids[valid].long(), minlength=total).to(counts.dtype)
    local = ids.long().clamp(0, total - 1)
    if expert_map is not None:
        local = expert_map.long()[local]
    local = torch.where(valid, local, -1)
    linear = kvern_kernels.linear  # of the backend that packed the projections
    out = torch.zeros(x.shape[0], x.shape[1], device=x.device)
    for expert, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
        token, place = (local == expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        inner = gated(linear(x[token].float(), gate_up), experts.activation)
        out.index_add_(0, token, linear(inner, down) * weights[token, place, None].float())
    return out.to(x.dtype)


def gated(x: Tensor, activation: str) -> Tensor:
    """x [T, 2I], gate then up, float32 → [T, I]."""
    gate, up = x.chunk(2, dim=-1)
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * sigmoid(1.702 * gate) * (up + 1)
    return (gate * sigmoid(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def sigmoid(x: Tensor) -> Tensor:
    """With the same bits wherever in a tensor x is: torch.sigmoid rounds the last elements otherwise."""
    return 1 / (1 + torch.exp(-x))
