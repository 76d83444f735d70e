"""config.json of every family is read as transformers reads it; what is not supported is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from worker.conftest import CONFIGS, load_executor

from kvern.errors import KvernError
from kvern.v1 import error_pb2
from kvern_worker.config import HfConfig, RopeConfig
from kvern_worker.layers.rotary import cos_sin_table
from kvern_worker.loading import choose_dtype
from kvern_worker.machine import available_memory, physical_cores
from kvern_worker.models.registry import load_hf_config, parse_hf_config
from kvern_worker.sizing import GIB, kv_bytes, parse_length, size_kv

Folders = Callable[[str], Path]
RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "torch_dtype": "bfloat16",
}


def parsed(raw: dict[str, Any]) -> Any:
    return parse_hf_config(HfConfig(raw))[1]


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_equal_transformers(name: str, checkpoint: Folders, reference: Callable[[str], Any]) -> None:
    found, expected = load_hf_config(checkpoint(name))[1], reference(name).config
    attention = reference(name).model.layers[0].self_attn
    assert found.hidden_size == expected.hidden_size
    assert found.q_size == attention.q_proj.out_features
    assert found.kv_size == attention.k_proj.out_features
    assert found.qkv_bias == (attention.q_proj.bias is not None)
    assert found.o_bias == (attention.o_proj.bias is not None)
    assert found.mlp_bias == (reference(name).model.layers[0].mlp.up_proj.bias is not None)
    assert found.tie_word_embeddings == expected.tie_word_embeddings
    assert found.eos_token_ids == (2,)
    assert found.dtype == "float32"


@pytest.mark.parametrize("name", [name for name in CONFIGS if "rope" in name or name == "qwen3"])
def test_rotary_tables_equal_transformers(
    name: str, checkpoint: Folders, reference: Callable[[str], Any]
) -> None:
    config = load_hf_config(checkpoint(name))[1]
    table = cos_sin_table(config.rope, config.head_dim, 512)
    with torch.inference_mode():
        cos, sin = reference(name).model.rotary_emb(torch.zeros(1), torch.arange(512).unsqueeze(0))
    half = config.head_dim // 2
    torch.testing.assert_close(table[:, :half], cos[0, :, :half], atol=2e-5, rtol=0)
    torch.testing.assert_close(table[:, half:], sin[0, :, :half], atol=2e-5, rtol=0)


# As published: Llama 3.1, Qwen2.5 with YaRN, DeepSeek-V3, GPT-OSS, and LongRoPE's two lists in the style of Phi-3.
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 1024, "truncate": False},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024, "attention_factor": 1.3},
    {
        "rope_type": "longrope",
        "short_factor": [1 + i / 16 for i in range(16)],
        "long_factor": [1 + i for i in range(16)],
        "original_max_position_embeddings": 1024,
        "factor": 4.0,
    },
]


@pytest.mark.parametrize("length", [1024, 4096])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: f"{s['rope_type']}-{s.get('factor')}")
def test_scaled_rotary_frequencies_equal_transformers(scaling: dict[str, Any], length: int) -> None:
    parameters = {**scaling, "rope_theta": 500_000.0}
    original = scaling.get("original_max_position_embeddings")
    # transformers takes LongRoPE's two lengths from the top level.
    top = {"original_max_position_embeddings": original} if scaling["rope_type"] == "longrope" else {}
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=4096,
        rope_parameters=parameters,
        **top,
    )
    initialize = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    inverse, factor = initialize(config, torch.device("cpu"), seq_len=length)
    raw = {**RAW, "num_attention_heads": 2, "max_position_embeddings": 4096, "rope_parameters": parameters}
    table = cos_sin_table(parsed({**raw, **top}).rope, 32, length)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
    torch.testing.assert_close(table[:, :16], angles.cos() * factor, atol=1e-6, rtol=0)
    torch.testing.assert_close(table[:, 16:], angles.sin() * factor, atol=1e-6, rtol=0)


def test_every_rotary_scaling_of_transformers_is_tried_or_refused() -> None:
    """ "proportional" belongs to models whose classes are not served."""
    assert {scaling["rope_type"] for scaling in SCALINGS} | {"proportional"} == {*ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("old_style", [True, False])
def test_rope_is_read_from_both_spellings(old_style: bool) -> None:
    """transformers 4 wrote rope_theta and rope_scaling (with "type" before "rope_type"), 5 rope_parameters."""
    raw = {**RAW, "max_position_embeddings": 2048}
    if old_style:
        raw |= {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
    else:
        raw |= {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}}
    config = parsed(raw)
    assert (config.rope.theta, config.rope.kind, config.rope.factor) == (5e5, "linear", 4.0)
    assert config.max_positions == 8192


def test_yarn_reaches_its_stretched_length() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    config = parsed({**RAW, "max_position_embeddings": 32_768, "rope_scaling": scaling})
    assert config.max_positions == 131_072


def test_gguf_divisors_scale_frequencies() -> None:
    plain = cos_sin_table(RopeConfig(), 8, 64)
    scaled = cos_sin_table(RopeConfig(divisors=(2.0, 2.0, 2.0, 2.0)), 8, 64)
    torch.testing.assert_close(scaled[::2], plain[:32], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "extra", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (0, 0, 0, 0)),
        ("MistralForCausalLM", {"sliding_window": 8}, (8, 8, 8, 8)),
        ("MistralForCausalLM", {"sliding_window": None}, (0, 0, 0, 0)),
        ("MistralForCausalLM", {}, (4096,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "max_window_layers": 2}, (0, 0, 0, 0)),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 8, "max_window_layers": 2, "use_sliding_window": True},
            (0, 0, 8, 8),
        ),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, 0, 8, 0),
        ),
    ],
)
def test_windows(architecture: str, extra: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert parsed({**RAW, "architectures": [architecture], **extra}).windows == windows


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"architectures": ["T5EncoderModel"]}, "architectures", "Qwen3ForCausalLM"),
        ({"architectures": None}, "architectures", "LlamaForCausalLM"),
        ({"quantization_config": {"quant_method": "quark"}}, "quantization_config.quant_method", "quark"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "quantization_config.bits", "4, 8"),
        ({"hidden_act": "gelu"}, "hidden_act", "gelu"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rope_scaling", "spiral"),
        (
            {
                "architectures": ["Phi3ForCausalLM"],
                "rope_scaling": {"type": "longrope", "long_factor": [1.0]},
            },
            "rope_scaling.short_factor",
            "needs 8",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor", "factor"),
        ({"num_attention_heads": 5}, "num_attention_heads", "multiple"),
        ({"hidden_size": None}, "hidden_size", "positive"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers", "positive"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "multiple"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype", "float8_e4m3fn"),
    ],
)
def test_what_is_unsupported_is_named(change: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(KvernError) as caught:
        parsed({**RAW, **change})
    assert caught.value.field == field
    assert words in caught.value.message


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**RAW, "eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert load_hf_config(tmp_path)[1].eos_token_ids == (7, 9)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(KvernError, match="not valid JSON"):
        load_hf_config(tmp_path)


@pytest.mark.parametrize(
    "family",
    [
        *("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3Text", "Phi3", "Olmo2", "Granite"),
        *("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GraniteMoe", "GptOss", "DeepseekV3"),
    ],
)
def test_class_defaults_equal_transformers(family: str) -> None:
    """What config.json leaves out means the default of the family's own class."""
    expected = getattr(transformers, f"{family}Config")()
    found = parsed({**RAW, "architectures": [f"{family.removesuffix('Text')}ForCausalLM"]})
    assert found.max_positions == expected.max_position_embeddings
    assert found.rms_norm_eps == expected.rms_norm_eps
    assert found.tie_word_embeddings == expected.tie_word_embeddings
    ropes = expected.rope_parameters
    assert found.rope.theta == ropes.get("full_attention", ropes)["rope_theta"]
    if (routing := getattr(found, "routing", None)) is not None:
        experts = ("num_experts", "num_local_experts", "n_routed_experts")
        count = next(getattr(expected, name) for name in experts if hasattr(expected, name))
        assert (routing.num_experts, routing.top_k) == (count, expected.num_experts_per_tok)


