"""Paged attention in Triton: values against the reference, and bits in batch-invariant mode."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from kvern_kernels import reference
from kvern_kernels.attention_options import AttentionOptions
from kvern_kernels.triton import attention, launch

F32, BF16, F16, E4M3 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn


@dataclass
class Case:
    """Sequences of `lengths` keys with random contents, their blocks scattered over the pool; the cache
    beyond them is NaN."""

    lengths: list[int]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = F32
    cache_dtype: torch.dtype | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        most = max(-(-n // self.block_size) for n in self.lengths)
        count = len(self.lengths) * most + 3
        shape = (count, self.kv_heads, self.block_size, self.dim)
        keys, values = torch.randn(shape), torch.randn(shape)
        order = torch.randperm(count)[: len(self.lengths) * most].view(len(self.lengths), most)
        unused = torch.ones(count, self.block_size, dtype=torch.bool)
        for s, length in enumerate(self.lengths):
            for block, begin in zip(order[s].tolist(), range(0, length, self.block_size), strict=False):
                unused[block, : length - begin] = False
        for cache in (keys, values):
            cache.transpose(1, 2)[unused] = float("nan")
        self.k, self.v = (x.to(self.cache_dtype or self.dtype).to(self.device) for x in (keys, values))
        self.tables = order.to(torch.int32).to(self.device)
        self.q = [torch.randn(n, self.heads, self.dim).to(self.dtype).to(self.device) for n in self.lengths]

    def run(self, chunks: list[tuple[int, int, int]], backend=attention, **options) -> torch.Tensor:
        """Attention of (sequence, first, last) query ranges in one call."""
        starts = torch.tensor([0, *[b - a for _, a, b in chunks]]).cumsum(0).int().to(self.device)
        q = torch.cat([self.q[s][a:b] for s, a, b in chunks])
        tables = self.tables[[s for s, _, _ in chunks]]
        ends = torch.tensor([b for _, _, b in chunks], dtype=torch.int32, device=self.device)
        lse, key_ends = options.pop("lse", None), options.pop("key_ends", None)
        rules = AttentionOptions(self.dim**-0.5, **options)
        return backend.paged_attention(q, self.k, self.v, tables, starts, ends, rules, lse, key_ends)

    def check(self, chunks: list[tuple[int, int, int]], **options) -> None:
        actual, expected = self.run(chunks, **options), self.run(chunks, reference, **options)
        coarse = self.cache_dtype == E4M3 and self.dtype != F32
        close = {F32: 1e-5, F16: 2e-3, BF16: 2e-2}[self.dtype] * (2 if coarse else 1)
        torch.testing.assert_close(actual, expected, rtol=close, atol=close)


MIXED = [(0, 69, 70), (1, 0, 1), (2, 50, 130), (3, 5, 17)]


@pytest.mark.parametrize(
    "dim,heads,kv_heads", [(64, 6, 2), (80, 4, 1), (128, 4, 4), (192, 3, 1), (256, 2, 1)]
)
def test_mixed_batch(device: str, dim: int, heads: int, kv_heads: int) -> None:
    Case([70, 1, 130, 17], heads, kv_heads, dim, device=device).check(MIXED)


@pytest.mark.parametrize("block_size,dtype", [(16, BF16), (32, F16), (64, BF16), (128, F16)])
def test_block_sizes_and_dtypes(device: str, block_size: int, dtype: torch.dtype) -> None:
    case = Case([70, 1, 130, 17], block_size=block_size, dtype=dtype, device=device)
    case.check(MIXED)
    case.check([(0, 69, 70), (2, 129, 130), (3, 16, 17)])


def slopes(case: Case) -> dict[str, torch.Tensor]:
    return {"alibi": torch.rand(case.heads, device=case.device) * 0.2}


def sinks(case: Case) -> dict[str, torch.Tensor]:
    return {"sinks": torch.randn(case.heads, device=case.device)}


@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 70},
        {"softcap": 2.0},
        {"sinks": 1},
        {"alibi": 1},
        {"window": 33, "softcap": 5.0, "sinks": 1},
    ],
    ids=str,
)
def test_features(device: str, options: dict) -> None:
    case = Case([300, 40], 4, 2, 32, device=device)
    made = {"sinks": sinks(case), "alibi": slopes(case)}
    given = {k: v for name, value in options.items() for k, v in (made.get(name) or {name: value}).items()}
    for chunks in ([(0, 240, 300), (1, 39, 40)], [(0, 299, 300), (1, 39, 40)]):
        lses = [torch.zeros(sum(b - a for _, a, b in chunks), 4, device=device) for _ in range(2)]
        torch.testing.assert_close(
            case.run(chunks, lse=lses[0], **given),
            case.run(chunks, reference, lse=lses[1], **given),
            rtol=2e-5,
            atol=2e-5,
        )
        torch.testing.assert_close(lses[0], lses[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "gfx942"])
def test_fp8_cache_with_and_without_hardware_for_it(device: str, chip: str) -> None:
    case = Case([70, 33], dtype=BF16, cache_dtype=E4M3, device=device)
    with launch.pretend(launch.CHIPS[chip]):
        case.check([(0, 60, 70), (1, 32, 33)], k_scale=0.5, v_scale=1.5)


def test_long_contexts_are_split(device: str) -> None:
    """A step of few sequences: the context is cut, the parts are merged in order."""
    case = Case([1500, 40, 600], 4, 1, 32, device=device)
    chunks = [(0, 1499, 1500), (1, 39, 40), (2, 599, 600)]
    how = attention.plan(launch.CHIPS["sm_90"], 3, 3, 4, 1, 32, 1504, 0, F32, F32, False)
    assert how.parallel and how.splits == 6
    case.check(chunks)
    case.check(chunks, **sinks(case))


@pytest.fixture
def invariant() -> Iterator[None]:
    launch.use_batch_invariant(True)
    yield
    launch.use_batch_invariant(False)


@pytest.mark.parametrize("options", [{}, {"window": 100}])
def test_a_row_has_the_same_bits_however_it_is_computed(
    device: str, invariant: None, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "INVARIANT_SPLIT", 128)
    length = 300
    case = Case([length, 50, 110, 1], 4, 2, 32, dtype=BF16, device=device)
    whole, expected = (case.run([(0, 0, length)], backend, **options) for backend in (attention, reference))
    torch.testing.assert_close(whole, expected, rtol=2e-2, atol=2e-2)
    for row in (0, 128, 299):
        assert torch.equal(case.run([(0, row, row + 1)], **options)[0], whole[row]), row
    batched = case.run([(1, 49, 50), (2, 109, 110), (3, 0, 1), (0, 299, 300)], **options)
    assert torch.equal(batched[-1], whole[299])
    for size, first in ((7, 286), (64, 192)):
        chunks = [case.run([(0, a, min(a + size, length))], **options) for a in range(first, length, size)]
        assert torch.equal(torch.cat(chunks), whole[first:]), f"chunks of {size}"


def test_sequences_without_queries_padding_and_empty_batches(device: str) -> None:
    case = Case([20, 30, 40], 4, 2, 32, device=device)
    out = case.run([(0, 20, 20), (1, 25, 30), (2, 40, 40)])
    torch.testing.assert_close(out, case.run([(1, 25, 30)], reference), rtol=1e-5, atol=1e-5)
    none = torch.empty(0, dtype=torch.int32, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    empty = torch.empty(0, 4, 32, device=device)
    assert attention.paged_attention(
        empty, case.k, case.v, case.tables[:0], zero, none, AttentionOptions(1.0)
    ).shape == (0, 4, 32)
    # A CUDA graph's batch: rows behind the last sequence, sequences of no length behind those.
    q = torch.cat([case.q[0][19:], case.q[1][29:], torch.zeros(3, 4, 32, device=device)])
    starts = torch.tensor([0, 1, 2, 2, 2, 2], dtype=torch.int32, device=device)
    ends = torch.tensor([20, 30, 0, 0, 0], dtype=torch.int32, device=device)
    tables = torch.cat([case.tables[:2], torch.zeros_like(case.tables)])
    padded = attention.paged_attention(q, case.k, case.v, tables, starts, ends, AttentionOptions(32**-0.5))
    expected = case.run([(0, 19, 20), (1, 29, 30)], reference)
    torch.testing.assert_close(padded[:2], expected, rtol=1e-5, atol=1e-5)


def test_strided_queries_and_transposed_keys(device: str) -> None:
    case = Case([40], 4, 2, 32, device=device)
    fused = torch.randn(10, 8 * 32, device=device)
    view = fused[:, : 4 * 32].unflatten(1, (4, 32))
    case.q[0] = torch.cat([torch.zeros(30, 4, 32, device=device), view])
    expected = case.run([(0, 30, 40)], reference)
    case.k = case.k.transpose(2, 3).contiguous().transpose(2, 3)
    starts = torch.tensor([0, 10], dtype=torch.int32, device=device)
    ends = torch.tensor([40], dtype=torch.int32, device=device)
    out = attention.paged_attention(
        view, case.k, case.v, case.tables, starts, ends, AttentionOptions(case.dim**-0.5)
    )
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_parts_merge(device: str) -> None:
    parts, lses = torch.randn(3, 5, 2, 48, device=device), torch.randn(3, 5, 2, device=device)
    lses[1, 2], parts[1, 2] = float("-inf"), float("nan")
    lses[:, 4], parts[:, 4] = float("-inf"), float("nan")
    for actual, expected in zip(
        attention.merge_attention(parts, lses), reference.merge_attention(parts, lses), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_is_refused(device: str) -> None:
    case = Case([40], 4, 2, 32, device=device)
    with pytest.raises(ValueError, match="head sizes must be equal"):
        case.q[0] = case.q[0][..., :16]
        case.run([(0, 39, 40)])
    with pytest.raises(ValueError, match="has no GPU kernel: use float8_e4m3fn"):
        Case([40], 4, 2, 32, cache_dtype=torch.float8_e5m2, device=device).run([(0, 39, 40)])
