"""Random quantized matrices, packed by the reference and by the Triton backend (for tests/kernels/triton; a folder
named kernels is better not imported, since that is the name of a library).
"""

from collections.abc import Callable
from typing import Any

import torch

from kvern_kernels import reference
from kvern_kernels.triton import packing

Made = tuple[reference.PackedLinear, packing.PackedLinear]


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def both(op: str, *args: Any, **options: Any) -> Made:
    return getattr(reference, op)(*args, **options), getattr(packing, op)(*args, **options)


def gptq(n: int, k: int, bits: int, group: int, reordered: bool = False, symmetric: bool = False) -> Made:
    groups = k // group
    zeros = words(groups, n * bits // 32)
    if symmetric:
        zeros = torch.full_like(zeros, 0x77777777)
    index = (torch.randperm(k) % groups).int() if reordered else None
    arguments = (words(k * bits // 32, n), zeros, torch.rand(groups, n).half() * 0.05, index)
    return both("pack_gptq", *arguments, torch.randn(n), bits)


def awq(n: int, k: int, group: int) -> Made:
    scales = torch.rand(k // group, n).half() * 0.05
    return both("pack_awq", words(k, n // 8), words(k // group, n // 8), scales)


def int8(n: int, k: int, activations: str | None) -> Made:
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    return both("pack_int8", codes, torch.rand(n) * 0.02, torch.randn(n), activations)


def fp8(n: int, k: int, blocked: bool, activations: str | None) -> Made:
    scales = torch.rand(-(-n // 128), -(-k // 128)) if blocked else torch.rand(n, 1)
    return both("pack_fp8", torch.randn(n, k).to(torch.float8_e4m3fn), scales, torch.randn(n), activations)


def mxfp4(n: int, k: int) -> Made:
    blocks = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    return both("pack_mxfp4", blocks, torch.randint(118, 130, (n, k // 32), dtype=torch.uint8))


def gguf(n: int, k: int, kind: str) -> Made:
    length = 256 if kind.endswith("_K") else 32
    blocks = torch.randint(0, 256, (n, k // length, reference.GGUF_BLOCK_BYTES[kind]), dtype=torch.uint8)
    for at in {"Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208]}.get(kind, [0]):
        blocks[..., at : at + 2] = (torch.randn(n, k // length, 1) * 0.05).half().view(torch.uint8)
    return both("pack_gguf", blocks.flatten(1), kind, torch.randn(n))


# Odd sizes, and more inputs than one step of the kernel takes.
KINDS: dict[str, Callable[[], Made]] = {
    "plain": lambda: both("pack_linear", torch.randn(70, 97), torch.randn(70)),
    "gptq 4": lambda: gptq(72, 256, 4, 128),
    "gptq 4 symmetric": lambda: gptq(72, 160, 4, 32, symmetric=True),
    "gptq 4 reordered": lambda: gptq(72, 144, 4, 24, reordered=True),
    "gptq 8": lambda: gptq(72, 96, 8, 32, reordered=True),
    "awq": lambda: awq(72, 192, 64),
    "int8": lambda: int8(70, 200, None),
    "w8a8 int8": lambda: int8(70, 200, "int8"),
    "fp8 channel": lambda: fp8(70, 200, False, None),
    "fp8 blocks": lambda: fp8(130, 200, True, None),
    "w8a8 fp8 channel": lambda: fp8(70, 200, False, "fp8"),
    "w8a8 fp8 blocks": lambda: fp8(130, 200, True, "fp8"),
    "mxfp4": lambda: mxfp4(70, 160),
    "Q4_0": lambda: gguf(70, 160, "Q4_0"),
    "Q4_1": lambda: gguf(70, 160, "Q4_1"),
    "Q8_0": lambda: gguf(70, 96, "Q8_0"),
    "Q4_K": lambda: gguf(70, 512, "Q4_K"),
    "Q6_K": lambda: gguf(70, 512, "Q6_K"),
}
