"""DeepSeek-V2 and V3 (and R1): latent attention, the first layers dense, the rest many small experts beside shared ones.

V2 weighs experts by a softmax; V3 by a sigmoid, chosen with a correction bias within the best groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

import kvern_kernels as kernels
from kvern_worker.config import DecoderConfig, HfConfig, decoder_fields, unsupported
from kvern_worker.layers.attention import KvCache
from kvern_worker.layers.decoder import Block, Decoder, load_decoder, load_pre_norm_block
from kvern_worker.layers.latent_attention import LatentAttention
from kvern_worker.layers.mlp import load_gated_mlp
from kvern_worker.layers.moe import MixtureOfExperts, Routing, load_experts, parse_routing
from kvern_worker.layers.norm import load_rms_norm
from kvern_worker.layers.rotary import cos_sin_table, yarn_magnitude
from kvern_worker.weights.loader import WeightLoader

# Of the norms inside attention, whatever the configuration says of the others.
_LATENT_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(DecoderConfig):
    """``head_dim`` is rotary + latent, what the cache holds of a token. ``query_rank``: 0 where queries are projected
    at once."""

    routing: Routing
    bias: bool
    interleaved: bool
    query_rank: int
    latent: int
    rotary: int
    plain: int
    value: int
    scale: float
    expert_size: int
    shared_size: int
    num_dense: int


def parse(raw: HfConfig) -> DeepseekConfig:
    version = 2 if raw.architecture == "DeepseekV2ForCausalLM" else 3
    raw.only("moe_layer_freq", 1)
    rotary, plain = raw.positive("qk_rope_head_dim", 64), raw.positive("qk_nope_head_dim", 128)
    latent = raw.positive("kv_lora_rank", 512)
    fields = decoder_fields(
        raw, max_positions=2048 if version == 2 else 4096, head_dim=raw.get("head_dim") or rotary
    )
    fields.update(num_kv_heads=1, head_dim=rotary + latent)
    rope = fields["rope"]
    magnitude = yarn_magnitude(rope.factor, rope.mscale_all_dim) if rope.mscale_all_dim else 1.0
    expert_size = raw.positive("moe_intermediate_size", 1407 if version == 2 else 2048)
    bias = bool(raw.get("attention_bias", False))
    return DeepseekConfig(
        **fields,
        windows=(0,) * fields["num_layers"],
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)) and version == 2,
        routing=_routing(raw, version),
        bias=version == 3,
        interleaved=version == 2 or bool(raw.get("rope_interleave", True)),
        query_rank=int(raw.get("q_lora_rank", 1536) or 0),
        latent=latent,
        rotary=rotary,
        plain=plain,
        value=raw.positive("v_head_dim", 128),
        scale=(plain + rotary) ** -0.5 * magnitude**2,
        expert_size=expert_size,
        shared_size=expert_size * raw.positive("n_shared_experts", 2 if version == 2 else 1),
        num_dense=int(raw.get("first_k_dense_replace", 0 if version == 2 else 3)),
    )


def _routing(raw: HfConfig, version: int) -> Routing:
    scale = raw.number("routed_scaling_factor", 1.0 if version == 2 else 2.5)
    if version == 3:
        return parse_routing(
            raw,
            "n_routed_experts",
            256,
            8,
            scoring="sigmoid",
            renormalize=bool(raw.get("norm_topk_prob", True)),
            num_groups=raw.positive("n_group", 8),
            top_groups=raw.positive("topk_group", 4),
            scale=scale,
        )
    raw.only("norm_topk_prob", False)
    groups = {"greedy": (1, 1), "group_limited_greedy": (raw.get("n_group"), raw.get("topk_group"))}
    method = raw.get("topk_method") or "greedy"
    if method not in groups:
        raise unsupported(
            f"topk_method {method} is not supported; supported are {', '.join(groups)}",
            field="topk_method",
            value=method,
        )
    num_groups, top_groups = groups[method]
    return parse_routing(
        raw,
        "n_routed_experts",
        64,
        6,
        renormalize=False,
        num_groups=int(num_groups or 1),
        top_groups=int(top_groups or 1),
        scale=scale,
    )


def build(config: DeepseekConfig, loader: WeightLoader, cache: KvCache, num_positions: int) -> Decoder:
    table = cos_sin_table(config.rope, config.rotary, num_positions)
    # V3's layers for predicting several tokens come after the model's own.
    beyond = f"model.layers.{config.num_layers}."
    return load_decoder(config, loader, partial(_block, config, loader, cache, table), ignored=(beyond,))


def _block(config: DeepseekConfig, loader: WeightLoader, cache: KvCache, table: Tensor, layer: int) -> Block:
    prefix, hidden = f"model.layers.{layer}", config.hidden_size
    return load_pre_norm_block(
        config,
        loader,
        prefix,
        attention=_attention(config, loader, cache, table, layer),
        mlp=_moe(config, loader, f"{prefix}.mlp")
        if layer >= config.num_dense
        else load_gated_mlp(
            *(loader, f"{prefix}.mlp", hidden, config.intermediate_size, config.activation, config.mlp_bias)
        ),
    )


def _attention(
    config: DeepseekConfig, loader: WeightLoader, cache: KvCache, table: Tensor, layer: int
) -> LatentAttention:
    prefix = f"model.layers.{layer}.self_attn"
    hidden, heads, rank = config.hidden_size, config.num_heads, config.latent
    query_size = heads * (config.plain + config.rotary)
    # Per head, rows that make keys, then rows that make values.
    kv = loader.read(f"{prefix}.kv_b_proj.weight", heads * (config.plain + config.value), rank)
    kv = kv.view(heads, config.plain + config.value, rank)
    keys, values = cache.layers[layer]
    queries: tuple[kernels.PackedLinear, ...]
    if config.query_rank:
        queries = (
            loader.linear([f"{prefix}.q_a_proj"], [config.query_rank], hidden, config.qkv_bias),
            loader.linear([f"{prefix}.q_b_proj"], [query_size], config.query_rank, bias=False),
        )
    else:
        queries = (loader.linear([f"{prefix}.q_proj"], [query_size], hidden, bias=False),)
    return LatentAttention(
        queries=queries,
        query_norm=load_rms_norm(loader, f"{prefix}.q_a_layernorm", config.query_rank, _LATENT_EPS)
        if config.query_rank
        else None,
        compress=loader.linear(
            [f"{prefix}.kv_a_proj_with_mqa"], [rank + config.rotary], hidden, config.qkv_bias
        ),
        norm=load_rms_norm(loader, f"{prefix}.kv_a_layernorm", rank, _LATENT_EPS),
        absorb=[loader.pack(head[: config.plain].t().contiguous()) for head in kv],
        expand=[loader.pack(head[config.plain :].contiguous()) for head in kv],
        o=loader.linear([f"{prefix}.o_proj"], [hidden], heads * config.value, config.o_bias),
        keys=keys,
        values=values,
        cos_sin=table,
        scale=config.scale,
        interleaved=config.interleaved,
    )


def _moe(config: DeepseekConfig, loader: WeightLoader, prefix: str) -> MixtureOfExperts:
    num_experts, hidden = config.routing.num_experts, config.hidden_size
    return MixtureOfExperts(
        routing=config.routing,
        router=loader.pack(loader.wide(f"{prefix}.gate.weight", num_experts, hidden)),
        experts=load_experts(loader, f"{prefix}.experts", num_experts, hidden, config.expert_size),
        bias=loader.wide(f"{prefix}.gate.e_score_correction_bias", num_experts) if config.bias else None,
        shared=load_gated_mlp(loader, f"{prefix}.shared_experts", hidden, config.shared_size),
    )
