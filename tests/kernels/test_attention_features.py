"""Attention beyond the plain: narrow caches, ALiBi, sinks, log-sum-exp, head sizes, parts of a context merged."""

import pytest
import torch
from kernels.test_attention_kernel import BF16, F16, F32, Case, tolerance

from kvern_kernels import cpu, kv_cache, reference

E4M3, E5M2, I8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
NARROW = [E4M3, E5M2, I8]


@pytest.mark.parametrize("cache_dtype", NARROW)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_narrow_caches(linear_variant: str, cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    for block_size, plain_layout in ((16, False), (5, False), (32, cache_dtype != I8)):
        case = Case([90, 33], 6, 2, 48, block_size, dtype, cache_dtype, plain_layout)
        chunks = [(0, 80, 90), (1, 32, 33)]
        scales = {} if cache_dtype == I8 else {"k_scale": 0.5, "v_scale": 2.0}
        out = case.run(chunks, **scales)
        torch.testing.assert_close(out, case.run(chunks, reference, **scales), **tolerance(dtype))


@pytest.mark.parametrize("cache_dtype", [F32, BF16, F16, *NARROW])
@pytest.mark.parametrize("value_dim", [None, 24])
def test_what_is_stored_is_what_the_reference_stores(
    variant: str, cache_dtype: torch.dtype, value_dim: int | None
) -> None:
    tokens, kv_heads, dim = 40, 2, 40
    value_dim = value_dim or dim
    q, k = torch.randn(tokens, 4, dim), torch.randn(tokens, kv_heads, dim)
    v = torch.randn(tokens, kv_heads, value_dim) * torch.logspace(-6, 6, tokens).view(-1, 1, 1)
    v[3], v[4, 0, 1], v[5, 0, 2] = 0.0, float("nan"), float("inf")
    cos_sin = torch.cat((torch.ones(1, dim // 2), torch.zeros(1, dim // 2)), 1)  # turns nothing
    slots = torch.randperm(80)[:tokens]
    slots[7] = -1
    caches = [cpu.new_kv_cache(5, kv_heads, 16, dim, cache_dtype, value_dim=value_dim) for _ in range(2)]
    for backend, cache in zip((cpu, reference), caches, strict=True):
        backend.rope_and_store(q, k, v, torch.zeros(tokens, dtype=torch.int64), cos_sin, slots, *cache)
    every = torch.arange(5)
    for ours, expected in zip(*caches, strict=True):
        ours, expected = kv_cache.read_blocks(ours, every), kv_cache.read_blocks(expected, every)
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    stored = kv_cache.read_blocks(caches[0][1], every).transpose(1, 2).reshape(80, kv_heads, value_dim)
    fine = torch.tensor([i for i in range(tokens) if i not in (4, 5, 7) and 8 < i < 25])
    step = {F32: 0.0, BF16: 2**-8, F16: 2**-11, E4M3: 2**-4, E5M2: 2**-3}.get(cache_dtype)
    largest = v[fine].abs().amax(-1, keepdim=True)
    error = (stored[slots[fine]] - v[fine]).abs()
    bound = largest / 253 if step is None else v[fine].abs() * step + 2**-9
    assert (error <= bound).all()
    assert torch.isnan(stored[slots[4], 0, 1])
    if cache_dtype in NARROW:  # saturated, or for int8 refused by its scale
        assert not torch.isinf(stored).any()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    "features", [{"alibi"}, {"sinks"}, {"alibi", "sinks", "softcap", "window"}, {"negative"}]
)
def test_alibi_sinks_and_the_log_sum_exp(linear_variant: str, dtype: torch.dtype, features: set[str]) -> None:
    case = Case([700, 20], 6, 2, 64, 16, dtype, dtype)
    chunks = [(0, 600, 700), (1, 0, 20), (0, 699, 700)]
    options = {}
    if "alibi" in features:
        options["alibi"] = 2.0 ** -torch.arange(1, 7)
    if "sinks" in features:
        options["sinks"] = torch.randn(6) * 3
    if "softcap" in features:
        options |= {"softcap": 3.0, "window": 50}
    if "negative" in features:  # any scale is served, not only positive ones
        options["k_scale"] = -1.0
    lses = [torch.full((121, 6), float("nan")) for _ in range(2)]
    out = case.run(chunks, lse=lses[0], **options)
    expected = case.run(chunks, reference, lse=lses[1], **options)
    torch.testing.assert_close(out, expected, **tolerance(dtype))
    torch.testing.assert_close(lses[0], lses[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("causal", [False, True])
def test_queries_that_see_later_keys(
    linear_variant: str, dtype: torch.dtype, window: int, causal: bool
) -> None:
    """An encoder, and images in a causal context: tokens 500 to 629 of the first sequence, 3 to 7 of the second."""
    case = Case([700, 20], 6, 2, 64, 16, dtype, dtype)
    chunks = [(0, 450, 700), (1, 0, 20)]
    options = {"window": window, "alibi": torch.rand(6) * 0.1}
    ends = torch.zeros(270, dtype=torch.int32)
    ends[50:180], ends[253:258] = 630, 8
    later = {"key_ends": ends} if causal else {"causal": False}
    out = case.run(chunks, **options, **later)
    torch.testing.assert_close(out, case.run(chunks, reference, **options, **later), **tolerance(dtype))
    plain = case.run(chunks, **options)
    assert not torch.allclose(out[50], plain[50], atol=0.02)
    assert torch.allclose(out[:20], plain[:20], atol=0.02) == causal
    if causal:  # whatever else is in the call
        part = case.run([(0, 490, 640)], key_ends=ends[40:190].contiguous(), **options)
        assert torch.equal(part, out[40:190])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    "dim,value_dim",
    [
        (32, 32),
        (72, 72),
        (80, 80),
        (96, 96),
        (112, 112),
        (192, 192),
        (192, 128),
        (128, 192),
        (576, 512),
        (17, 9),
    ],
)
def test_head_sizes(linear_variant: str, dtype: torch.dtype, dim: int, value_dim: int) -> None:
    case = Case([150, 40], 4, 1, dim, 16, dtype, dtype, value_dim=value_dim)
    chunks = [(0, 100, 150), (1, 39, 40)]
    out = case.run(chunks)
    assert out.shape == (51, 4, value_dim)
    torch.testing.assert_close(out, case.run(chunks, reference), **tolerance(dtype))


def test_values_may_be_a_part_of_the_keys(linear_variant: str) -> None:
    case = Case([150], 4, 1, 96, 16, BF16, BF16)
    case.v = case.k[..., :64]  # as in multi-head latent attention
    chunks = [(0, 100, 150)]
    torch.testing.assert_close(case.run(chunks), case.run(chunks, reference), **tolerance(BF16))


@pytest.mark.parametrize("cache_dtype", [BF16, *NARROW])
@pytest.mark.parametrize("featured", [False, True])
def test_bits_do_not_depend_on_chunks(linear_variant: str, cache_dtype: torch.dtype, featured: bool) -> None:
    length, heads = 600, 6  # two parts of the context
    case = Case([length, *[50 + 30 * i for i in range(5)]], heads, 2, 48, 16, BF16, cache_dtype)
    options = {"alibi": torch.rand(heads), "sinks": torch.randn(heads), "window": 300} if featured else {}
    whole_lse = torch.empty(length, heads)
    whole = case.run([(0, 0, length)], lse=whole_lse, **options)
    for row in (0, 63, 511, 512, 599):
        lse = torch.empty(1, heads)
        assert torch.equal(case.run([(0, row, row + 1)], lse=lse, **options)[0], whole[row]), row
        assert torch.equal(lse[0], whole_lse[row])
    others = [(s, case.lengths[s] - 1, case.lengths[s]) for s in range(1, 6)]
    assert torch.equal(case.run([*others, (0, 599, 600)], **options)[-1], whole[599])
    for size, first in ((7, 500), (250, 0)):
        chunks = [case.run([(0, a, min(a + size, length))], **options) for a in range(first, length, size)]
        assert torch.equal(torch.cat(chunks), whole[first:]), f"chunks of {size}"


def test_a_token_that_is_not_finite_spoils_later_ones_only(linear_variant: str) -> None:
    for cache_dtype in (F32, BF16, *NARROW):
        case = Case([40], 4, 2, 32, 16, BF16, cache_dtype)
        bad = torch.full((1, 2, 32), float("nan"))
        kv_cache.write_tokens(case.k, case.tables[0, 1:2].long(), torch.tensor([4]), bad)  # position 20
        assert torch.isfinite(case.run([(0, 19, 20)]).float()).all()
        assert torch.isnan(case.run([(0, 25, 26)]).float()).all()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_parts_of_a_context_merge(dtype: torch.dtype) -> None:
    """The keys of a query shared out over two calls, as context parallelism does."""
    case = Case([64, 100], 4, 2, 32, 16, dtype, dtype)
    case.tables[1, :4] = case.tables[0, :4]
    q, sinks = case.q[1][99:], torch.randn(4)
    expected_lse = torch.empty(1, 4)
    expected = case.run([(1, 99, 100)], sinks=sinks, lse=expected_lse)
    lses = torch.full((3, 1, 4), float("-inf"))  # the last part has no keys
    outs = torch.full((3, 1, 4, 32), float("nan")).to(dtype)
    outs[0] = case.run([(0, 63, 64)], q=q, sinks=sinks, lse=lses[0])
    tables = case.tables
    case.tables = tables[:, 4:]
    outs[1] = case.run([(1, 35, 36)], q=q, lse=lses[1])
    out, lse = reference.merge_attention(outs, lses)
    torch.testing.assert_close(out, expected, **tolerance(dtype))
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_copied_blocks_take_their_scales_along() -> None:
    for backend in (cpu, reference):
        case = Case([64], 4, 2, 32, 16, BF16, I8)
        before = kv_cache.read_blocks(case.k, torch.arange(4))
        backend.copy_blocks(case.k, case.v, torch.tensor([0, 1]), torch.tensor([1, 0]))
        assert torch.equal(kv_cache.read_blocks(case.k, torch.tensor([1, 0, 2, 3])), before)


def test_per_head_arguments_are_checked() -> None:
    case = Case([64], 4, 2, 32)
    with pytest.raises(ValueError, match=r"alibi must be float32 \[4\]"):
        case.run([(0, 0, 1)], alibi=torch.ones(2))
    with pytest.raises(ValueError, match=r"lse must be float32 \[1, 4\]"):
        case.run([(0, 0, 1)], lse=torch.empty(4))
