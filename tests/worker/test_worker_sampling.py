"""Sampling: each parameter against a naive implementation of one row, the distribution, and replay by seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats
from worker.mini_scheduler import MiniScheduler, Sequence, generate

from kvern.errors import KvernError
from kvern.v1 import error_pb2
from kvern.v1.sampling_pb2 import SamplingParams
from kvern_kernels.philox import philox4x32, uniform
from kvern_worker.executor import ModelExecutor
from kvern_worker.sampling import draw, sample
from kvern_worker.sampling_state import SamplingState

VOCAB = 500
Floats = npt.NDArray[np.float32]
Executors = Callable[[str], ModelExecutor]


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, vocab), dtype=np.float32) * np.float32(scale)


def choose(
    logits: Floats, params: list[SamplingParams], tokens: list[list[int]] | None = None, prompt: int = 1
) -> tuple[list[int], SamplingState]:
    """One step of ``sample`` for rows with these parameters and known tokens (``prompt`` of them prompt)."""
    state = SamplingState(len(params), logits.shape[1], (2,))
    tokens = tokens or [[5]] * len(params)
    for slot, (one, known) in enumerate(zip(params, tokens, strict=True)):
        state.add(slot, one, np.array(known, np.int32), prompt)
    lengths = np.array([len(known) for known in tokens])
    before = logits.copy()
    sampled = sample(logits, np.arange(len(params)), lengths, state)
    assert np.array_equal(before, logits), "the raw logits are needed for log-probabilities"
    assert not sampled.broken.any()
    assert not sampled.empty.any()
    return sampled.token_ids.tolist(), state


def naive_support(row: npt.NDArray[np.float64], params: SamplingParams) -> dict[int, float]:
    """The tokens that may be drawn, with their probabilities: the definition, one token at a time."""
    scaled = row / params.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    left = {int(t): float(p[t]) for t in np.argsort(-p, kind="stable")}
    if params.min_p > 0:
        best = max(left.values())
        left = {t: q for t, q in left.items() if q >= params.min_p * best}
    if params.top_k > 0:
        left = dict(list(left.items())[: params.top_k])
    if params.HasField("top_p") and params.top_p < 1:
        total, mass, kept = sum(left.values()), 0.0, {}
        for token, q in left.items():
            if mass >= params.top_p * total:
                break
            kept[token] = q
            mass += q
        left = kept
    total = sum(left.values())
    return {t: q / total for t, q in left.items()}


def naive_draw(support: dict[int, float], number: float) -> int:
    """Inverse of the cumulative distribution over tokens in order of id."""
    mass = 0.0
    for token in sorted(support):
        mass += support[token]
        if mass > number:
            return token
    return max(support)


def test_philox_known_answers() -> None:
    """Vectors of the authors' Random123 distribution (kat_vectors, philox4x32 with 10 rounds)."""

    def words(*values: int) -> tuple[npt.NDArray[np.uint64], ...]:
        return tuple(np.array([value], np.uint64) for value in values)

    ones = 0xFFFFFFFF
    cases = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, expected in cases:
        found = philox4x32(words(*counter), words(*key))  # type: ignore[arg-type]
        assert tuple(int(word[0]) for word in found) == expected


def test_uniform_depends_on_seed_and_position_only() -> None:
    seeds = np.array([0, 1, 2**63 + 7, 2**64 - 1], np.uint64)
    positions = np.array([0, 17, 2**33, 9], np.int64)
    together = uniform(seeds, positions)
    alone = np.concatenate([uniform(seeds[i : i + 1], positions[i : i + 1]) for i in range(4)])
    assert together.tolist() == alone.tolist()
    numbers = uniform(np.zeros(20_000, np.uint64), np.arange(20_000))
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3
    assert numbers.min() >= 0
    assert numbers.max() < 1


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.3},
        {"temperature": 2.5},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 7},
        {"temperature": 1.3, "top_k": VOCAB + 5},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 5.0, "top_p": 0.99},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 300, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 20.0, "top_k": 450, "top_p": 0.97},
    ],
    ids=str,
)
def test_draws_equal_the_naive_implementation(fields: dict[str, float]) -> None:
    logits = random_logits(40, seed=1)
    params = [SamplingParams(seed=seed, **fields) for seed in range(40)]  # type: ignore[arg-type]
    found, _ = choose(logits, params)
    numbers = uniform(np.arange(40, dtype=np.uint64), np.ones(40, np.int64))
    for row, token in enumerate(found):
        support = naive_support(logits[row].astype(np.float64), params[row])
        assert token in support
        assert token == naive_draw(support, numbers[row])


