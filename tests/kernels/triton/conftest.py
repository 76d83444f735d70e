"""Kernels run in Triton's interpreter here, on CPU tensors, unless the machine has a GPU."""

import os
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch


def _interpret() -> None:
    """Import triton (again) as an interpreter, without a change of the environment for other tests' processes."""
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

    def create_dot(self, a, b, *rest):
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

    def convert(x, source, target, rounding):
        flat = torch.from_numpy(np.ascontiguousarray(x).reshape(-1).view(f"i{x.itemsize}"))
        converted = flat.view(types[source.name]).to(types[target.name])
        bits = converted.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[converted.itemsize])
        return bits.numpy().view(f"u{converted.itemsize}").reshape(x.shape)

    interpreter._convert_float = convert


if not torch.cuda.is_available():
    _interpret()


@pytest.fixture
def device() -> str:
    """Where the tensors of a test live."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _quiet_numpy() -> Iterator[None]:
    """The interpreter computes with numpy, which warns of the infinities that kernels mean."""
    with np.errstate(all="ignore"):
        yield
