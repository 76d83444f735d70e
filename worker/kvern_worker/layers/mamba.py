"""Mamba-2 (arXiv 2405.21060) as hybrids have it: one state per sequence instead of keys and values.

::

    x → in_proj → gate | convolved: x, b, c | dt        y = scan(x, dt, b, c);  out_proj(norm(y · silu(gate)))
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

import kvern_kernels as kernels
from kvern.errors import invalid
from kvern_worker.config import HfConfig
from kvern_worker.layers.attention import KvCache, StepInputs
from kvern_worker.layers.mlp import ACTIVATIONS
from kvern_worker.weights.loader import WeightLoader


@dataclass(frozen=True, kw_only=True)
class MambaShape:
    """``inner`` = ``heads`` x ``head_dim`` channels; ``groups`` of heads share b and c of ``state`` components.
    ``dt_limit``: bounds of the time step."""

    inner: int
    heads: int
    head_dim: int
    groups: int
    state: int
    conv_width: int
    conv_bias: bool
    bias: bool
    dt_limit: tuple[float, float]

    @property
    def conv_channels(self) -> int:
        return self.inner + 2 * self.groups * self.state

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """The convolution's last inputs, and the scan's state."""
        return (self.conv_width - 1, self.conv_channels), (self.heads, self.head_dim, self.state)


def parse_mamba(raw: HfConfig, hidden: int) -> MambaShape:
    """From the ``mamba_…`` keys of Bamba and Granite. Raises KvernError where heads or groups do not divide."""
    inner, heads = raw.positive("mamba_expand", 2) * hidden, raw.positive("mamba_n_heads", 128)
    groups, head_dim = raw.positive("mamba_n_groups", 1), raw.get("mamba_d_head", "auto")
    head_dim = inner // heads if head_dim in (None, "auto") else head_dim
    if heads * head_dim != inner or heads % groups:
        raise invalid(
            "mamba_n_heads",
            f"{inner} channels do not divide into mamba_n_heads ({heads}) of {head_dim}, or heads into {groups} groups",
            value=heads,
        )
    # JSON has no infinity: transformers 5 writes {"__float__": "Infinity"}.
    limits = [
        float(bound["__float__"] if isinstance(bound, dict) else bound)
        for bound in raw.get("time_step_limit") or (0.0, inf)
    ]
    return MambaShape(
        inner=inner,
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state=raw.positive("mamba_d_state", 256),
        conv_width=raw.positive("mamba_d_conv", 4),
        conv_bias=bool(raw.get("mamba_conv_bias", True)),
        bias=bool(raw.get("mamba_proj_bias", False)),
        dt_limit=(limits[0], limits[1]),
    )


@dataclass(frozen=True, slots=True)
class Mamba:
    """x [T, hidden] → [T, hidden]. ``conv_weight`` [width, channels], ``a`` (negative), ``d``, ``dt_bias`` [heads] and
    ``norm`` [inner] float32; the norm is over each group's channels."""

    shape: MambaShape
    in_proj: kernels.PackedLinear
    out_proj: kernels.PackedLinear
    conv_weight: Tensor
    conv_bias: Tensor | None
    a: Tensor
    d: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    conv_states: Tensor
    scan_states: Tensor

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        how, where = self.shape, (step.query_start, step.state_rows, step.fresh)
        projected = kernels.linear(x, self.in_proj).float()
        gate, mixed, dt = projected.split_with_sizes([how.inner, how.conv_channels, how.heads], 1)
        mixed = kernels.causal_conv(mixed, self.conv_weight, self.conv_bias, self.conv_states, *where)
        side = how.groups * how.state
        inner, b, c = mixed.split_with_sizes([how.inner, side, side], 1)
        b, c = (part.unflatten(1, (how.groups, -1)) for part in (b, c))
        out = kernels.mamba_scan(
            *(inner.unflatten(1, (how.heads, -1)), dt, b, c, self.a, self.d, self.dt_bias),
            how.dt_limit,
            *(self.scan_states, *where),
        )
        gated = out.flatten(1) * ACTIVATIONS["silu"](gate)
        ones = torch.ones(how.inner // how.groups)
        normed = kernels.rms_norm(gated.view(-1, how.inner // how.groups), ones, self.eps).view_as(gated)
        return kernels.linear((normed * self.norm).to(x.dtype), self.out_proj)


def load_mamba(
    loader: WeightLoader, cache: KvCache, layer: int, prefix: str, shape: MambaShape, hidden: int, eps: float
) -> Mamba:
    """``in_proj``, ``conv1d``, ``A_log``, ``D``, ``dt_bias``, ``norm`` and ``out_proj`` under ``prefix``."""
    conv, scan = cache.states[layer]
    sizes = shape.inner + shape.conv_channels + shape.heads
    channels, heads = shape.conv_channels, shape.heads
    return Mamba(
        shape=shape,
        in_proj=loader.linear([f"{prefix}.in_proj"], [sizes], hidden, shape.bias),
        out_proj=loader.linear([f"{prefix}.out_proj"], [hidden], shape.inner, shape.bias),
        conv_weight=load_conv_weight(loader, f"{prefix}.conv1d", channels, shape.conv_width),
        conv_bias=loader.wide(f"{prefix}.conv1d.bias", channels) if shape.conv_bias else None,
        a=-torch.exp(loader.wide(f"{prefix}.A_log", heads)),
        d=loader.wide(f"{prefix}.D", heads),
        dt_bias=loader.wide(f"{prefix}.dt_bias", heads),
        norm=loader.wide(f"{prefix}.norm.weight", shape.inner),
        eps=eps,
        conv_states=conv,
        scan_states=scan,
    )


def load_conv_weight(loader: WeightLoader, name: str, channels: int, width: int) -> Tensor:
    """A depthwise convolution's weight as kernels.causal_conv takes it, [width, channels] float32."""
    return loader.wide(f"{name}.weight", channels, 1, width).squeeze(1).T.contiguous()
