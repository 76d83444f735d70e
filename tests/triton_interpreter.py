"""Triton's interpreter for tests: kernels run on CPU tensors, and round as a GPU does."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch


def interpret() -> None:
    """Imports triton (again) as an interpreter, without a change of the environment for other tests' processes."""
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and "._C" not in name]:
        del sys.modules[name]
    os.environ["TRITON_INTERPRET"] = "1"
    from triton import knobs

    del os.environ["TRITON_INTERPRET"]
    knobs.propagate_env = False
    knobs.runtime.interpret = True
    knobs.propagate_env = True
    _multiply_bfloat16()
    _round_to_nearest_even()


def _multiply_bfloat16() -> None:
    """The interpreter keeps bfloat16 as bits, and its matrix product takes them for integers."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    product = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (
            self.cast_impl(x, tl.block_type(tl.float32, list(x.data.shape))) if x.dtype == tl.bfloat16 else x
            for x in (a, b)
        )
        return product(self, a, b, *rest)

    InterpreterBuilder.create_dot = create_dot


def _round_to_nearest_even() -> None:
    """The interpreter cuts mantissas off where a GPU rounds, and has no infinities: convert as torch does."""
    from triton.runtime import interpreter

    types = {
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp8e4nv": torch.float8_e4m3fn,
        "fp8e5": torch.float8_e5m2,
    }

    def convert(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        flat = torch.from_numpy(np.ascontiguousarray(x).reshape(-1).view(f"i{x.itemsize}"))
        converted = flat.view(types[source.name]).to(types[target.name])
        bits = converted.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[converted.itemsize])
        return bits.numpy().view(f"u{converted.itemsize}").reshape(x.shape)

    interpreter._convert_float = convert
