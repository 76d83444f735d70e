"""GPT-2: learned positions, LayerNorm, matrices stored as [in, out]."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

import kvern_kernels as kernels
from kvern.errors import invalid
from kvern_worker.config import DecoderConfig, HfConfig, RopeConfig, model_fields
from kvern_worker.layers.attention import KvCache
from kvern_worker.layers.decoder import Block, Decoder, load_decoder
from kvern_worker.layers.mlp import ACTIVATIONS, Mlp
from kvern_worker.layers.norm import load_layer_norm
from kvern_worker.layers.self_attention import SelfAttention
from kvern_worker.weights.loader import WeightLoader

# Its matrices are stored as [in, out], which no quantized layout is.
QUANTIZATIONS = ()


@dataclass(frozen=True, kw_only=True)
class Gpt2Config(DecoderConfig):
    """``scales``: on the scores of each layer. ``rms_norm_eps`` is that of LayerNorm."""

    scales: tuple[float, ...]


def parse(raw: HfConfig) -> Gpt2Config:
    raw.only("add_cross_attention", False)
    hidden, heads, layers = (
        raw.positive("n_embd", 768),
        raw.positive("n_head", 12),
        raw.positive("n_layer", 12),
    )
    if hidden % heads:
        raise invalid("n_head", f"n_embd ({hidden}) must be a multiple of n_head ({heads})", value=heads)
    scale = (hidden // heads) ** -0.5 if raw.get("scale_attn_weights", True) else 1.0
    by_layer = bool(raw.get("scale_attn_by_inverse_layer_idx", False))
    return Gpt2Config(
        **model_fields(raw, tie=True),
        hidden_size=hidden,
        intermediate_size=raw.positive("n_inner", 4 * hidden),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        rms_norm_eps=raw.number("layer_norm_epsilon", 1e-5),
        max_positions=raw.positive("n_positions", 1024),
        rope=RopeConfig(partial=0.0),
        windows=(0,) * layers,
        activation=raw.activation("gelu_new", "activation_function"),
        scales=tuple(scale / (layer + 1 if by_layer else 1) for layer in range(layers)),
    )


def build(config: Gpt2Config, loader: WeightLoader, cache: KvCache, num_positions: int) -> Decoder:
    # The first checkpoints were saved from the decoder without its head, and lack the prefix.
    root = "transformer." if loader.has("transformer.wte.weight") else ""
    positions = loader.tensor(f"{root}wpe.weight", config.max_positions, config.hidden_size)
    return load_decoder(
        config,
        loader,
        partial(_block, config, loader, cache, root, torch.empty(num_positions, 0)),
        partial(load_layer_norm, loader, f"{root}ln_f", config.hidden_size, config.rms_norm_eps),
        embedding=f"{root}wte",
        positions=positions,
    )


def _block(
    config: Gpt2Config, loader: WeightLoader, cache: KvCache, root: str, table: torch.Tensor, layer: int
) -> Block:
    prefix, hidden, inner = f"{root}h.{layer}", config.hidden_size, config.intermediate_size
    keys, values = cache.layers[layer]

    def linear(name: str, size: int, in_size: int) -> kernels.PackedLinear:
        weight = loader.read(f"{prefix}.{name}.weight", in_size, size)
        return loader.pack(weight.t().contiguous(), loader.read(f"{prefix}.{name}.bias", size))

    return Block(
        attention=SelfAttention(
            qkv=linear("attn.c_attn", 3 * hidden, hidden),
            o=linear("attn.c_proj", hidden, hidden),
            keys=keys,
            values=values,
            cos_sin=table,
            options=kernels.AttentionOptions(config.scales[layer]),
        ),
        mlp=Mlp(
            up=linear("mlp.c_fc", inner, hidden),
            down=linear("mlp.c_proj", hidden, inner),
            activation=ACTIVATIONS[config.activation],
        ),
        pre_attention=load_layer_norm(loader, f"{prefix}.ln_1", hidden, config.rms_norm_eps),
        pre_mlp=load_layer_norm(loader, f"{prefix}.ln_2", hidden, config.rms_norm_eps),
    )
