"""Granite: a Llama with multipliers on embeddings, scores, residuals and logits; Granite-MoE has experts, all of a kind
in one tensor, and may have a shared one beside them. Granite 4's hybrids have Mamba-2 in most layers, the shared MLP in all,
and experts or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from kvern_worker.config import DecoderConfig, HfConfig, StateShapes, decoder_fields
from kvern_worker.layers.attention import KvCache
from kvern_worker.layers.decoder import Block, Decoder, load_decoder, load_pre_norm_block
from kvern_worker.layers.mamba import MambaShape, load_mamba, parse_mamba
from kvern_worker.layers.mlp import GatedMlp, load_fused_mlp, load_gated_mlp
from kvern_worker.layers.moe import (
    MixtureOfExperts,
    Routing,
    expert_map,
    load_stacked_experts,
    parse_routing,
)
from kvern_worker.layers.rotary import cos_sin_table
from kvern_worker.layers.self_attention import load_self_attention
from kvern_worker.weights.loader import WeightLoader

PARALLEL = ("tensor",)


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    """``logit_divisor`` divides logits, the other multipliers multiply. ``routing``: None without experts. ``rotated``:
    whether attention knows positions."""

    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logit_divisor: float
    routing: Routing | None
    shared_size: int
    rotated: bool
    mamba: MambaShape | None


def parse(raw: HfConfig) -> GraniteConfig:
    fields = decoder_fields(raw, max_positions=2048)
    bias = bool(raw.get("attention_bias", False))
    hybrid = "Hybrid" in raw.architecture
    mamba = parse_mamba(raw, fields["hidden_size"]) if hybrid else None
    has_experts = "Moe" in raw.architecture and not (hybrid and raw.get("num_local_experts") == 0)
    has_shared = hybrid or "Shared" in raw.architecture
    return GraniteConfig(
        **fields,
        windows=(0,) * fields["num_layers"],
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        embedding_multiplier=raw.number("embedding_multiplier", 1.0),
        attention_multiplier=raw.number("attention_multiplier", 1.0),
        residual_multiplier=raw.number("residual_multiplier", 1.0),
        logit_divisor=raw.number("logits_scaling", 1.0),
        routing=parse_routing(raw, "num_local_experts", 8, 2) if has_experts else None,
        shared_size=int(raw.get("shared_intermediate_size") or 1024 * hybrid) if has_shared else 0,
        rotated=not hybrid or raw.get("position_embedding_type") == "rope",
        mamba=mamba,
        states=StateShapes(_mamba_layers(raw, fields["num_layers"]), mamba.states) if mamba else None,
    )


def _mamba_layers(raw: HfConfig, num_layers: int) -> tuple[int, ...]:
    """transformers 5 writes other names for them than the checkpoints that were made before it."""
    types = raw.get("layer_types") or raw.get("layers_block_type") or ["mamba"] * num_layers
    return tuple(layer for layer, kind in enumerate(types) if kind in ("mamba", "linear_attention"))


def build(config: GraniteConfig, loader: WeightLoader, cache: KvCache, num_positions: int) -> Decoder:
    table = cos_sin_table(config.rope, config.rotary_dim if config.rotated else 0, num_positions)
    return load_decoder(
        config,
        loader,
        partial(_block, config, loader, cache, table),
        embedding_scale=config.embedding_multiplier,
        logit_scale=1 / config.logit_divisor,
    )


def _block(config: GraniteConfig, loader: WeightLoader, cache: KvCache, table: Tensor, layer: int) -> Block:
    prefix, hidden = f"model.layers.{layer}", config.hidden_size
    return load_pre_norm_block(
        config,
        loader,
        prefix,
        attention=load_mamba(
            loader, cache, layer, f"{prefix}.mamba", config.mamba, hidden, config.rms_norm_eps
        )
        if config.mamba is not None and layer in cache.states
        else load_self_attention(
            *(config, loader, cache, layer, table),
            prefix=f"{prefix}.self_attn",
            scale=config.attention_multiplier,
        ),
        mlp=_mlp(config, loader, prefix),
        multiplier=config.residual_multiplier,
    )


def _mlp(config: GraniteConfig, loader: WeightLoader, prefix: str) -> Callable[[Tensor], Tensor]:
    if config.routing is not None:
        return _moe(config, config.routing, loader, prefix)
    if config.shared_size:
        return _shared(config, loader, prefix)
    return load_gated_mlp(
        *(loader, f"{prefix}.mlp", config.hidden_size, config.intermediate_size),
        *(config.activation, config.mlp_bias),
    )


def _shared(config: GraniteConfig, loader: WeightLoader, prefix: str) -> GatedMlp:
    names, sizes, hidden = f"{prefix}.shared_mlp", config.shared_size, config.hidden_size
    return load_fused_mlp(
        *(loader, f"{names}.input_linear", f"{names}.output_linear"), *(hidden, sizes, config.activation)
    )


def _moe(config: GraniteConfig, routing: Routing, loader: WeightLoader, prefix: str) -> MixtureOfExperts:
    moe, hidden = f"{prefix}.block_sparse_moe", config.hidden_size
    return MixtureOfExperts(
        routing=routing,
        router=loader.linear([f"{moe}.router.layer"], [routing.num_experts], hidden, bias=False),
        experts=load_stacked_experts(
            *(loader, f"{moe}.input_linear.weight", f"{moe}.output_linear.weight"),
            *(routing.num_experts, hidden, config.intermediate_size),
        ),
        shared=_shared(config, loader, prefix) if config.shared_size else None,
        expert_map=expert_map(loader.tp, routing.num_experts),
        tp=loader.tp,
    )