def test_cuts_widen_beyond_the_first_candidates() -> None:
    """A flat distribution over 40,000 tokens: top-p keeps far more than are looked at first."""
    logits = random_logits(6, vocab=40_000, seed=3, scale=0.1)
    params = [SamplingParams(temperature=1.0, top_p=p, seed=9) for p in (0.001, 0.1, 0.3, 0.6, 0.9, 0.999)]
    found, _ = choose(logits, params)
    number = float(uniform(np.array([9], np.uint64), np.array([1]))[0])
    for row, token in enumerate(found):
        assert token == naive_draw(naive_support(logits[row].astype(np.float64), params[row]), number)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 12, "top_p": 0.9},
        {"temperature": 2.0, "min_p": 0.05},
    ],
    ids=str,
)
def test_sampled_distribution(fields: dict[str, float]) -> None:
    """χ² of 20,000 draws against the exact probabilities."""
    count, row = 20_000, random_logits(1, vocab=50, seed=4, scale=1.0)
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    numbers = uniform(np.full(count, 77, np.uint64), np.arange(count))
    full = np.ones(count)
    tokens = draw(
        np.broadcast_to(row, (count, 50)),
        (full * params.temperature).astype(np.float32),
        (full * params.top_k).astype(np.int64),
        full * (params.top_p if params.HasField("top_p") else 1.0),
        full * params.min_p,
        numbers,
    )
    support = naive_support(row[0].astype(np.float64), params)
    observed = np.bincount(tokens, minlength=50)
    assert set(np.flatnonzero(observed).tolist()) <= set(support)
    expected = np.array([support[token] for token in sorted(support)]) * count
    assert stats.chisquare(observed[sorted(support)], expected).pvalue > 1e-3


def test_penalties_equal_the_naive_implementation() -> None:
    rng = random.Random(5)
    logits = random_logits(20, seed=6)
    tokens = [[rng.randrange(VOCAB) for _ in range(60)] for _ in range(20)]
    # Seen tokens among the best, so that the penalties decide.
    for row in range(20):
        tokens[row][:4] = np.argsort(-logits[row])[:4].tolist()
        tokens[row][30:34] = np.argsort(-logits[row])[4:8].tolist()
    params = [
        SamplingParams(
            temperature=0.0,
            repetition_penalty=rng.choice([1.0, 1.3, 0.8]),
            presence_penalty=rng.choice([0.0, 1.5, -1.0]),
            frequency_penalty=rng.choice([0.0, 0.7, -0.4]),
        )
        for _ in range(20)
    ]
    found, _ = choose(logits, params, tokens, prompt=30)
    for row, token in enumerate(found):
        expected, one, known = logits[row].astype(np.float64), params[row], tokens[row]
        for seen in set(known):
            value = expected[seen]
            expected[seen] = value / one.repetition_penalty if value > 0 else value * one.repetition_penalty
        for out in set(known[30:]):
            expected[out] -= one.presence_penalty + one.frequency_penalty * known[30:].count(out)
        assert token == expected.argmax()


def test_penalties_count_the_tokens_of_each_step() -> None:
    """A frequency penalty drives a constant model through its tokens in order of their logits."""
    logits = np.array([[5.0, 4.9, 4.8, 0.0, -9.0]], np.float32)
    state = SamplingState(1, 5, ())
    state.add(0, SamplingParams(temperature=0.0, frequency_penalty=0.15), np.array([4], np.int32), 1)
    slots, chosen = np.array([0]), []
    for length in range(1, 8):
        token = sample(logits, slots, np.array([length]), state).token_ids
        state.record(slots, token)
        chosen.append(int(token[0]))
    assert chosen == [0, 1, 0, 2, 1, 0, 2]


def test_bias_bad_allowed_and_min_tokens() -> None:
    logits = np.zeros((6, VOCAB), np.float32)
    logits[:, :10] = np.arange(10, 0, -1)  # the arg max is 0, then 1, 2 …
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logit_bias={0: -5.0, 7: 100.0, 3: 1.0}),
        SamplingParams(temperature=0.0, bad_token_ids=[0, 1]),
        SamplingParams(temperature=0.0, allowed_token_ids=[400, 6, 8], logit_bias={8: 3.0, 0: 100.0}),
        SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=[0, 1]),
        SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[0, 1]),
    ]
    # Two output tokens are out already: min_tokens 3 still masks 0, 1 and the end token 2; 2 does not.
    found, _ = choose(logits, params, [[5, 6, 7]] * 6, prompt=1)
    assert found == [0, 7, 2, 8, 3, 0]


def test_a_released_slot_forgets_everything() -> None:
    logits = random_logits(1)
    state = SamplingState(1, VOCAB, (2,))
    best = int(logits.argmax())
    fancy = SamplingParams(
        temperature=0.0,
        bad_token_ids=[best],
        frequency_penalty=1.0,
        logprobs=3,
        prompt_logprobs=1,
        min_tokens=5,
    )
    state.add(0, fancy, np.array([1], np.int32), 1)
    state.release([0])
    state.add(0, SamplingParams(temperature=0.0), np.array([1], np.int32), 1)
    assert bool(state.plain[0])
    assert sample(logits, np.array([0]), np.array([1]), state).token_ids.tolist() == [best]
    assert not state.any_edits
    assert (state.penalty_row[0], state.prompt_logprobs[0], state.logprobs[0]) == (-1, -1, -1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -math.inf),
        ("bad_token_ids", [VOCAB]),
        ("allowed_token_ids", [2**32 - 1]),
        ("logit_bias", {VOCAB: 1.0}),
        ("logit_bias", {1: math.nan}),
    ],
)
def test_bad_parameters_are_named(field: str, value: object) -> None:
    state = SamplingState(1, VOCAB, ())
    with pytest.raises(KvernError) as caught:
        state.add(0, SamplingParams(**{field: value}), np.array([1], np.int32), 1)  # type: ignore[arg-type]
    assert caught.value.code == error_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert caught.value.field == field


