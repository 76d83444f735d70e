"""GPT-OSS: attention sinks, alternating windows, YaRN, and experts with a clamped SwiGLU, in MXFP4 or bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kvern_kernels as kernels
from kvern_worker.config import DecoderConfig, HfConfig, decoder_fields, windows_of
from kvern_worker.layers.attention import KvCache
from kvern_worker.layers.decoder import Block, Decoder, load_decoder, load_pre_norm_block
from kvern_worker.layers.moe import MixtureOfExperts, Routing, parse_routing
from kvern_worker.layers.rotary import cos_sin_table
from kvern_worker.layers.self_attention import load_self_attention
from kvern_worker.weights.loader import WeightLoader

QUANTIZATIONS = ("mxfp4",)

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(DecoderConfig):
    routing: Routing


def parse(raw: HfConfig) -> GptOssConfig:
    raw.only("swiglu_alpha", 1.702)
    raw.only("swiglu_limit", 7.0)
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or _ROPE
    raw = raw.replace(rope_parameters=rope)
    fields = decoder_fields(raw, max_positions=131_072, eps=1e-5, theta=150_000.0, head_dim=64)
    # Its max_position_embeddings is the length after stretching.
    fields["max_positions"] = raw.positive("max_position_embeddings", 131_072)
    bias = bool(raw.get("attention_bias", True))
    return GptOssConfig(
        **fields,
        windows=windows_of(raw, raw.get("sliding_window", 128), lambda layer: layer % 2 == 0),
        qkv_bias=bias,
        o_bias=bias,
        routing=parse_routing(raw, "num_local_experts", 128, 4),
    )


def build(config: GptOssConfig, loader: WeightLoader, cache: KvCache, num_positions: int) -> Decoder:
    table = cos_sin_table(config.rope, config.rotary_dim, num_positions)
    return load_decoder(config, loader, partial(_block, config, loader, cache, table))


def _block(config: GptOssConfig, loader: WeightLoader, cache: KvCache, table: Tensor, layer: int) -> Block:
    prefix = f"model.layers.{layer}"
    attention, mlp, num_experts = f"{prefix}.self_attn", f"{prefix}.mlp", config.routing.num_experts
    return load_pre_norm_block(
        config,
        loader,
        prefix,
        attention=load_self_attention(
            *(config, loader, cache, layer, table),
            prefix=attention,
            sinks=loader.wide(f"{attention}.sinks", config.num_heads),
        ),
        mlp=MixtureOfExperts(
            routing=config.routing,
            router=loader.linear([f"{mlp}.router"], [num_experts], config.hidden_size, bias=True),
            experts=_experts(config, loader, f"{mlp}.experts"),
        ),
    )


def _experts(config: GptOssConfig, loader: WeightLoader, prefix: str) -> Any:
    """In the file, outputs of gate and up alternate."""
    inner, hidden = config.intermediate_size, config.hidden_size
    in_order = torch.arange(2 * inner).view(-1, 2).t().flatten()
    packed = (
        _projections(config, loader, f"{prefix}.gate_up_proj", 2 * inner, hidden, in_order),
        _projections(config, loader, f"{prefix}.down_proj", hidden, inner, torch.arange(hidden)),
    )
    return kernels.pack_experts(*packed, activation="swiglu_oai")


def _projections(
    config: GptOssConfig, loader: WeightLoader, name: str, out_size: int, in_size: int, order: Tensor
) -> list[kernels.PackedLinear]:
    """One of each expert, its outputs in ``order``: four-bit blocks with a scale each, or weights as [in, out]."""
    count = config.routing.num_experts
    biases = loader.read(f"{name}_bias", count, out_size)[:, order]
    if loader.holds(f"{name}_blocks"):
        groups = in_size // 32
        blocks = loader.bytes(f"{name}_blocks", count, out_size, groups, 16)
        scales = loader.bytes(f"{name}_scales", count, out_size, groups)
        return [
            loader.counted(kernels.pack_mxfp4(block[order].flatten(1), scale[order], bias))
            for block, scale, bias in zip(blocks, scales, biases, strict=True)
        ]
    weights = loader.read(name, count, in_size, out_size)
    return [loader.pack_layer(weight.t()[order], bias) for weight, bias in zip(weights, biases, strict=True)]
