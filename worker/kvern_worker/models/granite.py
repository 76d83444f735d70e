"""Granite: a Llama with multipliers on embeddings, scores, residuals and logits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from kvern_worker.config import DecoderConfig, HfConfig, decoder_fields
from kvern_worker.layers.attention import KvCache
from kvern_worker.layers.decoder import Block, Decoder, load_decoder
from kvern_worker.layers.mlp import load_gated_mlp
from kvern_worker.layers.norm import load_rms_norm
from kvern_worker.layers.rotary import cos_sin_table
from kvern_worker.layers.self_attention import load_self_attention
from kvern_worker.weights.loader import WeightLoader


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    """``logit_divisor`` divides logits, the other multipliers multiply."""

    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logit_divisor: float


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
    )


def build(config: GraniteConfig, loader: WeightLoader, cache: KvCache, num_positions: int) -> Decoder:
    table = cos_sin_table(config.rope, config.rotary_dim, num_positions)
    return load_decoder(
        config,
        loader,
        partial(_block, config, loader, cache, table),
        partial(load_rms_norm, loader, "model.norm", config.hidden_size, config.rms_norm_eps),
        embedding_scale=config.embedding_multiplier,
        logit_scale=1 / config.logit_divisor,
    )


def _block(config: GraniteConfig, loader: WeightLoader, cache: KvCache, table: Tensor, layer: int) -> Block:
    prefix, hidden = f"model.layers.{layer}", config.hidden_size
    return Block(
        attention=load_self_attention(
            *(config, loader, cache, layer, table),
            prefix=f"{prefix}.self_attn",
            scale=config.attention_multiplier,
        ),
        mlp=load_gated_mlp(
            *(loader, f"{prefix}.mlp", hidden, config.intermediate_size, config.activation, config.mlp_bias)
        ),
        pre_attention=load_rms_norm(loader, f"{prefix}.input_layernorm", hidden, config.rms_norm_eps),
        pre_mlp=load_rms_norm(loader, f"{prefix}.post_attention_layernorm", hidden, config.rms_norm_eps),
        multiplier=config.residual_multiplier,
    )
