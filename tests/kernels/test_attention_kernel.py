"""Paged attention: values against the reference, and bits that don't depend on batch or chunking."""

from dataclasses import dataclass

import pytest
import torch

from kvern_kernels import cpu, kv_cache, reference
from kvern_kernels.attention_options import AttentionOptions

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@dataclass
class Case:
    """Sequences of `lengths` keys with random contents, their blocks scattered over the pool."""

    lengths: list[int]
    heads: int = 9
    kv_heads: int = 3
    dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = F32
    cache_dtype: torch.dtype = F32
    plain_layout: bool = False
    value_dim: int | None = None

    def __post_init__(self) -> None:
        most = max(-(-n // self.block_size) for n in self.lengths)
        count = len(self.lengths) * most + 3
        self.k, self.v = cpu.new_kv_cache(
            count, self.kv_heads, self.block_size, self.dim, self.cache_dtype, value_dim=self.value_dim
        )
        if self.plain_layout:
            self.k = self.k.contiguous()
        at = torch.arange(count * self.block_size)
        for cache in (self.k, self.v):
            x = torch.randn(len(at), self.kv_heads, cache.shape[3])
            kv_cache.write_tokens(cache, at // self.block_size, at % self.block_size, x)
        order = torch.randperm(count)[: len(self.lengths) * most]
        self.tables = order.view(len(self.lengths), most).to(torch.int32)
        self.q = [torch.randn(n, self.heads, self.dim).to(self.dtype) for n in self.lengths]

    def run(self, chunks: list[tuple[int, int, int]], backend=cpu, q=None, **options) -> torch.Tensor:
        """Attention of (sequence, first, last) query ranges in one call; `q` instead of the case's own."""
        starts = torch.tensor([0, *[b - a for _, a, b in chunks]]).cumsum(0).int()
        q = torch.cat([self.q[s][a:b] for s, a, b in chunks]) if q is None else q
        tables = self.tables[[s for s, _, _ in chunks]]
        ends = torch.tensor([b for _, _, b in chunks], dtype=torch.int32)
        lse, key_ends = options.pop("lse", None), options.pop("key_ends", None)
        rules = AttentionOptions(self.dim**-0.5, **options)
        return backend.paged_attention(q, self.k, self.v, tables, starts, ends, rules, lse, key_ends)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    # In bfloat16 the weights of values are rounded too.
    return {"rtol": 2 * torch.finfo(dtype).eps, "atol": {F32: 4e-6, BF16: 6e-3, F16: 2e-3}[dtype]}


@pytest.mark.parametrize(
    "dim,heads,kv_heads", [(16, 4, 4), (64, 9, 3), (80, 4, 1), (100, 2, 2), (128, 16, 2), (256, 8, 1)]
)
def test_mixed_batch_matches_reference(linear_variant: str, dim: int, heads: int, kv_heads: int) -> None:
    case = Case([70, 1, 130, 17], heads, kv_heads, dim)
    chunks = [(0, 69, 70), (1, 0, 1), (2, 50, 130), (3, 0, 17)]
    expected = case.run(chunks, reference)
    torch.testing.assert_close(case.run(chunks), expected, **tolerance(F32))


@pytest.mark.parametrize(
    "options",
    [{"window": 1}, {"window": 20}, {"window": 600}, {"softcap": 5.0}, {"window": 33, "softcap": 2.0}],
)
@pytest.mark.parametrize("block_size", [5, 16, 32])
def test_window_and_softcap_match_reference(
    linear_variant: str, options: dict[str, float], block_size: int
) -> None:
    case = Case([700, 40], 4, 2, 32, block_size)
    chunks = [(0, 640, 700), (1, 39, 40), (0, 699, 700)]
    torch.testing.assert_close(
        case.run(chunks, **options), case.run(chunks, reference, **options), **tolerance(F32)
    )


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("cache_dtype", [F32, BF16, F16])
@pytest.mark.parametrize("plain_layout", [False, True])
def test_dtypes_and_layouts(
    linear_variant: str, dtype: torch.dtype, cache_dtype: torch.dtype, plain_layout: bool
) -> None:
    case = Case([90, 33], 6, 2, 48, 16, dtype, cache_dtype, plain_layout)
    chunks = [(0, 60, 90), (1, 32, 33)]
    out = case.run(chunks)
    assert out.dtype == dtype
    torch.testing.assert_close(out, case.run(chunks, reference), **tolerance(dtype))


@pytest.mark.parametrize("cache_dtype", [F32, BF16])
@pytest.mark.parametrize("options", [{}, {"window": 100}])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_a_row_has_the_same_bits_however_it_is_computed(
    linear_variant: str, cache_dtype: torch.dtype, options: dict[str, int], kv_heads: int
) -> None:
    length = 1100  # more than two splits of the context
    case = Case([length, *[50 + 30 * i for i in range(31)]], 9, kv_heads, 32, 16, cache_dtype, cache_dtype)
    whole = case.run([(0, 0, length)], **options)
    rows = [0, 1, 15, 63, 64, 511, 512, 513, 700, 1023, 1024, 1099]
    for row in rows:
        alone = case.run([(0, row, row + 1)], **options)
        assert torch.equal(alone[0], whole[row]), f"row {row} as a decode step"
    others = [(s, case.lengths[s] - 1, case.lengths[s]) for s in range(1, 32)]
    batched = case.run([*others, (0, 1099, 1100)], **options)
    assert torch.equal(batched[-1], whole[1099])
    for size, first in ((7, 1000), (64, 400), (512, 0)):  # the end of the context, which sees most
        chunks = [case.run([(0, a, min(a + size, length))], **options) for a in range(first, length, size)]
        assert torch.equal(torch.cat(chunks), whole[first:]), f"chunks of {size}"


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_attention_bits_do_not_depend_on_threads(threads: int) -> None:
    case = Case([1500], 4, 1, 64)
    chunk = [(0, 1497, 1500)]
    before, expected = torch.get_num_threads(), case.run(chunk)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(case.run(chunk), expected)
    finally:
        torch.set_num_threads(before)


def test_shared_blocks_and_stale_contents(linear_variant: str) -> None:
    case = Case([64, 64], 4, 2, 32)
    case.tables[1, :2] = case.tables[0, :2]
    case.q[1] = case.q[0]
    both = case.run([(0, 20, 30), (1, 20, 30)])
    assert torch.equal(both[:10], both[10:])
    expected = case.run([(0, 29, 30)])
    block, offset = case.tables[0, 1], 30 % 16
    case.k[block, :, offset:] = float("nan")  # what an earlier owner left behind the sequence's end
    case.v[block, :, offset:] = float("nan")
    assert torch.equal(case.run([(0, 29, 30)]), expected)


def test_sequences_without_queries_and_empty_batches(linear_variant: str) -> None:
    case = Case([20, 30, 40], 4, 2, 32)
    out = case.run([(0, 20, 20), (1, 25, 30), (2, 40, 40)])
    assert torch.equal(out, case.run([(1, 25, 30)]))
    none = torch.empty(0, dtype=torch.int32)
    empty = cpu.paged_attention(
        *(torch.empty(0, 4, 32), case.k, case.v, case.tables[:0], torch.zeros(1, dtype=torch.int32), none),
        AttentionOptions(1.0),
    )
    assert empty.shape == (0, 4, 32)


def test_attention_reads_strided_queries(linear_variant: str) -> None:
    case = Case([40], 4, 2, 32)
    fused = torch.randn(10, 8 * 32)
    view = fused[:, : 4 * 32].unflatten(1, (4, 32))
    case.q[0] = torch.cat([torch.zeros(30, 4, 32), view])
    expected = case.run([(0, 30, 40)])
    starts, ends = torch.tensor([0, 10], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    out = cpu.paged_attention(
        view, case.k, case.v, case.tables, starts, ends, AttentionOptions(case.dim**-0.5)
    )
    assert torch.equal(out, expected)


def test_indices_outside_the_cache_are_refused() -> None:
    case = Case([40], 4, 2, 32)
    case.tables[0, 1] = case.k.shape[0]
    with pytest.raises(ValueError, match="block_tables reach outside"):
        case.run([(0, 39, 40)])
