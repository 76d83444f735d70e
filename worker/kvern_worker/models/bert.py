"""The BERT family of encoders (arXiv 1810.04805): BERT, RoBERTa, XLM-RoBERTa. They give embeddings, not tokens.

::

    tokens + positions + type 0 → norm → [attention → + → norm → up → gelu → down → + → norm] × L

Every token sees every other, so a prompt is computed within one step. Keys and values are needed no longer than for
their layer: all layers share one layer of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import kvern_kernels as kernels
from kvern.errors import invalid
from kvern_worker.config import HfConfig, ModelConfig, model_fields
from kvern_worker.layers.attention import KvCache, StepInputs
from kvern_worker.layers.mlp import ACTIVATIONS, Mlp
from kvern_worker.layers.norm import Norm, load_layer_norm
from kvern_worker.layers.self_attention import SelfAttention
from kvern_worker.weights.loader import WeightLoader


@dataclass(frozen=True, kw_only=True)
class BertConfig(ModelConfig):
    """``num_layers`` is that of the cache, 1; ``depth`` the encoder's. ``first_position``: the row of the position table
    that a first token gets."""

    depth: int
    intermediate_size: int
    norm_eps: float
    activation: str
    num_types: int
    first_position: int
    num_position_rows: int


def parse(raw: HfConfig) -> BertConfig:
    """See models/registry.py. Raises KvernError naming the key at fault."""
    raw.only("position_embedding_type", "absolute")
    raw.only("is_decoder", False)
    hidden, heads = raw.positive("hidden_size", 768), raw.positive("num_attention_heads", 12)
    if hidden % heads:
        raise invalid(
            "num_attention_heads",
            f"hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})",
            value=heads,
        )
    rows = raw.positive("max_position_embeddings", 512)
    # RoBERTa counts positions from behind its padding token.
    first = 0 if raw.architecture == "BertModel" else int(raw.get("pad_token_id") or 0) + 1
    return BertConfig(
        **model_fields(raw),
        hidden_size=hidden,
        num_layers=1,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=rows - first,
        bidirectional=True,
        depth=raw.positive("num_hidden_layers", 12),
        intermediate_size=raw.positive("intermediate_size", 3072),
        norm_eps=raw.number("layer_norm_eps", 1e-12),
        activation=raw.activation("gelu"),
        num_types=raw.positive("type_vocab_size", 2),
        first_position=first,
        num_position_rows=rows,
    )


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """x [T, hidden] → [T, hidden]; a norm after each half."""

    attention: SelfAttention
    attention_norm: Norm
    mlp: Mlp
    mlp_norm: Norm

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        x = self.attention_norm(x + self.attention(x, step))
        return self.mlp_norm(x + self.mlp(x))


@dataclass(frozen=True, slots=True)
class Encoder:
    """``tokens`` [vocab, hidden], ``positions`` [positions, hidden], with what every token gets added. A model in the
    sense of models/registry.py, without logits."""

    tokens: Tensor
    positions: Tensor
    norm: Norm
    layers: list[EncoderLayer]

    def forward(self, step: StepInputs) -> Tensor:
        embedded = self.tokens.index_select(0, step.token_ids)
        hidden = self.norm(embedded + self.positions.index_select(0, step.positions))
        for layer in self.layers:
            hidden = layer(hidden, step)
        return hidden

    def hidden(self, states: Tensor, rows: Tensor | slice) -> Tensor:
        return states[rows].float()

    def logits(self, states: Tensor, rows: Tensor | slice) -> Tensor:
        raise NotImplementedError("an encoder has no head")


def build(config: BertConfig, loader: WeightLoader, cache: KvCache, num_positions: int) -> Encoder:
    """See models/registry.py. Raises KvernError where the checkpoint does not hold what ``config`` promises."""
    word = "embeddings.word_embeddings.weight"
    root = next((root for root in ("bert.", "roberta.") if loader.holds(root + word)), "")
    hidden, prefix = config.hidden_size, f"{root}embeddings"
    tokens = loader.tensor(root + word, config.vocab_size, hidden)
    positions = loader.wide(f"{prefix}.position_embeddings.weight", config.num_position_rows, hidden)
    types = loader.wide(f"{prefix}.token_type_embeddings.weight", config.num_types, hidden)
    norm = load_layer_norm(loader, f"{prefix}.LayerNorm", hidden, config.norm_eps)
    table = torch.empty(num_positions, 0)
    layers = loader.side_by_side(
        *(
            partial(_layer, config, loader, cache, f"{root}encoder.layer.{layer}", table)
            for layer in range(config.depth)
        )
    )
    loader.finish(*(f"{root}{part}" for part in ("pooler.", "embeddings.position_ids")))
    return Encoder(tokens, (positions[config.first_position :] + types[0]).to(loader.dtype), norm, layers)


def _layer(
    config: BertConfig, loader: WeightLoader, cache: KvCache, prefix: str, table: Tensor
) -> EncoderLayer:
    hidden, inner = config.hidden_size, config.intermediate_size
    keys, values = cache.layers[0]
    attention = f"{prefix}.attention"
    return EncoderLayer(
        attention=SelfAttention(
            qkv=loader.linear(
                [f"{attention}.self.{name}" for name in ("query", "key", "value")], [hidden] * 3, hidden, True
            ),
            o=loader.linear([f"{attention}.output.dense"], [hidden], hidden, True),
            keys=keys,
            values=values,
            cos_sin=table,
            options=kernels.AttentionOptions(config.head_dim**-0.5, causal=False),
        ),
        attention_norm=load_layer_norm(loader, f"{attention}.output.LayerNorm", hidden, config.norm_eps),
        mlp=Mlp(
            up=loader.linear([f"{prefix}.intermediate.dense"], [inner], hidden, True),
            down=loader.linear([f"{prefix}.output.dense"], [hidden], inner, True),
            activation=ACTIVATIONS[config.activation],
        ),
        mlp_norm=load_layer_norm(loader, f"{prefix}.output.LayerNorm", hidden, config.norm_eps),
    )
