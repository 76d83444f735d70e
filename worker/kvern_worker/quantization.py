"""How a checkpoint says that its matrices are quantized, and what ``--quantization`` may ask for; no torch needed.

Read from ``quantization_config`` of a ``config.json``. Which matrices are quantized is not taken from its lists of exceptions
(``ignore``, ``modules_to_not_convert``; every tool writes names otherwise) but from the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvern.errors import KvernError, invalid
from kvern.v1 import error_pb2

# Quantizing at load, by vLLM's names → what a scale belongs to.
ONLINE = {
    "fp8": "fp8 tensor",
    "fp8_per_tensor": "fp8 tensor",
    "fp8_per_channel": "fp8 channel",
    "fp8_per_block": "fp8 block",
    "int8": "int8 channel",
    "int8_per_channel_weight_only": "int8 channel",
}
# Other names of methods that checkpoints have.
_ALIASES = {
    "gptq_marlin": "gptq",
    "auto_gptq": "gptq",
    "awq_marlin": "awq",
    "auto_awq": "awq",
    "gpt_oss_mxfp4": "mxfp4",
}
METHODS = ("gptq", "awq", "fp8", "compressed-tensors", "mxfp4", "gguf")
CHOICES = (*METHODS, *(name for name in ONLINE if name not in METHODS))


@dataclass(frozen=True)
class Quantization:
    """``method`` as the checkpoint spells it. ``bits``: of integer codes. ``group_size``: inputs that share a scale, 0: all.

    ``zero_offset``: what GPTQ's stored zero points are short of. ``activations``: "int8" where x is to be quantized per token.
    """

    method: str
    bits: int = 0
    group_size: int = 0
    zero_offset: int = 0
    activations: str | None = None


@dataclass(frozen=True)
class Asked:
    """Flags about quantization; None: not given."""

    quantization: str | None = None
    gptq_bits: int | None = None
    gptq_group_size: int | None = None
    awq_bits: int | None = None


def parse_quantization(raw: Mapping[str, Any]) -> Quantization | None:
    """From a ``config.json``; None where it is not quantized. Raises KvernError naming what is not supported."""
    config = raw.get("quantization_config") or raw.get("compression_config")
    if not config:
        return None
    method = str(config.get("quant_method", ""))
    if method not in _PARSERS:
        raise _unsupported(
            "quant_method",
            f"checkpoints quantized with {method or 'no named method'} are not supported; supported are "
            f"{', '.join(_PARSERS)} and GGUF files",
            method,
        )
    return _PARSERS[method](config)


def _gptq(config: Mapping[str, Any]) -> Quantization:
    layout = str(config.get("checkpoint_format") or "gptq")
    _only("checkpoint_format", layout, ("gptq", "gptq_v2"))
    bits = int(config.get("bits", 4))
    _only("bits", bits, (4, 8))
    return Quantization("gptq", bits, _group(config), zero_offset=1 if layout == "gptq" else 0)


def _awq(config: Mapping[str, Any]) -> Quantization:
    _only("version", str(config.get("version", "gemm")).lower(), ("gemm",))
    bits = int(config.get("bits", config.get("w_bit", 4)))
    _only("bits", bits, (4,))
    return Quantization("awq", bits, _group(config, "q_group_size"))


def _fp8(config: Mapping[str, Any]) -> Quantization:
    if (block := config.get("weight_block_size")) is not None:
        _only("weight_block_size", list(block), ([128, 128],))
    _only("fmt", config.get("fmt", "e4m3"), ("e4m3",))
    return Quantization("fp8", 8)


def _mxfp4(config: Mapping[str, Any]) -> Quantization:
    return Quantization("mxfp4", 4, 32)


def _compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    """compressed-tensors: one scheme for all quantized linear layers, int8, int4 or fp8 (QuantizationArgs there)."""
    groups = list((config.get("config_groups") or {}).values())
    schemes = [(group.get("weights"), group.get("input_activations")) for group in groups]
    if not schemes or any(scheme != schemes[0] for scheme in schemes):
        raise _unsupported(
            "config_groups",
            f"compressed-tensors with {len(groups)} groups of different schemes is not supported; supported is one",
            len(groups),
        )
    weights, inputs = schemes[0][0] or {}, schemes[0][1]
    layout = str(groups[0].get("format") or config.get("format", ""))
    bits, kind, strategy = (
        int(weights.get("num_bits", 8)),
        weights.get("type", "int"),
        str(weights.get("strategy")),
    )
    quantized = Quantization("compressed-tensors", bits, int(weights.get("group_size") or 0))
    if layout == "pack-quantized":
        _only("weights.type", kind, ("int",))
        _only("weights.num_bits", bits, (4, 8))
        _only("input_activations", inputs, (None,))
        return quantized
    if layout == "mxfp4-pack-quantized":
        _only("weights.group_size", quantized.group_size, (32,))
        return quantized
    _only("format", layout, ("int-quantized", "float-quantized", "naive-quantized"))
    _only("weights.num_bits", bits, (8,))
    _only("weights.symmetric", bool(weights.get("symmetric", True)), (True,))
    if kind == "float":
        _only("weights.strategy", strategy, ("tensor", "channel", "block"))
        if strategy == "block":
            _only("weights.block_structure", _block(weights.get("block_structure")), ([128, 128],))
        return quantized
    _only("weights.strategy", strategy, ("tensor", "channel"))
    if inputs is None:
        return quantized
    _only("input_activations.type", inputs.get("type", "int"), ("int",))
    _only("input_activations.num_bits", int(inputs.get("num_bits", 8)), (8,))
    _only("input_activations.dynamic", inputs.get("dynamic", False), (True,))
    _only("input_activations.strategy", inputs.get("strategy") or "token", ("token",))
    _only("input_activations.symmetric", bool(inputs.get("symmetric", True)), (True,))
    return Quantization("compressed-tensors", bits, activations="int8")


_PARSERS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": _mxfp4,
}


def check_asked(asked: Asked, method: str, found: Quantization | None) -> str | None:
    """What to quantize to at load, a value of :data:`ONLINE`, or None. ``method``: the checkpoint's, "" where it is not
    quantized. Raises KvernError with both values where a flag contradicts the checkpoint."""
    _check_sizes(asked, method, found)
    wanted = asked.quantization
    if wanted in (None, "", "none", "auto"):
        return None
    wanted = _ALIASES.get(wanted, wanted)
    if wanted not in CHOICES:
        raise invalid(
            "quantization",
            f"quantization {wanted} is unknown; choose one of {', '.join(CHOICES)}",
            value=wanted,
        )
    if wanted == method:
        return None
    if method:
        raise invalid(
            "quantization",
            f"--quantization {wanted} contradicts the checkpoint, which is quantized with {method}; leave the flag out",
            value=wanted,
            limit=method,
        )
    if wanted in ONLINE:
        return ONLINE[wanted]
    raise invalid(
        "quantization",
        f"--quantization {wanted} contradicts the checkpoint, which is not quantized; at load it can be quantized to "
        f"{', '.join(ONLINE)}",
        value=wanted,
        limit="none",
    )


def _check_sizes(asked: Asked, method: str, found: Quantization | None) -> None:
    for field, wanted, of, has in (
        ("gptq_bits", asked.gptq_bits, "gptq", found and found.bits),
        ("gptq_group_size", asked.gptq_group_size, "gptq", found and (found.group_size or -1)),
        ("awq_bits", asked.awq_bits, "awq", found and found.bits),
    ):
        if wanted is None:
            continue
        has = has if method == of else None
        if wanted != has:
            says = f"{of} with {has}" if has is not None else method or "no quantization"
            raise invalid(
                field,
                f"--{field.replace('_', '-')} {wanted} contradicts the checkpoint, which has {says}; leave the flag out",
                value=wanted,
                limit=has if has is not None else method or "none",
            )


def _group(config: Mapping[str, Any], other: str = "group_size") -> int:
    """−1 (all inputs share a scale) becomes 0."""
    return max(int(config.get("group_size", config.get(other, 128))), 0)


def _block(value: Any) -> Any:
    """ "128x128" was the first spelling of [128, 128]."""
    return [int(part) for part in value.split("x")] if isinstance(value, str) else value


def _only(key: str, value: object, supported: tuple[object, ...]) -> None:
    if value not in supported:
        names = ", ".join(str(name) for name in supported)
        raise _unsupported(key, f"{key} {value} is not supported; supported: {names}", value)


def _unsupported(key: str, message: str, value: object) -> KvernError:
    field = f"quantization_config.{key}"
    return KvernError(
        error_pb2.ERROR_CODE_UNIMPLEMENTED, f"quantization_config: {message}", field=field, value=value
    )
