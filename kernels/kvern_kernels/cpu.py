"""The C++ backend: checks and pointers here, arithmetic in kernels/csrc.

A tensor whose dtype or device it does not know goes to the torch reference. Rows may be strided (a
slice of a fused projection); only the last dimension must be dense, and is made so if it isn't.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvern_kernels import kv_cache, library, reference

_library = library.load()
NAME = f"cpu/{_library.kvern_variant().decode()}"
DEVICES = ("cpu",)

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
QUANTIZED = 3
KV_TYPES = TYPES | {torch.float8_e4m3fn: 16, torch.float8_e5m2: 17, torch.int8: 18}
_HUGE_PAGE = 2 << 20
_threads = torch.get_num_threads
_linear, _norm, _gate = _library.kvern_linear, _library.kvern_norm, _library.kvern_gate
_attention, _rope, _copy = (
    _library.kvern_attention,
    _library.kvern_rope_and_store,
    _library.kvern_copy_blocks,
)


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
    depth = 32 if weight.dtype == torch.bfloat16 else 1
    panels = aligned(-(-n // 16) * 16 * (-(-k // depth) * depth), weight.dtype)
    _library.kvern_pack(_threads(), weight.data_ptr(), TYPES[weight.dtype], panels.data_ptr(), n, k)
    return packed_linear(panels, TYPES[weight.dtype], n, k, bias)


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
    _library.kvern_pack_codes(_threads(), codes.data_ptr(), bits, panels.data_ptr(), n, k, padded)


def dequantize(packed: PackedLinear) -> Tensor:
    """The float32 weights [N, K] of a quantized layer, each with the one rounding of its format."""
    n, k = packed.out_features, packed.in_features
    out = torch.empty(n, k)
    _library.kvern_dequantize(_threads(), packed.address, out.data_ptr(), n, k)
    if len(packed.kept) > 2:  # checkpoints whose inputs were sorted by group
        order = packed.kept[2].long()
        out[:, order] = out.clone()
    return out


def new_kv_cache(
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    value_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See reference.new_kv_cache; in huge pages, since attention reads blocks in any order."""
    pair = []
    for dim, transposed in ((head_dim, True), (value_dim or head_dim, False)):
        sizes = (num_blocks, num_kv_heads, block_size, dim)
        memory = aligned(kv_cache.elements(*sizes, dtype), dtype)
        pair.append(kv_cache.shape_memory(memory, *sizes, transposed))
    return pair[0], pair[1]


def aligned(count: int, dtype: torch.dtype) -> Tensor:
    """`count` zeroed elements on a page boundary, in huge pages where the system grants them."""
    size = max(count * dtype.itemsize, 1)
    memory = mmap.mmap(-1, size)
    if size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)


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
    x = _dense(x)
    n = packed.out_features
    out = torch.empty((m, n), dtype=out_dtype)
    if m:
        _linear(
            *(_threads(), x.data_ptr(), x.stride(0), x_type, packed.address, packed.type),
            *(packed.bias_address, out.data_ptr(), y_type, m, n, k),
        )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See reference.rms_norm."""
    x_type, weight_type = TYPES.get(x.dtype), TYPES.get(weight.dtype)
    if x_type is None or weight_type is None or x.dim() != 2:
        return reference.rms_norm(x, weight, eps)
    x = _dense(x)
    rows, dim = x.shape
    _check_width("rms_norm", weight, dim)
    out = torch.empty((rows, dim), dtype=x.dtype)
    _norm(
        *(_threads(), x.data_ptr(), x.stride(0), None, 0, x_type),
        *(weight.data_ptr(), weight_type, out.data_ptr(), None, rows, dim, eps),
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See reference.add_rms_norm."""
    x_type, weight_type = TYPES.get(x.dtype), TYPES.get(weight.dtype)
    if x_type is None or weight_type is None or x.dtype != residual.dtype or x.dim() != 2:
        return reference.add_rms_norm(x, residual, weight, eps)
    x, residual = _dense(x), _dense(residual)
    rows, dim = x.shape
    _check_width("add_rms_norm", weight, dim)
    if residual.shape != x.shape:
        raise ValueError(f"add_rms_norm: residual {tuple(residual.shape)} is not like x {tuple(x.shape)}")
    out = torch.empty((rows, dim), dtype=x.dtype)
    total = torch.empty((rows, dim), dtype=x.dtype)
    _norm(
        *(_threads(), x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0), x_type),
        *(weight.data_ptr(), weight_type, out.data_ptr(), total.data_ptr(), rows, dim, eps),
    )
    return out, total


def silu_and_mul(x: Tensor) -> Tensor:
    """See reference.silu_and_mul."""
    return _gated(x, gelu=False)


def gelu_and_mul(x: Tensor) -> Tensor:
    """See reference.gelu_and_mul."""
    return _gated(x, gelu=True)


