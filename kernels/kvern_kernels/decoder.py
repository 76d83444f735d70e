"""A stack of decoder layers as one op: `pack_decoder` once, `run_decoder` per step.

Here are its data and its meaning, op by op; cpu_decoder runs it in one call, which saves some 80 µs of
Python per layer and step, with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvern_kernels.attention_options import AttentionOptions


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts in place of one MLP. `router` is a packed linear, `experts` from pack_experts; the others are
    arguments of moe_route."""

    router: Any
    experts: Any
    top_k: int
    scoring: str = "softmax"
    renormalize: bool = True
    bias: Tensor | None = None
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights and cache of one pre-norm layer (Llama, Mistral, Qwen, Mixtral, OLMoE, GPT-OSS).

    `qkv` projects to the query, key and value heads one after the other, `gate_up` to gate and up. The
    linears come from pack_linear or pack_gguf; `keys` and `values` from new_kv_cache. `window`: 0 or the
    number of keys that a query sees. A layer has `gate_up` and `down`, or a `mixture`. `q_norm` and `k_norm`
    are of each head, `q_whole_norm` and `k_whole_norm` of all heads together; `sinks`: see AttentionOptions.
    """

    input_norm: Tensor
    qkv: Any
    o: Any
    post_norm: Tensor
    gate_up: Any
    down: Any
    keys: Tensor
    values: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    window: int = 0
    mixture: Mixture | None = None
    q_whole_norm: Tensor | None = None
    k_whole_norm: Tensor | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Decoder:
    """What pack_decoder returns."""

    layers: Sequence[DecoderLayer]
    cos_sin: Tensor
    num_heads: int
    eps: float
    scale: float
    softcap: float
    interleaved: bool
    gelu: bool
    structs: Any = None  # ctypes array of _Layer where the C++ stack serves, else None


def run_layers(
    ops: ModuleType,
    decoder: Decoder,
    hidden: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
) -> tuple[Tensor, Tensor]:
    """run_decoder op by op, with the functions of the module `ops`."""
    residual = None
    gate = ops.gelu_and_mul if decoder.gelu else ops.silu_and_mul
    for layer in decoder.layers:
        if residual is None:
            residual, normed = hidden, ops.rms_norm(hidden, layer.input_norm, decoder.eps)
        else:
            normed, residual = ops.add_rms_norm(hidden, residual, layer.input_norm, decoder.eps)
        kv_heads, dim = layer.keys.shape[1], layer.keys.shape[3]
        sizes = [decoder.num_heads * dim, kv_heads * dim, kv_heads * dim]
        q, k, v = ops.linear(normed, layer.qkv).split_with_sizes(sizes, 1)
        if layer.q_whole_norm is not None and layer.k_whole_norm is not None:
            q = ops.rms_norm(q, layer.q_whole_norm, decoder.eps)
            k = ops.rms_norm(k, layer.k_whole_norm, decoder.eps)
        q, k, v = (part.unflatten(1, (-1, dim)) for part in (q, k, v))
        q = ops.rope_and_store(
            *(q, k, v, positions, decoder.cos_sin, slot_mapping, layer.keys, layer.values),
            *(decoder.interleaved, layer.q_norm, layer.k_norm, decoder.eps),
        )
        mixed = ops.paged_attention(
            *(q, layer.keys, layer.values, block_tables, query_start, seq_lens),
            AttentionOptions(decoder.scale, layer.window, decoder.softcap, sinks=layer.sinks),
        )
        hidden = ops.linear(mixed.view(mixed.shape[0], -1), layer.o)
        normed, residual = ops.add_rms_norm(hidden, residual, layer.post_norm, decoder.eps)
        if layer.mixture is None:
            hidden = ops.linear(gate(ops.linear(normed, layer.gate_up)), layer.down)
        else:
            hidden = run_mixture(ops, layer.mixture, normed)
    assert residual is not None
    return hidden, residual


def run_mixture(ops: Any, m: Mixture, x: Tensor) -> Tensor:
    """x [T, D] through each token's experts, with the functions of the module `ops`."""
    logits = ops.linear(x, m.router, torch.float32)
    weights, ids = ops.moe_route(
        *(logits, m.top_k, m.scoring, m.renormalize, m.bias, m.num_groups, m.top_groups, m.scale)
    )
    return ops.fused_moe(x, weights, ids, m.experts)


def run_by_op(decoder: Decoder, hidden: Tensor, *step: Tensor) -> tuple[Tensor, Tensor]:
    """run_decoder op by op, each from the backend that the dispatcher has chosen for it."""
    import kvern_kernels

    return run_layers(kvern_kernels, decoder, hidden, *step)
