"""What the worker needs to know of a model, and how a Hugging Face ``config.json`` says it; no transformers needed.

:class:`ModelConfig` is what serving needs of any model, :class:`DecoderConfig` adds what most decoders share; a model
file in ``models/`` adds its own. (GGUF metadata becomes the same classes in :mod:`kvern_worker.weights.gguf_source`.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from kvern.errors import KvernError, invalid
from kvern.v1 import error_pb2
from kvern_worker.quantization import Quantization, parse_quantization

LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "dummy")
SAFETENSORS_STRATEGIES = ("auto", "lazy", "eager", "prefetch")
KV_CACHE_DTYPES = (
    *("auto", "fp32", "bf16", "fp16", "fp8", "fp8_e5m2", "int8"),
    *("float32", "bfloat16", "float16", "fp8_e4m3"),
)
"""Of --kv-cache-dtype; the last four are other names."""


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
    # One divisor per frequency, [rotary dim / 2]: GGUF stores Llama-3 scaling so.
    divisors: tuple[float, ...] = ()
    # LongRoPE's divisors, for models served up to their original length and beyond it.
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    # The part of each head that is rotated, its first components.
    partial: float = 1.0


ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class StateShapes:
    """What ``layers`` keep of a sequence beside keys and values: one float32 tensor of each of ``shapes``."""

    layers: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def num_bytes(self) -> int:
        """Of one sequence, over all layers."""
        return 4 * len(self.layers) * sum(prod(shape) for shape in self.shapes)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes in elements. ``num_kv_heads`` and ``head_dim`` are those of the KV cache, in every layer that has one."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    # Every token sees every other: an encoder, whose cache is needed no longer than a step.
    bidirectional: bool = False
    # Of the checkpoint: "float32", "bfloat16" or "float16".
    dtype: str = "bfloat16"
    # How the checkpoint's matrices are quantized, where it is a folder and they are.
    quantization: Quantization | None = None
    # Of a hybrid: what its layers without keys and values keep instead.
    states: StateShapes | None = None

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that have keys and values in the cache."""
        without = self.states.layers if self.states is not None else ()
        return tuple(layer for layer in range(self.num_layers) if layer not in without)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """A decoder with rotary positions. ``windows``: keys that a query of each layer sees, itself included (0: all)."""

    intermediate_size: int
    num_heads: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int, ...]
    activation: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rope.partial)


def unsupported(message: str, *, field: str, value: object = "") -> KvernError:
    return KvernError(error_pb2.ERROR_CODE_UNIMPLEMENTED, message, field=field, value=value)


