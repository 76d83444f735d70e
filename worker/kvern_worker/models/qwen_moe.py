"""Qwen2-MoE (a gated shared expert beside the chosen ones) and Qwen3-MoE (norms of queries and keys, none shared)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from kvern_worker.config import DecoderConfig, HfConfig, decoder_fields, windows_of
from kvern_worker.layers.attention import KvCache
from kvern_worker.layers.decoder import Block, Decoder, load_decoder, load_pre_norm_block
from kvern_worker.layers.mlp import GatedMlp, load_gated_mlp
from kvern_worker.layers.moe import MixtureOfExperts, Routing, expert_map, load_experts, parse_routing
from kvern_worker.layers.rotary import cos_sin_table
from kvern_worker.layers.self_attention import load_self_attention
from kvern_worker.weights.loader import WeightLoader

PARALLEL = ("tensor",)


@dataclass(frozen=True, kw_only=True)
class QwenMoeConfig(DecoderConfig):
    """``sparse``: whether a layer has experts. ``shared_size``: width of the shared one, 0 where there is none."""

    routing: Routing
    expert_size: int
    shared_size: int
    sparse: tuple[bool, ...]


def parse(raw: HfConfig) -> QwenMoeConfig:
    version = 2 if raw.architecture == "Qwen2MoeForCausalLM" else 3
    fields = decoder_fields(raw, max_positions=32_768)
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
    last = int(raw.get("max_window_layers", 28))
    windows = windows_of(
        raw, window, lambda layer: bool(window) and (version == 3 or (layer % 2 == 0 and layer < last))
    )
    step, dense = raw.positive("decoder_sparse_step", 1), raw.get("mlp_only_layers") or ()
    bias = bool(raw.get("qkv_bias", True)) if version == 2 else bool(raw.get("attention_bias", False))
    return QwenMoeConfig(
        **fields,
        windows=windows,
        qkv_bias=bias,
        o_bias=bias and version == 3,
        qk_norm=version == 3,
        routing=parse_routing(
            raw,
            "num_experts",
            60 if version == 2 else 128,
            4 if version == 2 else 8,
            renormalize=bool(raw.get("norm_topk_prob", False)),
        ),
        expert_size=raw.positive("moe_intermediate_size", 1408 if version == 2 else 768),
        shared_size=raw.positive("shared_expert_intermediate_size", 5632) if version == 2 else 0,
        sparse=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(fields["num_layers"])),
    )


def build(config: QwenMoeConfig, loader: WeightLoader, cache: KvCache, num_positions: int) -> Decoder:
    table = cos_sin_table(config.rope, config.rotary_dim, num_positions)
    return load_decoder(config, loader, partial(_block, config, loader, cache, table))


def _block(config: QwenMoeConfig, loader: WeightLoader, cache: KvCache, table: Tensor, layer: int) -> Block:
    prefix = f"model.layers.{layer}"
    return load_pre_norm_block(
        config,
        loader,
        prefix,
        attention=load_self_attention(config, loader, cache, layer, table, prefix=f"{prefix}.self_attn"),
        mlp=load_mlp(config, loader, layer),
    )


def load_mlp(config: QwenMoeConfig, loader: WeightLoader, layer: int) -> Callable[[Tensor], Tensor]:
    """The experts of a layer, or the MLP of one without."""
    prefix = f"model.layers.{layer}.mlp"
    if config.sparse[layer]:
        return _moe(config, loader, prefix)
    return load_gated_mlp(loader, prefix, config.hidden_size, config.intermediate_size)


def _moe(config: QwenMoeConfig, loader: WeightLoader, prefix: str) -> MixtureOfExperts:
    num_experts, hidden = config.routing.num_experts, config.hidden_size
    shared: GatedMlp | None = None
    if config.shared_size:
        shared = load_gated_mlp(loader, f"{prefix}.shared_expert", hidden, config.shared_size)
    return MixtureOfExperts(
        routing=config.routing,
        router=loader.linear([f"{prefix}.gate"], [num_experts], hidden, bias=False),
        experts=load_experts(loader, f"{prefix}.experts", num_experts, hidden, config.expert_size),
        shared=shared,
        shared_gate=loader.linear([f"{prefix}.shared_expert_gate"], [1], hidden, bias=False)
        if shared
        else None,
        expert_map=expert_map(loader.tp, num_experts),
        tp=loader.tp,
    )
