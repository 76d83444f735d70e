"""A tiny random checkpoint of every family, made with transformers, which is also the oracle."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

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


GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
GPT_OSS = {
    "head_dim": 16,
    "intermediate_size": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}


MAMBA = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}


@dataclass(frozen=True)
class Family:
    """``prefix``: of the classes in transformers. ``max_model_len``: what the worker is told. ``change`` may rewrite the
    model and its saved folder alike.
    ``state_block_size``: of a hybrid, tokens between checkpoints of its states."""

    prefix: str
    fields: dict[str, Any] = field(default_factory=dict)
    model_class: str = ""
    max_model_len: int | None = None
    change: Callable[[Any, Path], None] | None = None
    state_block_size: int | None = None

    @property
    def architecture(self) -> str:
        return self.model_class or f"{self.prefix}ForCausalLM"

    def make(self) -> Any:
        """The model in float32, with weights large enough that its logits are far from uniform."""
        config = getattr(transformers, f"{self.prefix}Config")(**{**COMMON, **self.fields})
        torch.manual_seed(len(self.prefix))
        model = getattr(transformers, self.architecture)(config).eval().float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or ".ln_" in name:
                    parameter.add_(0.1 * torch.randn_like(parameter))
                elif "sinks" in name:
                    parameter.normal_(0.0, 2.0)
                else:
                    parameter.normal_(0.0, 0.2 if parameter.dim() > 1 else 0.1)
            for name, buffer in model.named_buffers():
                if "correction_bias" in name:
                    buffer.normal_(0.0, 0.2)
        return model

    def save(self, model: Any, folder: Path) -> Path:
        model.save_pretrained(folder)
        if self.change is not None:
            self.change(model, folder)
        return folder


def to_mxfp4(model: Any, folder: Path) -> None:
    """Random four-bit experts in the folder, and what transformers unpacks them to in the model."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for layer, module in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(module.mlp.experts, name)
            count, in_size, out_size = weight.shape
            blocks = torch.randint(0, 256, (count, out_size, in_size // 32, 16), dtype=torch.uint8)
            scales = torch.randint(122, 126, (count, out_size, in_size // 32), dtype=torch.uint8)
            key = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[key]
            tensors[f"{key}_blocks"], tensors[f"{key}_scales"] = blocks, scales
            weight.data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))


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
    "Granite": Family("Granite", GRANITE),
    "GPT-NeoX": Family("GPTNeoX"),
    "GPT-NeoX, sequential": Family("GPTNeoX", {"use_parallel_residual": False, "rotary_pct": 0.5}),
    "GPT-2": Family("GPT2", {"n_positions": 512}, "GPT2LMHeadModel"),
    "Mixtral": Family("Mixtral", {"num_local_experts": 4}),
    "Qwen2-MoE": Family(
        "Qwen2Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
    "Qwen3-MoE": Family(
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "OLMoE": Family("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
    "Granite-MoE": Family("GraniteMoe", {"num_local_experts": 4, **GRANITE}),
    "Granite-MoE, shared": Family(
        "GraniteMoeShared", {"num_local_experts": 4, "shared_intermediate_size": 48, **GRANITE}
    ),
    "GPT-OSS": Family("GptOss", GPT_OSS),
    "GPT-OSS, MXFP4": Family("GptOss", GPT_OSS, change=to_mxfp4),
    "DeepSeek-V2": Family(
        "DeepseekV2",
        {**DEEPSEEK, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
    ),
    "DeepSeek-V2-Lite, YaRN": Family(
        "DeepseekV2",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "mscale": 0.7,
                "mscale_all_dim": 0.9,
            },
        },
    ),
    "DeepSeek-V3": Family("DeepseekV3", DEEPSEEK),
    "Llama 4, text": Family(
        "Llama4Text",
        {
            "num_hidden_layers": 5,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "floor_scale": 16,
            "attn_scale": 0.5,
        },
        "Llama4ForCausalLM",
    ),
    "Bamba": Family("Bamba", {**MAMBA, "attn_layer_indices": [1, 3]}, state_block_size=16),
    "Granite 4, dense hybrid": Family(
        "GraniteMoeHybrid",
        {
            **MAMBA,
            **GRANITE,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 88,
        },
        state_block_size=16,
    ),
    "Granite 4, hybrid with experts": Family(
        "GraniteMoeHybrid",
        {
            **MAMBA,
            **GRANITE,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "num_local_experts": 4,
            "shared_intermediate_size": 48,
            "position_embedding_type": "rope",
        },
        state_block_size=32,
    ),
    "Qwen3-Next": Family(
        "Qwen3Next",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 24,
            "linear_value_head_dim": 20,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
        state_block_size=16,
    ),
    # Families without a file: transformers' own code.
    "Cohere": Family("Cohere", {"logit_scale": 0.5}),
    "Starcoder 2": Family("Starcoder2", {"sliding_window": 8}),
    "Phi 2": Family("Phi"),
    "OLMo 3": Family("Olmo3", {"sliding_window": 8}),
    "Nemotron": Family("Nemotron"),
    "OLMo": Family("Olmo"),
}
