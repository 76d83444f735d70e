"""The Llama family: Llama, Mistral (sliding window), Qwen2 (QKV bias), Qwen3 (norm of queries and keys).

::

    tokens → embedding → [norm → qkv → rope, store → attention → o → norm → gate_up → silu·up → down] × L → norm → head

What is between the brackets is one op, ``kernels.run_decoder``; its meaning is spelled out in kvern_kernels.decoder.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import kvern_kernels as kernels
from kvern_kernels.decoder import DecoderLayer
from kvern_worker.config import DecoderConfig, HfConfig, decoder_fields, unsupported, windows_of
from kvern_worker.layers.attention import KvCache, StepInputs
from kvern_worker.layers.decoder import Block, Decoder, load_decoder, load_pre_norm_block
from kvern_worker.layers.mlp import load_gated_mlp
from kvern_worker.layers.rotary import cos_sin_table
from kvern_worker.layers.self_attention import load_self_attention
from kvern_worker.weights.loader import WeightLoader

PARALLEL = ("tensor",)


def parse(raw: HfConfig) -> DecoderConfig:
    """See models/registry.py. Raises KvernError naming the key at fault."""
    family = raw.architecture.removesuffix("ForCausalLM")
    fields = decoder_fields(
        raw,
        max_positions={"Llama": 2048, "Mistral": 131_072}.get(family, 32_768),
        head_dim=128 if family == "Qwen3" else None,
    )
    if fields["activation"] != "silu":
        raise unsupported(
            f"hidden_act {raw['hidden_act']} is not supported; supported is silu",
            field="hidden_act",
            value=raw["hidden_act"],
        )
    bias = bool(raw.get("attention_bias", False)) and family in ("Llama", "Qwen3")
    return DecoderConfig(
        **fields,
        windows=_windows(raw, family),
        qkv_bias=bias or family == "Qwen2",
        o_bias=bias,
        mlp_bias=family == "Llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=family == "Qwen3",
    )


def _windows(raw: HfConfig, family: str) -> tuple[int, ...]:
    num_layers = raw.positive("num_hidden_layers")
    if family == "Llama":
        return (0,) * num_layers
    if family == "Mistral":
        return (int(raw.get("sliding_window", 4096) or 0),) * num_layers
    window = raw.get("sliding_window") if raw.get("use_sliding_window", False) else None
    return windows_of(
        raw, window, lambda layer: bool(window) and layer >= int(raw.get("max_window_layers", 28))
    )


def build(
    config: DecoderConfig, loader: WeightLoader, cache: KvCache, num_positions: int
) -> LlamaModel | Decoder:
    """See models/registry.py. Raises KvernError where the checkpoint does not hold what ``config`` promises."""
    table = cos_sin_table(config.rope, config.rotary_dim, num_positions)
    if loader.tp.size == 1:
        return LlamaModel(config, loader, table, cache)
    # Ranks add up what they have within a layer, which the one op does not.
    return load_decoder(config, loader, partial(_block, config, loader, cache, table))


def _block(config: DecoderConfig, loader: WeightLoader, cache: KvCache, table: Tensor, layer: int) -> Block:
    prefix = f"model.layers.{layer}"
    sizes = (config.hidden_size, config.intermediate_size)
    return load_pre_norm_block(
        config,
        loader,
        prefix,
        attention=load_self_attention(config, loader, cache, layer, table, prefix=f"{prefix}.self_attn"),
        mlp=load_gated_mlp(loader, f"{prefix}.mlp", *sizes, bias=config.mlp_bias),
    )


class LlamaModel:
    """The decoder and its head, on its KV cache. ``cos_sin``: [positions, head_dim] float32, see ``layers.rotary``.
    ``mrope_section``: frequencies of the axes of images' positions, where the model has such.

    Raises KvernError where the checkpoint does not hold what ``config`` promises.
    """

    def __init__(
        self,
        config: DecoderConfig,
        loader: WeightLoader,
        cos_sin: Tensor,
        cache: KvCache,
        mrope_section: list[int] | None = None,
    ) -> None:
        self._mrope_section = mrope_section or []
        # The embedding and the head first: they take longest.
        ends, *layers = loader.side_by_side(
            partial(_load_ends, config, loader),
            *(partial(_load_layer, config, index, loader, cache) for index in range(config.num_layers)),
        )
        loader.finish(*(["lm_head.weight"] if config.tie_word_embeddings else []))
        self._embedding, self._norm, self._head = ends
        self._eps = config.rms_norm_eps
        self._decoder = kernels.pack_decoder(
            layers, cos_sin, config.num_heads, config.rms_norm_eps, config.head_dim**-0.5
        )

    def forward(self, step: StepInputs) -> tuple[Tensor, Tensor]:
        """Runs the layers and fills the cache; returns (hidden, residual), [T, hidden_size] each, for
        :meth:`logits`."""
        embedded, decoder, positions = (
            self._embedding.index_select(0, step.token_ids),
            self._decoder,
            step.positions,
        )
        if step.images is not None:
            step.images.merge(embedded)
            if step.images.rotary is not None:
                # A table of this step's own rows, which are mixed of three.
                decoder = replace(decoder, cos_sin=self._mixed_table(step.images.rotary))
                positions = torch.arange(len(positions))
        return kernels.run_decoder(
            decoder,
            embedded,
            positions,
            step.slot_mapping,
            step.block_tables,
            step.query_start,
            step.seq_lens,
        )

    def _mixed_table(self, rotary: Tensor) -> Tensor:
        """Rows of the rotary table for positions in time, height and width, int64 [3, T]: of each, its section."""
        table = self._decoder.cos_sin[rotary]
        half = table.shape[-1] // 2
        parts = table.view(*table.shape[:2], 2, half).split(self._mrope_section, -1)
        return torch.cat([part[axis % 3] for axis, part in enumerate(parts)], -1).view(-1, 2 * half)

    def logits(self, states: tuple[Tensor, Tensor], rows: Tensor | slice) -> Tensor:
        """Logits [rows, vocab_size] float32 of those rows of :meth:`forward`'s result."""
        return kernels.linear(self._normed(states, rows), self._head, torch.float32)

    def hidden(self, states: tuple[Tensor, Tensor], rows: Tensor | slice) -> Tensor:
        """Final hidden states [rows, hidden_size] float32 of those rows."""
        return self._normed(states, rows).float()

    def _normed(self, states: tuple[Tensor, Tensor], rows: Tensor | slice) -> Tensor:
        hidden, residual = states
        return kernels.add_rms_norm(hidden[rows], residual[rows], self._norm, self._eps)[0]