def test_broken_rows_are_found_and_alone() -> None:
    logits = random_logits(6, seed=8)
    clean = logits.copy()
    logits[1, 17] = math.nan
    logits[2, 3] = math.inf
    logits[4] = -math.inf
    state = SamplingState(6, VOCAB, ())
    for slot in range(6):
        params = SamplingParams(temperature=1.0 if slot != 3 else 0.0, seed=slot, top_p=0.9)
        state.add(slot, params, np.array([1], np.int32), 1)
    slots, lengths = np.arange(6), np.ones(6, np.int64)
    found = sample(logits, slots, lengths, state)
    expected = sample(clean, slots, lengths, state)
    assert found.broken.tolist() == [False, True, True, False, True, False]
    assert found.token_ids[[0, 3, 5]].tolist() == expected.token_ids[[0, 3, 5]].tolist()


def test_nothing_left_to_sample_is_reported() -> None:
    state = SamplingState(2, VOCAB, ())
    state.add(0, SamplingParams(allowed_token_ids=[4], bad_token_ids=[4]), np.array([1], np.int32), 1)
    state.add(1, SamplingParams(temperature=0.0), np.array([1], np.int32), 1)
    sampled = sample(random_logits(2), np.arange(2), np.ones(2, np.int64), state)
    assert sampled.empty.tolist() == [True, False]


SEEDED = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.05},
    {"temperature": 0.0},
    {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    {"temperature": 0.9, "logit_bias": {9: 3.0}, "bad_token_ids": [11], "min_tokens": 4},
]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_seeded_sampling_alone_equals_a_batch_of_32(name: str, executor: Executors) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 263) for _ in range(rng.randint(5, 60))] for _ in range(32)]
    params = [SamplingParams(seed=100 + i, **SEEDED[i % len(SEEDED)]) for i in range(32)]  # type: ignore[arg-type]
    together = generate(executor(name), prompts, 16, params)
    assert len({tuple(output) for output in together}) > 25
    for i in range(12):
        assert generate(executor(name), [prompts[i]], 16, [params[i]]) == [together[i]]
    # Preempted after five tokens and resumed by recomputing: penalties and positions carry on.
    assert generate(executor(name), prompts, 16, params, preempt_at=5) == together
    other = [SamplingParams(seed=900 + i, **SEEDED[0]) for i in range(32)]  # type: ignore[arg-type]
    assert generate(executor(name), prompts, 16, other) != generate(executor(name), prompts, 16, params)


def test_logprobs_equal_log_softmax(executor: Executors) -> None:
    """Of raw logits, whatever the parameters; ranks and alternatives agree with each other."""
    params = SamplingParams(temperature=1.0, seed=5, logprobs=4, top_k=30, logit_bias={9: 2.0})
    sequence = Sequence(list(range(3, 20)), params, 8)
    everything = Sequence(list(range(3, 20)), SamplingParams(temperature=1.0, seed=5, logprobs=263, top_k=30,
                                                              logit_bias={9: 2.0}), 8)  # fmt: skip
    MiniScheduler(executor("llama")).run([sequence])
    MiniScheduler(executor("llama")).run([everything])
    assert sequence.output == everything.output
    for token, few, full in zip(sequence.output, sequence.logprobs, everything.logprobs, strict=True):
        assert few.token_id == token
        assert list(few.top_token_ids) == list(full.top_token_ids)[:4]
        assert math.fsum(math.exp(value) for value in full.top_logprobs) == pytest.approx(1.0, abs=1e-6)
        at = list(full.top_token_ids).index(token)
        assert few.rank == at + 1
        assert few.logprob == full.top_logprobs[at]


def test_prompt_logprobs_cover_the_prompt_once(executor: Executors) -> None:
    prompt = list(range(3, 50))
    for chunk in (7, 512):
        sequence = Sequence(prompt, SamplingParams(temperature=0.0, prompt_logprobs=2), 3)
        MiniScheduler(executor("llama")).run([sequence], chunk)
        assert sorted(sequence.prompt_logprobs) == list(range(1, len(prompt)))
        assert [sequence.prompt_logprobs[i].token_id for i in range(1, len(prompt))] == prompt[1:]
        assert all(len(found.top_token_ids) == 2 for found in sequence.prompt_logprobs.values())
