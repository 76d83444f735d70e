"""The blocks of a decoder as the one op ``kernels.run_decoder``, where they are of the kind that it knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

import kvern_kernels as kernels
from kvern_kernels.decoder import DecoderLayer, Mixture
from kvern_worker.layers.attention import StepInputs
from kvern_worker.layers.mlp import GatedMlp
from kvern_worker.layers.moe import MixtureOfExperts
from kvern_worker.layers.norm import Norm, RmsNorm, no_norm
from kvern_worker.layers.self_attention import SelfAttention

if TYPE_CHECKING:
    from kvern_worker.layers.decoder import Block


def pack_stack(blocks: Sequence[Block]) -> kernels.Decoder | None:
    """None unless each block has RMS norms before plain attention and a gated MLP or experts, and all share what the op
    has once for all layers."""
    layers = [layer for block in blocks if (layer := _layer(block)) is not None]
    attentions = [block.attention for block in blocks if isinstance(block.attention, SelfAttention)]
    activations = {block.mlp.activation for block in blocks if isinstance(block.mlp, GatedMlp)}
    if (
        not layers
        or len(layers) < len(blocks)
        or len(activations) > 1
        or len(set(map(_shared, attentions))) > 1
    ):
        return None
    first = attentions[0]
    kv_heads, dim = first.keys.shape[1], first.keys.shape[3]
    return kernels.pack_decoder(
        layers,
        first.cos_sin,
        first.qkv.out_features // dim - 2 * kv_heads,
        first.eps,
        first.options.scale,
        first.options.softcap,
        interleaved=first.interleaved,
        gelu=kernels.gelu_and_mul in activations,
    )


def run_stack(stack: kernels.Decoder, hidden: Tensor, step: StepInputs) -> tuple[Tensor, Tensor]:
    """See ``kernels.run_decoder``."""
    return kernels.run_decoder(
        *(stack, hidden, step.positions, step.slot_mapping),
        *(step.block_tables, step.query_start, step.seq_lens),
    )


def _shared(attention: SelfAttention) -> tuple[object, ...]:
    """What the op has once for all layers."""
    options = attention.options
    return (
        *(attention.cos_sin.data_ptr(), attention.qkv.out_features, attention.keys.shape),
        *(attention.eps, attention.interleaved, options.scale, options.softcap),
    )


def _layer(block: Block) -> DecoderLayer | None:
    attention, before, after = block.attention, block.pre_attention, block.pre_mlp
    if not (
        isinstance(attention, SelfAttention)
        and _is_plain(attention)
        and isinstance(before, RmsNorm)
        and isinstance(after, RmsNorm)
        and before.eps == after.eps == attention.eps
        and block.post_attention is block.post_mlp is no_norm
        and block.multiplier == 1.0
        and not block.parallel
    ):
        return None
    dense, mixture = _dense(block.mlp), _mixture(block.mlp)
    if dense is mixture is None:
        return None
    return DecoderLayer(
        input_norm=before.weight,
        qkv=attention.qkv,
        o=attention.o,
        post_norm=after.weight,
        gate_up=None if dense is None else dense.gate_up,
        down=None if dense is None else dense.down,
        keys=attention.keys,
        values=attention.values,
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        window=attention.options.window,
        mixture=mixture,
        q_whole_norm=_weight(attention.q_whole_norm),
        k_whole_norm=_weight(attention.k_whole_norm),
        sinks=attention.options.sinks,
    )


def _is_plain(attention: SelfAttention) -> bool:
    options, whole = attention.options, (attention.q_whole_norm, attention.k_whole_norm)
    return (
        attention.temperature is None
        and options.alibi is None
        and options.causal
        and options.k_scale == options.v_scale == 1.0
        and all(norm is None or (isinstance(norm, RmsNorm) and norm.eps == attention.eps) for norm in whole)
    )


def _weight(norm: Norm | None) -> Tensor | None:
    return norm.weight if isinstance(norm, RmsNorm) else None


def _dense(mlp: object) -> GatedMlp | None:
    known = (kernels.silu_and_mul, kernels.gelu_and_mul)
    return mlp if isinstance(mlp, GatedMlp) and mlp.activation in known else None


def _mixture(mlp: object) -> Mixture | None:
    if not isinstance(mlp, MixtureOfExperts) or mlp.shared is not None:
        return None
    how = mlp.routing
    return Mixture(
        *(mlp.router, mlp.experts, how.top_k, how.scoring, how.renormalize, mlp.bias),
        *(how.num_groups, how.top_groups, how.scale),
    )
