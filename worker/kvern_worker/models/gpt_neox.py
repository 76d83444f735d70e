"""GPT-NeoX and Pythia: LayerNorm, partly rotated heads, attention and MLP side by side on one residual."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

import kvern_kernels as kernels
from kvern_worker.config import DecoderConfig, HfConfig, decoder_fields
from kvern_worker.layers.attention import KvCache
from kvern_worker.layers.decoder import Block, Decoder, load_decoder
from kvern_worker.layers.mlp import ACTIVATIONS, Mlp
from kvern_worker.layers.norm import load_layer_norm
from kvern_worker.layers.rotary import cos_sin_table
from kvern_worker.layers.self_attention import SelfAttention
from kvern_worker.weights.loader import WeightLoader


@dataclass(frozen=True, kw_only=True)
class NeoxConfig(DecoderConfig):
    """``rms_norm_eps`` is that of LayerNorm."""

    parallel: bool


def parse(raw: HfConfig) -> NeoxConfig:
    renamed = {
        "num_key_value_heads": None,
        "rms_norm_eps": raw.number("layer_norm_eps", 1e-5),
        "hidden_act": raw.get("hidden_act", "gelu"),
        "rope_theta": raw.get("rope_theta") or raw.get("rotary_emb_base"),
        "partial_rotary_factor": raw.get("partial_rotary_factor") or raw.get("rotary_pct"),
    }
    fields = decoder_fields(raw.replace(**renamed), max_positions=2048, partial=0.25)
    bias = bool(raw.get("attention_bias", True))
    return NeoxConfig(
        **fields,
        windows=(0,) * fields["num_layers"],
        qkv_bias=bias,
        o_bias=bias,
        parallel=bool(raw.get("use_parallel_residual", True)),
    )


def build(config: NeoxConfig, loader: WeightLoader, cache: KvCache, num_positions: int) -> Decoder:
    table = cos_sin_table(config.rope, config.rotary_dim, num_positions)
    return load_decoder(
        config,
        loader,
        partial(_block, config, loader, cache, table),
        partial(
            load_layer_norm, loader, "gpt_neox.final_layer_norm", config.hidden_size, config.rms_norm_eps
        ),
        embedding="gpt_neox.embed_in",
        head="embed_out",
    )


def _block(config: NeoxConfig, loader: WeightLoader, cache: KvCache, table: Tensor, layer: int) -> Block:
    prefix, hidden, inner = f"gpt_neox.layers.{layer}", config.hidden_size, config.intermediate_size
    keys, values = cache.layers[layer]
    return Block(
        attention=SelfAttention(
            qkv=_qkv(config, loader, f"{prefix}.attention.query_key_value"),
            o=loader.linear([f"{prefix}.attention.dense"], [hidden], hidden, config.o_bias),
            keys=keys,
            values=values,
            cos_sin=table,
            options=kernels.AttentionOptions(config.head_dim**-0.5),
        ),
        mlp=Mlp(
            up=loader.linear([f"{prefix}.mlp.dense_h_to_4h"], [inner], hidden, bias=True),
            down=loader.linear([f"{prefix}.mlp.dense_4h_to_h"], [hidden], inner, bias=True),
            activation=ACTIVATIONS[config.activation],
        ),
        pre_attention=load_layer_norm(loader, f"{prefix}.input_layernorm", hidden, config.rms_norm_eps),
        pre_mlp=load_layer_norm(loader, f"{prefix}.post_attention_layernorm", hidden, config.rms_norm_eps),
        parallel=config.parallel,
    )


def _qkv(config: NeoxConfig, loader: WeightLoader, name: str) -> kernels.PackedLinear:
    """The file has query, key and value of one head after another; all queries come first here."""

    def by_kind(rows: Tensor) -> Tensor:
        return rows.view(config.num_heads, 3, config.head_dim, -1).transpose(0, 1).reshape(rows.shape)

    weight = loader.read(f"{name}.weight", 3 * config.hidden_size, config.hidden_size)
    bias = loader.read(f"{name}.bias", 3 * config.hidden_size) if config.qkv_bias else None
    return loader.pack_layer(by_kind(weight), None if bias is None else by_kind(bias))
