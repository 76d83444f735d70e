"""Finds the tensors of a quantized matrix in a checkpoint, whatever its tool called them, and checks their shapes.

| method | tensors of ``prefix`` |
|---|---|
| gptq (AutoGPTQ, GPTQModel) | qweight, qzeros, scales, perhaps g_idx |
| awq (AutoAWQ, "gemm") | qweight, qzeros, scales |
| fp8 (DeepSeek, Qwen3-FP8) | weight, weight_scale_inv for each 128×128, or weight_scale |
| compressed-tensors | weight, weight_scale; int4: weight_packed, weight_scale, perhaps weight_zero_point and weight_g_idx |
| GGUF | the matrix itself, in blocks |
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvern.errors import invalid
from kvern_worker.quantization import Quantization
from kvern_worker.weights.quantized import (
    FP8_BLOCK,
    AwqMatrix,
    Fp8Matrix,
    GptqMatrix,
    Int8Matrix,
    Mxfp4Matrix,
    QuantizedMatrix,
)

# Left over where x is not quantized by the checkpoint's own scales, and no one else's.
IGNORED_SUFFIXES = (
    *(".input_scale", ".input_zero_point", ".output_scale", ".activation_scale"),
    *(".k_scale", ".v_scale", ".q_scale", ".weight_shape"),
)


class Reader(Protocol):
    """What a layout needs of the loader."""

    def stored(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape and dtype of a tensor in the file, or None where it is not there to be read."""

    def raw(self, name: str, *shape: int) -> Tensor:
        """The tensor in its own dtype; raises KvernError where it is missing or has another shape."""


def read_matrix(
    reader: Reader, prefix: str, n: int, k: int, how: Quantization, exact: bool
) -> QuantizedMatrix | None:
    """The matrix ``prefix`` of ``n`` outputs and ``k`` inputs, or None where the file has plain weights of it. ``exact``:
    see Fp8Matrix. Raises KvernError naming the tensor that is missing or does not fit."""
    if reader.stored(f"{prefix}.qweight"):
        return _awq(reader, prefix, n, k, how) if how.method == "awq" else _gptq(reader, prefix, n, k, how)
    if packed := reader.stored(f"{prefix}.weight_packed"):
        if packed[1] == torch.uint8:
            return Mxfp4Matrix(
                reader.raw(f"{prefix}.weight_packed", n, k // 2),
                reader.raw(f"{prefix}.weight_scale", n, k // 32).view(torch.uint8),
            )
        return _packed(reader, prefix, n, k, how)
    weight = reader.stored(f"{prefix}.weight")
    if weight is None or weight[1] not in (torch.int8, torch.float8_e4m3fn):
        return None
    codes = reader.raw(f"{prefix}.weight", n, k)
    if weight[1] == torch.int8:
        return Int8Matrix(codes, _scales(reader, prefix, n, k, blocks=False), how.activations)
    return Fp8Matrix(codes, _scales(reader, prefix, n, k, blocks=True), exact)


def _gptq(reader: Reader, prefix: str, n: int, k: int, how: Quantization) -> GptqMatrix:
    fields, groups = 32 // how.bits, _groups(prefix, k, how)
    _divides(prefix, n, k, fields)
    index = f"{prefix}.g_idx"
    return GptqMatrix(
        reader.raw(f"{prefix}.qweight", k // fields, n),
        reader.raw(f"{prefix}.qzeros", groups, n // fields),
        reader.raw(f"{prefix}.scales", groups, n),
        _group_index(reader.raw(index, k), groups, index) if reader.stored(index) else None,
        *(how.bits, how.zero_offset),
    )


def _awq(reader: Reader, prefix: str, n: int, k: int, how: Quantization) -> AwqMatrix:
    groups = _groups(prefix, k, how)
    _divides(prefix, n, k, 8)
    return AwqMatrix(
        reader.raw(f"{prefix}.qweight", k, n // 8),
        reader.raw(f"{prefix}.qzeros", groups, n // 8),
        reader.raw(f"{prefix}.scales", groups, n),
    )


def _packed(reader: Reader, prefix: str, n: int, k: int, how: Quantization) -> GptqMatrix:
    """compressed-tensors packs as GPTQ does, transposed: weight_packed [N, K·bits/32], weight_scale [N, G], and
    weight_zero_point [N·bits/32, G]. Codes and zero points are both stored with 2^(bits − 1) added."""
    fields, groups = 32 // how.bits, _groups(prefix, k, how)
    _divides(prefix, n, k, fields)
    zeros, index = f"{prefix}.weight_zero_point", f"{prefix}.weight_g_idx"
    if reader.stored(zeros):
        qzeros = reader.raw(zeros, n // fields, groups).t().contiguous()
    else:
        word = {4: 0x88888888, 8: 0x80808080}[how.bits] - (1 << 32)
        qzeros = torch.full((groups, n // fields), word, dtype=torch.int32)
    return GptqMatrix(
        reader.raw(f"{prefix}.weight_packed", n, k // fields).t().contiguous(),
        qzeros,
        reader.raw(f"{prefix}.weight_scale", n, groups).t().contiguous(),
        _group_index(reader.raw(index, k), groups, index) if reader.stored(index) else None,
        *(how.bits, 0),
    )


def _scales(reader: Reader, prefix: str, n: int, k: int, *, blocks: bool) -> Tensor:
    """float32 [n], or [⌈n/128⌉, ⌈k/128⌉]."""
    name = f"{prefix}.weight_scale"
    if reader.stored(f"{name}_inv"):
        name = f"{name}_inv"
    found = reader.stored(name)
    shape = found[0] if found else (n, 1)
    # A block's shape goes before a channel's: they are the same only where both mean the same.
    block = (-(-n // FP8_BLOCK), -(-k // FP8_BLOCK))
    if blocks and shape == block and shape not in ((1, 1), (n, 1)):
        return reader.raw(name, *block).float()
    if shape in ((), (1,), (1, 1)):
        return reader.raw(name, *shape).float().view(1).expand(n).contiguous()
    return reader.raw(name, *(shape if shape == (n,) else (n, 1))).float().view(n)


def _group_index(index: Tensor, groups: int, name: str) -> Tensor:
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < groups:
        raise invalid(
            "model",
            f"tensor {name} names groups {int(index.min())} to {int(index.max())}, there are {groups}",
            value=int(index.max()),
            limit=groups,
        )
    return index


def _groups(prefix: str, k: int, how: Quantization) -> int:
    return -(-k // how.group_size) if how.group_size else 1


def _divides(prefix: str, n: int, k: int, fields: int) -> None:
    if n % fields or k % fields:
        raise invalid(
            "model",
            f"{prefix} has {n} outputs and {k} inputs; packed integers hold {fields}, and both must be multiples of it",
            value=n if n % fields else k,
            limit=fields,
        )
