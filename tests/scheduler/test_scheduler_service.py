"""The scheduler between a real gRPC gateway stream and real gRPC workers that simulate."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest
from scheduler.scheduler_harness import SIM, Cluster, SimWorker, make_submit

from kvern.v1 import error_pb2, sampling_pb2, session_pb2
from kvern_scheduler import engine
from kvern_scheduler.core.requests import sequence_seed
from kvern_scheduler.store.base import Leadership
from kvern_scheduler.store.memory import MemoryStore
from kvern_worker.sim import continue_greedily

PROMPT = list(range(30, 60))


async def test_tokens_and_end_arrive_for_every_choice(cluster: Cluster) -> None:
    await cluster.start()
    gateway = await cluster.gateway()
    await gateway.submit(10, PROMPT, 20, n=3, params={"temperature": 1.0})
    await gateway.finish(10, 11, 12)
    for choice in range(3):
        expected = continue_greedily(PROMPT, 20, SIM, sequence_seed(7, choice))
        assert gateway.tokens[10 + choice] == expected
        finished = gateway.finished[10 + choice]
        assert finished.reason == sampling_pb2.FINISH_REASON_LENGTH
        assert finished.num_output_tokens == 20
    assert gateway.finished[11].num_cached_tokens == 28
    assert list(gateway.admitted) == [10]
    welcome = gateway.welcome
    assert welcome is not None and welcome.kv_capacity_tokens == 1024 and welcome.block_size == 4


async def test_stop_tokens_end_and_min_tokens_delay(cluster: Cluster) -> None:
    await cluster.start()
    gateway = await cluster.gateway()
    full = continue_greedily(PROMPT, 20, SIM)
    await gateway.submit(1, PROMPT, 20, params={"stop_token_ids": [full[4]]})
    await gateway.submit(2, PROMPT, 20, params={"stop_token_ids": [full[4], full[9]], "min_tokens": 8})
    await gateway.finish(1, 2)
    assert gateway.tokens[1] == full[:5]
    assert gateway.finished[1].reason == sampling_pb2.FINISH_REASON_STOP
    assert gateway.finished[1].stop_token_id == full[4]
    assert gateway.tokens[2] == full[:10]


async def test_logprobs_reach_the_choice_that_asked(cluster: Cluster) -> None:
    cluster.flags = ["--max-num-batched-tokens", "16"]
    await cluster.start()
    gateway = await cluster.gateway()
    await gateway.submit(1, PROMPT, 3, params={"logprobs": 2, "prompt_logprobs": 0})
    await gateway.submit(2, PROMPT, 3)
    await gateway.finish(1, 2)
    prompt = [
        (e.first_index + i, t.token_id)
        for e in gateway.logprobs[1]
        if e.prompt
        for i, t in enumerate(e.tokens)
    ]
    assert prompt == list(enumerate(PROMPT))[1:]
    output = [(e.first_index, e.tokens[0].token_id) for e in gateway.logprobs[1] if not e.prompt]
    assert output == list(enumerate(gateway.tokens[1]))
    assert 2 not in gateway.logprobs


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"prompt": []}, error_pb2.ERROR_CODE_INVALID_ARGUMENT, "prompt"),
        ({"prompt": [5, 997]}, error_pb2.ERROR_CODE_INVALID_ARGUMENT, "prompt_token_ids"),
        ({"prompt": [-1]}, error_pb2.ERROR_CODE_INVALID_ARGUMENT, "prompt_token_ids"),
        ({"n": 129}, error_pb2.ERROR_CODE_INVALID_ARGUMENT, "n"),
        ({"max_tokens": 0}, error_pb2.ERROR_CODE_INVALID_ARGUMENT, "max_tokens"),
        ({"max_tokens": 380}, error_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, "max_tokens"),
        ({"params": {"min_tokens": 9}}, error_pb2.ERROR_CODE_INVALID_ARGUMENT, "min_tokens"),
        ({"params": {"stop_token_ids": [997]}}, error_pb2.ERROR_CODE_INVALID_ARGUMENT, "stop_token_ids"),
        ({"params": {"logprobs": 21}}, error_pb2.ERROR_CODE_INVALID_ARGUMENT, "logprobs"),
        ({"model": "other"}, error_pb2.ERROR_CODE_MODEL_NOT_FOUND, "model"),
        ({"request_id": "x" * 300}, error_pb2.ERROR_CODE_INVALID_ARGUMENT, "request_id"),
    ],
)  # fmt: skip
async def test_bad_submissions_are_refused_by_name(
    cluster: Cluster, fields: dict[str, object], code: int, field: str
) -> None:
    await cluster.start()
    gateway = await cluster.gateway()
    prompt = fields.pop("prompt", PROMPT)
    await gateway.submit(1, prompt, **fields)  # type: ignore[arg-type]
    await gateway.submit(2, PROMPT)
    await gateway.finish(1, 2)
    assert gateway.refused[1].code == code
    assert gateway.refused[1].field == field
    assert gateway.tokens[2] == continue_greedily(PROMPT, 8, SIM)


async def test_ragged_bytes_are_refused(cluster: Cluster) -> None:
    await cluster.start()
    gateway = await cluster.gateway()
    ragged = make_submit(1, PROMPT)
    ragged.prompt_token_ids = ragged.prompt_token_ids[:-1]
    hashes = make_submit(2, PROMPT)
    hashes.block_hashes = b"123"
    many = make_submit(3, PROMPT)
    many.block_hashes *= 2
    await gateway.send(submits=[ragged, hashes, many])
    await gateway.finish(1, 2, 3)
    assert {h: e.field for h, e in gateway.refused.items()} == {
        1: "prompt_token_ids",
        2: "block_hashes",
        3: "block_hashes",
    }


async def test_submitting_twice_is_one_request_and_another_body_a_conflict(cluster: Cluster) -> None:
    await cluster.start()
    gateway = await cluster.gateway()
    await gateway.submit(1, PROMPT, 12, request_id="a", resumable=True)
    await gateway.finish(1)
    await gateway.submit(2, PROMPT, 12, request_id="a", resumable=True)
    await gateway.submit(3, PROMPT[1:], 12, request_id="a", resumable=True)
    await gateway.submit(4, PROMPT, 12, request_id="a", tenant="t")
    await gateway.finish(2, 3, 4)
    assert gateway.tokens[2] == gateway.tokens[1]
    assert gateway.admitted[2].claim > gateway.admitted[1].claim
    assert gateway.refused[3].code == error_pb2.ERROR_CODE_REQUEST_ID_CONFLICT
    assert gateway.tokens[4] == gateway.tokens[1]


async def test_cancel_frees_the_blocks_and_stopped_counts_as_stop(cluster: Cluster) -> None:
    cluster.workers[0].config = replace(SIM, step_us=2000)
    await cluster.start()
    gateway = await cluster.gateway()
    await gateway.submit(1, PROMPT, 300)
    await gateway.submit(2, PROMPT[5:], 300)
    await gateway.until(lambda: len(gateway.tokens.get(1, [])) > 3 and len(gateway.tokens.get(2, [])) > 3)
    cancels = [session_pb2.CancelHandle(handle=1), session_pb2.CancelHandle(handle=2, stopped=True)]
    await gateway.send(cancels=[*cancels, session_pb2.CancelHandle(handle=99)])
    await gateway.finish(1, 2)
    assert gateway.finished[1].reason == sampling_pb2.FINISH_REASON_ABORT
    assert gateway.finished[2].reason == sampling_pb2.FINISH_REASON_STOP
    group = (await gateway.status()).groups[0]
    assert group.num_running == 0
    assert group.num_free_blocks + group.num_cached_blocks == group.num_blocks


async def test_a_deadline_ends_a_request(cluster: Cluster) -> None:
    cluster.workers[0].config = replace(SIM, step_us=5000)
    await cluster.start()
    gateway = await cluster.gateway()
    await gateway.submit(1, PROMPT, 300, deadline_unix_ms=1)
    await gateway.finish(1)
    assert gateway.finished[1].error.code == error_pb2.ERROR_CODE_DEADLINE_EXCEEDED


async def test_full_queues_refuse_at_once_and_the_admitted_finish(cluster: Cluster) -> None:
    cluster.flags = ["--max-queued-requests", "4", "--max-num-seqs", "2"]
    cluster.workers[0].config = replace(SIM, step_us=1000)
    await cluster.start()
    gateway = await cluster.gateway()
    await gateway.send(submits=[make_submit(h, PROMPT, 10) for h in range(12)])
    await gateway.finish(*range(12))
    assert sorted(gateway.finished) == [0, 1, 2, 3]
    assert {e.code for e in gateway.refused.values()} == {error_pb2.ERROR_CODE_OVERLOADED}
    assert all(e.retry_after_ms > 0 for e in gateway.refused.values())


async def test_a_broken_session_aborts_the_unnamed_and_keeps_the_named(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "UNNAMED_GRACE_S", 0.0)
    cluster.workers[0].config = replace(SIM, step_us=2000)
    await cluster.start()
    first = await cluster.gateway()
    await first.submit(
        1, PROMPT, 200, request_id="named", resumable=True, gateway_context=b"ctx", params={"logprobs": 0}
    )
    await first.submit(2, PROMPT, 200, request_id="unnamed")
    await first.until(lambda: len(first.tokens.get(1, [])) > 5 and len(first.tokens.get(2, [])) > 5)
    await first.close()
    seen = first.tokens[1]
    second = await cluster.gateway()
    attaches = [
        session_pb2.Attach(handle=5, request_id="named", next_index=[len(seen)]),
        session_pb2.Attach(handle=6, request_id="unnamed"),
    ]
    await second.send(attaches=attaches)
    await second.finish(5, 6)
    third = [session_pb2.Attach(handle=7, request_id="named", next_index=[150])]
    await second.send(attaches=third)
    await second.finish(7)
    assert [e.first_index for e in second.logprobs[7]] == list(range(150, 200))
    assert seen + second.tokens[5] == continue_greedily(PROMPT, 200, SIM)
    assert second.first_index[5] == len(seen)
    assert second.admitted[5].gateway_context == b"ctx"
    assert second.refused[6].code == error_pb2.ERROR_CODE_REQUEST_NOT_FOUND


async def test_a_silent_gateway_is_dropped(cluster: Cluster) -> None:
    await cluster.start()
    gateway = await cluster.gateway()
    gateway._tasks[1].cancel()
    await gateway.until(lambda: gateway.error is not None, 3.0)
    assert gateway.error is not None and gateway.error.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("fresh", [True, False])
async def test_a_lost_worker_costs_no_token(cluster: Cluster, fresh: bool) -> None:
    cluster.workers[0].config = replace(SIM, step_us=1000)
    await cluster.start()
    gateway = await cluster.gateway()
    await gateway.submit(1, PROMPT, 150, n=2, params={"temperature": 0.7})
    await gateway.until(lambda: len(gateway.tokens.get(2, [])) > 20)
    await cluster.workers[0].stop()
    await asyncio.sleep(0.1)
    await cluster.workers[0].start(fresh=fresh)
    await gateway.finish(1, 2)
    for choice in range(2):
        assert gateway.tokens[1 + choice] == continue_greedily(PROMPT, 150, SIM, sequence_seed(7, choice))


async def test_another_group_takes_over(cluster: Cluster) -> None:
    cluster.workers.append(SimWorker(cluster.address + "w1", SIM))
    for worker in cluster.workers:
        worker.config = replace(SIM, step_us=1000)
    await cluster.start()
    gateway = await cluster.gateway()
    async with asyncio.timeout(5):
        while sum(group.ready for group in (await gateway.status()).groups) < 2:
            await asyncio.sleep(0.02)
    await gateway.send(submits=[make_submit(h, PROMPT[h:], 100) for h in range(4)])
    await gateway.until(lambda: all(len(gateway.tokens.get(h, [])) > 10 for h in range(4)))
    assert [group.num_running for group in (await gateway.status()).groups] == [2, 2]
    await cluster.workers[0].stop()
    await gateway.finish(*range(4))
    for handle in range(4):
        assert gateway.tokens[handle] == continue_greedily(PROMPT[handle:], 100, SIM)
    await cluster.workers[0].start()


async def test_a_restarted_scheduler_goes_on(cluster: Cluster) -> None:
    cluster.workers[0].config = replace(SIM, step_us=1000)
    await cluster.start()
    first = await cluster.gateway()
    await first.submit(1, PROMPT, 150, n=2, request_id="a", resumable=True, params={"temperature": 0.7})
    await first.submit(3, PROMPT, 10, request_id="done", resumable=True)
    asked = {"logprobs": 1, "prompt_logprobs": 0}
    await first.submit(4, PROMPT[2:], 150, request_id="unnamed", params=asked)
    await first.until(lambda: 3 in first.finished and len(first.tokens.get(2, [])) > 20)
    await cluster.stop_scheduler()
    await first.close()
    prefilled = cluster.workers[0].executor.num_prefilled
    await cluster.start_scheduler()
    second = await cluster.gateway()
    await second.send(
        attaches=[
            session_pb2.Attach(
                handle=1, request_id="a", next_index=[len(first.tokens[1]), len(first.tokens[2])]
            ),
            session_pb2.Attach(handle=3, request_id="done"),
            session_pb2.Attach(handle=4, request_id="unnamed", next_index=[len(first.tokens[4])]),
        ]
    )
    await second.finish(1, 2, 3, 4)
    assert first.tokens[4] + second.tokens[4] == continue_greedily(PROMPT[2:], 150, SIM)
    for choice in range(2):
        whole = first.tokens[1 + choice] + second.tokens[1 + choice]
        assert whole == continue_greedily(PROMPT, 150, SIM, sequence_seed(7, choice))
    logprobs = first.logprobs[4] + second.logprobs[4]
    assert [e.first_index for e in logprobs if not e.prompt] == list(range(150))
    told = [t.token_id for e in logprobs if e.prompt for t in e.tokens]
    assert told == PROMPT[3:]
    assert second.tokens[3] == first.tokens[3]
    assert second.welcome is not None and second.welcome.epoch == 2
    # The blocks that were committed to the index are still in the worker: little was computed again.
    assert cluster.workers[0].executor.num_prefilled - prefilled < 4 * SIM.block_size


async def test_a_named_request_that_nobody_comes_back_for_ends_after_its_grace(cluster: Cluster) -> None:
    cluster.flags = ["--orphan-grace-s", "0.3"]
    cluster.workers[0].config = replace(SIM, step_us=50_000)
    await cluster.start()
    first = await cluster.gateway()
    await first.submit(1, PROMPT, 350, request_id="a", resumable=True)
    await first.until(lambda: bool(first.tokens.get(1)))
    await first.close()
    second = await cluster.gateway()
    async with asyncio.timeout(10):  # all of its steps take 17 s
        while (await second.status()).groups[0].num_running:
            await asyncio.sleep(0.02)
    await second.send(attaches=[session_pb2.Attach(handle=1, request_id="a")])
    await second.finish(1)
    assert second.finished[1].reason == sampling_pb2.FINISH_REASON_ABORT


async def test_a_scheduler_that_stops_aborts_nothing_however_short_the_grace(cluster: Cluster) -> None:
    """Its sessions break because it stops: their requests are the next leader's."""
    cluster.flags = ["--orphan-grace-s", "0"]
    cluster.workers[0].config = replace(SIM, step_us=2000)
    await cluster.start()
    first = await cluster.gateway()
    await first.submit(1, PROMPT, 200, request_id="a", resumable=True)
    await first.until(lambda: len(first.tokens.get(1, [])) > 5)
    await cluster.stop_scheduler()
    await first.close()
    cluster.flags = []
    await cluster.start_scheduler()
    second = await cluster.gateway()
    await second.send(attaches=[session_pb2.Attach(handle=1, request_id="a")])
    await second.finish(1)
    assert second.tokens[1] == continue_greedily(PROMPT, 200, SIM)
    assert second.finished[1].reason == sampling_pb2.FINISH_REASON_LENGTH


async def test_a_scheduler_that_stops_gives_its_lease_back(cluster: Cluster) -> None:
    cluster.store = MemoryStore(lease_s=60.0)
    await cluster.start()
    await cluster.gateway()
    await cluster.stop_scheduler()
    assert isinstance(await cluster.store.acquire("another", "elsewhere"), Leadership)


async def test_a_fenced_scheduler_stops(cluster: Cluster) -> None:
    from kvern_scheduler.committer import Fenced

    await cluster.start()
    gateway = await cluster.gateway()
    await cluster.store.acquire("other", "nowhere", steal=1)
    await gateway.submit(1, PROMPT)
    with pytest.raises(Fenced):
        await asyncio.wait_for(cluster.scheduler, 5)
    assert 1 not in gateway.tokens
