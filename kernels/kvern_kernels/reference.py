"""What every op means, in plain torch: float32 arithmetic, the result in the input's dtype.

It is the oracle of the tests and the fallback where no faster backend serves. It is written to be
read, not to be fast. Shapes: T tokens of a step, S sequences, Hq query and Hkv key/value heads,
D head size, I the inner width of an MLP.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvern_kernels import kv_cache
from kvern_kernels.attention_options import AttentionOptions
from kvern_kernels.decoder import Decoder, DecoderLayer, run_layers
from kvern_kernels.reference_gguf import GGUF_BLOCK_BYTES as GGUF_BLOCK_BYTES
from kvern_kernels.reference_gguf import dequantize_gguf as dequantize_gguf
from kvern_kernels.reference_gguf import gguf_shape as gguf_shape

NAME = "reference"
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer as it came: `weight` [N, K], `bias` [N] or None.

    `activations` says how x is quantized before the product (see reference_quant.requantized). `delta`: None, or what
    changes the output: `delta.add(x, out)`, called by `linear`, which does nothing unless `delta.active`.
    """

    weight: Tensor
    bias: Tensor | None
    activations: str | None = None
    delta: Any = None

    @property
    def num_bytes(self) -> int:
        bias = 0 if self.bias is None else self.bias.nbytes
        return self.weight.nbytes + bias

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Keep `weight` [N, K] and `bias` [N] for `linear`."""
    return PackedLinear(weight, bias)


def pack_gguf(blocks: Tensor, kind: str, bias: Tensor | None = None) -> PackedLinear:
    """Keep a GGUF matrix, uint8 [N, bytes of a row] of a `kind` in GGUF_BLOCK_BYTES, for `linear`."""
    return PackedLinear(dequantize_gguf(blocks, kind), bias)


def linear(x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [T, K] → x·Wᵀ + b, [T, N], in `out_dtype`, x's own by default."""
    bias = None if packed.bias is None else packed.bias.float()
    wide = requantized(x, packed.activations)
    out = F.linear(wide, packed.weight.float(), bias).to(out_dtype or x.dtype)
    if packed.delta is not None:
        packed.delta.add(x, out)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] divided by its root mean square over D, times weight [D]."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both [T, D] in x's dtype; inputs stay as they are."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, eps), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., D] less its mean over D, divided by its standard deviation, times weight [D], plus bias [D]."""
    wide = None if bias is None else bias.float()
    return F.layer_norm(x.float(), weight.shape, weight.float(), wide, eps).to(x.dtype)


def rotary(x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False) -> Tensor:
    """x [T, H, D] rotated as by rope_and_store."""
    return rotate(x.float(), positions, cos_sin, interleaved).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of x [T, H, D] (float32): pairs (i, i + R/2), or (2i, 2i + 1) if interleaved."""
    rotary = cos_sin.shape[1]
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    turned, rest = x[..., :rotary], x[..., rotary:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned, rest), -1)


