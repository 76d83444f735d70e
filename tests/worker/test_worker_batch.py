"""The persistent batch and the executor defend themselves: no plan crashes the worker or hurts a neighbour."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worker.conftest import load_executor
from worker.mini_scheduler import MiniScheduler, Sequence, generate, greedy

from kvern.errors import KvernError
from kvern.rpc.packing import pack_i32, pack_u32, unpack_i32, unpack_u32
from kvern.v1 import error_pb2, worker_pb2
from kvern.v1.sampling_pb2 import SamplingParams
from kvern_worker.batch import PersistentBatch
from kvern_worker.executor import ModelExecutor

Executors = Callable[[str], ModelExecutor]
VOCAB = 263


def new_sequence(slot: int, tokens: list[int], blocks: list[int], **fields: Any) -> worker_pb2.NewSequence:
    defaults: dict[str, Any] = {"num_prompt_tokens": len(tokens), "params": greedy()}
    return worker_pb2.NewSequence(
        slot=slot,
        token_ids=pack_i32(tokens),
        block_ids=pack_u32(blocks),
        block_generations=pack_u32([1] * len(blocks)),
        **{**defaults, **fields},
    )


def plan_of(*sequences: worker_pb2.NewSequence, **arrays: list[int]) -> worker_pb2.StepPlan:
    """A plan that prefills the sequences, unless other arrays are given."""
    if "prefill_slots" not in arrays:
        arrays["prefill_slots"] = [sequence.slot for sequence in sequences]
        arrays["prefill_lengths"] = [
            len(sequence.token_ids) // 4 - sequence.num_computed_tokens for sequence in sequences
        ]
    packed = {name: pack_u32(values) for name, values in arrays.items()}
    return worker_pb2.StepPlan(epoch=1, step=1, new_sequences=sequences, **packed)  # type: ignore[arg-type]


@pytest.fixture
def small(executor: Executors) -> ModelExecutor:
    executor("llama").reset()
    return executor("llama")


GOOD = [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("bad", "code", "field"),
    [
        (new_sequence(1, [5, VOCAB], [1]), error_pb2.ERROR_CODE_INVALID_ARGUMENT, "token_ids"),
        (new_sequence(1, [5, -1], [1]), error_pb2.ERROR_CODE_INVALID_ARGUMENT, "token_ids"),
        (
            new_sequence(1, [5] * 513, list(range(1, 34))),
            error_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
            "token_ids",
        ),
        (
            new_sequence(1, GOOD, [1], num_computed_tokens=5),
            error_pb2.ERROR_CODE_INVALID_ARGUMENT,
            "num_computed_tokens",
        ),
        (
            new_sequence(1, GOOD, [], num_computed_tokens=4),
            error_pb2.ERROR_CODE_INVALID_ARGUMENT,
            "block_ids",
        ),
        (new_sequence(1, GOOD, []), error_pb2.ERROR_CODE_INTERNAL, ""),
        (
            new_sequence(1, GOOD, [1], params=SamplingParams(temperature=-1.0)),
            error_pb2.ERROR_CODE_INVALID_ARGUMENT,
            "temperature",
        ),
        (
            new_sequence(1, GOOD, [1], params=SamplingParams(allowed_token_ids=[4], bad_token_ids=[4])),
            error_pb2.ERROR_CODE_INVALID_ARGUMENT,
            "allowed_token_ids",
        ),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else "",
)
def test_a_bad_sequence_fails_alone(
    small: ModelExecutor, bad: worker_pb2.NewSequence, code: int, field: str
) -> None:
    expected = small.run(plan_of(new_sequence(0, GOOD, [0])))
    small.reset()
    result = small.run(plan_of(new_sequence(0, GOOD, [0]), bad))
    assert [(e.slot, e.error.code, e.error.field) for e in result.errors] == [(1, code, field)]
    assert unpack_u32(result.slots).tolist() == [0]
    assert result.token_ids == expected.token_ids
    # The plan in flight still names it; it is skipped without a second error, and its slot can be used again.
    after = small.run(
        plan_of(decode_slots=[0, 1], append_slots=[1], append_blocks=[2], append_generations=[1])
    )
    assert (unpack_u32(after.slots).tolist(), len(after.errors)) == ([0], 0)
    again = small.run(plan_of(new_sequence(1, GOOD, [3]), released_slots=[1]))
    assert again.token_ids == expected.token_ids


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        (plan_of(new_sequence(0, GOOD, [100_000])), "block_ids"),
        (plan_of(new_sequence(32, GOOD, [1])), "new_sequences"),
        (plan_of(new_sequence(0, GOOD, [1]), new_sequence(0, GOOD, [2])), "new_sequences"),
        (plan_of(released_slots=[32]), "released_slots"),
        (plan_of(decode_slots=[3]), "decode_slots"),
        (plan_of(decode_slots=[2**32 - 1]), "decode_slots"),
        (plan_of(new_sequence(0, GOOD, [1]), prefill_slots=[0, 0], prefill_lengths=[2, 3]), "decode_slots"),
        (plan_of(new_sequence(0, GOOD, [1]), prefill_slots=[0], prefill_lengths=[]), "prefill_lengths"),
        (plan_of(append_slots=[0], append_blocks=[1], append_generations=[1]), "append_slots"),
        (plan_of(append_slots=[0], append_blocks=[], append_generations=[1]), "append_blocks"),
        (
            plan_of(
                new_sequence(0, GOOD, []), append_slots=[0], append_blocks=[2**31], append_generations=[1]
            ),
            "block_ids",
        ),
        (
            plan_of(
                new_sequence(0, GOOD, []),
                append_slots=[0] * 33,
                append_blocks=list(range(33)),
                append_generations=[1] * 33,
            ),
            "append_blocks",
        ),
        (plan_of(copy_sources=[0], copy_targets=[2**31]), "copy_targets"),
        (plan_of(copy_sources=[0], copy_targets=[]), "copy_targets"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_malformed_plan_is_refused(small: ModelExecutor, plan: worker_pb2.StepPlan, field: str) -> None:
    with pytest.raises(KvernError) as caught:
        small.run(plan)
    assert caught.value.code == error_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert caught.value.field == field
    small.reset()
    assert len(small.run(plan_of(new_sequence(0, GOOD, [0]))).token_ids) == 4


def test_a_step_over_the_token_limit_is_refused(checkpoint: Callable[[str], Path]) -> None:
    executor = load_executor(checkpoint("llama"), max_num_batched_tokens=8, max_num_seqs=4)
    with pytest.raises(KvernError, match="9 tokens in one step, the limit is 8"):
        executor.run(plan_of(new_sequence(0, GOOD, [0]), new_sequence(1, GOOD[:4], [1])))


def test_the_model_length_is_the_end(small: ModelExecutor) -> None:
    """512 positions: the token after the last is still sampled; running it is an error of that sequence."""
    tokens = [3 + i % 200 for i in range(512)]
    result = small.run(plan_of(new_sequence(0, tokens, list(range(32)))))
    assert len(result.token_ids) == 4
    result = small.run(plan_of(decode_slots=[0]))
    assert [e.error.code for e in result.errors] == [error_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED]


def test_nan_logits_fail_one_sequence(checkpoint: Callable[[str], Path]) -> None:
    """A NaN in one sequence's KV: that sequence ends with NUMERICAL, the others keep their tokens."""
    executor = load_executor(checkpoint("llama"))
    sequences = [new_sequence(slot, [3 + slot, 9, 9, 40], [slot]) for slot in range(4)]
    small_result = executor.run(plan_of(*sequences))
    assert len(small_result.token_ids) == 16
    clean = executor.run(plan_of(decode_slots=[0, 1, 2, 3]))
    executor.reset()
    executor.run(plan_of(*sequences))
    executor._cache.layers[1][1][2] = float("nan")  # values of block 2, layer 1
    result = executor.run(plan_of(decode_slots=[0, 1, 2, 3]))
    assert [(e.slot, e.error.code) for e in result.errors] == [(2, error_pb2.ERROR_CODE_NUMERICAL)]
    assert unpack_u32(result.slots).tolist() == [0, 1, 3]
    kept = unpack_i32(clean.token_ids)[[0, 1, 3]]
    assert unpack_i32(result.token_ids).tolist() == kept.tolist()


