"""Llama 4, text: three layers of four rotate and attend within chunks, the fourth knows no positions; one expert a token.

Within one chunk (8,192 tokens) attention is the plain causal one, and no further are sequences served: chunks are no
window, and the kernels don't know them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kvern_kernels as kernels
from kvern.errors import invalid
from kvern_worker.config import DecoderConfig, HfConfig, decoder_fields
from kvern_worker.layers.attention import KvCache
from kvern_worker.layers.decoder import Block, Decoder, load_decoder, load_pre_norm_block
from kvern_worker.layers.mlp import GatedMlp, load_gated_mlp
from kvern_worker.layers.moe import Routing, parse_routing
from kvern_worker.layers.rotary import cos_sin_table
from kvern_worker.layers.self_attention import SelfAttention, load_self_attention
from kvern_worker.weights.loader import WeightLoader


@dataclass(frozen=True, kw_only=True)
class Llama4Config(DecoderConfig):
    """``unit_norm``: whether queries and keys of layers that know positions
    are normed. ``rotated`` and ``sparse``: which layers know positions, and which have experts. ``temperature``: on queries of
    layers without positions, (scale, positions of one step of it), or None."""

    routing: Routing
    unit_norm: bool
    dense_size: int
    rotated: tuple[bool, ...]
    sparse: tuple[bool, ...]
    temperature: tuple[float, float] | None


def parse(raw: HfConfig) -> Llama4Config:
    fields = decoder_fields(raw, max_positions=131_072, eps=1e-5, theta=500_000.0, head_dim=128)
    layers = fields["num_layers"]
    every, interval = raw.positive("interleave_moe_layer_step", 1), raw.positive("no_rope_layer_interval", 4)
    raw.only("num_experts_per_tok", 1)
    sparse = raw.get("moe_layers") or range(every - 1, layers, every)
    rotated = raw.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(layers)]
    if len(rotated) != layers:
        raise invalid(
            "no_rope_layers",
            f"no_rope_layers has {len(rotated)} entries for {layers} layers",
            value=len(rotated),
        )
    if chunk := raw.get("attention_chunk_size", 8192):
        fields["max_positions"] = min(fields["max_positions"], int(chunk))
    tuned = raw.get("attn_temperature_tuning", True)
    return Llama4Config(
        **fields,
        windows=(0,) * layers,
        qkv_bias=bool(raw.get("attention_bias", False)),
        o_bias=bool(raw.get("attention_bias", False)),
        unit_norm=bool(raw.get("use_qk_norm", True)),
        routing=parse_routing(raw, "num_local_experts", 16, 1),
        dense_size=raw.positive("intermediate_size_mlp", 16_384),
        rotated=tuple(map(bool, rotated)),
        sparse=tuple(layer in sparse for layer in range(layers)),
        temperature=(raw.number("attn_scale", 0.1), raw.number("floor_scale", 8192)) if tuned else None,
    )


def build(config: Llama4Config, loader: WeightLoader, cache: KvCache, num_positions: int) -> Decoder:
    table = cos_sin_table(config.rope, config.rotary_dim, num_positions)
    return load_decoder(config, loader, partial(_block, config, loader, cache, table))


def _block(config: Llama4Config, loader: WeightLoader, cache: KvCache, table: Tensor, layer: int) -> Block:
    prefix, hidden = f"model.layers.{layer}", config.hidden_size
    mlp = f"{prefix}.feed_forward"
    return load_pre_norm_block(
        config,
        loader,
        prefix,
        attention=_attention(config, loader, cache, table, layer),
        mlp=_moe(config, loader, mlp)
        if config.sparse[layer]
        else load_gated_mlp(loader, mlp, hidden, config.dense_size, config.activation),
    )


def _attention(
    config: Llama4Config, loader: WeightLoader, cache: KvCache, table: Tensor, layer: int
) -> SelfAttention:
    attention = load_self_attention(
        *(config, loader, cache, layer, table if config.rotated[layer] else table[:, :0]),
        prefix=f"model.layers.{layer}.self_attn",
        interleaved=True,
    )
    if config.rotated[layer] and config.unit_norm:
        # It norms after rotating, without weights; rotation keeps a head's length, so that the order is no matter.
        ones = torch.ones(config.head_dim)
        return replace(attention, q_norm=ones, k_norm=ones)
    if not config.rotated[layer] and config.temperature is not None:
        scale, steps = config.temperature
        positions = torch.arange(table.shape[0]) + 1
        return replace(attention, temperature=1 + scale * torch.log1p(torch.floor(positions / steps)))
    return attention


@dataclass(frozen=True, slots=True)
class InputScaledExperts:
    """x [T, D] → the chosen expert of x·σ(its score), plus the shared one of x."""

    router: kernels.PackedLinear
    experts: Any
    shared: GatedMlp

    def __call__(self, x: Tensor) -> Tensor:
        scores = kernels.linear(x, self.router, torch.float32)
        weights, ids = kernels.moe_route(scores, 1, "sigmoid", False)
        scaled = (x * weights).to(x.dtype)
        return self.shared(x) + kernels.fused_moe(scaled, torch.ones_like(weights), ids, self.experts)


def _moe(config: Llama4Config, loader: WeightLoader, prefix: str) -> InputScaledExperts:
    count, hidden, inner = config.routing.num_experts, config.hidden_size, config.intermediate_size
    return InputScaledExperts(
        router=loader.linear([f"{prefix}.router"], [count], hidden, bias=False),
        experts=kernels.pack_experts(
            _transposed(loader, f"{prefix}.experts.gate_up_proj", count, hidden, 2 * inner),
            _transposed(loader, f"{prefix}.experts.down_proj", count, inner, hidden),
        ),
        shared=load_gated_mlp(loader, f"{prefix}.shared_expert", hidden, inner, config.activation),
    )


def _transposed(
    loader: WeightLoader, name: str, count: int, in_size: int, out_size: int
) -> list[kernels.PackedLinear]:
    """One of each expert; the file has [experts, in, out]."""
    return [
        loader.pack_layer(weight.t().contiguous()) for weight in loader.read(name, count, in_size, out_size)
    ]
