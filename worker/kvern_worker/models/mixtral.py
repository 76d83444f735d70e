"""Mixtral: a Mistral with experts for an MLP."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from kvern_worker.config import DecoderConfig, HfConfig, decoder_fields
from kvern_worker.layers.attention import KvCache
from kvern_worker.layers.decoder import Block, Decoder, load_decoder, load_pre_norm_block
from kvern_worker.layers.moe import MixtureOfExperts, Routing, expert_map, load_experts, parse_routing
from kvern_worker.layers.rotary import cos_sin_table
from kvern_worker.layers.self_attention import load_self_attention
from kvern_worker.weights.loader import WeightLoader

PARALLEL = ("tensor",)


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(DecoderConfig):
    routing: Routing


def parse(raw: HfConfig) -> MixtralConfig:
    fields = decoder_fields(raw, max_positions=131_072, eps=1e-5, theta=1e6)
    return MixtralConfig(
        **fields,
        windows=(int(raw.get("sliding_window") or 0),) * fields["num_layers"],
        routing=parse_routing(raw, "num_local_experts", 8, 2),
    )


def build(config: MixtralConfig, loader: WeightLoader, cache: KvCache, num_positions: int) -> Decoder:
    table = cos_sin_table(config.rope, config.rotary_dim, num_positions)
    return load_decoder(config, loader, partial(_block, config, loader, cache, table))


def _block(config: MixtralConfig, loader: WeightLoader, cache: KvCache, table: Tensor, layer: int) -> Block:
    prefix = f"model.layers.{layer}"
    moe, num_experts, hidden = f"{prefix}.block_sparse_moe", config.routing.num_experts, config.hidden_size
    return load_pre_norm_block(
        config,
        loader,
        prefix,
        attention=load_self_attention(config, loader, cache, layer, table, prefix=f"{prefix}.self_attn"),
        mlp=MixtureOfExperts(
            routing=config.routing,
            router=loader.linear([f"{moe}.gate"], [num_experts], hidden, bias=False),
            experts=load_experts(
                *(loader, f"{moe}.experts", num_experts, hidden, config.intermediate_size),
                names=("w1", "w3", "w2"),
            ),
            expert_map=expert_map(loader.tp, num_experts),
            tp=loader.tp,
        ),
    )
