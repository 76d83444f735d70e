"""Sampling on the device against the reference, and against the worker's own sampler."""

import numpy as np
import pytest
import torch

from kvern_kernels import philox, reference_sampling
from kvern_kernels.triton import sampling
from kvern_worker import logits_edits, logprobs
from kvern_worker import sampling as worker


def test_numbers_are_those_of_the_worker(device: str) -> None:
    rng = np.random.default_rng(1)
    seeds = np.concatenate([rng.integers(0, 2**64, 130, np.uint64), [np.uint64(2**64 - 1), np.uint64(0)]])
    positions = np.concatenate([rng.integers(0, 2**63, 131, np.int64), [0]])
    expected = philox.uniform(seeds, positions)
    given = torch.from_numpy(seeds.view(np.int64)).to(device), torch.from_numpy(positions).to(device)
    for backend in (sampling, reference_sampling):
        assert np.array_equal(backend.philox_uniform(*given).cpu().numpy(), expected)


CASES = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 1, 1.0, 0.0),
    (0.7, 40, 1.0, 0.0),
    (1.5, 0, 0.9, 0.0),
    (1.5, 0, 0.01, 0.0),
    (1.0, 0, 1.0, 0.05),
    (1.3, 100, 0.8, 0.01),
    (1.0, 10**9, 1.0, 0.0),
]


@pytest.mark.parametrize("vocab", [7, 2500])
def test_tokens_are_those_of_the_worker(device: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    rows = len(CASES) * 2
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32).round(2)  # rounded: many are equal
    temperature, top_k, top_p, min_p = (np.array(column * 2) for column in zip(*CASES, strict=True))
    top_k = np.minimum(top_k, vocab)
    numbers = rng.random(rows)
    numbers[0], numbers[1] = 0.0, np.nextafter(1.0, 0.0)
    expected = logits.argmax(-1)
    random = temperature > 0
    expected[random] = worker.draw(
        *(x[random] for x in (logits, temperature.astype(np.float32), top_k, top_p, min_p, numbers))
    )
    given = [torch.from_numpy(x).to(device) for x in (logits, temperature, top_k, top_p, min_p, numbers)]
    given[1], given[3], given[4] = given[1].float(), given[3].float(), given[4].float()
    for backend in (sampling, reference_sampling):
        tokens, finite = backend.sample(*given)
        assert finite.all() and tokens.tolist() == expected.tolist(), backend.__name__


def test_a_row_depends_on_nothing_but_itself_and_broken_rows_are_told(device: str) -> None:
    logits = torch.randn(4, 300, device=device) * 2
    ones, zeros = torch.ones(4, device=device), torch.zeros(4, device=device)
    rest = (torch.full((4,), 50, device=device), ones * 0.9, zeros, torch.rand(4, device=device).double())
    whole, _ = sampling.sample(logits, ones, *rest)
    logits[0, 7], logits[2] = float("nan"), float("-inf")
    tokens, finite = sampling.sample(logits, ones, *rest)
    assert finite.tolist() == [False, True, False, True]
    assert tokens.tolist() == [0, whole[1].item(), 0, whole[3].item()]
    none = [x[:0] for x in (logits, ones, *rest)]
    assert sampling.sample(*none)[0].shape == (0,)


def test_penalties_and_bitmask(device: str) -> None:
    torch.manual_seed(3)
    logits, vocab = torch.randn(4, 1100, device=device) * 3, 1100
    rows = torch.tensor([1, -1, 0, 1], device=device)
    counts = torch.randint(0, 3, (2, vocab), dtype=torch.int32, device=device)
    in_prompt = torch.rand(2, vocab, device=device) < 0.3
    repetition, presence, frequency = (torch.rand(4, device=device) + 0.5 for _ in range(3))
    ours, theirs = logits.clone(), logits.clone()
    for backend, into in ((sampling, ours), (reference_sampling, theirs)):
        backend.penalize_logits(into, rows, counts, in_prompt, repetition, presence, frequency)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    held = (rows >= 0).cpu()
    expected = logits_edits.penalize(
        logits[held].cpu().numpy(),
        counts[rows[held]].cpu().numpy(),
        in_prompt[rows[held]].cpu().numpy(),
        *(x[held].cpu().numpy()[:, None] for x in (repetition, presence, frequency)),
    )
    np.testing.assert_allclose(ours[held].cpu().numpy(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(ours[1], logits[1])

    bitmask = torch.randint(-(2**31), 2**31, (2, 35), dtype=torch.int32, device=device)
    for backend, into in ((sampling, ours), (reference_sampling, theirs)):
        into.copy_(logits)
        backend.mask_logits(into, rows, bitmask)
    assert torch.equal(ours, theirs) and torch.equal(ours[1], logits[1])
    bit = np.unpackbits(bitmask.cpu().numpy().view(np.uint8), axis=1, bitorder="little")[:, :vocab]
    assert np.array_equal(np.isneginf(ours[0].cpu().numpy()), bit[1] == 0)
    with pytest.raises(ValueError, match=r"bitmask must be int32 \[P, 35\]"):
        sampling.mask_logits(logits, rows, bitmask[:, :34])
    with pytest.raises(ValueError, match="logits must be float32"):
        sampling.mask_logits(logits.half(), rows, bitmask)


def test_logprobs_are_those_of_the_worker(device: str) -> None:
    logits = torch.randn(5, 5000, device=device).round(decimals=2) * 4
    tokens = torch.randint(0, 5000, (5,), device=device)
    expected = logprobs.token_logprobs(logits.cpu().numpy(), tokens.cpu().numpy(), np.zeros(5, np.int64))
    for backend in (sampling, reference_sampling):
        values, ranks, normalizers = backend.gather_logprobs(logits, tokens)
        assert ranks.tolist() == [one.rank for one in expected]
        np.testing.assert_allclose(values.tolist(), [one.logprob for one in expected], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(normalizers, logits.logsumexp(-1), rtol=1e-6, atol=1e-6)
