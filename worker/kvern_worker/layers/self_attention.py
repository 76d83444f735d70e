"""Multi-head, multi-query and grouped-query attention on the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

import kvern_kernels as kernels
from kvern_worker.config import DecoderConfig
from kvern_worker.layers.attention import KvCache, StepInputs
from kvern_worker.layers.norm import Norm
from kvern_worker.parallel.group import ALONE, TensorParallel
from kvern_worker.weights.loader import WeightLoader


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """x [T, hidden] → [T, hidden].

    ``qkv`` projects to the query, key and value heads one after the other. ``cos_sin``: [positions, rotary] float32,
    rotary 0 where positions aren't rotated. ``q_norm``, ``k_norm``: [head_dim], an RMS norm of each head.
    ``q_whole_norm``, ``k_whole_norm``: norms of all heads together.
    ``interleaved``: components 2i and 2i + 1 turn together, instead of the two halves. ``temperature``: [positions], a
    factor on queries.
    """

    qkv: kernels.PackedLinear
    o: kernels.PackedLinear
    keys: Tensor
    values: Tensor
    cos_sin: Tensor
    options: kernels.AttentionOptions
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6
    q_whole_norm: Norm | None = None
    k_whole_norm: Norm | None = None
    interleaved: bool = False
    temperature: Tensor | None = None
    tp: TensorParallel = ALONE

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        kv_heads, dim = self.keys.shape[1], self.keys.shape[3]
        kv_size = kv_heads * dim
        projected = kernels.linear(x, self.qkv)
        q, k, v = projected.split_with_sizes([projected.shape[1] - 2 * kv_size, kv_size, kv_size], 1)
        if self.q_whole_norm is not None and self.k_whole_norm is not None:
            q, k = self.q_whole_norm(q), self.k_whole_norm(k)
        q, k, v = (part.unflatten(1, (-1, dim)) for part in (q, k, v))
        if self.temperature is not None:
            q = (q * self.temperature[step.positions, None, None]).to(q.dtype)
        q = kernels.rope_and_store(
            *(q, k, v, step.positions, self.cos_sin, step.slot_mapping, self.keys, self.values),
            interleaved=self.interleaved,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=self.eps,
        )
        mixed = kernels.paged_attention(
            *(q, self.keys, self.values, step.block_tables, step.query_start, step.seq_lens),
            self.options,
        )
        return self.tp.linear(mixed.flatten(1), self.o)


def load_self_attention(
    config: DecoderConfig,
    loader: WeightLoader,
    cache: KvCache,
    layer: int,
    cos_sin: Tensor,
    *,
    prefix: str,
    fused: bool = False,
    norm_offset: float = 0.0,
    scale: float | None = None,
    softcap: float = 0.0,
    q_whole_norm: Norm | None = None,
    k_whole_norm: Norm | None = None,
    sinks: Tensor | None = None,
    interleaved: bool = False,
) -> SelfAttention:
    """``q_proj``, ``k_proj``, ``v_proj`` (or ``qkv_proj``, if ``fused``), ``o_proj``, and per-head norms where the
    configuration has them. ``scale``: 1/√head_dim by default."""
    sizes = [config.q_size, config.kv_size, config.kv_size]
    names = [f"{prefix}.qkv_proj"] if fused else [f"{prefix}.{name}_proj" for name in "qkv"]
    keys, values = cache.layers[layer]
    q_part = loader.tp.part(config.q_size)
    kv_part = loader.tp.kv_part(config.num_kv_heads, config.head_dim)
    rows = [[q_part], [kv_part], [kv_part]]
    if fused:
        starts = (0, config.q_size, config.q_size + config.kv_size)
        rows = [[_moved(part, start) for (part,), start in zip(rows, starts, strict=True)]]

    def norm(name: str) -> Tensor | None:
        if not config.qk_norm:
            return None
        return loader.wide(f"{prefix}.{name}.weight", config.head_dim) + norm_offset

    return SelfAttention(
        qkv=loader.linear(
            *(names, [sum(sizes)] if fused else sizes, config.hidden_size, config.qkv_bias),
            rows=loader.tp.split(rows),
        ),
        o=loader.linear(
            *([f"{prefix}.o_proj"], [config.hidden_size], config.q_size, config.o_bias),
            columns=loader.tp.split(q_part),
        ),
        keys=keys,
        values=values,
        cos_sin=cos_sin,
        options=kernels.AttentionOptions(
            scale=config.head_dim**-0.5 if scale is None else scale,
            window=config.windows[layer],
            softcap=softcap,
            sinks=sinks,
        ),
        q_norm=norm("q_norm"),
        k_norm=norm("k_norm"),
        eps=config.rms_norm_eps,
        q_whole_norm=q_whole_norm,
        k_whole_norm=k_whole_norm,
        interleaved=interleaved,
        tp=loader.tp,
    )


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
