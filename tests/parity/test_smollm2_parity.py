"""The real model through the real scheduler core: transformers' greedy tokens, whatever the scheduler does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from parity import smollm2
from parity.local_engine import LocalEngine

from kvern_scheduler.core.group import Limits
from kvern_worker.executor import ModelExecutor
from kvern_worker.loading import LoadOptions, load

# The first test computes the fifty outputs that the others compare with.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LENGTH = 64
TIE = 1e-4


class NoProgress:
    def start(self, total_bytes: int) -> None: ...

    def add(self, num_bytes: int) -> None: ...


@pytest.fixture(scope="module")
def executor() -> ModelExecutor:
    options = LoadOptions(
        model=str(smollm2.PATH), dtype="float32", kv_cache_memory_bytes=2**29, max_model_len=2048
    )
    return load(options, NoProgress())


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return smollm2.prompts()


@pytest.fixture(scope="module")
def outputs(executor: ModelExecutor, prompts: list[list[int]]) -> list[list[int]]:
    """All fifty in batches of 32, prefix caching on."""
    return LocalEngine(executor, Limits(max_num_seqs=32)).generate(prompts, LENGTH)


@pytest.fixture(scope="module")
def reference() -> Iterator[Any]:
    yield smollm2.reference()


def test_greedy_tokens_are_those_of_transformers(
    prompts: list[list[int]], outputs: list[list[int]], reference: Any
) -> None:
    assert [len(output) for output in outputs] == [LENGTH] * 50
    gaps = [smollm2.worst_gap(reference, p, o) for p, o in zip(prompts, outputs, strict=True)]
    assert max(gaps) < TIE, max(gaps)


@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_chunk_sizes(
    executor: ModelExecutor, prompts: list[list[int]], outputs: list[list[int]], chunk: int
) -> None:
    """A budget of ``chunk`` tokens a step splits prompts, and holds fewer sequences back than it has tokens."""
    engine = LocalEngine(executor, Limits(max_num_seqs=12, max_num_batched_tokens=chunk))
    assert engine.generate(prompts[:16], LENGTH) == outputs[:16]


def test_without_prefix_caching(
    executor: ModelExecutor, prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    engine = LocalEngine(executor, Limits(max_num_seqs=32, enable_prefix_caching=False))
    assert engine.generate(prompts[:32], LENGTH) == outputs[:32]
    assert engine.group.num_prefix_hits == 0


def test_prefix_hits(executor: ModelExecutor, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    """Prompts that continue earlier answers find them in the cache, and go on as those did."""
    engine = LocalEngine(executor, Limits(max_num_seqs=32))
    engine.generate(prompts[:16], LENGTH)
    half = LENGTH // 2
    longer = [p + o[:half] for p, o in zip(prompts[:16], outputs[:16], strict=True)]
    assert engine.generate(longer, half) == [o[half:] for o in outputs[:16]]
    assert engine.group.num_prefix_hits > 16 * half // 2


def test_a_pool_so_small_that_it_preempts(
    executor: ModelExecutor, prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    engine = LocalEngine(executor, Limits(max_num_seqs=32, enable_prefix_caching=False), num_blocks=24)
    assert engine.generate(prompts[:16], LENGTH) == outputs[:16]
    assert engine.group.num_preemptions > 0


def test_alone(executor: ModelExecutor, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    for prompt, output in zip(prompts[:4], outputs[:4], strict=True):
        assert LocalEngine(executor).generate([prompt], LENGTH) == [output]


def test_seeded_sampling_alone_and_in_a_batch(executor: ModelExecutor, prompts: list[list[int]]) -> None:
    """The same tokens at temperature 1, also when the batch is preempted; four choices differ from one another."""
    batch = prompts[:32]
    together = LocalEngine(executor, Limits(max_num_seqs=32)).generate(batch, 24, seed=7, temperature=1.0)
    squeezed = LocalEngine(executor, Limits(max_num_seqs=32, enable_prefix_caching=False), num_blocks=24)
    assert squeezed.generate(batch, 24, seed=7, temperature=1.0) == together
    assert squeezed.group.num_preemptions > 0
    for index in (0, 13, 31):
        alone = LocalEngine(executor).generate([batch[index]], 24, seed=7, temperature=1.0, n=4)
        assert alone[0] == together[index]
        assert len({tuple(choice) for choice in alone}) == 4
