"""Gated activations against the reference."""

import pytest
import torch

from kvern_kernels import reference
from kvern_kernels.triton import activations

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_and_mul", "swiglu_and_mul"])
def test_gated_activations(device: str, dtype: torch.dtype, op: str) -> None:
    for rows, inner in [(0, 4), (1, 1), (3, 21), (1, 1500)]:
        x = (torch.randn(rows, 2 * inner + 3, device=device) * 5).to(dtype)[:, 3:]
        actual, expected = getattr(activations, op)(x), getattr(reference, op)(x)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(actual, expected, rtol=max(2 * eps, 1e-5), atol=1e-5)
    extremes = torch.tensor([[-1e30, -90.0, -88.0, 90.0, 1.0, 1.0, 1.0, 1.0]], device=device)
    torch.testing.assert_close(
        getattr(activations, op)(extremes), getattr(reference, op)(extremes), rtol=1e-5, atol=1e-30
    )
