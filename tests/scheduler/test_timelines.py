"""Timelines against what the harness counts itself, and over the scheduler's gRPC."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest
from scheduler.core_harness import CoreHarness
from scheduler.scheduler_harness import SIM, Cluster, make_submit

from kvern.errors import KvernError
from kvern.rpc.channel import create_channel
from kvern.rpc.errors import error_from_rpc
from kvern.v1 import error_pb2, sampling_pb2
from kvern.v1 import operations_pb2 as pb
from kvern.v1.operations_pb2_grpc import OperationsServiceStub
from kvern_scheduler.core.journal import MAX_EVENTS, Journal
from kvern_scheduler.operations import block_states
from kvern_scheduler.timelines import heads, timeline
from kvern_worker.sim import SimConfig

QUEUE, PREFILL, DECODE = pb.PHASE_KIND_QUEUE, pb.PHASE_KIND_PREFILL, pb.PHASE_KIND_DECODE
SMALL: dict[str, Any] = {"block_size": 4, "max_model_len": 400, "vocab_size": 997, "strict": True}


def harness(num_blocks: int = 256, max_num_seqs: int = 16, tokens: int = 64, **limits: Any) -> CoreHarness:
    config = SimConfig(
        num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=tokens, **SMALL
    )
    return CoreHarness(config, **limits)


def told(h: CoreHarness, name: str) -> pb.Timeline:
    return timeline(h.cell.journal, name, "", h.now)


def check_adds_up(choice: pb.ChoiceTimeline) -> None:
    """Phases follow each other without a gap; each run gives a token by its prefill and one by each decode step."""
    for before, after in zip(choice.phases, choice.phases[1:], strict=False):
        assert before.end <= after.start
    runs = sum(phase.kind == DECODE for phase in choice.phases)
    steps = sum(phase.steps.steps for phase in choice.phases if phase.kind == DECODE)
    assert choice.finished and choice.output_tokens == runs + steps
    for phase in choice.phases:
        if phase.kind == QUEUE:
            assert sum(wait.seconds for wait in phase.waits) == pytest.approx(phase.end - phase.start)


def test_a_full_batch_is_why_a_request_waits() -> None:
    h = harness(max_num_seqs=2)
    h.submit([1, 2, 3], 10, name="a")
    h.submit([4, 5, 6], 10, name="b")
    h.submit([7, 8, 9], 5, name="c")
    h.run()
    (choice,) = told(h, "c").choices
    queue, prefill, decode = choice.phases
    assert [(wait.reason, wait.seconds) for wait in queue.waits] == [(pb.WAIT_REASON_BATCH_FULL, queue.end)]
    assert queue.tokens_ahead == 6 and queue.end >= 9
    assert (prefill.kind, prefill.blocks, prefill.chunks[0].tokens) == (PREFILL, 1, 3)
    assert (decode.kind, decode.steps.steps, decode.steps.p50) == (DECODE, 4, 1.0)
    check_adds_up(choice)


def test_chunks_and_cached_tokens_are_those_of_the_plans() -> None:
    h = harness(tokens=32)
    prompt = list(range(100, 200))
    h.submit(prompt, 3, name="first")
    planned: list[tuple[int, int]] = []
    while (plan := h.plan()) is not None:
        planned += [(plan.step, length) for length in plan.prefill_lengths]
        h.fold()
    chunks = told(h, "first").choices[0].phases[1].chunks
    assert [(chunk.step, chunk.tokens) for chunk in chunks] == planned and len(planned) > 2
    h.submit([*prompt, 1, 2], 3, name="again")
    h.run()
    (choice,) = told(h, "again").choices
    assert choice.phases[1].cached_tokens == h.cell.requests[2].sequences[0].num_cached_tokens == 100
    assert [chunk.tokens for chunk in choice.phases[1].chunks] == [2]
    check_adds_up(choice)


def test_preempted_sequences_account_for_every_token() -> None:
    h = harness(num_blocks=20, max_num_seqs=4)
    requests = [h.submit([i, i + 1, i + 2], 60, name=f"r{i}") for i in range(1, 4)]
    h.run()
    assert h.group.num_preemptions > 0
    for request in requests:
        (choice,) = told(h, request.submission.request_id).choices
        check_adds_up(choice)
        causes = [phase.cause for phase in choice.phases].count(pb.PHASE_CAUSE_PREEMPTED)
        assert choice.preemptions == causes == request.sequences[0].num_preemptions
    reasons = {
        wait.reason
        for request in requests
        for phase in told(h, request.submission.request_id).choices[0].phases
        for wait in phase.waits
    }
    assert pb.WAIT_REASON_KV_FULL in reasons


def test_a_lost_worker_and_the_wait_for_another_are_phases() -> None:
    h = harness()
    h.submit([1, 2, 3], 8, name="r")
    for _ in range(3):
        h.plan()
        h.fold()
        h.now += 1
    h.disconnect()
    h.now += 5
    h.group = h.connect()
    h.run()
    (choice,) = told(h, "r").choices
    kinds = [phase.kind for phase in choice.phases]
    assert kinds == [QUEUE, PREFILL, DECODE, pb.PHASE_KIND_HOMELESS, QUEUE, PREFILL, DECODE]
    homeless = choice.phases[3]
    assert (homeless.cause, homeless.end - homeless.start) == (pb.PHASE_CAUSE_WORKER_LOST, 5.0)
    check_adds_up(choice)


def test_routing_says_what_was_cached_where_it_went() -> None:
    h = harness()
    h.submit(list(range(40)), 2, name="first")
    h.run()
    cached_in, h.group = h.group, h.connect()
    h.submit([*range(40), 3], 2, name="second")
    (phase,) = told(h, "second").choices[0].phases
    assert (phase.group_id, phase.routed_cached_tokens) == (str(cached_in.index), 40)


def test_what_is_kept_is_bounded() -> None:
    h = harness(num_blocks=512)
    h.cell.journal = h.group.journal = journal = Journal(lambda: h.now, max_requests=3)
    for i in range(5):
        h.submit([i, 1], 300, name=f"r{i}")
    h.run()
    assert [head.request_id for head in heads(journal, None, 0)] == ["r4", "r3", "r2"]
    with pytest.raises(KvernError) as refused:
        timeline(journal, "r1", None, h.now)
    assert refused.value.code == error_pb2.ERROR_CODE_REQUEST_NOT_FOUND
    # Nothing is kept of a decoded token.
    assert all(len(trail) < 8 for record in journal.records.values() for trail in record.trails)
    h.submit(list(range(300)), 90, name="busy")
    record = journal.records["", "busy"]
    for _ in range(2 * MAX_EVENTS):
        journal.note(h.cell.requests[6].sequences[0], record.trails[0][0].kind)
    h.run()
    (choice,) = timeline(journal, "busy", None, h.now).choices
    assert (choice.truncated, choice.finished, choice.output_tokens) == (True, True, 90)


def test_the_ring_of_steps_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvern_scheduler.core.journal.MAX_STEPS", 8)
    h = harness()
    journal = h.cell.journal = h.group.journal = Journal(lambda: h.now)
    h.submit([1, 2, 3], 20, name="r")
    h.run()
    journal.committed(journal.num_steps - 2)
    steps = journal.steps()
    assert steps["step"].tolist() == list(range(13, 21))
    assert (steps["committed"] > 0).tolist() == [True] * 6 + [False] * 2


def test_blocks_are_shown_as_the_pool_has_them() -> None:
    h = harness()
    prompt = list(range(20))
    h.submit(prompt, 4)
    h.run()
    h.submit([*prompt, 1], 50)
    h.submit([*prompt, 2], 50)
    h.plan()
    states = np.frombuffer(block_states(h.group), np.uint8)
    pool = h.group.pool
    assert [(states == kind).sum() for kind in (0, 1, 2)] == [pool.num_free, pool.num_cached, 5]
    assert set(states[states > 2].tolist()) == {3 + slot for slot in np.flatnonzero(h.group.batch.active)}


async def test_over_grpc(cluster: Cluster) -> None:
    await cluster.start()
    gateway = await cluster.gateway()
    await gateway.submit(1, list(range(30, 60)), 9, tenant="a")
    await gateway.submit(2, list(range(30, 60)), 9, tenant="b", request_id="r1")
    await gateway.finish(1, 2)
    async with create_channel(cluster.address) as channel:
        stub = OperationsServiceStub(channel)
        own = (await stub.GetTimeline(pb.GetTimelineRequest(request_id="r1", tenant="a"))).timeline
        assert (own.tenant, own.prompt_tokens, own.max_tokens) == ("a", 30, 9)
        (choice,) = own.choices
        check_adds_up(choice)
        assert choice.reason == sampling_pb2.FINISH_REASON_LENGTH
        newest = (await stub.GetTimeline(pb.GetTimelineRequest(request_id="r1"))).timeline
        assert newest.tenant == "b"
        listed = await stub.ListTimelines(pb.ListTimelinesRequest(tenant="a"))
        assert [(head.request_id, head.output_tokens) for head in listed.timelines] == [("r1", 9)]
        (blocks,) = (await stub.GetBlocks(pb.GetBlocksRequest())).groups
        status = (await stub.GetCellStatus(pb.GetCellStatusRequest())).status.groups[0]
        assert len(blocks.states) == SIM.num_blocks
        assert blocks.states.count(1) == status.num_cached_blocks > 0
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetTimeline(pb.GetTimelineRequest(request_id="r1", tenant="c"))
        assert error_from_rpc(refused.value).code == error_pb2.ERROR_CODE_REQUEST_NOT_FOUND


async def test_a_new_scheduler_says_that_it_took_over(cluster: Cluster) -> None:
    await cluster.start()
    first = await cluster.gateway()
    await first.send(submits=[make_submit(1, list(range(30, 60)), 350, request_id="kept", resumable=True)])
    await first.until(lambda: len(first.tokens.get(1, [])) > 3)
    await cluster.stop_scheduler()
    await cluster.start_scheduler()
    await cluster.gateway()
    async with create_channel(cluster.address) as channel:
        answer = await OperationsServiceStub(channel).GetTimeline(pb.GetTimelineRequest(request_id="kept"))
    assert answer.timeline.choices[0].phases[0].cause == pb.PHASE_CAUSE_SCHEDULER_CHANGED
