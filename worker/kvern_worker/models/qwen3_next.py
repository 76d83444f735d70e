"""Qwen3-Next: three gated delta nets to a layer of gated attention, and Qwen2-MoE's experts with a shared one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import kvern_kernels as kernels
from kvern_worker.config import HfConfig, StateShapes, decoder_fields
from kvern_worker.layers.attention import KvCache, StepInputs
from kvern_worker.layers.decoder import Block, Decoder, load_decoder
from kvern_worker.layers.gated_delta import DeltaShape, load_gated_delta, parse_gated_delta
from kvern_worker.layers.moe import parse_routing
from kvern_worker.layers.norm import RmsNorm, load_rms_norm
from kvern_worker.layers.rotary import cos_sin_table
from kvern_worker.models.qwen_moe import QwenMoeConfig, load_mlp
from kvern_worker.weights.loader import WeightLoader


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(QwenMoeConfig):
    delta: DeltaShape


def parse(raw: HfConfig) -> Qwen3NextConfig:
    fields = decoder_fields(raw, max_positions=32_768, head_dim=256, partial=0.25)
    raw.only("attention_bias", raw.get("attention_bias") and False)
    num_layers, delta = fields["num_layers"], parse_gated_delta(raw)
    period = raw.positive("full_attention_interval", 4)
    types = raw.get("layer_types") or [
        "full_attention" if (layer + 1) % period == 0 else "linear_attention" for layer in range(num_layers)
    ]
    step, dense = raw.positive("decoder_sparse_step", 1), raw.get("mlp_only_layers") or ()
    return Qwen3NextConfig(
        **fields,
        windows=(0,) * num_layers,
        qk_norm=True,
        states=StateShapes(
            tuple(layer for layer, kind in enumerate(types) if kind == "linear_attention"), delta.states
        ),
        delta=delta,
        routing=parse_routing(raw, "num_experts", 512, 10, renormalize=bool(raw.get("norm_topk_prob", True))),
        expert_size=raw.positive("moe_intermediate_size", 512),
        shared_size=raw.positive("shared_expert_intermediate_size", 512),
        sparse=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
    )


def build(config: Qwen3NextConfig, loader: WeightLoader, cache: KvCache, num_positions: int) -> Decoder:
    table = cos_sin_table(config.rope, config.rotary_dim, num_positions)
    return load_decoder(
        config,
        loader,
        partial(_block, config, loader, cache, table),
        partial(_norm, config, loader, "model.norm"),
        ignored=("mtp.",),
    )


def _norm(config: Qwen3NextConfig, loader: WeightLoader, name: str) -> RmsNorm:
    return load_rms_norm(loader, name, config.hidden_size, config.rms_norm_eps, offset=1.0)


def _block(config: Qwen3NextConfig, loader: WeightLoader, cache: KvCache, table: Tensor, layer: int) -> Block:
    prefix = f"model.layers.{layer}"
    return Block(
        load_gated_delta(
            *(loader, cache, layer, f"{prefix}.linear_attn"),
            *(config.delta, config.hidden_size, config.rms_norm_eps),
        )
        if layer in cache.states
        else _load_attention(config, loader, cache, table, layer),
        load_mlp(config, loader, layer),
        pre_attention=_norm(config, loader, f"{prefix}.input_layernorm"),
        pre_mlp=_norm(config, loader, f"{prefix}.post_attention_layernorm"),
    )


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """x [T, hidden] → [T, hidden]: attention whose output is weighed by the sigmoid of a gate. ``qgkv`` projects to
    queries, gates, keys and values; ``cos_sin``, ``q_norm`` and ``k_norm`` as in SelfAttention."""

    qgkv: kernels.PackedLinear
    o: kernels.PackedLinear
    keys: Tensor
    values: Tensor
    cos_sin: Tensor
    q_norm: Tensor
    k_norm: Tensor
    eps: float

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        kv_heads, dim = self.keys.shape[1], self.keys.shape[3]
        projected, kv_size = kernels.linear(x, self.qgkv), kv_heads * dim
        q_size = (projected.shape[1] - 2 * kv_size) // 2
        q, gate, k, v = projected.split_with_sizes([q_size, q_size, kv_size, kv_size], 1)
        q, k, v = (part.unflatten(1, (-1, dim)) for part in (q, k, v))
        q = kernels.rope_and_store(
            *(q, k, v, step.positions, self.cos_sin, step.slot_mapping, self.keys, self.values),
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=self.eps,
        )
        mixed = kernels.paged_attention(
            *(q, self.keys, self.values, step.block_tables, step.query_start, step.seq_lens),
            kernels.AttentionOptions(dim**-0.5),
        ).flatten(1)
        # torch.sigmoid rounds the last rows of a step otherwise than the others.
        return kernels.linear((mixed / (1 + torch.exp(-gate.float()))).to(x.dtype), self.o)


def _load_attention(
    config: Qwen3NextConfig, loader: WeightLoader, cache: KvCache, table: Tensor, layer: int
) -> GatedAttention:
    prefix, dim, hidden = f"model.layers.{layer}.self_attn", config.head_dim, config.hidden_size
    # Each head's query is followed by its gate.
    both = loader.read(f"{prefix}.q_proj.weight", 2 * config.q_size, hidden)
    queries, gates = both.unflatten(0, (config.num_heads, 2, dim)).unbind(1)
    k, v = (loader.read(f"{prefix}.{name}_proj.weight", config.kv_size, hidden) for name in "kv")
    q_norm, k_norm = (loader.wide(f"{prefix}.{name}_norm.weight", dim) + 1 for name in "qk")
    keys, values = cache.layers[layer]
    return GatedAttention(
        qgkv=loader.pack(torch.cat((queries.flatten(0, 1), gates.flatten(0, 1), k, v))),
        o=loader.linear([f"{prefix}.o_proj"], [hidden], config.q_size, bias=False),
        keys=keys,
        values=values,
        cos_sin=table,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=config.rms_norm_eps,
    )
