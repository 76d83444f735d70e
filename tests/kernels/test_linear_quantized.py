"""Quantized linear layers: the format's own values, products against float64, and bits that nothing else changes."""

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch

from kvern_kernels import cpu, reference, reference_quant
from kvern_kernels.cpu_linear import QUANTIZED
from kvern_kernels.reference_gguf import GGUF_BLOCK_BYTES, gguf_block_length

HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2)}
HALVES |= {"Q5_1": (0, 2)}


def gguf_blocks(kind: str, n: int, k: int) -> torch.Tensor:
    """Random blocks with scales of both signs, subnormal ones too."""
    blocks = torch.randint(
        0, 256, (n * k // gguf_block_length(kind), GGUF_BLOCK_BYTES[kind]), dtype=torch.uint8
    )
    for at in HALVES.get(kind, (0,)):
        scales = torch.randn(len(blocks), 1) * 0.05
        scales[::7] *= 1e-4
        blocks[:, at : at + 2] = scales.half().view(torch.uint8)
    return blocks.view(n, -1)


def words(bits: int, *shape: int) -> torch.Tensor:
    rows, columns = shape
    return torch.randint(-(1 << 31), 1 << 31, (rows, columns * bits // 32)).to(torch.int32)


def gptq(n: int, k: int, groups: int = 3, bits: int = 4, reordered: bool = False, wide: bool = False) -> dict:
    scales = torch.rand(groups, n) * 0.02 + 0.001
    index = torch.arange(k) // (k // groups)
    return {
        "qweight": words(bits, n, k).t().contiguous(),
        "qzeros": words(bits, groups, n),
        "scales": scales.bfloat16() * 1.001 if wide else scales.half(),
        "g_idx": index[torch.randperm(k)].int() if reordered else None,
        "bits": bits,
    }


def made(name: str, n: int, k: int, bias: torch.Tensor | None) -> tuple[cpu.PackedLinear, torch.Tensor]:
    """The layer, and its weights by the reference."""
    if name in GGUF_BLOCK_BYTES:
        blocks = gguf_blocks(name, n, k)
        return cpu.pack_gguf(blocks, name, bias), reference.dequantize_gguf(blocks, name)
    if name.startswith("gptq"):
        parts = gptq(
            n,
            k,
            bits=8 if "8" in name else 4,
            reordered="order" in name,
            wide="wide" in name,
            groups=1 if "one" in name else 3,
        )
        if "symmetric" in name:
            parts["qzeros"][:] = 0x77777777
        return cpu.pack_gptq(**parts, bias=bias), reference.pack_gptq(**parts).weight
    if name == "awq":
        scales = torch.rand(3, n).half() * 0.02
        args = words(4, k, n), words(4, 3, n), scales
        return cpu.pack_awq(*args, bias=bias), reference.pack_awq(*args).weight
    if name == "mxfp4":
        args2 = (
            torch.randint(0, 256, (n, k // 2), dtype=torch.uint8),
            torch.randint(115, 130, (n, k // 32), dtype=torch.uint8),
        )
        return cpu.pack_mxfp4(*args2, bias=bias), reference.pack_mxfp4(*args2).weight
    codes = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    scales = torch.rand(n, 3 if "group" in name else 1) * 0.01
    wide = codes.float() * scales.repeat_interleave(k // scales.shape[1], 1)
    return cpu.pack_int8(codes, scales, bias, "int8" if name == "w8a8" else None), wide


GGUF_SHAPES = {32: [(5, 32), (200, 576)], 256: [(5, 256), (72, 768)]}
OTHERS = ["gptq", "gptq8", "gptq-order", "gptq-wide", "gptq-one", "gptq-symmetric", "awq", "mxfp4", "int8"]
OTHERS += ["int8-group", "w8a8"]
NAMES = [*GGUF_BLOCK_BYTES, *OTHERS]


def shapes(name: str) -> list[tuple[int, int]]:
    if name in GGUF_BLOCK_BYTES:
        return GGUF_SHAPES[gguf_block_length(name)]
    return [(24, 96), (136, 384)] + ([(7, 3), (33, 50)] if name in ("int8", "w8a8") else [])


@pytest.mark.parametrize("kind", GGUF_BLOCK_BYTES)
def test_gguf_dequantizes_as_the_gguf_library_does(linear_variant: str, kind: str) -> None:
    blocks = gguf_blocks(kind, 21, 512)
    expected = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(reference.dequantize_gguf(blocks, kind).numpy(), expected)
    assert np.array_equal(cpu.dequantize(cpu.pack_gguf(blocks, kind)).numpy(), expected)


@pytest.mark.parametrize("name", OTHERS)
def test_packing_keeps_every_value(linear_variant: str, name: str) -> None:
    for n, k in shapes(name):
        packed, weight = made(name, n, k, None)
        assert isinstance(packed, cpu.PackedLinear) and packed.type == QUANTIZED
        if name == "gptq-wide":  # scale · (code − zero) in two roundings
            torch.testing.assert_close(cpu.dequantize(packed), weight, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(cpu.dequantize(packed), weight)


@pytest.mark.parametrize("name", NAMES)
def test_products_match_float64(linear_variant: str, name: str) -> None:
    for (n, k), dtype in zip(
        shapes(name) * 2, [torch.bfloat16, torch.bfloat16, torch.float32, torch.float16], strict=False
    ):
        bias = torch.randn(n)
        packed, weight = made(name, n, k, bias)
        for m in (0, 1, 3, 18):
            x = torch.randn(m, k).to(dtype)
            y = cpu.linear(x, packed, torch.float32)
            seen = x.double()
            if name == "w8a8":
                codes, scales = reference_quant.quantize_int8(x.float())
                seen = codes.double() * scales.double()
            expected = seen @ weight.double().T + bias.double()
            terms = seen.abs() @ weight.double().abs().T
            bound = terms * 4e-6 + expected.abs() * 1e-6 + 1e-6
            if name != "w8a8" and dtype != torch.float32:  # half a step of x in each product
                peak = x.double().abs().amax(1, keepdim=True)
                bound += 0.505 * peak / 32639 * weight.double().abs().sum(1)
            assert y.shape == (m, n) and ((y.double() - expected).abs() <= bound).all()
            narrow = cpu.linear(x, packed)
            assert narrow.dtype == dtype and torch.equal(narrow, y.to(dtype))


@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_bits_in_every_batch(linear_variant: str, name: str) -> None:
    n, k = (72, 768) if "_K" in name else (136, 384)
    packed, _ = made(name, n, k, torch.randn(n))
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(70, k).to(dtype)
        whole = cpu.linear(x, packed)
        for size in (1, 3, 7, 32):
            parts = torch.cat([cpu.linear(part, packed) for part in x.split(size)])
            assert torch.equal(parts, whole), f"chunks of {size}"
        strange = torch.cat([torch.full((5, k), float("nan")).to(dtype), x[:1], x[1:9] * 0])
        y = cpu.linear(strange, packed)
        assert torch.equal(y[5], whole[0]) and y[:5].isnan().all() and y[6:].isfinite().all()


def test_every_variant_with_a_fused_product_gives_the_same_bits(every_linear: Callable) -> None:
    packed, _ = made("Q4_K", 72, 768, None)
    x = torch.randn(20, 768).bfloat16()
    results = every_linear(lambda: cpu.linear(x, packed))
    results.pop("portable")
    first, *others = results.values()
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_threads(threads: int) -> None:
    packed, _ = made("gptq", 136, 384, None)
    x = torch.randn(40, 384).bfloat16()
    before, expected = torch.get_num_threads(), cpu.linear(x, packed)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(cpu.linear(x, packed), expected)
    finally:
        torch.set_num_threads(before)


def test_strided_rows_are_read(linear_variant: str) -> None:
    packed, _ = made("awq", 24, 96, None)
    view = torch.randn(6, 300).bfloat16()[:, 30:126]
    assert torch.equal(cpu.linear(view, packed), cpu.linear(view.contiguous(), packed))


def test_what_has_no_even_groups_goes_to_the_reference() -> None:
    parts = gptq(16, 96, groups=12)  # of 8 inputs
    packed = cpu.pack_gptq(**parts)
    assert isinstance(packed, reference.PackedLinear)
    x = torch.randn(2, 96)
    torch.testing.assert_close(cpu.linear(x, packed), x @ reference.pack_gptq(**parts).weight.t())


def test_sizes_are_those_of_the_format() -> None:
    n, k = 256, 1024
    bits = {"Q4_0": 4.5, "Q4_1": 5, "Q8_0": 8.5, "Q4_K": 4.625, "Q6_K": 6.5625, "Q5_0": 6.5, "Q2_K": 5.125}
    for kind, expected in bits.items():
        assert cpu.pack_gguf(gguf_blocks(kind, n, k), kind).num_bytes * 8 / (n * k) == expected
    packed = cpu.pack_gptq(**gptq(n, k, groups=8))
    assert packed.num_bytes * 8 / (n * k) == 4 + 24 / 128
