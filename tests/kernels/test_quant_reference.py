"""Unpacking of quantized checkpoints against packers written from the published layouts, and other libraries."""

import gguf
import numpy as np
import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import kvern_kernels as kernels
from kvern_kernels import reference, reference_quant


def pack_along(codes: torch.Tensor, dim: int, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Plain loops: field i of a word holds value order[i] of its run of 32/bits along `dim`."""
    per_word = 32 // bits
    order = order or list(range(per_word))
    rows = codes.movedim(dim, 0).tolist()
    words = []
    for start in range(0, len(rows), per_word):
        line = []
        for column in range(len(rows[0])):
            value = sum(rows[start + order[i]][column] << (bits * i) for i in range(per_word))
            line.append(value - (1 << 32) if value >= 1 << 31 else value)
        words.append(line)
    return torch.tensor(words, dtype=torch.int32).movedim(0, dim).contiguous()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("reordered", [False, True])
def test_gptq(bits: int, reordered: bool) -> None:
    n, k, groups = 16, 64, 4
    top = (1 << bits) - 1
    codes = torch.randint(0, top + 1, (k, n))
    stored_zeros = torch.randint(0, top, (groups, n))
    scales = torch.rand(groups, n, dtype=torch.float16)
    g_idx = torch.randperm(k) % groups if reordered else torch.arange(k) // (k // groups)
    packed = reference.pack_gptq(
        pack_along(codes, 0, bits),
        pack_along(stored_zeros, 1, bits),
        scales,
        g_idx.int() if reordered else None,
        bits=bits,
    )
    expected = (codes - (stored_zeros[g_idx] + 1)) * scales.float()[g_idx]
    torch.testing.assert_close(packed.weight, expected.t(), rtol=0, atol=0)


def test_awq() -> None:
    n, k, groups = 16, 24, 3
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    codes, zeros = torch.randint(0, 16, (k, n)), torch.randint(0, 16, (groups, n))
    scales = torch.rand(groups, n, dtype=torch.float16)
    packed = reference.pack_awq(pack_along(codes, 1, 4, order), pack_along(zeros, 1, 4, order), scales)
    g = torch.arange(k) // 8
    torch.testing.assert_close(packed.weight, ((codes - zeros[g]) * scales.float()[g]).t(), rtol=0, atol=0)


def test_mxfp4_is_what_transformers_and_gguf_read() -> None:
    n, k = 6, 64
    blocks = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scales = torch.randint(100, 140, (n, k // 32), dtype=torch.uint8)
    got = reference.pack_mxfp4(blocks, scales).weight
    theirs = convert_moe_packed_tensors(
        blocks.view(1, n, k // 32, 16), scales.view(1, n, -1), dtype=torch.float32
    )
    assert torch.equal(got, theirs[0].t())
    codes = torch.stack((blocks & 15, blocks >> 4), -1).view(n, k // 32, 32)
    halves = codes[..., :16] | (codes[..., 16:] << 4)  # GGUF pairs values 16 apart
    rows = torch.cat((scales.unsqueeze(-1), halves), -1).view(n, -1).numpy()
    assert np.array_equal(got.numpy(), gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.MXFP4))


@pytest.mark.parametrize("group", [0, 128])
def test_fp8_activations_are_within_half_a_step(group: int) -> None:
    x = torch.randn(5, 200) * torch.logspace(-3, 3, 5).unsqueeze(1)
    x[2] = 0
    codes, scales = reference.quantize_fp8(x, group)
    assert codes.dtype == torch.float8_e4m3fn and scales.shape == (5, 2 if group else 1)
    spread = scales.repeat_interleave(128, 1)[:, :200] if group else scales
    # Three mantissa bits; below 2^-6 of the scale the steps are 2^-9.
    bound = torch.maximum(x.abs() / 16, spread * 2**-10)
    assert bool(((codes.float() * spread - x).abs() <= bound * 1.0001).all())
    assert torch.equal(scales[2], torch.ones_like(scales[2]))


def test_int8_activations_are_within_half_a_step() -> None:
    x = torch.randn(5, 33)
    codes, scales = reference.quantize_int8(x)
    assert bool(((codes.float() * scales - x).abs() <= scales * 0.5001).all())
    assert int(codes.abs().max()) == 127


def test_quantized_activations_are_part_of_the_product() -> None:
    x, weight = torch.randn(3, 256), torch.randn(130, 256)
    codes = weight.clamp(-4, 4).to(torch.float8_e4m3fn)
    blocks = torch.rand(2, 2) + 0.5
    plain = reference.linear(x, reference.pack_fp8(codes, blocks))
    spread = blocks.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)
    torch.testing.assert_close(plain, x @ (codes.float() * spread).t())
    both = reference.linear(x, reference.pack_fp8(codes, blocks, activations="fp8"))
    assert 0 < (both - plain).norm() / plain.norm() < 0.04
    integers = torch.randint(-127, 128, (130, 256), dtype=torch.int8)
    plain = reference.linear(x, reference.pack_int8(integers, torch.rand(130)))
    both = reference.linear(x, reference.pack_int8(integers, torch.rand(130), activations="int8"))
    assert plain.shape == both.shape


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="do not fit a weight of 130 outputs and 256 inputs"):
        reference.pack_fp8(torch.zeros(130, 256).to(torch.float8_e4m3fn), torch.ones(2, 3))
    with pytest.raises(ValueError, match="GPTQ with 3 bits"):
        reference.pack_gptq(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), bits=3)
    with pytest.raises(ValueError, match=r"must be int32, not torch\.float32"):
        reference_quant.unpack_awq(torch.zeros(1, 1), torch.zeros(1, 1))
    with pytest.raises(ValueError, match="unknown activation quantization 'fp4'"):
        reference_quant.requantized(torch.zeros(1, 1), "fp4")


@pytest.mark.parametrize(("kind", "halves"), [("Q4_K", [0, 2]), ("Q6_K", [208])])
def test_gguf_k_quants_dequantize_as_the_gguf_library_does(kind: str, halves: list[int]) -> None:
    blocks = torch.randint(0, 256, (5, 2, reference.GGUF_BLOCK_BYTES[kind]), dtype=torch.uint8)
    for at in halves:
        blocks[..., at : at + 2] = torch.randn(5, 2, 1).half().view(torch.uint8)
    blocks = blocks.flatten(1)
    expected = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(reference.dequantize_gguf(blocks, kind), torch.from_numpy(expected))
    packed = kernels.pack_gguf(blocks, kind)
    x = torch.randn(2, 512)
    torch.testing.assert_close(
        kernels.linear(x, packed), x @ torch.from_numpy(expected).t(), rtol=1e-4, atol=1e-3
    )
