"""The C++ backend's mixture of experts: one call routes, one runs all experts of a layer (csrc/moe.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvern_kernels import reference_moe
from kvern_kernels.cpu_base import LIBRARY, TYPES, address_of, threads
from kvern_kernels.cpu_elementwise import ACTIVATIONS
from kvern_kernels.cpu_linear import PackedLinear, Projection, projection


class Experts(ctypes.Structure):
    """Experts as csrc/moe.h has them."""

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


class Routing(ctypes.Structure):
    """The arguments of moe_route as csrc/moe.h has them."""

    _fields_ = [
        *[(name, c_int64) for name in ("experts", "top_k", "sigmoid", "renormalize")],
        ("bias", c_void_p),
        *[("groups", c_int64), ("top_groups", c_int64)],
        ("scale", c_float),
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

    def struct(self, place: Tensor | None = None) -> Experts:
        """`place`: a contiguous int32 expert_map, see reference_moe.fused_moe."""
        count = len(self.gate_up)
        return Experts(
            *(ctypes.addressof(side) for side in self.structs),
            *(count, count if place is None else place.shape[0], address_of(place)),
            *(self.gate_up[0].in_features, self.down[0].in_features, ACTIVATIONS[self.activation]),
        )


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
    reference_moe.check_route(logits.shape[1], top_k, scoring, num_groups, top_groups)
    logits = logits.float().contiguous()
    bias = None if bias is None else bias.float().contiguous()
    weights = torch.empty(logits.shape[0], top_k)
    ids = torch.empty(logits.shape[0], top_k, dtype=torch.int32)
    routing = Routing(
        *(logits.shape[1], top_k, scoring == "sigmoid", renormalize, address_of(bias)),
        *(num_groups, top_groups, scale),
    )
    LIBRARY.kvern_moe_route(
        *(threads(), ctypes.byref(routing), logits.data_ptr(), logits.shape[0]),
        *(weights.data_ptr(), ids.data_ptr()),
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
    struct = experts.struct(place)
    out = torch.empty(x.shape, dtype=x.dtype)
    LIBRARY.kvern_moe(
        *(threads(), ctypes.byref(struct), x.data_ptr(), x.stride(0), TYPES[x.dtype], x.shape[0]),
        *(weights.data_ptr(), ids.data_ptr(), ids.shape[1], address_of(grown), out.data_ptr()),
    )
    if counts is not None and grown is not None and grown.data_ptr() != counts.data_ptr():
        counts.copy_(grown)
    return out
