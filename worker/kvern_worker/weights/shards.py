"""A rank's part of a quantized matrix: codes, and the scales that belong to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import singledispatch

import torch
from torch import Tensor

from kvern.errors import invalid
from kvern_kernels.reference_gguf import GGUF_BLOCK_BYTES, gguf_block_length
from kvern_worker.weights.quantized import (
    FP8_BLOCK,
    AwqMatrix,
    Fp8Matrix,
    GgufMatrix,
    GptqMatrix,
    Int8Matrix,
    Mxfp4Matrix,
    QuantizedMatrix,
)
from kvern_worker.weights.source import WHOLE, Part


def cut(matrix: QuantizedMatrix, part: Part, name: str) -> QuantizedMatrix:
    """``part`` of ``matrix``, which is the tensor ``name``. Raises KvernError where values that share a scale, a byte or
    a word would come to lie on two ranks."""
    return matrix if part == WHOLE else _cut(matrix, part, name)


@singledispatch
def _cut(matrix: QuantizedMatrix, part: Part, name: str) -> QuantizedMatrix:
    raise TypeError(type(matrix))


@_cut.register
def _(matrix: GptqMatrix, part: Part, name: str) -> QuantizedMatrix:
    fields, inputs = 32 // matrix.bits, matrix.qweight.shape[0] * 32 // matrix.bits
    columns, groups = _grouped(part, inputs, len(matrix.scales), fields, name)
    index = matrix.g_idx
    if index is not None and columns is not None:
        size = inputs // len(matrix.scales)
        if not torch.equal(index.long(), torch.arange(inputs) // size):
            raise _across(name, "groups in the order of activations (desc_act)", inputs)
        # In order, as it is without an index.
        index = None
    outputs = _divided(part.rows, fields, name)
    return replace(
        matrix,
        qweight=_select(matrix.qweight, _divide(columns, fields), part.rows),
        qzeros=_select(matrix.qzeros, groups, outputs),
        scales=_select(matrix.scales, groups, part.rows),
        g_idx=index,
    )


@_cut.register
def _(matrix: AwqMatrix, part: Part, name: str) -> QuantizedMatrix:
    columns, groups = _grouped(part, len(matrix.qweight), len(matrix.scales), 1, name)
    outputs = _divided(part.rows, 8, name)
    return AwqMatrix(
        _select(matrix.qweight, columns, outputs),
        _select(matrix.qzeros, groups, outputs),
        _select(matrix.scales, groups, part.rows),
    )


@_cut.register
def _(matrix: Int8Matrix, part: Part, name: str) -> QuantizedMatrix:
    scales = Part(part.rows).of(matrix.scales)
    return replace(matrix, weight=part.of(matrix.weight).contiguous(), scales=scales)


@_cut.register
def _(matrix: Fp8Matrix, part: Part, name: str) -> QuantizedMatrix:
    # torch concatenates bytes, not float8.
    weight = part.of(matrix.weight.view(torch.uint8)).contiguous().view(matrix.weight.dtype)
    scales = Part(part.rows)
    if matrix.scales.dim() == 2:
        columns = _divided(None if part.columns is None else [part.columns], FP8_BLOCK, name)
        scales = Part(_divided(part.rows, FP8_BLOCK, name), columns[0] if columns else None)
    return replace(matrix, weight=weight, scales=scales.of(matrix.scales).contiguous())


@_cut.register
def _(matrix: Mxfp4Matrix, part: Part, name: str) -> QuantizedMatrix:
    groups = _divided(None if part.columns is None else [part.columns], 32, name)
    scales = Part(part.rows, groups[0] if groups else None)
    return Mxfp4Matrix(
        Part(part.rows, _divide(part.columns, 2)).of(matrix.blocks).contiguous(),
        scales.of(matrix.scales).contiguous(),
    )


@_cut.register
def _(matrix: GgufMatrix, part: Part, name: str) -> QuantizedMatrix:
    blocks = _divided(None if part.columns is None else [part.columns], gguf_block_length(matrix.kind), name)
    size = GGUF_BLOCK_BYTES[matrix.kind]
    columns = slice(blocks[0].start * size, blocks[0].stop * size) if blocks else None
    return replace(matrix, blocks=Part(part.rows, columns).of(matrix.blocks).contiguous())


def _grouped(
    part: Part, inputs: int, groups: int, fields: int, name: str
) -> tuple[slice | None, slice | None]:
    """The inputs kept, and their groups, of which there are ``groups`` in all."""
    if part.columns is None:
        return None, None
    _divided([part.columns], fields, name)
    if groups == 1:
        return part.columns, None
    size = -(-inputs // groups)
    return part.columns, (_divided([part.columns], size, name) or [slice(0)])[0]


def _select(tensor: Tensor, inputs: slice | None, outputs: Sequence[slice] | None) -> Tensor:
    """Of a tensor whose rows are inputs and whose columns are outputs."""
    kept = tensor if inputs is None else tensor[inputs]
    return (kept if outputs is None else torch.cat([kept[:, one] for one in outputs], 1)).contiguous()


def _divided(ranges: Sequence[slice] | None, by: int, name: str) -> Sequence[slice] | None:
    for one in ranges or []:
        if one.start % by or one.stop % by:
            raise _across(name, f"{by} values that are stored together", one.stop - one.start)
    return None if ranges is None else [slice(one.start // by, one.stop // by) for one in ranges]


def _divide(one: slice | None, by: int) -> slice | None:
    return None if one is None else slice(one.start // by, one.stop // by)


def _across(name: str, what: str, size: int) -> Exception:
    return invalid(
        "tensor_parallel_size",
        f"tensor {name} cannot be split over these ranks: {what} would lie on two of them ({size} values a rank); choose "
        "a smaller --tensor-parallel-size",
        value=size,
    )
