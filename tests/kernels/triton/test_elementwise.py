"""Norms, rotary embedding, KV store and block copies against the reference."""

import pytest
import torch

from kvern_kernels import reference
from kvern_kernels.triton import kv, launch, norms, rope

F32, BF16, F16, E4M3 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 2 * torch.finfo(dtype).eps if dtype != F32 else 3e-6, "atol": 1e-6}


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_norms(device: str, dtype: torch.dtype) -> None:
    for rows, dim in [(0, 8), (1, 1), (3, 17), (5, 576)]:
        x = torch.randn(rows, dim + 5, device=device).to(dtype)[:, 5:]
        residual = torch.randn(rows, dim, device=device).to(dtype)
        weight, bias = torch.randn(dim, device=device), torch.randn(dim, device=device).to(BF16)
        before = x.clone()
        torch.testing.assert_close(
            norms.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **tolerance(dtype)
        )
        for given in (None, bias):
            actual, expected = (b.layer_norm(x, weight, given, 1e-5) for b in (norms, reference))
            torch.testing.assert_close(actual, expected, **(tolerance(dtype) | {"atol": 2e-6}))
        normed, total = norms.add_rms_norm(x, residual, weight, 1e-5)
        expected, expected_total = reference.add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, expected_total) and torch.equal(x, before)
        torch.testing.assert_close(normed, expected, **tolerance(dtype))
    heads = torch.randn(3, 4, 20, device=device).to(dtype)
    weight = torch.randn(20, device=device).to(dtype)
    torch.testing.assert_close(
        norms.rms_norm(heads, weight, 1e-5), reference.rms_norm(heads, weight, 1e-5), **tolerance(dtype)
    )


def test_norms_refuse_what_does_not_fit(device: str) -> None:
    x = torch.randn(2, 8, device=device)
    with pytest.raises(ValueError, match=r"weight \(7,\) must be dense and of x's width, 8"):
        norms.rms_norm(x, torch.ones(7, device=device), 1e-5)
    with pytest.raises(ValueError, match=r"residual .* is not like x"):
        norms.add_rms_norm(x, x.bfloat16(), torch.ones(8, device=device), 1e-5)


@pytest.mark.parametrize(
    "dim,rotary,interleaved,qk_norm",
    [
        (64, 64, False, True),
        (80, 24, False, False),
        (80, 24, True, True),
        (18, 18, True, False),
        (64, 0, False, True),
    ],
)
def test_rope_and_store(device: str, dim: int, rotary: int, interleaved: bool, qk_norm: bool) -> None:
    tokens, heads, kv_heads, block_size = 7, 2, 1, 5
    fused = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=device).unflatten(1, (-1, dim))
    q, k, v = fused.split_with_sizes([heads, kv_heads, kv_heads], 1)
    positions = torch.randint(0, 50, (tokens,), device=device)
    cos_sin = torch.randn(50, rotary, device=device)
    slots = torch.tensor([3, 22, -1, 7, 24, -1, 0], device=device)
    q_norm, k_norm = (torch.randn(dim, device=device) for _ in range(2)) if qk_norm else (None, None)
    caches = [
        [torch.full((5, kv_heads, block_size, dim), 7.0, device=device) for _ in range(2)] for _ in range(2)
    ]
    outs = [
        backend.rope_and_store(q, k, v, positions, cos_sin, slots, *cache, interleaved, q_norm, k_norm, 1e-5)
        for backend, cache in zip((rope, reference), caches, strict=True)
    ]
    torch.testing.assert_close(*outs, rtol=3e-6, atol=1e-5)
    for actual, expected in zip(*caches, strict=True):
        torch.testing.assert_close(actual, expected, rtol=3e-6, atol=1e-5)
        untouched = torch.ones(5 * block_size, dtype=torch.bool, device=device)
        untouched[slots[slots >= 0]] = False
        rows = actual.transpose(1, 2).reshape(5 * block_size, -1)
        assert (rows[untouched] == 7.0).all() and (rows[~untouched] != 7.0).any()


