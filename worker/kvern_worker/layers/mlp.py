"""Feed-forward layers and their activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import kvern_kernels as kernels
from kvern_worker.parallel.group import ALONE, TensorParallel
from kvern_worker.weights.loader import WeightLoader

Activation = Callable[[Tensor], Tensor]


def _silu(x: Tensor) -> Tensor:
    """x·σ(x)."""
    wide = x.float()
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


def _gelu(x: Tensor) -> Tensor:
    """x·Φ(x)."""
    wide = x.float()
    return (0.5 * wide * (1 + torch.erf(wide * math.sqrt(0.5)))).to(x.dtype)


def _gelu_tanh(x: Tensor) -> Tensor:
    """GELU with the tanh of the original paper (arXiv 1606.08415)."""
    wide = x.float()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1 + torch.tanh(inner))).to(x.dtype)


# [T, I] → [T, I]. Made of operations that give an element the same bits wherever in a tensor it is: F.silu, F.gelu and
# torch.sigmoid round the last elements otherwise.
ACTIVATIONS: dict[str, Activation] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": torch.relu,
}


def gate(activation: str) -> Activation:
    """[T, 2 I] → activation of the first half times the second, [T, I]."""
    if activation == "silu":
        return kernels.silu_and_mul
    if activation == "gelu_tanh":
        return kernels.gelu_and_mul
    plain = ACTIVATIONS[activation]

    def gated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return plain(first) * second

    return gated


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """x → down(activation(gate(x)) · up(x)); ``gate_up`` is both, one after the other."""

    gate_up: kernels.PackedLinear
    down: kernels.PackedLinear
    activation: Activation
    tp: TensorParallel = ALONE

    def __call__(self, x: Tensor) -> Tensor:
        return self.tp.linear(self.activation(kernels.linear(x, self.gate_up)), self.down)


@dataclass(frozen=True, slots=True)
class Mlp:
    """x → down(activation(up(x)))."""

    up: kernels.PackedLinear
    down: kernels.PackedLinear
    activation: Activation

    def __call__(self, x: Tensor) -> Tensor:
        return kernels.linear(self.activation(kernels.linear(x, self.up)), self.down)


def load_gated_mlp(
    loader: WeightLoader, prefix: str, hidden: int, inner: int, activation: str = "silu", bias: bool = False
) -> GatedMlp:
    """``gate_proj``, ``up_proj`` and ``down_proj`` under ``prefix``."""
    part = loader.tp.part(inner, "inner features")
    return GatedMlp(
        gate_up=loader.linear(
            *([f"{prefix}.gate_proj", f"{prefix}.up_proj"], [inner, inner], hidden, bias),
            rows=loader.tp.split([[part], [part]]),
        ),
        down=loader.linear([f"{prefix}.down_proj"], [hidden], inner, bias, columns=loader.tp.split(part)),
        activation=gate(activation),
        tp=loader.tp,
    )


def load_fused_mlp(
    loader: WeightLoader, gate_up: str, down: str, hidden: int, inner: int, activation: str = "silu"
) -> GatedMlp:
    """``gate_up`` [2 inner, hidden], the gate's rows first, and ``down``; no biases."""
    part = loader.tp.part(inner, "inner features")
    return GatedMlp(
        gate_up=loader.linear(
            *([gate_up], [2 * inner], hidden, False),
            rows=loader.tp.split([[part, slice(part.start + inner, part.stop + inner)]]),
        ),
        down=loader.linear([down], [hidden], inner, False, columns=loader.tp.split(part)),
        activation=gate(activation),
        tp=loader.tp,
    )
