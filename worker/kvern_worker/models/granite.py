"""Granite: a Llama with multipliers on embeddings, scores, residuals and logits; Granite-MoE has experts, all of a kind
in one tensor, and may have a shared one beside them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from kvern_worker.config import DecoderConfig, HfConfig, decoder_fields
from kvern_worker.layers.attention import KvCache
from kvern_worker.layers.decoder import Block, Decoder, load_decoder, load_pre_norm_block
from kvern_worker.layers.mlp import GatedMlp, gate, load_gated_mlp
from kvern_worker.layers.moe import MixtureOfExperts, Routing, load_stacked_experts, parse_routing
from kvern_worker.layers.rotary import cos_sin_table
from kvern_worker.layers.self_attention import load_self_attention
from kvern_worker.weights.loader import WeightLoader


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    """``logit_divisor`` divides logits, the other multipliers multiply. ``routing``: None without experts."""

    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logit_divisor: float
    routing: Routing | None
    shared_size: int


def parse(raw: HfConfig) -> GraniteConfig:
    fields = decoder_fields(raw, max_positions=2048)
    bias = bool(raw.get("attention_bias", False))
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
        routing=parse_routing(raw, "num_local_experts", 8, 2) if "Moe" in raw.architecture else None,
        shared_size=int(raw.get("shared_intermediate_size") or 0) if "Shared" in raw.architecture else 0,
    )


def build(config: GraniteConfig, loader: WeightLoader, cache: KvCache, num_positions: int) -> Decoder:
    table = cos_sin_table(config.rope, config.rotary_dim, num_positions)
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
        attention=load_self_attention(
            *(config, loader, cache, layer, table),
            prefix=f"{prefix}.self_attn",
            scale=config.attention_multiplier,
        ),
        mlp=load_gated_mlp(
            *(loader, f"{prefix}.mlp", hidden, config.intermediate_size, config.activation, config.mlp_bias)
        )
        if config.routing is None
        else _moe(config, config.routing, loader, prefix),
        multiplier=config.residual_multiplier,
    )


def _moe(config: GraniteConfig, routing: Routing, loader: WeightLoader, prefix: str) -> MixtureOfExperts:
    moe, hidden = f"{prefix}.block_sparse_moe", config.hidden_size
    shared: GatedMlp | None = None
    if config.shared_size:
        names, sizes = f"{prefix}.shared_mlp", config.shared_size
        shared = GatedMlp(
            gate_up=loader.linear([f"{names}.input_linear"], [2 * sizes], hidden, bias=False),
            down=loader.linear([f"{names}.output_linear"], [hidden], sizes, bias=False),
            activation=gate(config.activation),
        )
    return MixtureOfExperts(
        routing=routing,
        router=loader.linear([f"{moe}.router.layer"], [routing.num_experts], hidden, bias=False),
        experts=load_stacked_experts(
            *(loader, f"{moe}.input_linear.weight", f"{moe}.output_linear.weight"),
            *(routing.num_experts, hidden, config.intermediate_size),
        ),
        shared=shared,
    )
