"""Mixture of experts: a router chooses a few of many MLPs for each token, and perhaps one runs for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kvern_kernels as kernels
from kvern.errors import invalid
from kvern_worker.config import HfConfig
from kvern_worker.layers.mlp import GatedMlp
from kvern_worker.parallel.group import ALONE, TensorParallel
from kvern_worker.weights.loader import WeightLoader
from kvern_worker.weights.source import Part


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How experts are chosen; see ``kernels.moe_route``."""

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


def parse_routing(raw: HfConfig, experts: str, num_experts: int, top_k: int, **options: Any) -> Routing:
    """From the key ``experts`` and ``num_experts_per_tok``; the numbers are their defaults. Raises KvernError where
    the experts don't divide into groups or are fewer than each token needs."""
    # transformers 5 writes Qwen3-MoE's num_experts under the name that others use.
    experts = experts if experts in raw else "num_local_experts"
    routing = Routing(
        num_experts=raw.positive(experts, num_experts),
        top_k=raw.positive("num_experts_per_tok", top_k),
        **options,
    )
    if routing.num_experts % routing.num_groups:
        raise invalid(
            "n_group",
            f"{routing.num_experts} experts do not divide into {routing.num_groups} groups",
            value=routing.num_groups,
        )
    reachable = routing.num_experts // routing.num_groups * routing.top_groups
    if routing.top_k > reachable:
        raise invalid(
            "num_experts_per_tok",
            f"num_experts_per_tok is {routing.top_k} and {reachable} experts can be chosen",
            value=routing.top_k,
            limit=reachable,
        )
    return routing


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """x [T, D] → [T, D]. ``bias``: [experts] float32, on scores for the choice alone. ``shared_gate``: one output, whose
    sigmoid weighs the shared expert.

    Ranks that share the experts see the same x, and add up what theirs give. ``expert_map``: [experts] int32, where each
    lies on this rank, −1 nowhere; None where all are here, or a part of each.
    """

    routing: Routing
    router: kernels.PackedLinear
    experts: Any
    bias: Tensor | None = None
    shared: GatedMlp | None = None
    shared_gate: kernels.PackedLinear | None = None
    expert_map: Tensor | None = None
    tp: TensorParallel = ALONE

    def __call__(self, x: Tensor) -> Tensor:
        how = self.routing
        weights, ids = kernels.moe_route(
            kernels.linear(x, self.router, torch.float32),
            *(how.top_k, how.scoring, how.renormalize, self.bias, how.num_groups, how.top_groups, how.scale),
        )
        out = self.tp.sum(kernels.fused_moe(x, weights, ids, self.experts, self.expert_map)).to(x.dtype)
        if self.shared is None:
            return out
        shared = self.shared(x)
        if self.shared_gate is not None:
            score = kernels.linear(x, self.shared_gate, torch.float32)
            # torch.sigmoid rounds the last rows of a step otherwise than the others.
            share = 1 / (1 + torch.exp(-score))
            shared = (shared * share).to(x.dtype)
        return out + shared


def load_experts(
    loader: WeightLoader,
    prefix: str,
    num_experts: int,
    hidden: int,
    inner: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Any:
    """``prefix``.0 … with a gate, an up and a down projection each."""
    gate, up, down = names
    each = [f"{prefix}.{expert}" for expert in loader.tp.experts(num_experts)]
    if loader.tp.expert_parallel:
        loader.skip(f"{prefix}.")
    part = _inner_part(loader.tp, inner)
    rows = None if part is None else [[part], [part]]
    return kernels.pack_experts(
        [
            loader.linear([f"{one}.{gate}", f"{one}.{up}"], [inner, inner], hidden, False, rows=rows)
            for one in each
        ],
        [loader.linear([f"{one}.{down}"], [hidden], inner, False, columns=part) for one in each],
    )


def load_stacked_experts(
    loader: WeightLoader, gate_up: str, down: str, num_experts: int, hidden: int, inner: int
) -> Any:
    """``gate_up`` [experts, 2 inner, hidden], the gates first, and ``down`` [experts, hidden, inner]."""
    held = Part([slice(expert, expert + 1) for expert in loader.tp.experts(num_experts)])
    part = _inner_part(loader.tp, inner)
    ups = loader.read(gate_up, num_experts, 2 * inner, hidden, part=held)
    downs = loader.read(down, num_experts, hidden, inner, part=held)
    if part is not None:
        rows = Part([part, slice(part.start + inner, part.stop + inner)])
        return kernels.pack_experts(
            [loader.pack_layer(rows.of(weight)) for weight in ups],
            [loader.pack_layer(weight[:, part].contiguous()) for weight in downs],
        )
    return kernels.pack_experts(
        [loader.pack_layer(weight) for weight in ups], [loader.pack_layer(weight) for weight in downs]
    )


def _inner_part(tp: TensorParallel, inner: int) -> slice | None:
    """A rank's part of each expert; None where it holds whole ones."""
    return None if tp.size == 1 or tp.expert_parallel else tp.part(inner, "inner features of an expert")


def expert_map(tp: TensorParallel, num_experts: int) -> Tensor | None:
    """See MixtureOfExperts."""
    if not tp.expert_parallel:
        return None
    places = torch.full((num_experts,), -1, dtype=torch.int32)
    held = tp.experts(num_experts)
    places[held] = torch.arange(len(held), dtype=torch.int32)
    return places
