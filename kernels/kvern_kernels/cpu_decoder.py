"""The C++ backend's stack of decoder layers: structures of csrc/decoder.cpp, filled once, run per step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from kvern_kernels.cpu_attention import cache_layout, check_tables
from kvern_kernels.cpu_base import KV_TYPES, LIBRARY, TYPES, address_of, threads
from kvern_kernels.cpu_linear import PackedLinear, Projection, projection
from kvern_kernels.cpu_moe import Experts, PackedExperts, Routing
from kvern_kernels.decoder import Decoder, DecoderLayer, Mixture, run_layers
from kvern_kernels.reference_moe import check_route

_NORMS = ("input_norm", "post_norm", "q_norm", "k_norm", "q_whole_norm", "k_whole_norm")


class _Mixture(ctypes.Structure):
    _fields_ = [("router", Projection), ("routing", Routing), ("experts", Experts)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *[(name, c_void_p) for name in _NORMS],
        *[(name, Projection) for name in ("qkv", "o", "gate_up", "down")],
        ("mixture", ctypes.POINTER(_Mixture)),
        *[(name, c_void_p) for name in ("keys", "values", "shape")],
        ("window", c_int64),
        ("sinks", c_void_p),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *[(name, c_void_p) for name in ("hidden", "hidden_out", "residual_out")],
        *[(name, c_int64) for name in ("type", "norm_type", "tokens", "width", "query_heads")],
        ("positions", c_void_p),
        ("positions_64", c_int64),
        ("cos_sin", c_void_p),
        *[(name, c_int64) for name in ("max_positions", "rotary", "interleaved")],
        *[(name, c_void_p) for name in ("slots", "tables")],
        *[(name, c_int64) for name in ("table_row", "max_blocks")],
        *[(name, c_void_p) for name in ("query_start", "seq_lens")],
        *[(name, c_int64) for name in ("sequences", "gelu")],
        *[(name, c_float) for name in ("scale", "softcap", "eps")],
    ]


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
    """See reference.pack_decoder. Layers that hold what the C++ stack does not know run op by op."""
    structs = None
    for layer in layers:
        if (m := layer.mixture) is not None:
            check_route(m.router.out_features, m.top_k, m.scoring, m.num_groups, m.top_groups)
    if layers and all(_fits(layer, layers[0]) for layer in layers) and cos_sin.is_contiguous():
        structs = (_Layer * len(layers))(*[_struct(layer) for layer in layers])
    return Decoder(layers, cos_sin, num_heads, eps, scale, softcap, interleaved, gelu, structs)


def _fits(layer: DecoderLayer, first: DecoderLayer) -> bool:
    norms = [norm for name in _NORMS if (norm := getattr(layer, name)) is not None]
    return (
        all(isinstance(linear, PackedLinear) for linear in _linears(layer))
        and (layer.mixture is None or isinstance(layer.mixture.experts, PackedExperts))
        and _shape(layer.qkv) == _shape(first.qkv)
        and all(norm.dtype == first.input_norm.dtype and norm.is_contiguous() for norm in norms)
        and first.input_norm.dtype in TYPES
        and (layer.q_whole_norm is None) == (layer.k_whole_norm is None)
        and layer.keys.dtype in KV_TYPES
        and layer.keys.shape == layer.values.shape == first.keys.shape
        and layer.keys.shape[3] <= 1024
        and (layer.sinks is None or (layer.sinks.dtype == torch.float32 and layer.sinks.is_contiguous()))
    )


def _linears(layer: DecoderLayer) -> list[Any]:
    mlp = [layer.gate_up, layer.down] if layer.mixture is None else [layer.mixture.router]
    return [layer.qkv, layer.o, *mlp]


def _shape(linear: PackedLinear) -> tuple[int, int]:
    return linear.out_features, linear.in_features


def _struct(layer: DecoderLayer) -> _Layer:
    dense = (
        [projection(p) for p in (layer.gate_up, layer.down)] if layer.mixture is None else [Projection()] * 2
    )
    return _Layer(
        *(address_of(getattr(layer, name)) for name in _NORMS),
        *(projection(layer.qkv), projection(layer.o), *dense),
        None if layer.mixture is None else ctypes.pointer(_mixture(layer.mixture)),
        *(layer.keys.data_ptr(), layer.values.data_ptr()),
        ctypes.addressof(cache_layout(layer.keys, layer.values)),
        layer.window,
        address_of(layer.sinks),
    )


def _mixture(m: Mixture) -> _Mixture:
    routing = Routing(
        *(m.router.out_features, m.top_k, m.scoring == "sigmoid", m.renormalize, address_of(m.bias)),
        *(m.num_groups, m.top_groups, m.scale),
    )
    return _Mixture(projection(m.router), routing, m.experts.struct())


def _changed(decoder: Decoder) -> bool:
    """Whether something is to be added to the outputs of linear layers in this step, which goes op by op."""
    delta = decoder.layers[0].qkv.delta
    return delta is not None and bool(delta.active)


def run_decoder(
    decoder: Decoder,
    hidden: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
) -> tuple[Tensor, Tensor]:
    """See reference.run_decoder. Raises ValueError on an index out of range."""
    if decoder.structs is None or hidden.dtype not in TYPES or _changed(decoder):
        step = (positions, slot_mapping, block_tables, query_start, seq_lens)
        from kvern_kernels import cpu  # which has this module's ops too

        return run_layers(cpu, decoder, hidden, *step)
    check_tables(block_tables, query_start, seq_lens)
    hidden, slot_mapping = hidden.contiguous(), slot_mapping.contiguous()
    first = decoder.layers[0]
    out, residual = torch.empty_like(hidden), torch.empty_like(hidden)
    if hidden.shape[0] == 0:
        return out, residual
    step_struct = _Step(
        *(hidden.data_ptr(), out.data_ptr(), residual.data_ptr()),
        *(TYPES[hidden.dtype], TYPES[first.input_norm.dtype], *hidden.shape, decoder.num_heads),
        *(positions.data_ptr(), positions.dtype == torch.int64),
        *(decoder.cos_sin.data_ptr(), *decoder.cos_sin.shape, decoder.interleaved),
        *(slot_mapping.data_ptr(), block_tables.data_ptr(), block_tables.stride(0), block_tables.shape[1]),
        *(query_start.data_ptr(), seq_lens.data_ptr(), seq_lens.shape[0], decoder.gelu),
        *(decoder.scale, decoder.softcap, decoder.eps),
    )
    if LIBRARY.kvern_decoder(threads(), decoder.structs, len(decoder.layers), ctypes.byref(step_struct)):
        raise ValueError(
            "run_decoder: positions, slots, query_start, seq_lens or block_tables reach outside the rotary table, "
            "the batch or the cache"
        )
    return out, residual