def test_rope_in_place_of_the_models_dtypes(device: str) -> None:
    q, k = torch.randn(3, 2, 32, device=device).to(BF16), torch.randn(3, 1, 32, device=device).to(BF16)
    arguments = (torch.arange(3, device=device), torch.randn(9, 32, device=device))
    actual, expected = (b.rotary(q, *arguments) for b in (rope, reference))
    torch.testing.assert_close(actual, expected, **tolerance(BF16))
    caches = [reference.new_kv_cache(3, 1, 16, 32, BF16, device) for _ in range(2)]  # its own layout of keys
    for backend, cache in zip((rope, reference), caches, strict=True):
        backend.rope_and_store(q, k, k, *arguments, torch.tensor([17, 2, 40], device=device), *cache)
    for a, b in zip(*caches, strict=True):
        torch.testing.assert_close(a, b, **tolerance(BF16))
    empty = torch.empty(0, 2, 32, device=device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    assert rope.rotary(empty, none, arguments[1]).shape == (0, 2, 32)


@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
def test_an_fp8_store_rounds_as_torch_does(device: str, chip: str) -> None:
    """All 256 bytes' values, what lies half-way between them, and what lies outside."""
    bytes_ = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    ordered = bytes_[~bytes_.isnan()].sort().values
    values = torch.cat(
        [ordered, (ordered[1:] + ordered[:-1]) / 2, torch.randn(700) * 3, torch.randn(70) * 0.01]
    )
    values = torch.cat([values, torch.tensor([500.0, -1e6, 1e-9, -1e-9])])
    values = torch.cat([values, torch.zeros(-len(values) % 64)]).view(-1, 1, 64).to(device)
    slots = torch.randperm(32, device=device)[: len(values)]
    caches = [torch.zeros(2, 1, 16, 64, device=device).to(E4M3) for _ in range(4)]
    with launch.pretend(launch.CHIPS[chip]):
        kv.store_kv(values, -values, slots, *caches[:2])
    reference.store_kv(values, -values, slots, *caches[2:])
    for actual, expected in zip(caches[:2], caches[2:], strict=True):
        assert torch.equal(actual.float(), expected.float())


@pytest.mark.parametrize("cache_dtype", [F32, BF16, F16, E4M3])
def test_store_with_scales(device: str, cache_dtype: torch.dtype) -> None:
    k, v = torch.randn(4, 3, 48, device=device).to(F16), torch.randn(4, 3, 48, device=device).to(F16)
    slots = torch.tensor([40, -1, 3, 16], device=device)
    caches = [torch.full((3, 3, 16, 48), 7.0, device=device).to(cache_dtype) for _ in range(4)]
    kv.store_kv(k, v, slots, *caches[:2], 0.5, 2.0)
    reference.store_kv(k, v, slots, *caches[2:], 0.5, 2.0)
    for actual, expected in zip(caches[:2], caches[2:], strict=True):
        assert torch.equal(actual.float(), expected.float())


@pytest.mark.parametrize("dtype", [F32, E4M3])
def test_copy_blocks(device: str, dtype: torch.dtype) -> None:
    keys, values = (
        torch.randn(6, 2, 4, 8, device=device).to(dtype),
        torch.randn(6, 2, 4, 8, device=device).to(dtype),
    )
    before = keys.float().clone(), values.float().clone()
    sources, targets = torch.tensor([0, 1, 2], device=device), torch.tensor([1, 0, 5], device=device)
    kv.copy_blocks(keys, values, sources, targets)  # a swap and a copy
    for now, old in zip((keys.float(), values.float()), before, strict=True):
        assert torch.equal(now[[1, 0, 5, 2, 3, 4]], old[[0, 1, 2, 2, 3, 4]])
    kv.copy_blocks(keys, values, sources[:0], targets[:0])
