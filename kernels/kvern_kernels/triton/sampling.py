"""Choosing tokens on the device: one program per row, which walks the vocabulary a few times.

Cuts are found by value, by a search over the bits of a float: a pass over the row settles two bits of the
cut by counting what lies above three candidates. Sums run in one fixed order in float64, so that a row's
token depends on that row alone. The numbers come from Philox4x32-10 (see `kvern_kernels.philox`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvern_kernels.triton.launch import cdiv, dense, launch, next_power_of_2


@triton.jit
def _philox_kernel(seeds_ptr, positions_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    seed = tl.load(seeds_ptr + at, mask=mask, other=0).to(tl.uint64, bitcast=True)
    position = tl.load(positions_ptr + at, mask=mask, other=0).to(tl.uint64, bitcast=True)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    c2, c3 = tl.zeros([BLOCK], tl.uint32), tl.zeros([BLOCK], tl.uint32)
    for _ in tl.static_range(10):
        product_0 = c0.to(tl.uint64) * 0xD2511F53
        product_1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (product_1 >> 32).to(tl.uint32) ^ c1 ^ k0, (product_0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = product_1.to(tl.uint32), product_0.to(tl.uint32)
        k0 = k0 + tl.full([BLOCK], 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full([BLOCK], 0xBB67AE85, tl.uint32)
    bits = ((c0.to(tl.uint64) << 32) | c1.to(tl.uint64)) >> 11
    tl.store(out_ptr + at, bits.to(tl.int64, bitcast=True).to(tl.float64) * 1.1102230246251565e-16, mask=mask)


def philox_uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """See reference_sampling.philox_uniform."""
    seeds, positions = seeds.contiguous(), positions.contiguous()
    out = torch.empty(seeds.shape, dtype=torch.float64, device=seeds.device)
    count = seeds.shape[0]
    launch(_philox_kernel, (cdiv(count, 128),), seeds, positions, out, count, BLOCK=128)
    return out


@triton.jit
def _key(x):
    """uint32 that order as the floats do."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _above(row_ptr, vocab, largest, inverse, floor, low, step, WEIGH: tl.constexpr, BLOCK: tl.constexpr):
    """How many (WEIGH: how much mass) of the scaled logits with keys ≥ floor have keys ≥ low + step, low + 2 step
    and low + 3 step; float64.
    """
    first = tl.zeros([BLOCK], tl.float64)
    second = tl.zeros([BLOCK], tl.float64)
    third = tl.zeros([BLOCK], tl.float64)
    for at in range(0, vocab, BLOCK):
        column = at + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + column, mask=column < vocab, other=float("-inf"))
        scaled = (x - largest) * inverse
        key = _key(scaled)
        each = tl.full([BLOCK], 1.0, tl.float64)
        if WEIGH:
            each = tl.exp(scaled).to(tl.float64)
        each = tl.where((column < vocab) & (key >= floor), each, 0.0)
        first += tl.where(key >= low + step, each, 0.0)
        second += tl.where(key >= low + 2 * step, each, 0.0)
        third += tl.where(key >= low + 3 * step, each, 0.0)
    return tl.sum(first, 0), tl.sum(second, 0), tl.sum(third, 0)


