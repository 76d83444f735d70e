"""Reads adapters as PEFT saves them: ``adapter_config.json`` beside ``adapter_model.safetensors`` (or ``.bin``).

What would change more than the outputs of linear layers is refused by name: DoRA, ``modules_to_save``, biases, adapters
of embeddings and of the output layer, vocabularies of their own.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvern.errors import KvernError, invalid
from kvern_worker.config import unsupported
from kvern_worker.weights.safetensors_source import SafetensorsSource
from kvern_worker.weights.source import TensorSource
from kvern_worker.weights.torch_source import TorchSource

CONFIG = "adapter_config.json"
FILES = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")

# Key of the configuration → why it cannot be served, where it is set.
_REFUSED = {
    "use_dora": "DoRA adapters change the norms of weights, and are not supported; merge it into the weights",
    "modules_to_save": "modules saved whole replace weights of the base model, and are not supported",
    "trainable_token_indices": "adapters with a vocabulary of their own are not supported",
    "layer_replication": "replicated layers are not supported",
    "lora_bias": "biases of adapters are not supported",
    "use_qalora": "QALoRA adapters are not supported",
    "target_parameters": "adapters of single parameters (such as fused experts) are not supported",
    "alora_invocation_tokens": "activated LoRA is not supported",
}
_OTHER_BASE = ("pissa", "olora", "corda")


@dataclass(frozen=True, slots=True)
class Target:
    """A module that adapters may change: its outputs and inputs."""

    out_features: int
    in_features: int


@dataclass(frozen=True, slots=True)
class Pair:
    """``a`` [rank, in], ``b`` [out, rank] of one module; what is added to its output is b·a·x·scale."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """``digest``: SHA-256 over both files."""

    digest: bytes
    rank: int
    pairs: Mapping[str, Pair]


def read_adapter(folder: Path, targets: Mapping[str, Target], max_rank: int, dtype: torch.dtype) -> Adapter:
    """Raises KvernError with what is missing, does not fit, or is not supported."""
    config_file = folder / CONFIG
    weights = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if not config_file.is_file() or weights is None:
        raise invalid(
            "lora_path",
            f"{folder} holds no adapter that PEFT saved: {CONFIG} and {' or '.join(FILES)}",
            value=folder,
        )
    config = _read_config(config_file)
    source: TensorSource = (
        SafetensorsSource([weights], "lazy") if weights.suffix == ".safetensors" else TorchSource([weights])
    )
    names = _names(source, targets)
    pairs = {
        module: _pair(source, module, sides, targets[module], config, dtype)
        for module, sides in names.items()
    }
    rank = max(pair.a.shape[0] for pair in pairs.values())
    if rank > max_rank:
        raise invalid(
            "lora_path",
            f"the adapter in {folder} has rank {rank}, this worker takes up to {max_rank}; raise --max-lora-rank",
            value=rank,
            limit=max_rank,
        )
    return Adapter(_digest(config_file, weights), rank, pairs)


def _read_config(file: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise invalid("lora_path", f"{file} cannot be read: {error}", value=file) from error
    if not isinstance(config, dict):
        raise invalid("lora_path", f"{file} must hold a JSON object", value=file)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise unsupported(
            f"{file}: peft_type {kind!r} is not supported; supported is 'LORA'", field="peft_type"
        )
    for key, reason in _REFUSED.items():
        if config.get(key):
            raise unsupported(f"{file}: {key} is set: {reason}", field=key, value=config[key])
    if config.get("bias", "none") != "none":
        raise unsupported(
            f"{file}: bias {config['bias']!r} is not supported", field="bias", value=config["bias"]
        )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_OTHER_BASE):
        raise unsupported(
            f"{file}: init_lora_weights {start!r} belongs to a changed base model; save it converted to plain LoRA",
            field="init_lora_weights",
            value=start,
        )
    if not isinstance(config.get("lora_alpha", 8), int | float):
        raise invalid("lora_alpha", f"{file}: lora_alpha must be a number", value=config["lora_alpha"])
    return config


def _names(source: TensorSource, targets: Mapping[str, Target]) -> dict[str, dict[str, str]]:
    """Module → side → tensor name."""
    names: dict[str, dict[str, str]] = {}
    for name, info in source.infos.items():
        match = _NAME.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            raise unsupported(_not_lora(name, info.file), field="lora_path", value=name)
        if match["module"] not in targets:
            known = sorted({target.rsplit(".", 1)[-1] for target in targets})
            raise unsupported(
                f"{info.file}: module {match['module']} takes no adapter in this model; modules that do are "
                f"{', '.join(known) or 'none'}",
                field="target_modules",
                value=match["module"],
            )
        names.setdefault(match["module"], {})[match["side"]] = name
    if not names:
        raise invalid("lora_path", "the adapter holds no tensors")
    return names


def _not_lora(name: str, file: Path) -> str:
    if "lora_magnitude_vector" in name:
        reason = "DoRA adapters are not supported"
    elif "lora_embedding" in name:
        reason = "adapters of embeddings are not supported"
    elif "embed_tokens" in name or "lm_head" in name:
        reason = "adapters with a vocabulary of their own are not supported"
    else:
        reason = "it belongs to no LoRA of a linear layer"
    return f"{file}: tensor {name}: {reason}"


def _pair(
    source: TensorSource,
    module: str,
    sides: Mapping[str, str],
    target: Target,
    config: Mapping[str, Any],
    dtype: torch.dtype,
) -> Pair:
    if len(sides) != 2:
        raise invalid("lora_path", f"the adapter lacks lora_A or lora_B of {module}", value=module)
    shapes = [source.infos[sides[side]].shape for side in "AB"]
    rank = shapes[0][0] if shapes[0] else 0
    wanted = [(rank, target.in_features), (target.out_features, rank)]
    if shapes != wanted or not rank:
        raise invalid(
            "lora_path",
            f"{source.infos[sides['A']].file}: the adapter of {module} has shapes {[list(s) for s in shapes]}, the "
            f"model wants {[list(s) for s in wanted]}: is it one of this model?",
            value=shapes,
        )
    tensors = [torch.empty(shape, dtype=dtype) for shape in shapes]
    for side, tensor in zip("AB", tensors, strict=True):
        source.read_into(sides[side], tensor)
        if not torch.isfinite(tensor).all():
            raise invalid(
                "lora_path", f"tensor {sides[side]} holds NaN or infinite values", value=sides[side]
            )
    alpha = _alpha(module, config)
    return Pair(tensors[0], tensors[1], alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _alpha(module: str, config: Mapping[str, Any]) -> float:
    """``alpha_pattern`` holds regular expressions for the ends of module names."""
    for pattern, alpha in (config.get("alpha_pattern") or {}).items():
        try:
            if re.fullmatch(rf"(.*\.)?({pattern.removeprefix('^')})", module):
                return float(alpha)
        except re.error as error:
            raise invalid("alpha_pattern", f"alpha_pattern {pattern!r}: {error}", value=pattern) from error
    return float(config.get("lora_alpha", 8))


def _digest(*files: Path) -> bytes:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.digest()


def changed(path: str) -> KvernError:
    return invalid(
        "lora_path",
        f"the adapter's files in {path} are not those that were loaded; unload and load it anew",
        value=path,
    )
