"""The Llama family: Llama, Mistral (sliding window), Qwen2 (QKV bias), Qwen3 (norm of queries and keys).

::

    tokens → embedding → [norm → qkv → rope, store → attention → o → norm → gate_up → silu·up → down] × L → norm
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

import kvern_kernels as kernels
from kvern_worker.config import ModelConfig
from kvern_worker.layers.attention import KvCache, StepInputs
from kvern_worker.weights.loader import WeightLoader


class LlamaLayer:
    """One decoder layer. Hidden states are [T, hidden_size]."""

    def __init__(self, config: ModelConfig, index: int, loader: WeightLoader) -> None:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.q_size, config.kv_size
        self.input_norm = loader.tensor(f"{prefix}.input_layernorm.weight", hidden)
        self.qkv = loader.linear(
            [f"{attention}.{name}_proj" for name in "qkv"],
            [q_size, kv_size, kv_size],
            hidden,
            config.qkv_bias,
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = loader.tensor(f"{attention}.q_norm.weight", config.head_dim)
            self.k_norm = loader.tensor(f"{attention}.k_norm.weight", config.head_dim)
        self.o = loader.linear([f"{attention}.o_proj"], [hidden], q_size, config.o_bias)
        self.post_norm = loader.tensor(f"{prefix}.post_attention_layernorm.weight", hidden)
        self.gate_up = loader.linear(
            [f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner, inner], hidden, config.mlp_bias
        )
        self.down = loader.linear([f"{mlp}.down_proj"], [hidden], inner, config.mlp_bias)
        self.window = config.windows[index]
        self.eps = config.rms_norm_eps
        self.scale = config.head_dim**-0.5
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        self.heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]

    def __call__(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        step: StepInputs,
        cos_sin: Tensor,
        kv: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Returns (output to be added, residual)."""
        if residual is None:
            residual = hidden
            normed = kernels.rms_norm(hidden, self.input_norm, self.eps)
        else:
            normed, residual = kernels.add_rms_norm(hidden, residual, self.input_norm, self.eps)
        qkv = kernels.linear(normed, self.qkv).view(normed.shape[0], -1, self.head_dim)
        q, k, v = qkv.split_with_sizes(self.heads, 1)
        keys, values = kv
        q = kernels.rope_and_store(
            q, k, v, step.positions, cos_sin, step.slot_mapping, keys, values,
            q_norm=self.q_norm, k_norm=self.k_norm, eps=self.eps,
        )  # fmt: skip
        mixed = kernels.paged_attention(
            q, keys, values, step.block_tables, step.query_start, step.seq_lens, self.scale, self.window
        )
        hidden = kernels.linear(mixed.view(mixed.shape[0], -1), self.o)
        normed, residual = kernels.add_rms_norm(hidden, residual, self.post_norm, self.eps)
        return kernels.linear(kernels.silu_and_mul(kernels.linear(normed, self.gate_up)), self.down), residual


class LlamaModel:
    """The decoder and its head. ``cos_sin``: [positions, head_dim] float32, see ``layers.rotary``."""

    def __init__(self, config: ModelConfig, loader: WeightLoader, cos_sin: Tensor) -> None:
        self.config = config
        self.cos_sin = cos_sin
        # The embedding and the head first: they take longest.
        ends, *self.layers = loader.side_by_side(
            lambda: self._load_ends(loader),
            *(partial(LlamaLayer, config, index, loader) for index in range(config.num_layers)),
        )
        self.embedding, self.norm, self.head = ends
        loader.finish(*(["lm_head.weight"] if config.tie_word_embeddings else []))

    def _load_ends(self, loader: WeightLoader) -> tuple[Tensor, Tensor, kernels.PackedLinear]:
        config = self.config
        embedding = loader.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        norm = loader.tensor("model.norm.weight", config.hidden_size)
        if config.tie_word_embeddings:
            return embedding, norm, loader.head("model.embed_tokens.weight", embedding)
        return (
            embedding,
            norm,
            loader.linear(["lm_head"], [config.vocab_size], config.hidden_size, bias=False),
        )

    def forward(self, step: StepInputs, cache: KvCache) -> tuple[Tensor, Tensor]:
        """Runs the layers and fills the cache; returns (hidden, residual), [T, hidden_size] each, for
        :meth:`logits`."""
        hidden, residual = self.embedding.index_select(0, step.token_ids), None
        for layer, kv in zip(self.layers, cache.layers, strict=True):
            hidden, residual = layer(hidden, residual, step, self.cos_sin, kv)
        assert residual is not None
        return hidden, residual

    def logits(self, hidden: Tensor, residual: Tensor, rows: Tensor | slice) -> Tensor:
        """Logits [rows, vocab_size] float32 of those rows of :meth:`forward`'s result."""
        normed, _ = kernels.add_rms_norm(hidden[rows], residual[rows], self.norm, self.config.rms_norm_eps)
        return kernels.linear(normed, self.head).float()
