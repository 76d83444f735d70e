"""Quantized matrices as checkpoints store them: stacked by outputs, packed for the kernels, or dequantized.

N outputs, K inputs, G groups along K. Each class holds the tensors of a published layout and knows

* ``pack(bias)``: what kernels.linear takes, multiplied by as it is;
* ``dequantize()``: float32 [N, K], the format's own values;
* ``stack(parts)``: several over the same inputs, one below the other, or None where their scales do not go together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import kvern_kernels as kernels
from kvern_kernels import reference, reference_quant

FP8_BLOCK = 128


class QuantizedMatrix(Protocol):
    def pack(self, bias: Tensor | None) -> kernels.PackedLinear: ...

    def dequantize(self) -> Tensor: ...

    @classmethod
    def stack(cls, parts: Sequence[Any]) -> QuantizedMatrix | None: ...


@dataclass(frozen=True, slots=True)
class GptqMatrix:
    """See reference_quant.unpack_gptq. qweight [K·bits/32, N], qzeros [G, N·bits/32], scales [G, N], g_idx [K] or None."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor | None
    bits: int
    zero_offset: int

    def pack(self, bias: Tensor | None) -> kernels.PackedLinear:
        return kernels.pack_gptq(
            *(self.qweight, self.qzeros, self.scales, self.g_idx, bias, self.bits, self.zero_offset)
        )

    def dequantize(self) -> Tensor:
        return reference_quant.pack_gptq(
            *(self.qweight, self.qzeros, self.scales, self.g_idx, None, self.bits, self.zero_offset)
        ).weight

    @classmethod
    def stack(cls, parts: Sequence[GptqMatrix]) -> GptqMatrix | None:
        first = parts[0]
        if any(
            not _equal(part.g_idx, first.g_idx) or len(part.scales) != len(first.scales) for part in parts
        ):
            return None
        return cls(
            torch.cat([part.qweight for part in parts], 1),
            torch.cat([part.qzeros for part in parts], 1),
            torch.cat([part.scales for part in parts], 1),
            *(first.g_idx, first.bits, first.zero_offset),
        )


