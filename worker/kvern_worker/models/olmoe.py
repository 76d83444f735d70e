"""OLMoE: experts, and norms of all query (key) heads together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from kvern_worker.config import DecoderConfig, HfConfig, decoder_fields
from kvern_worker.layers.attention import KvCache
from kvern_worker.layers.decoder import Block, Decoder, load_decoder, load_pre_norm_block
from kvern_worker.layers.moe import MixtureOfExperts, Routing, load_experts, parse_routing
from kvern_worker.layers.norm import load_rms_norm
from kvern_worker.layers.rotary import cos_sin_table
from kvern_worker.layers.self_attention import load_self_attention
from kvern_worker.weights.loader import WeightLoader


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(DecoderConfig):
    routing: Routing


def parse(raw: HfConfig) -> OlmoeConfig:
    raw.only("clip_qkv", None)
    fields = decoder_fields(raw, max_positions=4096, eps=1e-5)
    bias = bool(raw.get("attention_bias", False))
    renormalize = bool(raw.get("norm_topk_prob", False))
    return OlmoeConfig(
        **fields,
        windows=(0,) * fields["num_layers"],
        qkv_bias=bias,
        o_bias=bias,
        routing=parse_routing(raw, "num_experts", 64, 8, renormalize=renormalize),
    )


def build(config: OlmoeConfig, loader: WeightLoader, cache: KvCache, num_positions: int) -> Decoder:
    table = cos_sin_table(config.rope, config.rotary_dim, num_positions)
    return load_decoder(config, loader, partial(_block, config, loader, cache, table))


def _block(config: OlmoeConfig, loader: WeightLoader, cache: KvCache, table: Tensor, layer: int) -> Block:
    prefix = f"model.layers.{layer}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    num_experts, hidden, eps = config.routing.num_experts, config.hidden_size, config.rms_norm_eps
    return load_pre_norm_block(
        config,
        loader,
        prefix,
        attention=load_self_attention(
            *(config, loader, cache, layer, table),
            prefix=attention,
            q_whole_norm=load_rms_norm(loader, f"{attention}.q_norm", config.q_size, eps),
            k_whole_norm=load_rms_norm(loader, f"{attention}.k_norm", config.kv_size, eps),
        ),
        mlp=MixtureOfExperts(
            routing=config.routing,
            router=loader.linear([f"{mlp}.gate"], [num_experts], hidden, bias=False),
            experts=load_experts(loader, f"{mlp}.experts", num_experts, hidden, config.intermediate_size),
        ),
    )
