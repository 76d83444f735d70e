"""OLMo 2: norms after attention and MLP instead of before, and of all query (key) heads together."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from kvern_worker.config import DecoderConfig, HfConfig, decoder_fields
from kvern_worker.layers.attention import KvCache
from kvern_worker.layers.decoder import Block, Decoder, load_decoder
from kvern_worker.layers.mlp import load_gated_mlp
from kvern_worker.layers.norm import RmsNorm, load_rms_norm
from kvern_worker.layers.rotary import cos_sin_table
from kvern_worker.layers.self_attention import load_self_attention
from kvern_worker.weights.loader import WeightLoader


def parse(raw: HfConfig) -> DecoderConfig:
    fields = decoder_fields(raw, max_positions=2048, eps=1e-5)
    bias = bool(raw.get("attention_bias", False))
    return DecoderConfig(**fields, windows=(0,) * fields["num_layers"], qkv_bias=bias, o_bias=bias)


def build(config: DecoderConfig, loader: WeightLoader, cache: KvCache, num_positions: int) -> Decoder:
    table = cos_sin_table(config.rope, config.rotary_dim, num_positions)
    return load_decoder(config, loader, partial(_block, config, loader, cache, table))


def _block(config: DecoderConfig, loader: WeightLoader, cache: KvCache, table: Tensor, layer: int) -> Block:
    prefix, hidden = f"model.layers.{layer}", config.hidden_size

    def norm(name: str, size: int = hidden) -> RmsNorm:
        return load_rms_norm(loader, f"{prefix}.{name}", size, config.rms_norm_eps)

    return Block(
        attention=load_self_attention(
            *(config, loader, cache, layer, table),
            prefix=f"{prefix}.self_attn",
            q_whole_norm=norm("self_attn.q_norm", config.q_size),
            k_whole_norm=norm("self_attn.k_norm", config.kv_size),
        ),
        mlp=load_gated_mlp(loader, f"{prefix}.mlp", hidden, config.intermediate_size, config.activation),
        post_attention=norm("post_attention_layernorm"),
        post_mlp=norm("post_feedforward_layernorm"),
    )
