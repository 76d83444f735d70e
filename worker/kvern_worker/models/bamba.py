"""Bamba: Mamba-2 layers with a few of attention between them, and an MLP after each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from kvern_worker.config import DecoderConfig, HfConfig, StateShapes, decoder_fields
from kvern_worker.layers.attention import KvCache
from kvern_worker.layers.decoder import Block, Decoder, load_decoder
from kvern_worker.layers.mamba import MambaShape, load_mamba, parse_mamba
from kvern_worker.layers.mlp import load_gated_mlp
from kvern_worker.layers.norm import load_rms_norm
from kvern_worker.layers.rotary import cos_sin_table
from kvern_worker.layers.self_attention import load_self_attention
from kvern_worker.weights.loader import WeightLoader


@dataclass(frozen=True, kw_only=True)
class BambaConfig(DecoderConfig):
    mamba: MambaShape


def parse(raw: HfConfig) -> BambaConfig:
    fields = decoder_fields(raw, max_positions=262_144, eps=1e-5, partial=0.5)
    mamba = parse_mamba(raw, fields["hidden_size"])
    attention = raw.get("attn_layer_indices") or ()
    layers = tuple(layer for layer in range(fields["num_layers"]) if layer not in attention)
    bias = bool(raw.get("attention_bias", False))
    return BambaConfig(
        **fields,
        windows=(0,) * fields["num_layers"],
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        states=StateShapes(layers, mamba.states),
        mamba=mamba,
    )


def build(config: BambaConfig, loader: WeightLoader, cache: KvCache, num_positions: int) -> Decoder:
    table = cos_sin_table(config.rope, config.rotary_dim, num_positions)
    hidden, eps = config.hidden_size, config.rms_norm_eps
    return load_decoder(
        config,
        loader,
        partial(_block, config, loader, cache, table),
        partial(load_rms_norm, loader, "model.final_layernorm", hidden, eps),
    )


def _block(config: BambaConfig, loader: WeightLoader, cache: KvCache, table: Tensor, layer: int) -> Block:
    prefix, hidden, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
    before, after = (
        load_rms_norm(loader, f"{prefix}.{name}", hidden, eps)
        for name in ("input_layernorm", "pre_ff_layernorm")
    )
    mixer = (
        load_mamba(loader, cache, layer, f"{prefix}.mamba", config.mamba, hidden, eps)
        if layer in cache.states
        else load_self_attention(config, loader, cache, layer, table, prefix=f"{prefix}.self_attn")
    )
    mlp = load_gated_mlp(
        *(loader, f"{prefix}.feed_forward", hidden, config.intermediate_size),
        *(config.activation, config.mlp_bias),
    )
    return Block(mixer, mlp, pre_attention=before, pre_mlp=after)
