"""Activations to 8 bits: the reference's codes and scales, bit for bit."""

import pytest
import torch

from kvern_kernels import reference
from kvern_kernels.triton import quantize


@pytest.mark.parametrize("scheme", ["fp8", "fp8_group", "int8"])
def test_codes_are_the_references(device: str, scheme: str) -> None:
    def run(backend: object, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if scheme == "int8":
            return backend.quantize_int8(x)
        return backend.quantize_fp8(x, 128 if scheme == "fp8_group" else 0)

    for rows, width in [(0, 8), (1, 1), (6, 300)]:
        x = torch.randn(rows, width) * torch.logspace(-6, 4, max(rows, 1)).unsqueeze(1)[:rows]
        if rows > 2:
            x[1] = 0
            x[2, 5] = float("nan")
        codes, scales = run(quantize, x.to(device))
        expected_codes, expected_scales = run(reference, x)
        torch.testing.assert_close(scales.cpu(), expected_scales, rtol=0, atol=0, equal_nan=True)
        whole = ~expected_scales.isnan().any(1)
        assert torch.equal(codes.cpu()[whole].float(), expected_codes[whole].float())
