"""FP8 weights (OCP OFP8 e4m3): every code's value, products against float64, and bits that nothing else changes."""

import pytest
import torch

from kvern_kernels import cpu, reference
from kvern_kernels.cpu_linear import E4M3

SCALES = ["tensor", "channel", "block"]
SHAPES = [(1, 1), (7, 5), (33, 50), (130, 300), (272, 256), (16, 129)]  # N, K


def made(
    n: int, k: int, scales: str, bias: torch.Tensor | None = None
) -> tuple[cpu.PackedLinear, torch.Tensor]:
    """The layer, and its weights in float64."""
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    codes[codes & 127 == 127] = 3
    weight = codes.view(torch.float8_e4m3fn)
    shape = {"tensor": (1,), "channel": (n, 1), "block": (-(-n // 128), -(-k // 128))}[scales]
    factors = torch.rand(shape) * 0.1 + 0.01
    spread = factors.double().expand(n, 1) if scales != "block" else factors.double()
    if scales == "block":
        spread = spread.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    packed = cpu.pack_fp8(weight, factors, bias)
    assert isinstance(packed, cpu.PackedLinear) and packed.type == E4M3
    return packed, weight.double() * spread


def test_every_code_has_its_value(linear_variant: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 127 != 127]
    packed = cpu.pack_fp8(codes.view(torch.float8_e4m3fn).view(-1, 1), torch.ones(1))
    for rows in (1, 20):
        y = cpu.linear(torch.ones(rows, 1).bfloat16(), packed, torch.float32)
        assert torch.equal(y, codes.view(torch.float8_e4m3fn).float().expand(rows, -1))


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_products_match_float64(linear_variant: str, scales: str, dtype: torch.dtype) -> None:
    for n, k in SHAPES:
        bias = torch.randn(n)
        packed, weight = made(n, k, scales, bias)
        for m in (0, 1, 2, 9, 16, 35):
            x = torch.randn(m, k).to(dtype)
            y = cpu.linear(x, packed, torch.float32)
            expected = x.double() @ weight.T + bias.double()
            terms = x.double().abs() @ weight.abs().T
            assert y.shape == (m, n)
            assert ((y.double() - expected).abs() <= terms * 2e-6 + expected.abs() * 1e-6 + 1e-6).all()
            narrow = cpu.linear(x, packed)
            assert narrow.dtype == dtype and torch.equal(narrow, y.to(dtype))


@pytest.mark.parametrize("scales", SCALES)
def test_a_row_has_the_same_bits_in_every_batch(linear_variant: str, scales: str) -> None:
    packed, _ = made(136, 384, scales)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(300, 384).to(dtype)
        whole = cpu.linear(x, packed)
        for size in (1, 3, 8, 16, 64):
            parts = torch.cat([cpu.linear(part, packed) for part in x[: 4 * size].split(size)])
            assert torch.equal(parts, whole[: 4 * size]), f"chunks of {size}"
        strange = torch.cat([torch.full((5, 384), float("nan")).to(dtype), x[:1]])
        assert torch.equal(cpu.linear(strange, packed)[5], whole[0])


def test_rows_may_be_strided(linear_variant: str) -> None:
    packed, _ = made(48, 96, "channel")
    view = torch.randn(6, 300).bfloat16()[:, 30:126]
    assert torch.equal(cpu.linear(view, packed), cpu.linear(view.contiguous(), packed))


def test_a_weight_takes_one_byte() -> None:
    packed, _ = made(256, 1024, "block")
    assert packed.num_bytes == 256 * 1024 + 256 * 8 * 4


def test_nan_codes_give_nan() -> None:
    weight = torch.tensor([[1.0, float("nan")], [2.0, 3.0]]).to(torch.float8_e4m3fn)
    packed = cpu.pack_fp8(weight, torch.ones(1))
    y = cpu.linear(torch.ones(1, 2), packed)
    assert y[0, 0].isnan() and y[0, 1] == 5.0


def test_scales_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        cpu.pack_fp8(torch.zeros(130, 256).to(torch.float8_e4m3fn), torch.ones(2, 3))


@pytest.mark.parametrize("shape", [(1,), (130,), (130, 1), (2, 3)])
def test_e5m2_weights_are_their_values_in_bfloat16(shape: tuple[int, ...]) -> None:
    weight, scales = torch.randn(130, 300).to(torch.float8_e5m2), torch.rand(shape) + 0.5
    packed = cpu.pack_fp8(weight, scales)
    assert isinstance(packed, cpu.PackedLinear) and packed.num_bytes == 144 * 320 * 2
    x = torch.randn(3, 300)
    expected = x @ reference.pack_fp8(weight, scales).weight.bfloat16().float().t()
    torch.testing.assert_close(cpu.linear(x, packed), expected, rtol=1e-4, atol=1e-3)