@dataclass(frozen=True, slots=True)
class AwqMatrix:
    """See reference_quant.unpack_awq. qweight [K, N/8], qzeros [G, N/8], scales [G, N]."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor

    def pack(self, bias: Tensor | None) -> kernels.PackedLinear:
        return kernels.pack_awq(self.qweight, self.qzeros, self.scales, bias)

    def dequantize(self) -> Tensor:
        return reference_quant.pack_awq(self.qweight, self.qzeros, self.scales).weight

    @classmethod
    def stack(cls, parts: Sequence[AwqMatrix]) -> AwqMatrix | None:
        if any(len(part.scales) != len(parts[0].scales) for part in parts):
            return None
        fields = zip(*((part.qweight, part.qzeros, part.scales) for part in parts), strict=True)
        return cls(*(torch.cat(field, 1) for field in fields))


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """weight int8 [N, K], scales float32 [N]; ``activations`` "int8": x is quantized per token too."""

    weight: Tensor
    scales: Tensor
    activations: str | None = None

    def pack(self, bias: Tensor | None) -> kernels.PackedLinear:
        return kernels.pack_int8(self.weight, self.scales, bias, self.activations)

    def dequantize(self) -> Tensor:
        return reference_quant.pack_int8(self.weight, self.scales).weight

    @classmethod
    def stack(cls, parts: Sequence[Int8Matrix]) -> Int8Matrix | None:
        weight = torch.cat([part.weight for part in parts])
        return cls(weight, torch.cat([part.scales for part in parts]), parts[0].activations)


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """weight e4m3 [N, K], scales float32 [N], or a scale a block of 128×128, [⌈N/128⌉, ⌈K/128⌉]. x is not quantized.

    ``exact``: the product meets float32 weights, as float32 x wants them; the kernels keep scale · weight in bfloat16.
    """

    weight: Tensor
    scales: Tensor
    exact: bool = False

    def pack(self, bias: Tensor | None) -> kernels.PackedLinear:
        if self.exact:
            return kernels.pack_linear(self.dequantize(), bias)
        return kernels.pack_fp8(self.weight, self.scales, bias)

    def dequantize(self) -> Tensor:
        return reference_quant.pack_fp8(self.weight, self.scales).weight

    @classmethod
    def stack(cls, parts: Sequence[Fp8Matrix]) -> Fp8Matrix | None:
        blocked = {part.scales.dim() == 2 for part in parts}
        if len(blocked) > 1 or (
            blocked == {True} and any(len(part.weight) % FP8_BLOCK for part in parts[:-1])
        ):
            return None
        # torch concatenates bytes, not float8.
        weight = torch.cat([part.weight.view(torch.uint8) for part in parts]).view(parts[0].weight.dtype)
        return cls(weight, torch.cat([part.scales for part in parts]), parts[0].exact)


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix:
    """See reference_quant.pack_mxfp4. blocks uint8 [N, K/2], scales uint8 [N, K/32]."""

    blocks: Tensor
    scales: Tensor

    def pack(self, bias: Tensor | None) -> kernels.PackedLinear:
        return kernels.pack_mxfp4(self.blocks, self.scales, bias)

    def dequantize(self) -> Tensor:
        return reference_quant.pack_mxfp4(self.blocks, self.scales).weight

    @classmethod
    def stack(cls, parts: Sequence[Mxfp4Matrix]) -> Mxfp4Matrix | None:
        return cls(torch.cat([p.blocks for p in parts]), torch.cat([p.scales for p in parts]))


@dataclass(frozen=True, slots=True)
class GgufMatrix:
    """Blocks of a ggml type, uint8 [N, bytes of a row]."""

    blocks: Tensor
    kind: str

    def pack(self, bias: Tensor | None) -> kernels.PackedLinear:
        return kernels.pack_gguf(self.blocks, self.kind, bias)

    def dequantize(self) -> Tensor:
        return reference.dequantize_gguf(self.blocks, self.kind)

    @classmethod
    def stack(cls, parts: Sequence[GgufMatrix]) -> GgufMatrix | None:
        if any(part.kind != parts[0].kind for part in parts):
            return None
        return cls(torch.cat([part.blocks for part in parts]), parts[0].kind)


def quantize(weight: Tensor, to: str) -> QuantizedMatrix:
    """weight [N, K] of any float dtype, rounded to ``to``, a value of quantization.ONLINE: the largest magnitude of a
    tensor, channel (output) or block of 128×128 becomes the largest code."""
    kind, strategy = to.split()
    wide = weight.float()
    n, k = wide.shape
    if kind == "int8":
        return Int8Matrix(*_codes(reference_quant.quantize_int8(wide)))
    if strategy == "channel":
        codes, scales = _codes(reference_quant.quantize_fp8(wide))
    elif strategy == "tensor":
        codes, scale = reference_quant.quantize_fp8(wide.reshape(1, -1))
        codes, scales = codes.view(n, k), scale.view(1).expand(n).contiguous()
    else:
        rows, columns = -(-n // FP8_BLOCK), -(-k // FP8_BLOCK)
        padded = torch.zeros(rows * FP8_BLOCK, columns * FP8_BLOCK)
        padded[:n, :k] = wide
        blocks = padded.view(rows, FP8_BLOCK, columns, FP8_BLOCK).transpose(1, 2).reshape(rows * columns, -1)
        flat, scales = reference_quant.quantize_fp8(blocks)
        spread = flat.view(rows, columns, FP8_BLOCK, FP8_BLOCK).view(torch.uint8).transpose(1, 2)
        codes = spread.reshape(padded.shape)[:n, :k].contiguous().view(flat.dtype)
        scales = scales.view(rows, columns)
    return Fp8Matrix(codes, scales, exact=weight.dtype == torch.float32)


def _codes(quantized: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    codes, scales = quantized
    return codes, scales.view(-1)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))
