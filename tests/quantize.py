"""Checkpoints quantized by rounding to nearest, each in its tool's published layout, written with numpy alone.

Kvern's own unpacking is not used: this is what it is compared with. ``float8`` is torch's cast.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

Array = np.ndarray
Tensors = dict[str, torch.Tensor]

AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each nibble of a word holds, the lowest nibble first
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


@dataclass(frozen=True)
class Scheme:
    """``make(weight [N, K] float32, seed)`` → tensors by suffix, and the float32 matrix that they mean."""

    make: Callable[[Array, int], tuple[Tensors, Array]]
    config: dict[str, Any]


def words(codes: Array, bits: int) -> torch.Tensor:
    """Codes [R, C] → int32 [R, C·bits/32], consecutive columns from the low bits up."""
    fields = 32 // bits
    parts = codes.astype(np.uint32).reshape(len(codes), -1, fields)
    packed = np.zeros(parts.shape[:2], np.uint32)
    for at in range(fields):
        packed |= parts[:, :, at] << np.uint32(bits * at)
    return torch.from_numpy(packed.view(np.int32))


def rounded(weight: Array, index: Array, bits: int, symmetric: bool) -> tuple[Array, Array, Array, Array]:
    """Codes [N, K], zero points [N, G], float16 scales [N, G], and what they mean; ``index`` [K]: each input's group."""
    groups, top = int(index.max()) + 1, 2**bits - 1
    scales, zeros = np.empty((len(weight), groups), np.float16), np.empty((len(weight), groups), np.int64)
    for group in range(groups):
        part = weight[:, index == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        span = 2 * np.maximum(-low, high) if symmetric else high - low
        scales[:, group] = np.maximum(span / top, 1e-5)
        wide = scales[:, group].astype(np.float32)
        # A zero point of 0 cannot be told from 16 in the original GPTQ layout.
        zeros[:, group] = (top + 1) // 2 if symmetric else np.clip(np.round(-low / wide), 1, top)
    spread, zero = scales.astype(np.float32)[:, index], zeros[:, index]
    codes = np.clip(np.round(weight / spread) + zero, 0, top).astype(np.int64)
    return codes, zeros, scales, (codes - zero).astype(np.float32) * spread


def gptq(bits: int, group: int, symmetric: bool, reorder: bool, v2: bool = False) -> Scheme:
    def make(weight: Array, seed: int) -> tuple[Tensors, Array]:
        inputs = weight.shape[1]
        index = np.arange(inputs) // (group if group > 0 else inputs)
        if reorder:
            # Of one layer's query, key and value alike: they see the same inputs.
            index = index[np.random.default_rng(inputs).permutation(inputs)]
        codes, zeros, scales, meant = rounded(weight, index, bits, symmetric)
        return {
            "qweight": words_down(codes, bits),
            "qzeros": words(zeros.T - (0 if v2 else 1), bits),
            "scales": torch.from_numpy(np.ascontiguousarray(scales.T)),
            "g_idx": torch.from_numpy(index.astype(np.int32)),
        }, meant

    layout = "gptq_v2" if v2 else "gptq"
    return Scheme(make, {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": reorder, "sym": symmetric, "checkpoint_format": layout})  # fmt: skip


def words_down(codes: Array, bits: int) -> torch.Tensor:
    """Codes [N, K] → int32 [K·bits/32, N]."""
    return words(codes, bits).t().contiguous()


def awq(group: int) -> Scheme:
    def shuffled(codes: Array) -> Array:
        return codes.reshape(len(codes), -1, 8)[:, :, list(AWQ_NIBBLES)].reshape(codes.shape)

    def make(weight: Array, seed: int) -> tuple[Tensors, Array]:
        index = np.arange(weight.shape[1]) // group
        codes, zeros, scales, meant = rounded(weight, index, 4, symmetric=False)
        return {
            "qweight": words(shuffled(codes.T), 4),
            "qzeros": words(shuffled(zeros.T), 4),
            "scales": torch.from_numpy(np.ascontiguousarray(scales.T)),
        }, meant

    return Scheme(make, {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"})  # fmt: skip


def compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}  # fmt: skip


TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def int8(activations: bool) -> Scheme:
    def make(weight: Array, seed: int) -> tuple[Tensors, Array]:
        scale = np.abs(weight).max(1, keepdims=True) / 127
        codes = np.clip(np.round(weight / scale), -127, 127).astype(np.int8)
        return {"weight": torch.from_numpy(codes), "weight_scale": torch.from_numpy(scale)}, codes * scale

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    return Scheme(make, compressed("int-quantized", weights, TOKENS if activations else None))


def int4(group: int, symmetric: bool) -> Scheme:
    """compressed-tensors' W4A16, "pack-quantized"."""

    def make(weight: Array, seed: int) -> tuple[Tensors, Array]:
        index = np.arange(weight.shape[1]) // group
        codes, zeros, scales, meant = rounded(weight, index, 4, symmetric)
        tensors = {
            "weight_packed": words(codes, 4),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words_down(zeros.T, 4)
        return tensors, meant

    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
    return Scheme(make, compressed("pack-quantized", weights))


def _fp8(weight: Array, strategy: str) -> tuple[torch.Tensor, torch.Tensor, Array]:
    wide = torch.from_numpy(weight)
    n, k = wide.shape
    if strategy == "block":
        rows, columns = -(-n // 128), -(-k // 128)
        scale = torch.empty(rows, columns)
        for row in range(rows):
            for column in range(columns):
                part = wide[128 * row : 128 * row + 128, 128 * column : 128 * column + 128]
                scale[row, column] = part.abs().max() / 448
        spread = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    else:
        scale = wide.abs().amax(1, keepdim=True) / 448 if strategy == "channel" else wide.abs().max() / 448
        spread = scale.expand(n, k) if strategy == "channel" else scale
    codes = (wide / spread).to(torch.float8_e4m3fn)
    return (
        codes,
        scale.clone() if strategy != "tensor" else scale.reshape(1),
        (codes.float() * spread).numpy(),
    )


def compressed_fp8(strategy: str) -> Scheme:
    def make(weight: Array, seed: int) -> tuple[Tensors, Array]:
        codes, scale, meant = _fp8(weight, strategy)
        tensors = {"weight": codes, "weight_scale": scale}
        if strategy == "tensor":
            tensors["input_scale"] = torch.ones(1)
        return tensors, meant

    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    return Scheme(make, compressed("float-quantized", weights, {**TOKENS, "type": "float"}))


def native_fp8(block: bool) -> Scheme:
    """DeepSeek's and Qwen3-FP8's, with a scale a block; or vLLM's, with one a matrix."""

    def make(weight: Array, seed: int) -> tuple[Tensors, Array]:
        codes, scale, meant = _fp8(weight, "block" if block else "tensor")
        return {"weight": codes, "weight_scale_inv" if block else "weight_scale": scale}, meant

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return Scheme(make, {**config, "weight_block_size": [128, 128]} if block else config)


def mxfp4() -> Scheme:
    """OCP Microscaling 1.0 as compressed-tensors writes it: two codes a byte, the low nibble first, a power of two a group."""

    def make(weight: Array, seed: int) -> tuple[Tensors, Array]:
        groups = weight.reshape(len(weight), -1, 32)
        peak = np.maximum(np.abs(groups).max(-1, keepdims=True), 1e-30)
        power = np.floor(np.log2(peak)) - 2
        scaled = groups / 2.0**power
        codes = np.abs(np.abs(scaled)[..., None] - E2M1).argmin(-1).astype(np.uint8)
        meant = np.sign(scaled) * E2M1[codes] * 2.0**power
        codes |= (scaled < 0).astype(np.uint8) << 3
        flat = codes.reshape(weight.shape)
        return {
            "weight_packed": torch.from_numpy(flat[:, ::2] | (flat[:, 1::2] << 4)),
            "weight_scale": torch.from_numpy((power[..., 0] + 127).astype(np.uint8)),
        }, meant.reshape(weight.shape).astype(np.float32)

    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    return Scheme(make, compressed("mxfp4-pack-quantized", weights))


SCHEMES: dict[str, Callable[[int], Scheme]] = {
    "gptq-4": lambda group: gptq(4, group, True, False),
    "gptq-4-asym-reordered": lambda group: gptq(4, group, False, True),
    "gptq-4-v2": lambda group: gptq(4, group, False, False, v2=True),
    "gptq-4-one-group": lambda group: gptq(4, -1, True, False),
    "gptq-8-reordered": lambda group: gptq(8, group, False, True),
    "awq": awq,
    "w8a8": lambda group: int8(True),
    "w8a16": lambda group: int8(False),
    "w4a16": lambda group: int4(group, True),
    "w4a16-asym": lambda group: int4(group, False),
    "fp8-tensor": lambda group: compressed_fp8("tensor"),
    "fp8-channel": lambda group: compressed_fp8("channel"),
    "fp8-block": lambda group: compressed_fp8("block"),
    "fp8-native-block": lambda group: native_fp8(True),
    "fp8-native-tensor": lambda group: native_fp8(False),
    "mxfp4": lambda group: mxfp4(),
}


def is_linear(name: str, value: torch.Tensor) -> bool:
    """What the tools quantize: the matrices of layers, no router, no head."""
    return (
        name.startswith("model.layers.")
        and value.dim() == 2
        and not name.endswith((".gate.weight", "norm.weight"))
    )


def quantize_tensors(tensors: Tensors, scheme: Scheme) -> tuple[Tensors, Tensors]:
    """The checkpoint's tensors, and the float32 ones that they mean."""
    stored, meant = dict(tensors), dict(tensors)
    for seed, (name, value) in enumerate(sorted(tensors.items())):
        if is_linear(name, value):
            parts, wide = scheme.make(value.float().numpy(), seed)
            del stored[name]
            prefix = name.removesuffix(".weight")
            stored |= {f"{prefix}.{suffix}": part.contiguous() for suffix, part in parts.items()}
            meant[name] = torch.from_numpy(np.ascontiguousarray(wide, np.float32))
    return stored, meant


def write_checkpoint(folder: Path, like: Path, stored: Tensors, scheme: Scheme) -> Path:
    """``stored`` beside the configuration of the folder ``like``."""
    folder.mkdir(exist_ok=True)
    for file in like.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, folder / file.name)
    config = json.loads((like / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": scheme.config}))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return folder
