"""What the worker needs to know of a model: parsed from a Hugging Face ``config.json``, without transformers.

(GGUF metadata is turned into the same :class:`ModelConfig` by :mod:`kvern_worker.weights.gguf_config`.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvern.rpc.errors import KvernError, invalid
from kvern.v1 import error_pb2

LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "dummy")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. ``kind`` is one of :data:`ROPE_KINDS`; fields of other kinds are unused."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    # GGUF stores Llama-3 scaling as one divisor per frequency, [head_dim / 2].
    divisors: tuple[float, ...] = ()


ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family. Sizes in elements; ``windows`` has one entry per layer (0: unlimited)."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: RopeConfig
    windows: tuple[int, ...]
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    # Of the checkpoint: "float32", "bfloat16" or "float16".
    dtype: str = "bfloat16"

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class _Family:
    """How an architecture differs where its config.json is silent."""

    name: str
    max_positions: int
    sliding_window: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None


ARCHITECTURES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family("llama", 2048),
    "MistralForCausalLM": _Family("mistral", 131_072, sliding_window=4096),
    "Qwen2ForCausalLM": _Family("qwen2", 32_768, qkv_bias=True),
    "Qwen3ForCausalLM": _Family("qwen3", 32_768, qk_norm=True, head_dim=128),
}


def unsupported(message: str, *, field: str, value: object = "") -> KvernError:
    return KvernError(error_pb2.ERROR_CODE_UNIMPLEMENTED, message, field=field, value=value)


def load_hf_config(folder: Path) -> ModelConfig:
    """Reads ``folder/config.json`` (and ``generation_config.json`` for end tokens). Raises KvernError."""
    raw = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    eos = _token_ids(raw.get("eos_token_id"))
    if generation.exists():
        eos += _token_ids(_read_json(generation).get("eos_token_id"))
    return parse_hf_config(raw, eos_token_ids=tuple(dict.fromkeys(eos)))


def parse_hf_config(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...] = ()) -> ModelConfig:
    """Turns the contents of a ``config.json`` into a ModelConfig. Raises KvernError naming the key at fault."""
    architectures = raw.get("architectures") or ["(none)"]
    family = ARCHITECTURES.get(architectures[0])
    if family is None:
        raise unsupported(
            f"architecture {architectures[0]} is not supported; supported are {', '.join(ARCHITECTURES)}",
            field="architectures",
            value=architectures[0],
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise unsupported(
            f"checkpoints quantized with {method} are not supported; use the unquantized checkpoint or a GGUF file",
            field="quantization_config",
            value=method,
        )
    if (act := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise unsupported(
            f"hidden_act {act} is not supported; supported is silu", field="hidden_act", value=act
        )

    hidden_size = _positive(raw, "hidden_size")
    num_layers = _positive(raw, "num_hidden_layers")
    num_heads = _positive(raw, "num_attention_heads")
    num_kv_heads = raw.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise invalid(
            "num_key_value_heads",
            f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})",
            value=num_kv_heads,
        )
    head_dim = raw.get("head_dim") or family.head_dim or hidden_size // num_heads
    max_positions = int(raw.get("max_position_embeddings") or family.max_positions)
    rope, max_positions = _parse_rope(raw, max_positions)
    bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        family=family.name,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_positions=max_positions,
        rope=rope,
        windows=_parse_windows(raw, family, num_layers),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias or (family.name in ("llama", "qwen3") and bias),
        o_bias=family.name in ("llama", "qwen3") and bias,
        mlp_bias=family.name == "llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        eos_token_ids=eos_token_ids or _token_ids(raw.get("eos_token_id")),
        dtype=_parse_dtype(raw),
    )


def _parse_windows(raw: Mapping[str, Any], family: _Family, num_layers: int) -> tuple[int, ...]:
    """Keys that a query of each layer sees, itself included; 0 where it sees all."""
    if family.name == "llama":
        return (0,) * num_layers
    window = raw.get("sliding_window", family.sliding_window)
    if family.name == "mistral":
        return (int(window or 0),) * num_layers
    if not raw.get("use_sliding_window", False):
        window = None
    types = raw.get("layer_types")
    if types is None:
        first = int(raw.get("max_window_layers", 28))
        types = [
            "sliding_attention" if window and i >= first else "full_attention" for i in range(num_layers)
        ]
    if len(types) != num_layers:
        raise invalid(
            "layer_types", f"layer_types has {len(types)} entries for {num_layers} layers", value=len(types)
        )
    return tuple(int(window or 0) if kind == "sliding_attention" else 0 for kind in types)


def _parse_rope(raw: Mapping[str, Any], max_positions: int) -> tuple[RopeConfig, int]:
    """The rotary embedding, and how many positions it reaches."""
    # transformers 5 writes rope_parameters; before, rope_theta stood alone and rope_scaling beside it.
    scaling: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    if kind not in ROPE_KINDS:
        raise unsupported(
            f"rope scaling {kind} is not supported; supported are {', '.join(ROPE_KINDS)}",
            field="rope_scaling",
            value=kind,
        )
    partial = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise unsupported(
            "partial rotary embeddings are not supported for this family",
            field="partial_rotary_factor",
            value=partial,
        )
    if kind == "default":
        return RopeConfig(theta=theta), max_positions
    original = int(
        raw.get("original_max_position_embeddings")
        or scaling.get("original_max_position_embeddings")
        or max_positions
    )
    factor = scaling.get("factor")
    if factor is None and kind != "yarn":
        raise invalid("rope_scaling.factor", f"rope scaling {kind} needs a factor")
    factor = float(factor) if factor is not None else max_positions / original
    rope = RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_positions=original,
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        attention_factor=scaling.get("attention_factor"),
        mscale=float(scaling.get("mscale") or 0),
        mscale_all_dim=float(scaling.get("mscale_all_dim") or 0),
        truncate=bool(scaling.get("truncate", True)),
    )
    if kind in ("linear", "yarn"):
        # Configs differ in whether max_position_embeddings is the length before or after stretching.
        base = original if kind == "yarn" else max_positions
        max_positions = max(max_positions, int(base * factor))
    return rope, max_positions


def _parse_dtype(raw: Mapping[str, Any]) -> str:
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise unsupported(
            f"checkpoint dtype {dtype} is not supported; supported are float32, bfloat16, float16",
            field="dtype",
            value=dtype,
        )
    return dtype


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise invalid("model", f"cannot read {path}: {error.strerror}", value=path) from error
    except ValueError as error:
        raise invalid("model", f"{path} is not valid JSON: {error}", value=path) from error
    if not isinstance(content, dict):
        raise invalid("model", f"{path} must hold a JSON object", value=path)
    return content


def _positive(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value <= 0:
        raise invalid(key, f"config.json: {key} must be a positive integer, is {value!r}", value=value)
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
