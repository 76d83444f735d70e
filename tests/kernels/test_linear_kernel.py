"""Linear layers: values against float64, and bits that don't depend on the batch."""

import pytest
import torch

from kvern_kernels import cpu, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (7, 5), (64, 16), (33, 50), (576, 300), (101, 260)]  # K, N


def close(actual: torch.Tensor, expected: torch.Tensor, terms: torch.Tensor) -> None:
    """Within float32 accumulation error of `expected`, plus one rounding to the result's dtype."""
    bound = terms * 1e-6 + expected.abs() * torch.finfo(actual.dtype).eps + 1e-6
    assert ((actual.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("w_dtype", DTYPES)
def test_linear_matches_float64(linear_variant: str, x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    for k, n in SHAPES:
        weight, bias = torch.randn(n, k).to(w_dtype), torch.randn(n)
        packed = cpu.pack_linear(weight, bias)
        for m in (0, 1, 2, 5, 8, 9, 33):
            x = torch.randn(m, k).to(x_dtype)
            y = cpu.linear(x, packed)
            expected = x.double() @ weight.double().T + bias.double()
            assert y.dtype == x_dtype and y.shape == (m, n)
            terms = x.double().abs() @ weight.double().abs().T
            close(y, expected, terms)
            wide = cpu.linear(x, packed, torch.float32)
            assert wide.dtype == torch.float32
            close(wide, expected, terms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(576, 192), (1000, 261)])
def test_a_row_has_the_same_bits_in_every_batch(
    linear_variant: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    k, n = shape
    packed = cpu.pack_linear(torch.randn(n, k).to(dtype))
    x = torch.randn(300, k).to(dtype)
    whole = cpu.linear(x, packed)
    for size in (1, 2, 3, 5, 7, 8, 32, 64):
        parts = torch.cat([cpu.linear(part, packed) for part in x[: 4 * size].split(size)])
        assert torch.equal(parts, whole[: 4 * size]), f"chunks of {size}"
    strange = torch.cat([torch.full((9, k), float("nan")).to(dtype), x[:1], torch.randn(22, k).to(dtype)])
    assert torch.equal(cpu.linear(strange, packed)[9], whole[0])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_threads(threads: int) -> None:
    packed, x = cpu.pack_linear(torch.randn(576, 320)), torch.randn(40, 320)
    before, expected = torch.get_num_threads(), cpu.linear(x, packed)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(cpu.linear(x, packed), expected)
    finally:
        torch.set_num_threads(before)


def test_linear_reads_strided_rows(linear_variant: str) -> None:
    wide = torch.randn(6, 100)
    packed = cpu.pack_linear(torch.randn(20, 40))
    view = wide[:, 30:70]
    assert torch.equal(cpu.linear(view, packed), cpu.linear(view.contiguous(), packed))
    columns = torch.randn(40, 6).T
    assert torch.equal(cpu.linear(columns, packed), cpu.linear(columns.contiguous(), packed))


def test_linear_refuses_a_wrong_width() -> None:
    with pytest.raises(ValueError, match="41 features, the weights take 40"):
        cpu.linear(torch.randn(2, 41), cpu.pack_linear(torch.randn(3, 40)))


def test_packed_size_is_told() -> None:
    packed = cpu.pack_linear(torch.randn(20, 40).bfloat16(), torch.randn(20))
    assert (packed.in_features, packed.out_features) == (40, 20)
    assert packed.num_bytes == 32 * 64 * 2 + 32 * 4
    kept = reference.pack_linear(torch.randn(20, 40))
    assert kept.num_bytes == 20 * 40 * 4


def test_gguf_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="IQ1_S has no kernel"):
        cpu.pack_gguf(torch.zeros(2, 34, dtype=torch.uint8), "IQ1_S")
    with pytest.raises(ValueError, match="multiple of 34"):
        cpu.pack_gguf(torch.zeros(2, 33, dtype=torch.uint8), "Q8_0")
