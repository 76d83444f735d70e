"""Gemma 1, 2 and 3: norms that store their weights less 1, GELU, scaled embeddings, a head tied to them.

Gemma 2 norms each sub-layer's output too, alternates windowed and full attention, and caps scores and logits. Gemma 3
drops the caps, norms queries and keys, and rotates windowed layers by angles of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvern_worker.config import DecoderConfig, HfConfig, RopeConfig, decoder_fields, parse_rope, windows_of
from kvern_worker.layers.attention import KvCache
from kvern_worker.layers.decoder import Block, Decoder, load_decoder
from kvern_worker.layers.mlp import load_gated_mlp
from kvern_worker.layers.norm import RmsNorm, load_rms_norm, no_norm
from kvern_worker.layers.rotary import cos_sin_table
from kvern_worker.layers.self_attention import load_self_attention
from kvern_worker.weights.loader import WeightLoader

PARALLEL = ("tensor",)


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(DecoderConfig):
    """``post_norms``: Gemma 2's norms after attention and MLP. ``local_rope``: that of layers with a window."""

    scale: float
    post_norms: bool
    local_rope: RopeConfig
    score_softcap: float = 0.0
    logit_softcap: float = 0.0


def parse(raw: HfConfig) -> GemmaConfig:
    version = {"GemmaForCausalLM": 1, "Gemma2ForCausalLM": 2, "Gemma3ForCausalLM": 3}[raw.architecture]
    raw = raw.replace(hidden_act=raw.get("hidden_activation") or "gelu_pytorch_tanh")
    raw.only("use_bidirectional_attention", raw.get("use_bidirectional_attention") and False)
    ropes = raw.get("rope_parameters") or {}
    theta = 1e6 if version == 3 else 1e4
    if version == 3 and "full_attention" in ropes:
        raw = raw.replace(rope_parameters=ropes["full_attention"])
    fields = decoder_fields(
        raw, max_positions=131_072 if version == 3 else 8192, theta=theta, head_dim=256, tie=True
    )
    local = fields["rope"]
    if version == 3:
        plain = ropes.get("sliding_attention") or {"rope_theta": raw.get("rope_local_base_freq", 1e4)}
        local, _ = parse_rope(raw, fields["max_positions"], scaling=plain)
    period = raw.positive("sliding_window_pattern", 6) if version == 3 else 2
    window = raw.get("sliding_window", 4096) if version > 1 else None
    bias = bool(raw.get("attention_bias", False))
    default_scalar = 256 if version > 1 else fields["head_dim"]
    return GemmaConfig(
        **fields,
        windows=windows_of(raw, window, lambda layer: version > 1 and (layer + 1) % period != 0),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=version == 3,
        scale=raw.number("query_pre_attn_scalar", default_scalar) ** -0.5,
        post_norms=version > 1,
        local_rope=local,
        score_softcap=raw.get("attn_logit_softcapping", 50.0 if version == 2 else None) or 0.0,
        logit_softcap=raw.get("final_logit_softcapping", 30.0 if version == 2 else None) or 0.0,
    )


def build(config: GemmaConfig, loader: WeightLoader, cache: KvCache, num_positions: int) -> Decoder:
    tables = [
        cos_sin_table(rope, config.head_dim, num_positions) for rope in (config.rope, config.local_rope)
    ]
    # transformers rounds the scale to the dtype of the model.
    scale = float(torch.tensor(config.hidden_size**0.5, dtype=loader.dtype, device="cpu"))
    return load_decoder(
        config,
        loader,
        partial(_block, config, loader, cache, tables),
        partial(_norm, config, loader, "model.norm"),
        embedding_scale=scale,
        logit_softcap=config.logit_softcap,
    )


def _norm(config: GemmaConfig, loader: WeightLoader, name: str) -> RmsNorm:
    return load_rms_norm(loader, name, config.hidden_size, config.rms_norm_eps, offset=1.0)


def _block(
    config: GemmaConfig, loader: WeightLoader, cache: KvCache, tables: list[Tensor], layer: int
) -> Block:
    prefix = f"model.layers.{layer}"
    norm = partial(_norm, config, loader)
    return Block(
        attention=load_self_attention(
            *(config, loader, cache, layer, tables[1 if config.windows[layer] else 0]),
            prefix=f"{prefix}.self_attn",
            norm_offset=1.0,
            scale=config.scale,
            softcap=config.score_softcap,
        ),
        mlp=load_gated_mlp(
            loader, f"{prefix}.mlp", config.hidden_size, config.intermediate_size, config.activation
        ),
        pre_attention=norm(f"{prefix}.input_layernorm"),
        post_attention=norm(f"{prefix}.post_attention_layernorm") if config.post_norms else no_norm,
        pre_mlp=norm(
            f"{prefix}.pre_feedforward_layernorm"
            if config.post_norms
            else f"{prefix}.post_attention_layernorm"
        ),
        post_mlp=norm(f"{prefix}.post_feedforward_layernorm") if config.post_norms else no_norm,
    )
