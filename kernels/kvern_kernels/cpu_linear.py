"""The C++ backend's linear layers: weights packed once into panels, and their product with rows."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvern_kernels import reference
from kvern_kernels.cpu_base import KV_TYPES, LIBRARY, TYPES, aligned, dense, threads

QUANTIZED, E4M3 = 3, 16
_linear = LIBRARY.kvern_linear


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weights in panels of 16 outputs (layout: csrc/abi.h), bias in float32 padded to whole panels."""

    panels: Tensor
    bias: Tensor | None
    type: int
    in_features: int
    out_features: int
    address: int
    bias_address: int | None
    kept: tuple[Any, ...] = ()  # what the address leads to besides `panels`
    delta: Any = None  # see reference.PackedLinear

    @property
    def num_bytes(self) -> int:
        tensors = [x for x in (self.panels, self.bias, *self.kept) if isinstance(x, Tensor)]
        return sum(x.nbytes for x in tensors)


class Projection(ctypes.Structure):
    """A packed linear layer as the structures of whole layers hold it (csrc/abi.h)."""

    _fields_ = [
        *[("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p)],
        *[("type", ctypes.c_int64), ("n", ctypes.c_int64), ("k", ctypes.c_int64)],
    ]


def projection(p: PackedLinear) -> Projection:
    return Projection(p.address, p.bias_address, p.type, p.out_features, p.in_features)


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear | reference.PackedLinear:
    """Repack weight [N, K] (float32, bfloat16; float16 is widened to float32) and bias [N] once.

    The result owns its memory; `weight` may be freed.
    """
    if weight.device.type != "cpu" or weight.dtype not in TYPES:
        return reference.pack_linear(weight, bias)
    if weight.dtype == torch.float16:
        weight = weight.float()
    weight = weight.contiguous()
    n, k = weight.shape
    return packed_linear(pack_panels(weight), TYPES[weight.dtype], n, k, bias)


def pack_panels(weight: Tensor) -> Tensor:
    """Contiguous weight [N, K] (float32, bfloat16, float8_e4m3fn) → its panels (csrc/abi.h)."""
    n, k = weight.shape
    depth = 1 if weight.dtype == torch.float32 else 32
    panels = aligned(-(-n // 16) * 16 * (-(-k // depth) * depth), weight.dtype)
    LIBRARY.kvern_pack(threads(), weight.data_ptr(), KV_TYPES[weight.dtype], panels.data_ptr(), n, k)
    return panels


def packed_linear(
    panels: Tensor,
    type_: int,
    n: int,
    k: int,
    bias: Tensor | None,
    address: int | None = None,
    kept: tuple[Any, ...] = (),
) -> PackedLinear:
    """What `linear` takes; `address` is that of the panels unless given."""
    padded = None
    if bias is not None:
        padded = torch.zeros(-(-n // 16) * 16)
        padded[:n] = bias
    bias_address = None if padded is None else padded.data_ptr()
    return PackedLinear(panels, padded, type_, k, n, address or panels.data_ptr(), bias_address, kept)


def pack_codes(codes: Tensor, bits: int, panels: Tensor, padded: int) -> None:
    """uint8 codes [N, K] below 2^bits → panels of 4, 6 or 8 bits, K padded (csrc/integers.h)."""
    n, k = codes.shape
    LIBRARY.kvern_pack_codes(threads(), codes.data_ptr(), bits, panels.data_ptr(), n, k, padded)


def dequantize(packed: PackedLinear) -> Tensor:
    """The float32 weights [N, K] of a quantized layer, each with the one rounding of its format."""
    n, k = packed.out_features, packed.in_features
    out = torch.empty(n, k)
    LIBRARY.kvern_dequantize(threads(), packed.address, out.data_ptr(), n, k)
    if len(packed.kept) > 2:  # checkpoints whose inputs were sorted by group
        order = packed.kept[2].long()
        out[:, order] = out.clone()
    return out


def linear(
    x: Tensor, packed: PackedLinear | reference.PackedLinear, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x [T, K] → x·Wᵀ + b, [T, N], in `out_dtype`, x's own by default. Raises ValueError on a wrong width."""
    out_dtype = out_dtype or x.dtype
    x_type, y_type = TYPES.get(x.dtype), TYPES.get(out_dtype)
    if x_type is None or y_type is None or not isinstance(packed, PackedLinear):
        return reference.linear(x, packed, out_dtype)  # type: ignore[arg-type]
    m, k = x.shape
    if k != packed.in_features:
        raise ValueError(f"linear: x has {k} features, the weights take {packed.in_features}")
    x = dense(x)
    n = packed.out_features
    out = torch.empty((m, n), dtype=out_dtype)
    if m:
        _linear(
            *(threads(), x.data_ptr(), x.stride(0), x_type, packed.address, packed.type),
            *(packed.bias_address, out.data_ptr(), y_type, m, n, k),
        )
    if packed.delta is not None:
        packed.delta.add(x, out)
    return out