@triton.jit
def _search(row_ptr, vocab, largest, inverse, floor, wanted, WEIGH: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key at or above which lie `wanted` logits, or mass, of those with keys ≥ floor."""
    cut = tl.full([], 0, tl.uint32)
    step = tl.full([], 1 << 30, tl.uint32)
    while step > 0:
        first, second, third = _above(row_ptr, vocab, largest, inverse, floor, cut, step, WEIGH, BLOCK)
        steps = (
            (first >= wanted).to(tl.uint32)
            + (second >= wanted).to(tl.uint32)
            + (third >= wanted).to(tl.uint32)
        )
        cut += steps * step
        step = step >> 2
    return cut


@triton.jit
def _sample_kernel(
    logits_ptr,  # float32 [R, V]
    temperature_ptr,  # float32 [R]
    top_k_ptr,  # int64 [R]
    top_p_ptr,  # float32 [R]
    min_p_ptr,  # float32 [R]
    numbers_ptr,  # float64 [R]
    out_ptr,  # int64 [R]
    finite_ptr,  # bool [R]
    stride_r,
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_r
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.full([BLOCK], 0, tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for at in range(0, vocab, BLOCK):
        column = at + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + column, mask=column < vocab, other=float("-inf"))
        broken = broken | ((x != x) | (x == float("inf"))).to(tl.int32)
        where = tl.where(x > top, column, where)
        top = tl.maximum(top, x)
    largest = tl.max(top, 0)
    best = tl.min(tl.where(top == largest, where, vocab), 0)
    finite = (tl.max(broken, 0) == 0) & (largest > float("-inf"))
    tl.store(finite_ptr + row, finite)
    temperature = tl.load(temperature_ptr + row)
    if (temperature <= 0) | (finite == 0):
        tl.store(out_ptr + row, tl.where(finite, best, 0).to(tl.int64))
        return
    inverse = 1.0 / temperature
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row).to(tl.float64)
    min_p = tl.load(min_p_ptr + row)
    cut = tl.full([], 0, tl.uint32)
    if min_p > 0:
        cut = _key(tl.log(min_p))
    if (top_k > 0) & (top_k < vocab):
        everything = tl.full([], 0, tl.uint32)
        found = _search(row_ptr, vocab, largest, inverse, everything, top_k.to(tl.float64), False, BLOCK)
        cut = tl.maximum(cut, found)

    total = _total(row_ptr, vocab, largest, inverse, cut, BLOCK)
    if top_p < 1:
        found = _search(row_ptr, vocab, largest, inverse, cut, total * top_p, True, BLOCK)
        cut = tl.maximum(cut, found)
        total = _total(row_ptr, vocab, largest, inverse, cut, BLOCK)

    target = tl.load(numbers_ptr + row) * total
    passed = tl.full([], 0.0, tl.float64)
    token = tl.full([], -1, tl.int32)
    last = best
    for at in range(0, vocab, BLOCK):
        column = at + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + column, mask=column < vocab, other=float("-inf"))
        scaled = (x - largest) * inverse
        kept = (column < vocab) & (_key(scaled) >= cut)
        weight = tl.where(kept, tl.exp(scaled).to(tl.float64), 0.0)
        mass = tl.sum(weight, 0)
        if (token < 0) & (mass > 0):
            final = tl.max(tl.where(weight > 0, column, 0), 0)  # rounding may leave the target past it
            last = final
            if passed + mass > target:
                beyond = (weight > 0) & (passed + tl.cumsum(weight, 0) > target)
                token = tl.minimum(tl.min(tl.where(beyond, column, vocab), 0), final)
        passed += mass
    tl.store(out_ptr + row, tl.where(token < 0, last, token).to(tl.int64))


@triton.jit
def _total(row_ptr, vocab, largest, inverse, cut, BLOCK: tl.constexpr):
    """The mass of what is kept, float64, its blocks added in order as the walk that draws adds them."""
    total = tl.full([], 0.0, tl.float64)
    for at in range(0, vocab, BLOCK):
        column = at + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + column, mask=column < vocab, other=float("-inf"))
        scaled = (x - largest) * inverse
        kept = (column < vocab) & (_key(scaled) >= cut)
        total += tl.sum(tl.where(kept, tl.exp(scaled).to(tl.float64), 0.0), 0)
    return total


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, numbers: Tensor
) -> tuple[Tensor, Tensor]:
    """See reference_sampling.sample; a row without a finite largest logit, or with a NaN, gets token 0."""
    logits = dense(logits)
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    launch(
        _sample_kernel,
        (rows,),
        *(logits, temperature, top_k, top_p, min_p, numbers, out, finite, logits.stride(0), vocab),
        BLOCK=min(2048, next_power_of_2(vocab)),
        num_warps=8,
    )
    return out, finite


@triton.jit
def _edit_kernel(
    logits_ptr,  # float32 [R, V]
    rows_ptr,  # int64 [R]
    counts_ptr,  # int32 [P, V]
    in_prompt_ptr,  # bool [P, V]
    repetition_ptr,  # float32 [R]
    presence_ptr,
    frequency_ptr,
    bitmask_ptr,  # int32 [P, words]
    stride_r,
    stride_p,
    vocab,
    PENALIZE: tl.constexpr,  # else MASK
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    held = tl.load(rows_ptr + row)
    if held < 0:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < vocab
    x = tl.load(logits_ptr + row * stride_r + column, mask=mask)
    if PENALIZE:
        count = tl.load(counts_ptr + held * stride_p + column, mask=mask, other=0)
        given = tl.load(in_prompt_ptr + held * stride_p + column, mask=mask, other=0) != 0
        factor = tl.load(repetition_ptr + row)
        x = tl.where((count > 0) | given, tl.where(x > 0, x / factor, x * factor), x)
        x -= tl.load(frequency_ptr + row) * count.to(tl.float32)
        x = tl.where(count > 0, x - tl.load(presence_ptr + row), x)
    else:
        word = tl.load(bitmask_ptr + held * stride_p + column // 32, mask=mask, other=0)
        x = tl.where(((word >> (column % 32)) & 1) != 0, x, float("-inf"))
    tl.store(logits_ptr + row * stride_r + column, x, mask=mask)


def penalize_logits(
    logits: Tensor,
    rows: Tensor,
    counts: Tensor,
    in_prompt: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """See reference_sampling.penalize_logits."""
    _check_in_place("penalize_logits", logits)
    if counts.shape != in_prompt.shape or counts.shape[1] != logits.shape[1]:
        raise ValueError(
            f"penalize_logits: counts {tuple(counts.shape)} must be [P, {logits.shape[1]}], as in_prompt"
        )
    count, vocab = logits.shape
    launch(
        _edit_kernel,
        (count, cdiv(vocab, 1024)),
        *(logits, rows, counts.contiguous(), in_prompt.contiguous(), repetition, presence, frequency, counts),
        *(logits.stride(0), vocab, vocab),
        PENALIZE=True,
        BLOCK=1024,
    )


def mask_logits(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """See reference_sampling.mask_logits."""
    _check_in_place("mask_logits", logits)
    count, vocab = logits.shape
    if bitmask.dtype != torch.int32 or bitmask.shape[1] != cdiv(vocab, 32):
        raise ValueError(
            f"mask_logits: bitmask must be int32 [P, {cdiv(vocab, 32)}], not {tuple(bitmask.shape)}"
        )
    bitmask = dense(bitmask)
    launch(
        _edit_kernel,
        (count, cdiv(vocab, 1024)),
        *(
            logits,
            rows,
            bitmask,
            bitmask,
            logits,
            logits,
            logits,
            bitmask,
            logits.stride(0),
            bitmask.stride(0),
            vocab,
        ),
        PENALIZE=False,
        BLOCK=1024,
    )


def _check_in_place(op: str, logits: Tensor) -> None:
    if logits.dtype != torch.float32 or logits.stride(-1) != 1:
        raise ValueError(
            f"{op}: logits must be float32 and dense, to be changed in place, not {logits.dtype}"
        )


@triton.jit
def _logprob_kernel(
    logits_ptr,  # float32 [R, V]
    token_ids_ptr,  # int64 [R]
    out_ptr,  # float32 [R]
    ranks_ptr,  # int64 [R]
    normalizers_ptr,  # float32 [R]
    stride_r,
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_r
    chosen = tl.load(row_ptr + tl.load(token_ids_ptr + row))
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    above = tl.zeros([BLOCK], tl.int32)
    for at in range(0, vocab, BLOCK):
        column = at + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + column, mask=column < vocab, other=float("-inf"))
        top = tl.maximum(top, x)
        above += (x > chosen).to(tl.int32)
    largest = tl.max(top, 0)
    mass = tl.zeros([BLOCK], tl.float64)
    for at in range(0, vocab, BLOCK):
        column = at + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + column, mask=column < vocab, other=float("-inf"))
        mass += tl.exp(x - largest).to(tl.float64)
    normalizer = largest + tl.log(tl.sum(mass, 0).to(tl.float32))
    tl.store(out_ptr + row, chosen - normalizer)
    tl.store(ranks_ptr + row, tl.sum(above, 0).to(tl.int64) + 1)
    tl.store(normalizers_ptr + row, normalizer)


def gather_logprobs(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See reference_sampling.gather_logprobs. Token ids lie on the device and are not checked."""
    logits = dense(logits)
    rows, vocab = logits.shape
    out, normalizers = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    ranks = torch.empty(rows, dtype=torch.int64, device=logits.device)
    launch(
        _logprob_kernel,
        (rows,),
        *(logits, token_ids, out, ranks, normalizers, logits.stride(0), vocab),
        BLOCK=min(4096, next_power_of_2(vocab)),
        num_warps=8,
    )
    return out, ranks, normalizers


def production() -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls whose compilations `aot` checks."""

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    logits, floats, ids = meta(64, 151936), meta(64), meta(64, dtype=torch.int64)
    numbers = meta(64, dtype=torch.float64)
    counts, given = meta(8, 151936, dtype=torch.int32), meta(8, 151936, dtype=torch.bool)
    bitmask = meta(8, 151936 // 32, dtype=torch.int32)
    yield "numbers", lambda: philox_uniform(ids, ids)
    yield "top-k, top-p, min-p", lambda: sample(logits, floats, ids, floats, floats, numbers)
    yield "penalties", lambda: penalize_logits(logits, ids, counts, given, floats, floats, floats)
    yield "bitmask", lambda: mask_logits(logits, ids, bitmask)
    yield "log-probabilities", lambda: gather_logprobs(logits, ids)
