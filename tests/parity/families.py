"""A tiny random checkpoint of every family, made with transformers, which is also the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 263
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 88,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.6],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
    "partial_rotary_factor": 0.75,
}


@dataclass(frozen=True)
class Family:
    """``prefix``: of the classes in transformers. ``max_model_len``: what the worker is told."""

    prefix: str
    fields: dict[str, Any] = field(default_factory=dict)
    model_class: str = ""
    max_model_len: int | None = None

    def make(self) -> Any:
        """The model in float32, with weights large enough that its logits are far from uniform."""
        config = getattr(transformers, f"{self.prefix}Config")(**{**COMMON, **self.fields})
        torch.manual_seed(len(self.prefix))
        model = getattr(transformers, self.model_class or f"{self.prefix}ForCausalLM")(config).eval().float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or ".ln_" in name:
                    parameter.add_(0.1 * torch.randn_like(parameter))
                else:
                    parameter.normal_(0.0, 0.2 if parameter.dim() > 1 else 0.1)
        return model

    def save(self, model: Any, folder: Path) -> Path:
        model.save_pretrained(folder)
        return folder


FAMILIES: dict[str, Family] = {
    "Llama": Family("Llama"),
    "Mistral": Family("Mistral", {"sliding_window": 8}),
    "Qwen 2.5": Family("Qwen2", {"tie_word_embeddings": True}),
    "Qwen 3": Family("Qwen3", {"head_dim": 32}),
    "Gemma": Family("Gemma", {"head_dim": 32}),
    "Gemma 2": Family(
        "Gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
            "attn_implementation": "eager",
        },
    ),
    "Gemma 3": Family(
        "Gemma3Text",
        {
            "num_hidden_layers": 7,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        "Gemma3ForCausalLM",
    ),
    "Phi 3": Family("Phi3", {"sliding_window": 16}),
    "Phi 4, LongRoPE within the original length": Family(
        "Phi3",
        {
            "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 256},
            "original_max_position_embeddings": 256,
        },
        max_model_len=256,
    ),
    "Phi 4, LongRoPE beyond it": Family(
        "Phi3",
        {
            "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 8},
            "original_max_position_embeddings": 8,
        },
    ),
    "OLMo 2": Family("Olmo2"),
    "Granite": Family(
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
        },
    ),
    "GPT-NeoX": Family("GPTNeoX"),
    "GPT-NeoX, sequential": Family("GPTNeoX", {"use_parallel_residual": False, "rotary_pct": 0.5}),
    "GPT-2": Family("GPT2", {"n_positions": 512}, "GPT2LMHeadModel"),
}
