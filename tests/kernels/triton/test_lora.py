"""LoRA for many adapters in one batch against the reference."""

import pytest
import torch

from kvern_kernels import reference
from kvern_kernels.triton import lora


@pytest.mark.parametrize(("rank", "widths"), [(8, (64, 16, 16)), (5, (40,)), (256, (33, 33))])
def test_shrink_and_expand(device: str, rank: int, widths: tuple[int, ...]) -> None:
    a, b = torch.randn(3, len(widths), rank, 48), torch.randn(3, sum(widths), rank)
    scales = torch.tensor([0.5, 2.0, 1.0])
    for indices in ([], [-1, -1], [1], [2, 0, -1, 0, 2, 2, -1, 0, 7] * 3):
        tokens = len(indices)
        chosen = torch.tensor(indices, dtype=torch.int32)
        x, out = torch.randn(tokens, 51)[:, 3:], torch.randn(tokens, sum(widths) + 4)[:, 4:]
        wanted, got = out.clone(), out.to(device)
        plan = reference.lora_plan(chosen, 3)
        reference.lora_expand(reference.lora_shrink(x, a, plan), b, scales, plan, wanted, widths)
        moved = lora.lora_plan(chosen.to(device), 3)
        hidden = lora.lora_shrink(x.to(device), a.to(device), moved)
        lora.lora_expand(hidden, b.to(device), scales.to(device), moved, got, widths)
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-3)
        without = (chosen < 0) | (chosen > 2)
        assert torch.equal(got.cpu()[without], out[without])


def test_an_adapters_tokens_do_not_depend_on_the_others(device: str) -> None:
    a, b = torch.randn(2, 1, 8, 64, device=device), torch.randn(2, 40, 8, device=device)
    scales, x = torch.ones(2, device=device), torch.randn(9, 64, device=device)

    def run(rows: list[int], indices: list[int]) -> torch.Tensor:
        out = torch.zeros(len(rows), 40, device=device)
        plan = lora.lora_plan(torch.tensor(indices, dtype=torch.int32, device=device), 2)
        lora.lora_expand(lora.lora_shrink(x[rows], a, plan), b, scales, plan, out, (40,))
        return out

    together = run(list(range(9)), [0, 1, 1, 0, -1, 1, 0, 0, 1])
    assert torch.equal(run([2], [1])[0], together[2])
    assert torch.equal(run([3, 7], [0, 0]), together[[3, 7]])


def test_what_does_not_fit_is_named(device: str) -> None:
    plan = lora.lora_plan(torch.zeros(1, dtype=torch.int32, device=device), 1)
    with pytest.raises(ValueError, match="x has 4 features, the adapters take 5"):
        lora.lora_shrink(torch.zeros(1, 4, device=device), torch.zeros(1, 1, 2, 5, device=device), plan)
    hidden, b, out = torch.zeros(1, 4, 2), torch.zeros(1, 4, 2), torch.zeros(1, 4)
    with pytest.raises(ValueError, match="4 slices \\(limit 3\\)"):
        lora.lora_expand(hidden, b, torch.ones(1), plan, out, (1, 1, 1, 1))
