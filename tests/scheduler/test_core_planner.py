"""What the planner promises, one promise a test."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scheduler.core_harness import CoreHarness

from kvern.errors import KvernError
from kvern.rpc.packing import pack_u32
from kvern.v1 import error_pb2, sampling_pb2, worker_pb2
from kvern_scheduler.core.errors import IntegrityError, ProtocolError
from kvern_scheduler.core.fold import fold_step
from kvern_scheduler.core.plan import Result
from kvern_scheduler.core.requests import sequence_seed
from kvern_worker.sim import SimConfig

CONFIG = SimConfig(
    num_blocks=64,
    block_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=32,
    max_model_len=200,
    vocab_size=997,
    strict=True,
)
PROMPT = list(range(30, 57))


def run_all(config: SimConfig, **limits: object) -> list[list[int]]:
    core = CoreHarness(config, **limits)
    prompts = [PROMPT[: 5 + 3 * i] for i in range(8)]
    requests = [core.submit(prompt, 30 + i, temperature=1.0, n=1 + i % 2) for i, prompt in enumerate(prompts)]
    core.run()
    assert core.largest_batch <= config.max_num_seqs
    assert core.largest_step <= config.max_num_batched_tokens
    sequences = [sequence for request in requests for sequence in request.sequences]
    assert [core.output(s) for s in sequences] == [core.expected(s) for s in sequences]
    return [core.output(s) for s in sequences]


@pytest.mark.parametrize(
    ("config", "limits"),
    [
        ({}, {"enable_prefix_caching": False}),
        ({"max_num_batched_tokens": 1, "max_num_seqs": 1}, {}),
        ({"max_num_batched_tokens": 7}, {}),
        ({"max_num_batched_tokens": 512}, {}),
        ({"num_blocks": 18}, {}),
        ({"num_blocks": 18}, {"enable_prefix_caching": False, "max_preemptions": 0}),
        ({}, {"max_plans_in_flight": 1}),
    ],
)
def test_outputs_do_not_depend_on_how_steps_are_filled(
    config: dict[str, int], limits: dict[str, object]
) -> None:
    assert run_all(replace(CONFIG, **config), **limits) == run_all(CONFIG)  # type: ignore[arg-type]


def test_a_tiny_pool_preempts_within_the_bound() -> None:
    core = CoreHarness(replace(CONFIG, num_blocks=18), max_preemptions=2)
    requests = [core.submit(PROMPT[: 4 + i], 40) for i in range(8)]
    core.run()
    assert core.group.num_preemptions > 0
    for request in requests:
        finish = request.sequences[0].finish
        assert finish is not None and finish.num_preemptions <= 2
        assert core.output(request.sequences[0]) == core.expected(request.sequences[0])


def test_the_newest_of_the_least_important_is_preempted_first() -> None:
    core = CoreHarness(replace(CONFIG, num_blocks=12), enable_prefix_caching=False)
    low = core.submit([1] * 11, 20, priority=5)
    first = core.submit([2] * 11, 20)
    newest = core.submit([3] * 11, 20)
    core.run()
    preemptions = [r.sequences[0].finish.num_preemptions for r in (low, first, newest)]  # type: ignore[union-attr]
    assert preemptions[1] == 0
    assert preemptions[0] >= preemptions[2] and preemptions[0] > 0


def test_important_requests_start_first() -> None:
    core = CoreHarness(replace(CONFIG, max_num_seqs=1))
    late = core.submit(PROMPT, 2, priority=1)
    early = core.submit(PROMPT, 2, priority=-1)
    core.run()
    assert early.sequences[0].first_scheduled < late.sequences[0].first_scheduled


def test_short_prompts_overtake_long_ones_and_the_rest_of_the_budget_is_used() -> None:
    core = CoreHarness(replace(CONFIG, num_blocks=256))  # budget 32: more than 8 tokens is long
    for i in range(3):
        core.submit([100 + i] * 150, 2)
    short = core.submit([5] * 6, 2)
    plan = core.plan()
    assert plan is not None and plan.num_computed_tokens == 32
    assert short.sequences[0].slot in plan.prefill_slots
    assert len(plan.entries) == 3, "two long ones at a time"
    core.run()


def test_decodes_come_before_prefills() -> None:
    core = CoreHarness(replace(CONFIG, num_blocks=256))
    core.submit([5] * 4, 50)
    core.plan()
    core.fold()
    core.submit([6] * 150, 2)
    plan = core.plan()
    assert plan is not None
    assert plan.decoded.size == 1 and sum(plan.prefill_lengths) == 31
    core.run()


def test_a_known_length_wastes_no_step() -> None:
    core = CoreHarness(CONFIG)
    core.submit(PROMPT, 5)
    core.run()
    assert core.num_plans == 5


def test_choices_share_the_prompt_s_blocks() -> None:
    core = CoreHarness(CONFIG)
    request = core.submit(PROMPT, 5, n=4, temperature=1.0)
    core.run()
    assert core.executor.num_prefilled == 27 + 3 * 3
    cached = [s.finish.num_cached_tokens for s in request.sequences if s.finish is not None]
    assert cached == [0, 24, 24, 24]
    assert len({tuple(core.output(s)) for s in request.sequences}) == 4


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11, 12, 13])
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 9])
def test_every_full_computed_block_is_indexed(length: int, max_tokens: int) -> None:
    core = CoreHarness(CONFIG)
    core.submit(PROMPT[:length], max_tokens)
    core.run()
    # The last token is sampled, never computed.
    assert core.group.pool.num_indexed == (length + max_tokens - 1) // 4


def test_output_blocks_are_cached_too_and_salts_keep_apart() -> None:
    core = CoreHarness(CONFIG)
    first = core.submit(PROMPT, 10)
    core.run()
    conversation = PROMPT + core.output(first.sequences[0]) + [5, 6]
    follow_up = core.submit(conversation, 2)
    salted = core.submit(conversation, 2, salt="other")
    core.run()
    assert follow_up.sequences[0].num_cached_tokens == 36
    assert salted.sequences[0].num_cached_tokens == 0


def test_prompt_logprobs_skip_the_cache() -> None:
    core = CoreHarness(CONFIG)
    core.submit(PROMPT, 2)
    core.run()
    asked = core.submit(PROMPT, 2, prompt_logprobs=1)
    core.cell.take_changes()
    core.run()
    assert asked.sequences[0].num_cached_tokens == 0
    told = [t.token_id for e in core.cell.take_changes().logprobs if e.prompt for t in e.tokens]
    assert told == PROMPT[1:]


def test_prompt_logprobs_are_told_once_though_preempted() -> None:
    core = CoreHarness(replace(CONFIG, num_blocks=14))
    core.submit([9] * 20, 25)
    core.submit(PROMPT, 20, prompt_logprobs=1, logprobs=1)
    core.run()
    changes = core.cell.take_changes()
    assert core.group.num_preemptions > 0
    assert [t.token_id for e in changes.logprobs if e.prompt for t in e.tokens] == PROMPT[1:]
    assert [e.first_index for e in changes.logprobs if not e.prompt] == list(range(20))


def test_what_never_fits_is_refused_with_both_numbers() -> None:
    core = CoreHarness(replace(CONFIG, num_blocks=10))
    with pytest.raises(KvernError) as refused:
        core.submit(PROMPT, 20)
    assert refused.value.code == error_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED
    assert (refused.value.value, refused.value.limit) == ("47", "40")
    assert not core.cell.requests


def test_queues_are_bounded_in_tokens_too() -> None:
    core = CoreHarness(CONFIG, max_queued_tokens=60)
    core.submit([1] * 100, 2)
    with pytest.raises(KvernError) as refused:
        core.submit([1] * 10, 2)
    assert refused.value.code == error_pb2.ERROR_CODE_OVERLOADED and refused.value.retry_after_ms


def test_deadlines_end_waiting_and_running_requests() -> None:
    core = CoreHarness(replace(CONFIG, max_num_seqs=1))
    running = core.submit(PROMPT, 50, deadline=5.0)
    waiting = core.submit(PROMPT, 50, deadline=4.0)
    core.plan()
    core.cell.expire(4.5)
    assert waiting.num_unfinished == 0 and running.num_unfinished == 1
    core.cell.expire(5.0)
    assert running.num_unfinished == 0
    finish = running.sequences[0].finish
    assert finish is not None and finish.error is not None
    assert finish.error.code == error_pb2.ERROR_CODE_DEADLINE_EXCEEDED
    core.run()
    core.cell.check_integrity()


def test_a_late_result_of_a_cancelled_sequence_is_ignored() -> None:
    core = CoreHarness(CONFIG)
    first = core.submit(PROMPT, 20)
    core.plan()
    core.cell.cancel(first.sequences[0], 0.0)
    second = core.submit(PROMPT[::-1], 6)
    core.plan()
    assert second.sequences[0].slot == 0, "the slot is used again at once"
    core.run()
    assert core.output(first.sequences[0]) == []
    assert core.output(second.sequences[0]) == core.expected(second.sequences[0])


def test_an_error_in_a_slot_ends_that_sequence_alone() -> None:
    core = CoreHarness(replace(CONFIG, max_num_batched_tokens=512))
    bad, good = core.submit(PROMPT, 20), core.submit(PROMPT[1:], 20)
    core.plan()
    core.fold()
    core.plan()
    result = core.results[0]
    slots = np.frombuffer(result.slots, np.uint32)
    tokens = np.frombuffer(result.token_ids, np.int32)
    keep = slots != bad.sequences[0].slot
    result.slots, result.token_ids = slots[keep].tobytes(), tokens[keep].tobytes()
    error = result.errors.add(slot=bad.sequences[0].slot)
    error.error.code = error_pb2.ERROR_CODE_NUMERICAL
    core.run()
    finish = bad.sequences[0].finish
    assert finish is not None and finish.error is not None
    assert finish.reason == sampling_pb2.FINISH_REASON_ERROR
    assert finish.error.code == error_pb2.ERROR_CODE_NUMERICAL
    assert core.output(bad.sequences[0]) == core.expected(bad.sequences[0])[:1]
    assert core.output(good.sequences[0]) == core.expected(good.sequences[0])


@pytest.mark.parametrize(
    "change",
    [
        {"step": 9},
        {"slots": pack_u32([5])},
        {"slots": b"", "tokens": np.empty(0, np.int32)},
        {"tokens": np.array([997], np.int32)},
        {"tokens": np.array([-1], np.int32)},
        {"errors": [worker_pb2.SlotError(slot=7)]},
    ],
)
def test_a_result_that_answers_no_plan_is_refused(change: dict[str, object]) -> None:
    core = CoreHarness(CONFIG)
    core.submit(PROMPT, 5)
    core.plan()
    result = Result(1, pack_u32([0]), np.array([3], np.int32))
    with pytest.raises(ProtocolError):
        fold_step(core.group, replace(result, **change), 0.0)  # type: ignore[arg-type]
    core.lose(keep_blocks=True)
    core.run()


def test_new_requests_wait_for_a_worker_that_restarts_but_not_for_ever() -> None:
    core = CoreHarness(replace(CONFIG, num_blocks=10))
    core.disconnect()
    core.now += 10.0
    patient = core.submit(PROMPT, 8)
    with pytest.raises(KvernError) as too_long:
        core.submit(PROMPT, 20)
    assert (too_long.value.value, too_long.value.limit) == ("47", "40")
    core.now += 10.0
    with pytest.raises(KvernError, match="no worker is ready"):
        core.submit(PROMPT, 8)
    core.group = core.connect()
    core.run()
    assert core.output(patient.sequences[0]) == core.expected(patient.sequences[0])


def test_a_request_that_kills_workers_ends_and_one_that_gets_on_does_not() -> None:
    core = CoreHarness(CONFIG)
    poison = core.submit(PROMPT, 20)
    for _ in range(8):
        core.plan()
        core.lose(keep_blocks=False)
    finish = poison.sequences[0].finish
    assert finish is not None and finish.error is not None
    assert finish.error.code == error_pb2.ERROR_CODE_INTERNAL
    lucky = core.submit(PROMPT, 40)
    for _ in range(8):
        for _ in range(5):
            core.plan()
            core.fold()
        core.lose(keep_blocks=False)
    core.run()
    assert core.output(lucky.sequences[0]) == core.expected(lucky.sequences[0])


def test_seeds_of_choices_are_pure_and_differ() -> None:
    assert sequence_seed(7, 0) == 7
    seeds = [sequence_seed(7, choice) for choice in range(128)]
    assert len(set(seeds)) == 128
    assert seeds == [sequence_seed(7, choice) for choice in range(128)]
    assert max(seeds) < 2**64


def test_the_integrity_check_finds_what_is_wrong() -> None:
    core = CoreHarness(CONFIG)
    core.submit(PROMPT, 20)
    core.plan()
    core.fold()
    core.cell.check_integrity()
    core.group.batch.table[0, 0] += 1
    with pytest.raises(IntegrityError):
        core.cell.check_integrity()


def test_blocks_out_of_a_window_s_reach_are_given_back() -> None:
    """Eight sequences of 150 tokens in a pool of 64 blocks of 4, each held to its window and what is being written."""
    core = CoreHarness(replace(CONFIG, sliding_window=10))
    requests = [core.submit([20 + i, *PROMPT[: 4 * i]], 120) for i in range(8)]
    most = 0
    while core.cell.num_waiting or core.group.batch.num_running or core.results:
        while core.plan() is not None:
            pass
        core.fold()
        core.group.check_integrity()
        decoding = np.flatnonzero(core.group.batch.decoding)
        most = max([most, *(core.group.batch.held(slot).size for slot in decoding.tolist())])
    for request in requests:
        assert core.output(request.sequences[0]) == core.expected(request.sequences[0])
    assert core.group.num_preemptions == 0
    # The window in blocks, one that it begins in, one for each plan in flight.
    assert most <= 6


def test_a_window_that_is_given_back_is_still_found() -> None:
    core = CoreHarness(replace(CONFIG, sliding_window=10))
    prompt = [*PROMPT, *PROMPT]
    core.submit(prompt, 2)
    core.run()
    again = core.submit(prompt, 2)
    core.run()
    assert again.sequences[0].num_cached_tokens == 52
    assert core.output(again.sequences[0]) == core.expected(again.sequences[0])


@pytest.mark.parametrize("seed", range(4))
def test_windows_under_pressure(seed: int) -> None:
    """Chunks, preemption and prefix hits, with blocks that change hands while steps are in flight."""
    random = np.random.default_rng(seed)
    core = CoreHarness(replace(CONFIG, num_blocks=45, sliding_window=int(random.integers(1, 30))))
    requests = []
    for _ in range(40):
        prompt = PROMPT[: random.integers(1, 27)] * int(random.integers(1, 4))
        requests.append(core.submit(prompt, int(random.integers(1, 60)), n=int(random.integers(1, 3))))
        core.plan()
        if core.results and random.random() < 0.7:
            core.fold()
        core.cell.check_integrity()
    core.run()
    sequences = [sequence for request in requests for sequence in request.sequences]
    assert [core.output(s) for s in sequences] == [core.expected(s) for s in sequences]
