"""LoRA ops against weights with the adapters merged in."""

import pytest
import torch

import kvern_kernels as kernels
from kvern_kernels import reference


def test_each_token_gets_its_merged_weights() -> None:
    k, rank, widths = 20, 6, (12, 4, 4)
    a, b = torch.randn(3, 3, rank, k), torch.randn(3, sum(widths), rank)
    scales = torch.tensor([0.5, 2.0, 1.0])
    base = torch.randn(sum(widths), k)
    x = torch.randn(9, k)
    indices = torch.tensor([2, -1, 0, 0, 1, 7, -1, 2, 1], dtype=torch.int32)
    out = x @ base.t()
    plan = kernels.lora_plan(indices, 3)
    kernels.lora_expand(kernels.lora_shrink(x, a, plan), b, scales, plan, out, widths)
    for token, adapter in enumerate(indices.tolist()):
        merged = base.clone()
        if 0 <= adapter < 3:
            for s, (start, stop) in enumerate([(0, 12), (12, 16), (16, 20)]):
                merged[start:stop] += scales[adapter] * b[adapter, start:stop] @ a[adapter, s]
        torch.testing.assert_close(out[token], merged @ x[token], rtol=1e-4, atol=1e-4)


def test_slices_that_do_not_fit_are_named() -> None:
    plan = reference.lora_plan(torch.zeros(1, dtype=torch.int32), 1)
    with pytest.raises(ValueError, match=r"slices \[4, 4\] do not fit hidden \[1, 1, 2\]"):
        reference.lora_expand(
            torch.zeros(1, 1, 2), torch.zeros(1, 8, 2), torch.ones(1), plan, torch.zeros(1, 8), (4, 4)
        )