class HfConfig(Mapping[str, Any]):
    """The contents of a ``config.json``, with checked access. ``eos_token_ids`` may come from elsewhere. ``folder`` is
    where the file lies, and ``trust_remote_code`` whether code that lies there may be run."""

    def __init__(
        self,
        raw: Mapping[str, Any],
        eos_token_ids: tuple[int, ...] = (),
        folder: Path | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self._raw = raw
        self.folder = folder
        self.trust_remote_code = trust_remote_code
        self.eos_token_ids = eos_token_ids or token_ids(raw.get("eos_token_id"))

    def __getitem__(self, key: str) -> Any:
        return self._raw[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def replace(self, **values: Any) -> HfConfig:
        """The same with other values of some keys."""
        return HfConfig({**self._raw, **values}, self.eos_token_ids, self.folder, self.trust_remote_code)

    @property
    def architecture(self) -> str:
        return (self.get("architectures") or ["(none)"])[0]

    def positive(self, key: str, default: int | None = None) -> int:
        """A whole number above 0. Raises KvernError when it is something else, or missing without a default."""
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or value <= 0:
            raise invalid(key, f"config.json: {key} must be a positive integer, is {value!r}", value=value)
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, (int, float)):
            raise invalid(key, f"config.json: {key} must be a number, is {value!r}", value=value)
        return float(value)

    def only(self, key: str, supported: object) -> None:
        """Raises KvernError where ``key`` is there and is not ``supported``."""
        if (value := self.get(key, supported)) != supported:
            raise unsupported(
                f"config.json: {key} {value!r} is not supported for {self.architecture}; supported is {supported!r}",
                field=key,
                value=value,
            )

    def activation(self, default: str = "silu", key: str = "hidden_act") -> str:
        """ "silu", "gelu" (exact), "gelu_tanh" or "relu"."""
        value = self.get(key) or default
        if value not in _ACTIVATIONS:
            raise unsupported(
                f"{key} {value} is not supported; supported are {', '.join(_ACTIVATIONS)}",
                field=key,
                value=value,
            )
        return _ACTIVATIONS[value]


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def model_fields(raw: HfConfig, *, tie: bool = False) -> dict[str, Any]:
    """The fields of ModelConfig that every ``config.json`` calls the same; ``tie`` is the class's default."""
    return {
        "architecture": raw.architecture,
        "vocab_size": raw.positive("vocab_size"),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", tie)),
        "eos_token_ids": raw.eos_token_ids,
        "dtype": _parse_dtype(raw),
        "quantization": parse_quantization(raw),
    }


def decoder_fields(
    raw: HfConfig,
    *,
    max_positions: int,
    eps: float = 1e-6,
    theta: float = 10_000.0,
    partial: float = 1.0,
    head_dim: int | None = None,
    tie: bool = False,
) -> dict[str, Any]:
    """The fields of DecoderConfig, without windows and biases; the arguments say what a missing key means.

    Raises KvernError naming the key at fault.
    """
    hidden_size = raw.positive("hidden_size")
    num_heads = raw.positive("num_attention_heads")
    num_kv_heads = raw.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise invalid(
            "num_key_value_heads",
            f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})",
            value=num_kv_heads,
        )
    head_dim = raw.get("head_dim") or head_dim
    if head_dim is None:
        if hidden_size % num_heads:
            raise invalid(
                "num_attention_heads",
                f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads}) where "
                "head_dim is not given",
                value=num_heads,
            )
        head_dim = hidden_size // num_heads
    rope, max_positions = parse_rope(
        raw, raw.positive("max_position_embeddings", max_positions), theta, partial
    )
    return {
        **model_fields(raw, tie=tie),
        "hidden_size": hidden_size,
        "intermediate_size": raw.positive("intermediate_size"),
        "num_layers": raw.positive("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": raw.number("rms_norm_eps", eps),
        "max_positions": max_positions,
        "rope": rope,
        "activation": raw.activation(),
    }


def windows_of(raw: HfConfig, window: int | None, sliding: Callable[[int], bool]) -> tuple[int, ...]:
    """A window per layer from ``layer_types``, and where that is missing from ``sliding(layer)``."""
    num_layers = raw.positive("num_hidden_layers")
    types = raw.get("layer_types")
    if types is None:
        types = ["sliding_attention" if sliding(layer) else "full_attention" for layer in range(num_layers)]
    if len(types) != num_layers:
        raise invalid(
            "layer_types", f"layer_types has {len(types)} entries for {num_layers} layers", value=len(types)
        )
    return tuple(int(window or 0) if kind == "sliding_attention" else 0 for kind in types)


def parse_rope(
    raw: HfConfig,
    max_positions: int,
    theta: float = 10_000.0,
    partial: float = 1.0,
    scaling: Mapping[str, Any] | None = None,
) -> tuple[RopeConfig, int]:
    """The rotary embedding, and how many positions it reaches. ``scaling``: that of one kind of layers."""
    # transformers 5 writes rope_parameters; before, rope_theta stood alone and rope_scaling beside it.
    if scaling is None:
        scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # Phi-3's first spelling
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or theta)
    if kind not in ROPE_KINDS:
        raise unsupported(
            f"rope scaling {kind} is not supported; supported are {', '.join(ROPE_KINDS)}",
            field="rope_scaling",
            value=kind,
        )
    partial = float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or partial)
    if kind == "default":
        return RopeConfig(theta=theta, partial=partial), max_positions
    original = int(
        raw.get("original_max_position_embeddings")
        or scaling.get("original_max_position_embeddings")
        or max_positions
    )
    factor = scaling.get("factor")
    if factor is None and kind not in ("yarn", "longrope"):
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
        short_factors=tuple(scaling.get("short_factor") or ()),
        long_factors=tuple(scaling.get("long_factor") or ()),
        partial=partial,
    )
    if kind in ("linear", "yarn"):
        # Configs differ in whether max_position_embeddings is the length before or after stretching.
        base = original if kind == "yarn" else max_positions
        max_positions = max(max_positions, int(base * factor))
    return rope, max_positions


def _parse_dtype(raw: HfConfig) -> str:
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise unsupported(
            f"checkpoint dtype {dtype} is not supported; supported are float32, bfloat16, float16",
            field="dtype",
            value=dtype,
        )
    return dtype


def token_ids(value: Any) -> tuple[int, ...]:
    """End tokens as config files write them: none, one, or a list."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
