"""Normalization over the last dimension, as modules that hold their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

import kvern_kernels as kernels
from kvern_worker.weights.loader import WeightLoader


class Norm(Protocol):
    """x [T, D] → the same shape and dtype."""

    def __call__(self, x: Tensor) -> Tensor: ...


def no_norm(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """``weight`` [D] float32. (arXiv 1910.07467)"""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """``weight``, ``bias`` [D] float32. (arXiv 1607.06450)"""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)


def load_rms_norm(loader: WeightLoader, name: str, size: int, eps: float, offset: float = 0.0) -> RmsNorm:
    """``name``.weight; Gemma stores weights less 1, which is ``offset``."""
    return RmsNorm(loader.wide(f"{name}.weight", size) + offset, eps)


def load_layer_norm(loader: WeightLoader, name: str, size: int, eps: float, bias: bool = True) -> LayerNorm:
    """``name``.weight and ``name``.bias."""
    return LayerNorm(
        loader.wide(f"{name}.weight", size), loader.wide(f"{name}.bias", size) if bias else None, eps
    )