def test_nan_prompt_logprobs_fail_one_sequence(small: ModelExecutor) -> None:
    expected = small.run(plan_of(new_sequence(0, GOOD, [0])))
    small.reset()
    tokens = [3 + i for i in range(20)]
    small.run(plan_of(new_sequence(2, tokens[:16], [7])))
    small._cache.layers[0][1][7] = float("nan")
    asking = new_sequence(
        1, tokens, [7, 8], num_computed_tokens=16, params=greedy(prompt_logprobs=1, logprobs=1)
    )
    result = small.run(plan_of(new_sequence(0, GOOD, [0]), asking))
    small._cache.layers[0][1][7] = 0.0
    assert [(e.slot, e.error.code) for e in result.errors] == [(1, error_pb2.ERROR_CODE_NUMERICAL)]
    assert (unpack_u32(result.slots).tolist(), len(result.logprobs)) == ([0], 0)
    assert result.token_ids == expected.token_ids


def test_a_prefix_in_the_cache_is_used(small: ModelExecutor) -> None:
    """num_computed_tokens > 0 reads the blocks of an earlier sequence: same tokens, fewer computed."""
    tokens = [3 + (7 * i) % 200 for i in range(40)]
    first = small.run(plan_of(new_sequence(0, tokens, [5, 2, 9])))
    hit = new_sequence(1, tokens, [5, 2, 11], num_computed_tokens=32)
    assert small.run(plan_of(hit)).token_ids == first.token_ids


