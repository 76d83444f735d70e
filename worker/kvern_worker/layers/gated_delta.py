"""The gated delta net (arXiv 2412.06464) as Qwen3-Next has it: one state per sequence instead of keys and values.

::

    x → q, k, v (convolved) | z | b, a        out_proj(norm(scan(q, k, v, a, b)) · silu(z))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import kvern_kernels as kernels
from kvern.errors import invalid
from kvern_worker.config import HfConfig
from kvern_worker.layers.attention import KvCache, StepInputs
from kvern_worker.layers.mamba import load_conv_weight
from kvern_worker.layers.mlp import ACTIVATIONS
from kvern_worker.weights.loader import WeightLoader


@dataclass(frozen=True, kw_only=True)
class DeltaShape:
    """``key_heads`` of ``key_dim`` for queries and keys, each shared by ``heads`` / ``key_heads`` of ``value_dim``."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.heads * self.value_dim

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """The convolution's last inputs, and the scan's state."""
        return (self.conv_width - 1, 2 * self.keys + self.values), (self.heads, self.key_dim, self.value_dim)


def parse_gated_delta(raw: HfConfig) -> DeltaShape:
    """From the ``linear_…`` keys. Raises KvernError where heads do not divide."""
    key_heads, heads = raw.positive("linear_num_key_heads", 16), raw.positive("linear_num_value_heads", 32)
    if heads % key_heads:
        raise invalid(
            "linear_num_value_heads",
            f"linear_num_value_heads ({heads}) must be a multiple of linear_num_key_heads ({key_heads})",
            value=heads,
        )
    return DeltaShape(
        key_heads=key_heads,
        heads=heads,
        key_dim=raw.positive("linear_key_head_dim", 128),
        value_dim=raw.positive("linear_value_head_dim", 128),
        conv_width=raw.positive("linear_conv_kernel_dim", 4),
    )


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """x [T, hidden] → [T, hidden]. ``in_proj`` gives q, k, v, z, b, a one after the other. ``conv_weight`` [width,
    channels], ``rate`` (negative) and ``dt_bias`` [heads], ``norm`` [value_dim] float32."""

    shape: DeltaShape
    in_proj: kernels.PackedLinear
    out_proj: kernels.PackedLinear
    conv_weight: Tensor
    rate: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    conv_states: Tensor
    scan_states: Tensor

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        how, where = self.shape, (step.query_start, step.state_rows, step.fresh)
        projected = kernels.linear(x, self.in_proj).float()
        sizes = [2 * how.keys + how.values, how.values, how.heads, how.heads]
        mixed, z, b, a = projected.split_with_sizes(sizes, 1)
        mixed = kernels.causal_conv(mixed, self.conv_weight, None, self.conv_states, *where)
        q, k, v = mixed.split_with_sizes([how.keys, how.keys, how.values], 1)
        q, k = (part.unflatten(1, (how.key_heads, -1)) for part in (q, k))
        out = kernels.gated_delta_scan(
            *(q, k, v.unflatten(1, (how.heads, -1)), a, b),
            *(self.rate, self.dt_bias, self.scan_states, *where),
        )
        normed = kernels.rms_norm(out.view(-1, how.value_dim), self.norm, self.eps).view(z.shape)
        return kernels.linear((normed * ACTIVATIONS["silu"](z)).to(x.dtype), self.out_proj)


def load_gated_delta(
    loader: WeightLoader, cache: KvCache, layer: int, prefix: str, shape: DeltaShape, hidden: int, eps: float
) -> GatedDeltaNet:
    """``in_proj_qkvz``, ``in_proj_ba``, ``conv1d``, ``A_log``, ``dt_bias``, ``norm`` and ``out_proj`` under ``prefix``."""
    conv, scan = cache.states[layer]
    return GatedDeltaNet(
        shape=shape,
        in_proj=loader.pack(_ungrouped(loader, prefix, shape, hidden)),
        out_proj=loader.linear([f"{prefix}.out_proj"], [hidden], shape.values, bias=False),
        conv_weight=load_conv_weight(loader, f"{prefix}.conv1d", conv.shape[2], shape.conv_width),
        rate=-torch.exp(loader.wide(f"{prefix}.A_log", shape.heads)),
        dt_bias=loader.wide(f"{prefix}.dt_bias", shape.heads),
        norm=loader.wide(f"{prefix}.norm.weight", shape.value_dim),
        eps=eps,
        conv_states=conv,
        scan_states=scan,
    )


def _ungrouped(loader: WeightLoader, prefix: str, shape: DeltaShape, hidden: int) -> Tensor:
    """The input projections, whose rows the checkpoint has by key head, as [q of all heads, k, v, z, b, a]."""
    each = shape.heads // shape.key_heads
    parts: list[Tensor] = []
    values = each * shape.value_dim
    for name, sizes in (
        ("in_proj_qkvz", [shape.key_dim, shape.key_dim, values, values]),
        ("in_proj_ba", [each, each]),
    ):
        weight = loader.read(f"{prefix}.{name}.weight", shape.key_heads * sum(sizes), hidden)
        grouped = weight.unflatten(0, (shape.key_heads, -1)).split_with_sizes(sizes, 1)
        parts += [part.flatten(0, 1) for part in grouped]
    return torch.cat(parts)
