"""Phi-3 and Phi-4: a Llama whose checkpoint holds QKV and gate/up as one matrix each; LongRoPE, partly rotated heads."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from kvern.errors import invalid
from kvern_worker.config import DecoderConfig, HfConfig, decoder_fields
from kvern_worker.layers.attention import KvCache
from kvern_worker.layers.decoder import Block, Decoder, load_decoder, load_pre_norm_block
from kvern_worker.layers.mlp import load_fused_mlp
from kvern_worker.layers.rotary import cos_sin_table
from kvern_worker.layers.self_attention import load_self_attention
from kvern_worker.weights.loader import WeightLoader

PARALLEL = ("tensor",)


def parse(raw: HfConfig) -> DecoderConfig:
    fields = decoder_fields(raw, max_positions=4096, eps=1e-5)
    window = int(raw.get("sliding_window") or 0)
    config = DecoderConfig(**fields, windows=(window,) * fields["num_layers"])
    for name, factors in (("short", config.rope.short_factors), ("long", config.rope.long_factors)):
        if config.rope.kind == "longrope" and len(factors) != config.rotary_dim // 2:
            raise invalid(
                f"rope_scaling.{name}_factor",
                f"rope_scaling.{name}_factor has {len(factors)} numbers, longrope needs {config.rotary_dim // 2}",
                value=len(factors),
                limit=config.rotary_dim // 2,
            )
    return config


def build(config: DecoderConfig, loader: WeightLoader, cache: KvCache, num_positions: int) -> Decoder:
    table = cos_sin_table(config.rope, config.rotary_dim, num_positions)
    return load_decoder(config, loader, partial(_block, config, loader, cache, table))


def _block(config: DecoderConfig, loader: WeightLoader, cache: KvCache, table: Tensor, layer: int) -> Block:
    prefix, hidden, inner = f"model.layers.{layer}", config.hidden_size, config.intermediate_size
    attention = f"{prefix}.self_attn"
    return load_pre_norm_block(
        config,
        loader,
        prefix,
        attention=load_self_attention(config, loader, cache, layer, table, prefix=attention, fused=True),
        mlp=load_fused_mlp(
            *(loader, f"{prefix}.mlp.gate_up_proj", f"{prefix}.mlp.down_proj"),
            *(hidden, inner, config.activation),
        ),
    )