def test_copied_blocks_hold_the_same(small: ModelExecutor) -> None:
    tokens = [3 + (7 * i) % 200 for i in range(40)]
    first = small.run(plan_of(new_sequence(0, tokens, [5, 2, 9])))
    hit = new_sequence(1, tokens, [20, 21, 11], num_computed_tokens=32)
    plan = plan_of(hit, copy_sources=[5, 2], copy_targets=[20, 21])
    assert small.run(plan).token_ids == first.token_ids


def test_generations_are_recorded_and_survive_a_reset(checkpoint: Callable[[str], Path]) -> None:
    executor = load_executor(checkpoint("llama"))
    assert not executor.generations().any()
    sequence = new_sequence(0, GOOD, [4])
    sequence.block_generations = pack_u32([7])
    executor.run(plan_of(sequence, append_slots=[0, 0], append_blocks=[6, 2], append_generations=[8, 9]))
    executor.reset()
    assert {int(b): int(executor.generations()[b]) for b in np.flatnonzero(executor.generations())} == {
        4: 7,
        6: 8,
        2: 9,
    }


def test_appended_blocks_keep_their_order() -> None:
    batch = PersistentBatch(max_num_seqs=4, max_model_len=128, block_size=16, num_blocks=50, vocab_size=10)
    for slot in (0, 2):
        batch.add(new_sequence(slot, [1], [10 + slot]))
    batch.append_blocks(
        plan_of(append_slots=[2, 0, 2, 2], append_blocks=[3, 4, 5, 6], append_generations=[1, 1, 1, 1])
    )
    assert batch.block_table[0, :2].tolist() == [10, 4]
    assert batch.block_table[2, :4].tolist() == [12, 3, 5, 6]
    assert batch.table_len.tolist() == [2, 0, 4, 0]


def test_prepared_inputs_equal_a_plain_loop(small: ModelExecutor) -> None:
    """A mixed step: chunk in the middle of a prompt, whole prompt, decode."""
    batch = PersistentBatch(max_num_seqs=4, max_model_len=128, block_size=4, num_blocks=50, vocab_size=100)
    known = {0: list(range(20, 41)), 3: [7, 8, 9], 1: [50, 51, 52, 53, 54]}
    computed = {0: 6, 3: 0, 1: 4}
    tables = {0: [9, 8, 7, 6, 5, 4], 3: [30], 1: [40, 41]}
    for slot, tokens in known.items():
        batch.add(new_sequence(slot, tokens, tables[slot], num_computed_tokens=computed[slot]))
    rows, errors = batch.rows(plan_of(prefill_slots=[0, 3], prefill_lengths=[9, 3], decode_slots=[1]))
    assert not errors
    assert rows.samples.tolist() == [False, True, True]
    step = batch.prepare(rows)
    expected = [
        (known[slot][p], p, tables[slot][p // 4] * 4 + p % 4)
        for slot, count in ((0, 9), (3, 3), (1, 1))
        for p in range(computed[slot], computed[slot] + count)
    ]
    found = zip(step.token_ids.tolist(), step.positions.tolist(), step.slot_mapping.tolist(), strict=True)
    assert list(found) == expected
    assert step.query_start.tolist() == [0, 9, 12, 13]
    assert step.seq_lens.tolist() == [15, 3, 5]
    assert step.block_tables.shape == (3, 4)
    assert step.block_tables[0].tolist() == [9, 8, 7, 6]


def test_an_empty_plan_gives_an_empty_result(small: ModelExecutor) -> None:
    result = small.run(worker_pb2.StepPlan(epoch=3, step=9))
    assert (result.epoch, result.step, result.slots) == (3, 9, b"")


def test_more_sequences_than_slots_wait(checkpoint: Callable[[str], Path], executor: Executors) -> None:
    prompts = [[3 + i, 4, 5, 6 + i] for i in range(9)]
    expected = generate(executor("llama"), prompts, 5)
    few = load_executor(checkpoint("llama"), max_num_seqs=2)
    assert generate(few, prompts, 5) == expected


def test_timings_are_reported(small: ModelExecutor) -> None:
    sequence = Sequence(GOOD, greedy(), 1)
    MiniScheduler(small).run([sequence])
    small.reset()
    result = small.run(plan_of(new_sequence(0, GOOD, [0])))
    assert result.forward_us > 0
    assert result.prepare_us > 0
    assert result.sample_us > 0
