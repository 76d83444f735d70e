"""A worker's GPU path: on a GPU where there is one, else on CPU tensors by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from triton_interpreter import interpret

import kvern_kernels as kernels
from kvern_kernels import dispatch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    interpret()


@pytest.fixture
def device() -> str:
    """The ``device`` of LoadOptions."""
    return "cuda" if HAS_GPU else "interpreter"


@pytest.fixture(autouse=True)
def _triton() -> Iterator[None]:
    """Every op from the Triton backend. The interpreter computes with numpy, which warns of infinities that are meant."""
    if HAS_GPU:
        yield
        return
    dispatch._failures.pop("triton", None)
    kernels.select("triton")
    with np.errstate(all="ignore"):
        yield
    kernels.select(None)
