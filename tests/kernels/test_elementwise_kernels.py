"""Norms, rotary embedding and KV store, gated activations, block copies: against the reference."""

import pytest
import torch

from kvern_kernels import cpu, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 3e-6, "atol": 1e-6}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_norms(variant: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    for rows, dim in [(0, 8), (1, 1), (3, 17), (5, 576), (200, 300)]:
        wide = torch.randn(rows, dim + 5).to(dtype)
        x, residual = wide[:, 5:], torch.randn(rows, dim).to(dtype)
        weight = torch.randn(dim).to(weight_dtype)
        before = x.clone()
        torch.testing.assert_close(
            cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **tolerance(dtype)
        )
        normed, total = cpu.add_rms_norm(x, residual, weight, 1e-5)
        expected, expected_total = reference.add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, expected_total) and torch.equal(x, before)
        torch.testing.assert_close(normed, expected, **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_and_mul", "swiglu_and_mul"])
def test_gated_activations(variant: str, dtype: torch.dtype, op: str) -> None:
    for rows, inner in [(0, 4), (1, 1), (3, 21), (40, 1536)]:
        x = (torch.randn(rows, 2 * inner + 3) * 5).to(dtype)[:, 3:]
        gate, up = x.double().chunk(2, dim=-1)
        if op == "swiglu_and_mul":  # as in transformers' GptOssExperts
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            expected = ((up + 1) * gate * torch.sigmoid(1.702 * gate)).to(dtype)
        elif op == "gelu_and_mul":
            expected = (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(dtype)
        else:
            expected = (torch.nn.functional.silu(gate) * up).to(dtype)
        torch.testing.assert_close(getattr(cpu, op)(x), expected, **tolerance(dtype))
        torch.testing.assert_close(getattr(reference, op)(x), expected, **(tolerance(dtype) | {"atol": 1e-5}))
    extremes = torch.tensor([[-1e30, -90.0, -88.0, 90.0, 1.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(
        getattr(cpu, op)(extremes), getattr(reference, op)(extremes), rtol=1e-5, atol=1e-30
    )
    spoilt = torch.ones(2, 8)
    spoilt[0, 1] = spoilt[1, 6] = float("nan")  # a row's error is seen, and its neighbours' is none
    assert torch.equal(getattr(cpu, op)(spoilt).isnan(), torch.tensor([[0, 1, 0, 0], [0, 0, 1, 0]]).bool())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("dim,rotary", [(64, 64), (64, 24), (18, 18), (256, 128)])
def test_rope_and_store(variant: str, interleaved: bool, qk_norm: bool, dim: int, rotary: int) -> None:
    for dtype, cache_dtype in [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16),
    ]:
        tokens, heads, kv_heads, block_size = 11, 6, 2, 16
        fused = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
        q, k, v = (
            part.unflatten(1, (-1, dim))
            for part in fused.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
        )
        positions = torch.randint(0, 50, (tokens,))
        cos_sin = torch.randn(50, rotary)
        slots = torch.randperm(4 * block_size)[:tokens]
        slots[3] = -1
        norms = (torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)) if qk_norm else (None, None)
        caches = [cpu.new_kv_cache(5, kv_heads, block_size, dim, cache_dtype) for _ in range(2)]
        for keys, values in caches:
            keys.fill_(7.0)
            values.fill_(7.0)
        given = fused.clone()
        results = [
            backend.rope_and_store(q, k, v, p, cos_sin, slots, *cache, interleaved, *norms, 1e-6)
            for backend, cache, p in zip((reference, cpu), caches, (positions, positions.int()), strict=True)
        ]
        assert torch.equal(fused, given)
        torch.testing.assert_close(results[1], results[0], **(tolerance(dtype) | {"atol": 1e-5}))
        for expected, actual in zip(*caches, strict=True):
            torch.testing.assert_close(actual, expected, **(tolerance(cache_dtype) | {"atol": 1e-5}))
            untouched = torch.ones(5 * block_size, dtype=torch.bool)
            untouched[slots[slots >= 0]] = False
            rows = actual.transpose(1, 2).reshape(5 * block_size, -1)
            assert (rows[untouched] == 7.0).all() and (rows[~untouched] != 7.0).any()


def test_a_plain_key_layout_is_written_too(variant: str) -> None:
    keys, values = torch.zeros(3, 2, 5, 32), torch.zeros(3, 2, 5, 32)
    other = cpu.new_kv_cache(3, 2, 5, 32, torch.float32)
    q, k, v = torch.randn(4, 4, 32), torch.randn(4, 2, 32), torch.randn(4, 2, 32)
    arguments = (q, k, v, torch.arange(4), torch.randn(9, 32), torch.tensor([4, 5, 14, 0]))
    cpu.rope_and_store(*arguments, keys, values)
    reference.rope_and_store(*arguments, *other)
    torch.testing.assert_close(keys, other[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(values, other[1])


def test_rope_refuses_indices_out_of_range() -> None:
    cache = cpu.new_kv_cache(2, 1, 4, 16, torch.float32)
    x = torch.randn(1, 1, 16)
    for position, slot in [(8, 0), (-1, 0), (0, 8)]:
        with pytest.raises(ValueError, match="position is outside 0…7 or a slot outside"):
            cpu.rope_and_store(
                x, x, x, torch.tensor([position]), torch.randn(8, 16), torch.tensor([slot]), *cache
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_blocks(dtype: torch.dtype) -> None:
    keys, values = cpu.new_kv_cache(6, 2, 4, 8, dtype)
    keys.copy_(torch.randn(keys.shape))
    values.copy_(torch.randn(values.shape))
    before = keys.clone(), values.clone()
    cpu.copy_blocks(keys, values, torch.tensor([0, 1, 2]), torch.tensor([1, 0, 5]))  # a swap and a copy
    for now, old in zip((keys, values), before, strict=True):
        assert torch.equal(now[[1, 0, 5, 2, 3, 4]], old[[0, 1, 2, 2, 3, 4]])
    cpu.copy_blocks(keys, values, torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    with pytest.raises(ValueError, match="outside 0…5"):
        cpu.copy_blocks(keys, values, torch.tensor([0]), torch.tensor([6]))


@pytest.mark.parametrize("op", ["rms_norm", "silu_and_mul"])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_rows_do_not_depend_on_the_batch(variant: str, op: str, dtype: torch.dtype) -> None:
    x = torch.randn(100, 1000).to(dtype)
    more = (torch.randn(1000), 1e-6) if op == "rms_norm" else ()
    whole = getattr(cpu, op)(x, *more)
    for row in (0, 57, 99):
        assert torch.equal(getattr(cpu, op)(x[row : row + 1], *more)[0], whole[row])