def rope_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] (after an RMS norm over D where a weight [D] is given),
    write k and v [T, Hkv, Dv] at their slots (block * block_size + offset; -1 is skipped), return the rotated q.

    `cos_sin` [max_positions, R] float32: the first half of a row is cosines, the second sines; R ≤ D.
    """
    wide_q = q.float() if q_norm is None else rms_norm(q.float(), q_norm, eps)
    wide_k = k.float() if k_norm is None else rms_norm(k.float(), k_norm, eps)
    wide_q = rotate(wide_q, positions, cos_sin, interleaved)
    wide_k = rotate(wide_k, positions, cos_sin, interleaved)
    store_kv(wide_k, v, slot_mapping, k_cache, v_cache, k_scale, v_scale)
    return wide_q.to(q.dtype)


def store_kv(
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write k / k_scale and v / v_scale [T, Hkv, D] at their slots (block * block_size + offset; -1 is
    skipped), saturated where the cache is float8_e4m3fn.
    """
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block_size = k_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    for cache, given, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        kv_cache.write_tokens(cache, blocks, offsets, given[kept].float() / scale)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    options: AttentionOptions,
    lse: Tensor | None = None,
    key_ends: Tensor | None = None,
) -> Tensor:
    """Attention of q [T, Hq, D] over the paged cache → [T, Hq, Dv], the values' head size.

    Sequence s owns query rows query_start[s] … query_start[s+1] (int32 [S+1]); they are the last of its
    seq_lens[s] keys (int32 [S]), which lie in blocks block_tables[s] (int32 [S, max_blocks]). `lse`
    (float32 [T, Hq]), if given, receives the natural logarithm of what the exponentials sum to, sinks
    included. `key_ends` (int32 [T]): query t also sees the keys from its own up to key_ends[t] (of its
    sequence, and no more than that has), as the tokens of one image do.
    """
    out = q.new_empty((*q.shape[:2], v_cache.shape[3]))
    block_size, kv_heads = k_cache.shape[2], k_cache.shape[1]
    group = q.shape[1] // kv_heads
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    for s, length in enumerate(lengths):
        rows = slice(starts[s], starts[s + 1])
        count = rows.stop - rows.start
        if count == 0:
            continue
        blocks = block_tables[s, : -(-length // block_size)].long()
        keys, values = (
            kv_cache.read_blocks(cache, blocks).transpose(1, 2).flatten(0, 1)[:length].transpose(0, 1)
            * factor
            for cache, factor in ((k_cache, options.k_scale), (v_cache, options.v_scale))
        )  # [Hkv, length, D]
        queries = q[rows].float().transpose(0, 1).unflatten(0, (kv_heads, group))
        scores = torch.einsum("hgqd,hkd->hgqk", queries, keys) * options.scale
        if options.softcap > 0:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        key_at = torch.arange(length, device=q.device)
        query_at = torch.arange(length - count, length, device=q.device).unsqueeze(1)
        if options.alibi is not None:
            scores += options.alibi.view(kv_heads, group, 1, 1) * (key_at - query_at)
        seen = seen_keys(key_at - query_at, options)
        if key_ends is not None:
            seen |= (key_at >= query_at) & (key_at < key_ends[rows].unsqueeze(1))
        scores = scores.masked_fill(~seen, float("-inf"))
        total = scores.logsumexp(-1, keepdim=True)
        if options.sinks is not None:
            total = torch.logaddexp(total, options.sinks.float().view(kv_heads, group, 1, 1))
        mixed = torch.einsum("hgqk,hkd->hgqd", (scores - total).exp(), values)
        out[rows] = mixed.flatten(0, 1).transpose(0, 1).to(q.dtype)
        if lse is not None:
            lse[rows] = total.flatten(0, 1).squeeze(-1).transpose(0, 1)
    return out


def seen_keys(distance: Tensor, options: AttentionOptions) -> Tensor:
    """Which keys are seen at a `distance`, key position - query position (any shape)."""
    seen = distance <= 0 if options.causal else torch.ones_like(distance, dtype=torch.bool)
    return seen & (distance.abs() < options.window) if options.window > 0 else seen


def merge_attention(parts: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over disjoint sets of keys, `parts` [P, T, Hq, D] with `lses` float32 [P, T, Hq], as one:
    (out [T, Hq, D], lse [T, Hq]). A part that saw no key has lse -inf; where all have, out is 0.
    """
    lse = lses.logsumexp(0)
    weights = (lses - lse.masked_fill(lse.isneginf(), 0)).exp().unsqueeze(-1)
    mixed = torch.where(weights > 0, parts.float() * weights, 0).sum(0)
    return mixed.to(parts.dtype), lse


def silu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2I] → silu(x[:, :I]) · x[:, I:], [T, I]."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def gelu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2I] → gelu(x[:, :I]) · x[:, I:], [T, I], with the tanh form of GELU (Gemma's)."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)


def swiglu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2I] → g·sigmoid(1.702 g)·(u + 1), [T, I], with g = x[:, :I] up to 7 and u = x[:, I:] within ±7
    (GPT-OSS).
    """
    return gated(x.float(), "swiglu_oai").to(x.dtype)


def copy_blocks(k_cache: Tensor, v_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy block sources[i] onto targets[i] (int64 [n]); all sources are read before any is written."""
    kv_cache.copy(k_cache, sources, targets)
    kv_cache.copy(v_cache, sources, targets)


def new_kv_cache(
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    value_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Zeroed (keys, values) as kv_cache describes them; on a CPU, memory is taken when first written. `value_dim`:
    the head size of the values, where it differs."""
    pair = []
    for dim, transposed in ((head_dim, True), (value_dim or head_dim, False)):
        sizes = (num_blocks, num_kv_heads, block_size, dim)
        count = kv_cache.elements(*sizes, dtype)
        if torch.device(device).type == "cpu":
            pair.append(kv_cache.shape_memory(_untouched_zeros(count, dtype), *sizes, transposed))
        else:
            pair.append(kv_cache.shape_memory(torch.zeros(count, dtype=dtype, device=device), *sizes, False))
    return pair[0], pair[1]


def _untouched_zeros(count: int, dtype: torch.dtype) -> Tensor:
    """Zeros that cost no memory yet: torch.zeros writes them, numpy's come from calloc. 64-byte aligned."""
    size = count * dtype.itemsize
    buffer = np.zeros(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return torch.from_numpy(buffer)[start : start + size].view(dtype)


def pack_decoder(
    layers: Sequence[DecoderLayer],
    cos_sin: Tensor,
    num_heads: int,
    eps: float,
    scale: float,
    softcap: float = 0.0,
    interleaved: bool = False,
    gelu: bool = False,
) -> Decoder:
    """Prepare `layers` for run_decoder. The tensors must stay where they are in memory."""
    return Decoder(layers, cos_sin, num_heads, eps, scale, softcap, interleaved, gelu)


def run_decoder(
    decoder: Decoder,
    hidden: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
) -> tuple[Tensor, Tensor]:
    """hidden [T, D] through all layers → (hidden, residual), [T, D] each; their sum is the result, to be
    normed by add_rms_norm. The other arguments are those of rope_and_store and paged_attention.
    """
    step = (positions, slot_mapping, block_tables, query_start, seq_lens)
    return run_layers(sys.modules[__name__], decoder, hidden, *step)


# Last, since they build on the ops above.
from kvern_kernels.reference_lora import lora_expand, lora_plan, lora_shrink  # noqa: E402, F401
from kvern_kernels.reference_moe import fused_moe, gated, moe_route, pack_experts  # noqa: E402, F401
from kvern_kernels.reference_quant import (  # noqa: E402, F401
    pack_awq,
    pack_fp8,
    pack_gptq,
    pack_int8,
    pack_mxfp4,
    quantize_fp8,
    quantize_int8,
    requantized,
)
from kvern_kernels.reference_sampling import (  # noqa: E402, F401
    gather_logprobs,
    mask_logits,
    penalize_logits,
    philox_uniform,
    sample,
)
from kvern_kernels.reference_states import causal_conv, gated_delta_scan, mamba_scan  # noqa: E402, F401
