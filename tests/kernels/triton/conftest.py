"""Kernels run in Triton's interpreter here, on CPU tensors, unless the machine has a GPU."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from triton_interpreter import interpret

if not torch.cuda.is_available():
    interpret()


@pytest.fixture
def device() -> str:
    """Where the tensors of a test live."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _quiet_numpy() -> Iterator[None]:
    """The interpreter computes with numpy, which warns of the infinities that kernels mean."""
    with np.errstate(all="ignore"):
        yield
