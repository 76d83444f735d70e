"""LoRA's C++ ops: against the reference on every variant, and bits that the batch doesn't change."""

import pytest
import torch

from kvern_kernels import cpu, reference

T = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("dtype", T)
@pytest.mark.parametrize(("rank", "widths"), [(8, (64, 16, 16)), (5, (40,)), (64, (33, 7)), (16, (3,))])
def test_shrink_and_expand(variant: str, dtype: torch.dtype, rank: int, widths: tuple[int, ...]) -> None:
    k, n = 83, sum(widths)
    a, scales = torch.randn(3, len(widths), rank, k).to(dtype), torch.tensor([0.5, 0.0, 2.0])
    b = torch.randn(3, rank, n).to(dtype).transpose(1, 2)
    for indices in ([], [-1, -1], [1], [2, 0, -1, 0, 2, 2, -1, 1, 7] * 3):
        x, out = (
            torch.randn(len(indices), k + 3)[:, 3:].to(dtype),
            torch.randn(len(indices), n + 4)[:, 4:].to(dtype),
        )
        chosen = torch.tensor(indices, dtype=torch.int32)
        wanted, plan = out.clone(), cpu.lora_plan(chosen, 3)
        hidden = reference.lora_shrink(x, a, plan)
        reference.lora_expand(hidden, b, scales, plan, wanted, widths)
        got, untouched = out.clone(), (chosen < 0) | (chosen > 2)
        mine = cpu.lora_shrink(x, a, plan)
        torch.testing.assert_close(mine[~untouched], hidden[~untouched], rtol=1e-4, atol=1e-3)
        cpu.lora_expand(mine, b, scales, plan, got, widths)
        close = {torch.float32: 1e-3, torch.bfloat16: 0.02, torch.float16: 4e-3}[dtype]
        torch.testing.assert_close(got, wanted, rtol=close, atol=close * 10)
        assert torch.equal(got[untouched], out[untouched])
        dense = out.clone()
        cpu.lora_expand(mine, b.contiguous(), scales, plan, dense, widths)
        assert torch.equal(dense, got)


def test_a_tokens_bits_depend_on_its_adapter_alone(variant: str) -> None:
    a, b, scales = torch.randn(3, 2, 12, 70), torch.randn(3, 90, 12), torch.ones(3)
    x, base = torch.randn(400, 70), torch.randn(400, 90)
    indices = torch.randint(-1, 3, (400,), dtype=torch.int32)

    def run(rows: torch.Tensor) -> torch.Tensor:
        out, plan = base[rows].clone(), cpu.lora_plan(indices[rows], 3)
        cpu.lora_expand(cpu.lora_shrink(x[rows], a, plan), b, scales, plan, out, (50, 40))
        return out

    together = run(torch.arange(400))
    for row in range(0, 400, 37):
        assert torch.equal(run(torch.tensor([row]))[0], together[row])
    assert torch.equal(run(torch.arange(100, 90, -1)), together[torch.arange(100, 90, -1)])


def test_an_adapter_of_another_width_is_named() -> None:
    plan = cpu.lora_plan(torch.zeros(1, dtype=torch.int32), 1)
    with pytest.raises(ValueError, match=r"x \[1, 4\] does not fit adapters of width 5"):
        cpu.lora_shrink(torch.zeros(1, 4), torch.zeros(1, 1, 2, 5), plan)