def _gated(x: Tensor, gelu: bool) -> Tensor:
    x_type = TYPES.get(x.dtype)
    if x_type is None or x.dim() != 2:
        return reference.gelu_and_mul(x) if gelu else reference.silu_and_mul(x)
    x = _dense(x)
    rows, inner = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, inner), dtype=x.dtype)
    _gate(_threads(), x.data_ptr(), x.stride(0), x_type, out.data_ptr(), rows, inner, gelu)
    return out


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
    """See reference.rope_and_store. Raises ValueError on a position or slot out of range."""
    type_ = TYPES.get(q.dtype)
    norm_type = 0 if q_norm is None else TYPES.get(q_norm.dtype)
    same = q.dtype == k.dtype == v.dtype and (q_norm is None) == (k_norm is None)
    if q_norm is not None and k_norm is not None:
        same = same and q_norm.dtype == k_norm.dtype
    same = same and k_scale == v_scale == 1.0
    if type_ is None or norm_type is None or not same or k_cache.dtype not in KV_TYPES or q.shape[2] > 1024:
        return reference.rope_and_store(
            *(q, k, v, positions, cos_sin, slot_mapping, k_cache, v_cache, interleaved, q_norm, k_norm, eps),
            *(k_scale, v_scale),
        )
    q, k, v = _dense(q), _dense(k), _dense(v)
    tokens, heads, dim = q.shape
    cached = [(cache.shape[1], cache.shape[3]) for cache in (k_cache, v_cache)]
    if k.shape[2] != dim or len(k) != len(v) or [k.shape[1:], v.shape[1:]] != cached:
        raise ValueError(
            f"rope_and_store: shapes q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} and "
            f"cache {tuple(k_cache.shape)}, {tuple(v_cache.shape)} do not fit"
        )
    q_row, q_head, _ = q.stride()
    k_row, k_head, _ = k.stride()
    v_row, v_head, _ = v.stride()
    cos_sin, slot_mapping = cos_sin.contiguous(), slot_mapping.contiguous()
    out = torch.empty((tokens, heads, dim), dtype=q.dtype)
    status = _rope(
        *(_threads(), q.data_ptr(), q_row, q_head, k.data_ptr(), k_row, k_head, v.data_ptr(), v_row, v_head),
        *(type_, out.data_ptr(), tokens, heads, positions.data_ptr(), positions.dtype == torch.int64),
        *(cos_sin.data_ptr(), cos_sin.shape[0], cos_sin.shape[1], slot_mapping.data_ptr()),
        *(k_cache.data_ptr(), v_cache.data_ptr(), cache_layout(k_cache, v_cache), interleaved),
        *(None if q_norm is None else q_norm.data_ptr(), None if k_norm is None else k_norm.data_ptr()),
        *(norm_type, eps),
    )
    if status:
        raise ValueError(
            f"rope_and_store: a position is outside 0…{cos_sin.shape[0] - 1} or a slot outside the cache of "
            f"{k_cache.shape[0]} blocks of {k_cache.shape[2]}"
        )
    return out


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    lse: Tensor | None = None,
) -> Tensor:
    """See reference.paged_attention. Raises ValueError when a length or block id is out of range."""
    type_ = TYPES.get(q.dtype)
    if type_ is None or k_cache.dtype not in KV_TYPES:
        return reference.paged_attention(
            *(q, k_cache, v_cache, block_tables, query_start, seq_lens, scale, window, softcap),
            *(alibi, sinks, k_scale, v_scale, lse),
        )
    q = _dense(q)
    tokens, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    if dim != k_cache.shape[3] or heads % kv_heads:
        raise ValueError(
            f"paged_attention: q {tuple(q.shape)} and cache {tuple(k_cache.shape)} do not fit: the head sizes "
            "must be equal and the query heads a multiple of the key heads"
        )
    check_tables(block_tables, query_start, seq_lens)
    q_row, q_head, _ = q.stride()
    out = torch.empty((tokens, heads, v_cache.shape[3]), dtype=q.dtype)
    if lse is not None and (
        lse.dtype != torch.float32 or lse.shape != (tokens, heads) or not lse.is_contiguous()
    ):
        raise ValueError(
            f"lse must be float32 [{tokens}, {heads}] and dense, not {lse.dtype} {list(lse.shape)}"
        )
    status = _attention(
        *(_threads(), q.data_ptr(), q_row, q_head, type_, out.data_ptr(), _address(lse), tokens, heads),
        *(k_cache.data_ptr(), v_cache.data_ptr(), cache_layout(k_cache, v_cache), block_tables.data_ptr()),
        *(block_tables.stride(0), block_tables.shape[1], query_start.data_ptr(), seq_lens.data_ptr()),
        *(seq_lens.shape[0], scale * k_scale, v_scale, softcap, window),
        *(_per_head("alibi", alibi, heads), _per_head("sinks", sinks, heads)),
    )
    if status:
        raise ValueError(
            f"paged_attention: query_start, seq_lens or block_tables reach outside q ({tokens} tokens), the table "
            f"({block_tables.shape[1]} blocks) or the cache ({k_cache.shape[0]} blocks of {k_cache.shape[2]})"
        )
    return out


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _per_head(name: str, x: Tensor | None, heads: int) -> int | None:
    if x is not None and (x.dtype != torch.float32 or x.shape != (heads,) or not x.is_contiguous()):
        raise ValueError(f"{name} must be float32 [{heads}] and dense, not {x.dtype} {list(x.shape)}")
    return _address(x)


