"""Loads the compiled kernels with ctypes: signatures, thread count and the choice of a variant."""

from __future__ import annotations

import ctypes
import logging
import os
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p

from kvern_kernels import build

log = logging.getLogger("kvern.kernels")

SIGNATURES: dict[str, list[type]] = {
    "kvern_pack": [c_int, c_void_p, c_int, c_void_p, c_int64, c_int64],
    "kvern_pack_codes": [c_int, c_void_p, c_int, c_void_p, c_int64, c_int64, c_int64],
    "kvern_dequantize": [c_int, c_void_p, c_void_p, c_int64, c_int64],
    "kvern_linear": [
        *[c_int, c_void_p, c_int64, c_int, c_void_p, c_int, c_void_p, c_void_p, c_int],
        *[c_int64] * 3,
    ],
    "kvern_attention": [
        *[c_int, c_void_p, c_int64, c_int64, c_int, c_void_p, c_void_p, c_int64, c_int64],
        *[c_void_p] * 4,
        *[c_int64, c_int64, c_void_p, c_void_p, c_int64, c_float, c_float, c_float, c_int64],
        *[c_void_p, c_void_p, c_int, c_void_p],
    ],
    "kvern_rope_and_store": [
        c_int,
        *[c_void_p, c_int64, c_int64] * 3,
        *[c_int, c_void_p, c_int64, c_int64, c_void_p, c_int, c_void_p, c_int64, c_int64],
        *[c_void_p] * 4,
        *[c_int, c_void_p, c_void_p, c_int, c_float],
    ],
    "kvern_norm": [
        *[c_int, c_void_p, c_int64, c_void_p, c_int64, c_int, c_void_p, c_int, c_void_p, c_void_p],
        *[c_int64, c_int64, c_float],
    ],
    "kvern_gate": [c_int, c_void_p, c_int64, c_int, c_void_p, c_int64, c_int64, c_int],
    "kvern_copy_blocks": [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int64],
    "kvern_decoder": [c_int, c_void_p, c_int64, c_void_p],
    "kvern_moe_route": [c_int, c_void_p, c_void_p, c_int64, c_void_p, c_void_p],
    "kvern_moe": [
        *[c_int, c_void_p, c_void_p, c_int64, c_int, c_int64],
        *[c_void_p, c_void_p, c_int64, c_void_p, c_void_p],
    ],
    "kvern_causal_conv": [
        *[c_int, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_void_p],
        *[c_int64, c_void_p, c_void_p, c_void_p, c_void_p],
    ],
    "kvern_mamba_scan": [
        c_int,
        *[c_void_p, c_int64] * 4,
        *[c_void_p, c_void_p, c_void_p, c_float, c_float],
        *[c_int64, c_int64, c_int64, c_int64, c_void_p],
        *[c_int64, c_void_p, c_void_p, c_void_p, c_void_p],
    ],
    "kvern_gated_delta_scan": [
        c_int,
        *[c_void_p, c_int64] * 5,
        *[c_void_p, c_void_p],
        *[c_int64, c_int64, c_int64, c_int64, c_void_p],
        *[c_int64, c_void_p, c_void_p, c_void_p, c_void_p],
    ],
    "kvern_lora_shrink": [
        *[c_int, c_void_p, c_int64, c_int, c_void_p, c_int, c_void_p, c_int64, c_void_p],
        *[c_int64] * 3,
    ],
    "kvern_lora_expand": [
        *[c_int, c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int, c_void_p],
        *[c_int64] * 4,
    ],
    "kvern_read": [c_int, c_void_p, c_int64],
    "kvern_use_variant": [c_int],
    "kvern_variant_name": [c_int],
    "kvern_variant_count": [],
    "kvern_variant": [],
}


def load() -> ctypes.CDLL:
    """The library, compiled first if need be. Raises ImportError with the reason when that can't be."""
    try:
        path = build.library_path()
        library = ctypes.CDLL(str(path))
    except (build.BuildError, OSError) as error:
        raise ImportError(str(error)) from error
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = c_int
    library.kvern_variant.restype = library.kvern_variant_name.restype = c_char_p
    wanted = os.environ.get("KVERN_CPU_ISA")
    if wanted:
        use_variant(library, wanted)
    return library


def variants(library: ctypes.CDLL) -> list[str]:
    """Names of the variants that this processor can run, the fastest last."""
    return [library.kvern_variant_name(i).decode() for i in range(library.kvern_variant_count())]


def use_variant(library: ctypes.CDLL, name: str) -> None:
    """Serve all ops from the variant `name` from now on. Raises ImportError if it can't run here."""
    names = variants(library)
    if name not in names:
        raise ImportError(f"kernel variant {name!r} cannot run here: use one of {', '.join(names)}")
    library.kvern_use_variant(names.index(name))