def _load_layer(config: DecoderConfig, index: int, loader: WeightLoader, cache: KvCache) -> DecoderLayer:
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.q_size, config.kv_size
    keys, values = cache.layers[index]
    return DecoderLayer(
        input_norm=loader.tensor(f"{prefix}.input_layernorm.weight", hidden),
        qkv=loader.linear(
            [f"{attention}.{name}_proj" for name in "qkv"],
            [q_size, kv_size, kv_size],
            hidden,
            config.qkv_bias,
        ),
        o=loader.linear([f"{attention}.o_proj"], [hidden], q_size, config.o_bias),
        post_norm=loader.tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=loader.linear(
            [f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner, inner], hidden, config.mlp_bias
        ),
        down=loader.linear([f"{mlp}.down_proj"], [hidden], inner, config.mlp_bias),
        keys=keys,
        values=values,
        q_norm=loader.tensor(f"{attention}.q_norm.weight", config.head_dim) if config.qk_norm else None,
        k_norm=loader.tensor(f"{attention}.k_norm.weight", config.head_dim) if config.qk_norm else None,
        window=config.windows[index],
    )


def _load_ends(config: DecoderConfig, loader: WeightLoader) -> tuple[Tensor, Tensor, kernels.PackedLinear]:
    """The embedding, the last norm and the head."""
    vocab, hidden = config.vocab_size, config.hidden_size
    embedding = loader.tensor("model.embed_tokens.weight", vocab, hidden)
    norm = loader.tensor("model.norm.weight", hidden)
    if config.tie_word_embeddings:
        return embedding, norm, loader.head("model.embed_tokens.weight", embedding)
    return embedding, norm, loader.linear(["lm_head"], [vocab], hidden, bias=False)
