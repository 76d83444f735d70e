"""Tiny random checkpoints of every family, made with transformers, which is also the oracle."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # as the server does, before torch is imported

import pytest
import torch
import transformers

from kvern_worker.executor import ModelExecutor
from kvern_worker.loading import LoadOptions, load

COMMON: dict[str, Any] = {
    "vocab_size": 263,
    "num_hidden_layers": 3,
    "intermediate_size": 88,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA = {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "llama-tied": ("Llama", {**LLAMA, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("Llama", {**LLAMA, "rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": (
        "Llama",
        {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
    ),
    "llama-yarn-rope": ("Llama", {**LLAMA, "rope_parameters": YARN_ROPE}),
    # A window of 8 is shorter than every prompt of the tests.
    "mistral": (
        "Mistral",
        {
            "hidden_size": 72,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "sliding_window": 8,
        },
    ),
    "qwen2": (
        "Qwen2",
        {
            "hidden_size": 112,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2-windows": (
        "Qwen2",
        {
            "hidden_size": 112,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
    ),
    "qwen3": (
        "Qwen3",
        {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 32},
    ),
}


class Progress:
    """Counts what the loader reports."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self.loaded_bytes = 0

    def start(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes

    def add(self, num_bytes: int) -> None:
        self.loaded_bytes += num_bytes


def make_reference(name: str) -> Any:
    """A transformers model in float32 with weights large enough that its logits are far from uniform."""
    family, fields = CONFIGS[name]
    config = getattr(transformers, f"{family}Config")(**COMMON, **fields)
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            else:
                parameter.normal_(0.0, 0.2 if parameter.dim() == 2 else 0.1)
    return model


@pytest.fixture(scope="session")
def reference() -> Callable[[str], Any]:
    """By name of :data:`CONFIGS`: the transformers model, made once."""
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            made[name] = make_reference(name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def checkpoint(
    reference: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """By name of :data:`CONFIGS`: a folder with safetensors and config.json."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            reference(name).save_pretrained(made[name])
        return made[name]

    return get


def load_executor(model: Path | str, **options: Any) -> ModelExecutor:
    """An executor with a small pool, in float32 unless told otherwise."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "kv_cache_memory_bytes": 64 * 2**20,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 2048,
    }
    return load(LoadOptions(model=str(model), **{**defaults, **options}), Progress())


@pytest.fixture(scope="session")
def executor(checkpoint: Callable[[str], Path]) -> Callable[[str], ModelExecutor]:
    """By name of :data:`CONFIGS`: an executor in float32, loaded once."""
    made: dict[str, ModelExecutor] = {}

    def get(name: str) -> ModelExecutor:
        if name not in made:
            made[name] = load_executor(checkpoint(name))
        return made[name]

    return get