def copy_blocks(k_cache: Tensor, v_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """See reference.copy_blocks. Raises ValueError on a block id out of range."""
    sizes = [
        kv_cache.block_bytes(cache.shape[1], cache.shape[2], cache.shape[3], cache.dtype)
        for cache in (k_cache, v_cache)
    ]
    if [k_cache.stride(0) * k_cache.itemsize, v_cache.stride(0) * v_cache.itemsize] != sizes:
        return reference.copy_blocks(k_cache, v_cache, sources, targets)
    sources, targets = sources.contiguous(), targets.contiguous()
    status = _copy(
        *(k_cache.data_ptr(), v_cache.data_ptr(), *sizes, k_cache.shape[0]),
        *(sources.data_ptr(), targets.data_ptr(), sources.shape[0]),
    )
    if status:
        raise ValueError(f"copy_blocks: a block id is outside 0…{k_cache.shape[0] - 1}")
    return None


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _check_width(op: str, weight: Tensor, dim: int) -> None:
    if weight.shape[0] != dim or weight.stride(0) != 1:
        raise ValueError(f"{op}: weight {tuple(weight.shape)} must be dense and of x's width, {dim}")


def check_tables(block_tables: Tensor, query_start: Tensor, seq_lens: Tensor) -> None:
    """Raises ValueError unless all three are int32 with a dense last dimension."""
    for name, tensor in (
        ("block_tables", block_tables),
        ("query_start", query_start),
        ("seq_lens", seq_lens),
    ):
        if tensor.dtype != torch.int32 or (tensor.stride(-1) != 1 and tensor.numel() > 1):
            raise ValueError(f"paged_attention: {name} must be int32 and dense, not {tensor.dtype}")


def run_stack(layers: ctypes.Array[Any], count: int, step: ctypes.Structure) -> None:
    """The layers of cpu_decoder in one call. Raises ValueError on an index out of range."""
    if _library.kvern_decoder(_threads(), layers, count, ctypes.byref(step)):
        raise ValueError(
            "run_decoder: positions, slots, query_start, seq_lens or block_tables reach outside the rotary table, "
            "the batch or the cache"
        )


def run_route(logits: Tensor, top_k: int, options: tuple[Any, ...], weights: Tensor, ids: Tensor) -> None:
    """See cpu_moe.moe_route."""
    _library.kvern_moe_route(
        *(_threads(), logits.data_ptr(), *logits.shape, top_k, *options, weights.data_ptr(), ids.data_ptr())
    )


def run_experts(
    experts: ctypes.Structure, x: Tensor, weights: Tensor, ids: Tensor, counts: Tensor | None, out: Tensor
) -> None:
    """See cpu_moe.fused_moe."""
    _library.kvern_moe(
        *(_threads(), ctypes.byref(experts), x.data_ptr(), x.stride(0), TYPES[x.dtype], x.shape[0]),
        *(weights.data_ptr(), ids.data_ptr(), ids.shape[1]),
        *(None if counts is None else counts.data_ptr(), out.data_ptr()),
    )


def cache_layout(k_cache: Tensor, v_cache: Tensor) -> ctypes.Array[ctypes.c_int64]:
    """Shape and strides of a cache for the library, kept on the tensor since they never change."""
    known = getattr(k_cache, "_kvern_layout", None)
    if known is not None and known[0] == v_cache.data_ptr():
        return known[1]
    if k_cache.shape[:3] != v_cache.shape[:3] or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"the key cache {tuple(k_cache.shape)} differs from the value cache {tuple(v_cache.shape)}"
        )
    values = [*k_cache.shape, v_cache.shape[3], KV_TYPES[k_cache.dtype], *k_cache.stride(), *v_cache.stride()]
    layout = (ctypes.c_int64 * len(values))(*values)
    k_cache._kvern_layout = (v_cache.data_ptr(), layout)  # type: ignore[attr-defined]
    return layout


# Last, since they build on the ops above.
from kvern_kernels.cpu_decoder import pack_decoder, run_decoder  # noqa: E402, F401
from kvern_kernels.cpu_moe import fused_moe, moe_route, pack_experts  # noqa: E402, F401
from kvern_kernels.cpu_quant import (  # noqa: E402, F401
    pack_awq,
    pack_fp8,
    pack_gguf,
    pack_gptq,
    pack_int8,
    pack_mxfp4,
)
