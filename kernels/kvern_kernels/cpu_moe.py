"""The C++ backend's mixture of experts: one call routes, one runs all experts of a layer (csrc/moe.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvern_kernels import reference_moe
from kvern_kernels.cpu_base import LIBRARY, TYPES, threads
from kvern_kernels.cpu_elementwise import ACTIVATIONS
from kvern_kernels.cpu_linear import PackedLinear, Projection, projection


class _Experts(ctypes.Structure):
    _fields_ = [
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("count", c_int64),
        ("total", c_int64),
        ("map", c_void_p),
        ("width", c_int64),
        ("inner", c_int64),
        ("activation", c_int64),
    ]


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """See reference_moe.PackedExperts; with the structures that the library reads."""

    gate_up: tuple[PackedLinear, ...]
    down: tuple[PackedLinear, ...]
    activation: str
    structs: tuple[Any, Any]

    @property
    def num_bytes(self) -> int:
        return sum(packed.num_bytes for packed in (*self.gate_up, *self.down))


def pack_experts(
    gate_up: Sequence[Any], down: Sequence[Any], activation: str = "silu"
) -> PackedExperts | reference_moe.PackedExperts:
    """See reference_moe.pack_experts."""
    reference_moe.check_experts(gate_up, down, activation)
    known = all(isinstance(p, PackedLinear) for p in (*gate_up, *down))
    if not known or activation not in ACTIVATIONS:
        return reference_moe.pack_experts(gate_up, down, activation)
    arrays = [(Projection * len(side))(*[projection(p) for p in side]) for side in (gate_up, down)]
    return PackedExperts(tuple(gate_up), tuple(down), activation, (arrays[0], arrays[1]))


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
    """See reference_moe.moe_route."""
    reference_moe.check_route(logits, top_k, scoring, num_groups, top_groups)
    logits = logits.float().contiguous()
    bias = None if bias is None else bias.float().contiguous()
    weights = torch.empty(logits.shape[0], top_k)
    ids = torch.empty(logits.shape[0], top_k, dtype=torch.int32)
    options = (
        *(scoring == "sigmoid", renormalize, None if bias is None else bias.data_ptr()),
        *(num_groups, top_groups, scale),
    )
    LIBRARY.kvern_moe_route(
        *(threads(), logits.data_ptr(), *logits.shape, top_k, *options, weights.data_ptr(), ids.data_ptr())
    )
    return weights, ids


def fused_moe(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    experts: PackedExperts | reference_moe.PackedExperts,
    expert_map: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """See reference_moe.fused_moe."""
    if not isinstance(experts, PackedExperts) or x.dtype not in TYPES:
        return reference_moe.fused_moe(x, weights, ids, experts, expert_map, counts)  # type: ignore[arg-type]
    x = x if x.stride(-1) == 1 else x.contiguous()
    width = experts.gate_up[0].in_features
    if x.shape[1] != width or ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"fused_moe: x {list(x.shape)}, weights {list(weights.shape)} and ids {list(ids.shape)} do not fit "
            f"experts of width {width}"
        )
    weights, ids = weights.float().contiguous(), ids.int().contiguous()
    place = None if expert_map is None else expert_map.int().contiguous()
    grown = None if counts is None else counts.int().contiguous()
    count = len(experts.gate_up)
    struct = _Experts(
        *(ctypes.addressof(side) for side in experts.structs),
        *(count, count if place is None else place.shape[0], None if place is None else place.data_ptr()),
        *(width, experts.down[0].in_features, ACTIVATIONS[experts.activation]),
    )
    out = torch.empty(x.shape[0], width)
    LIBRARY.kvern_moe(
        *(threads(), ctypes.byref(struct), x.data_ptr(), x.stride(0), TYPES[x.dtype], x.shape[0]),
        *(weights.data_ptr(), ids.data_ptr(), ids.shape[1]),
        *(None if grown is None else grown.data_ptr(), out.data_ptr()),
    )
    if counts is not None and grown is not None and grown.data_ptr() != counts.data_ptr():
        counts.copy_(grown)
    return out.to(x.dtype)