def test_dtype_auto() -> None:
    assert choose_dtype("auto", "bfloat16", True) == "bfloat16"
    assert choose_dtype("auto", "bfloat16", False) == "float32"
    assert choose_dtype("auto", "float16", False) == "float16"
    assert choose_dtype("half", "bfloat16", True) == "float16"
    assert choose_dtype("bfloat16", "float32", False) == "bfloat16"
    with pytest.raises(KvernError, match="choose auto, float32, bfloat16, float16"):
        choose_dtype("int4", "float32", True)


def test_lengths_are_parsed() -> None:
    assert parse_length("auto") is None
    assert parse_length("-1") is None
    assert [parse_length(text) for text in ("8192", "8k", "8K", "1.5k")] == [8192, 8000, 8192, 1500]
    for text in ("0", "-5", "many", "", "k"):
        with pytest.raises(KvernError, match="neither auto nor a positive number"):
            parse_length(text)


def test_pool_sizes() -> None:
    assert kv_bytes(123, 0.9, 10 * GIB, GIB) == 123
    assert kv_bytes(None, None, 20 * GIB, 2 * GIB) == 4 * GIB
    assert kv_bytes(None, None, 5 * GIB, 1 * GIB) == 2 * GIB
    assert kv_bytes(None, 0.5, 20 * GIB, 2 * GIB) == 8 * GIB
    with pytest.raises(KvernError, match=r"\(0, 1\]"):
        kv_bytes(None, 1.5, GIB, 0)
    auto = size_kv(1000, 10, 16, None, 8192)
    assert (auto.num_blocks, auto.max_model_len, auto.num_tokens) == (100, 1600, 1600)
    assert size_kv(1000, 10, 16, None, 512).max_concurrency == pytest.approx(3.125)
    assert size_kv(1000, 10, 16, 100, 512).max_model_len == 100


@pytest.mark.parametrize(
    ("pool", "length", "words"),
    [
        (
            10 * 2**20,
            4096,
            ["4096 tokens", "0.250 GiB", "0.010 GiB", "enough for 160 tokens", "--max-model-len"],
        ),
        (100, None, ["100 bytes", "1048576 bytes", "--kv-cache-memory-bytes"]),
        (GIB, 9000, ["9000", "8192 positions"]),
    ],
)
def test_what_cannot_fit_is_refused_with_figures(pool: int, length: int | None, words: list[str]) -> None:
    with pytest.raises(KvernError) as caught:
        size_kv(pool, 2**20, 16, length, 8192)
    assert caught.value.code == error_pb2.ERROR_CODE_INVALID_ARGUMENT
    for word in words:
        assert word in caught.value.message


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"block_size": 0}, "block_size"),
        ({"max_num_seqs": -1}, "max_num_seqs"),
        ({"max_num_batched_tokens": 31}, "max_num_batched_tokens"),
        ({"threads": -2}, "threads"),
        ({"max_model_len": 513}, "max_model_len"),
        ({"load_format": "npcache"}, "load_format"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_options_are_checked_before_weights_are_read(
    options: dict[str, Any], field: str, checkpoint: Folders
) -> None:
    with pytest.raises(KvernError) as caught:
        load_executor(checkpoint("llama"), **options)
    assert caught.value.field == field


def test_the_machine_is_read() -> None:
    assert physical_cores() >= 1
    assert available_memory() > 2**28
