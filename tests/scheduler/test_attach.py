"""Going on with a request on another session: after a leader's death, and while somebody else has it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import grpc
from scheduler.scheduler_harness import SIM, Cluster, Gateway, make_submit

from kvern.v1 import error_pb2, sampling_pb2, session_pb2
from kvern_scheduler.store.base import Name, StoredRequest, StoreUnavailable
from kvern_scheduler.store.memory import MemoryStore
from kvern_worker.sim import continue_greedily

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


async def test_an_unnamed_request_that_ends_before_its_gateway_is_back(cluster: Cluster) -> None:
    cluster.workers[0].config = replace(SIM, step_us=2000)
    await cluster.start()
    first = await cluster.gateway()
    await first.submit(1, PROMPT, 60)
    await first.until(lambda: len(first.tokens.get(1, [])) > 20)
    await cluster.stop_scheduler()
    await first.close()
    await cluster.start_scheduler()
    second = await cluster.gateway()
    async with asyncio.timeout(10):
        while (status := await second.status()).groups[0].num_running or status.step < 60:
            await asyncio.sleep(0.01)
    await second.send(
        attaches=[session_pb2.Attach(handle=1, request_id="r1", next_index=[len(first.tokens[1])])]
    )
    await second.finish(1)
    assert 1 not in second.refused
    assert first.tokens[1] + second.tokens[1] == continue_greedily(PROMPT, 60, SIM)


async def test_what_is_resumed_must_exist(cluster: Cluster) -> None:
    await cluster.start()
    gateway = await cluster.gateway()
    await gateway.submit(1, PROMPT, request_id="a", resumable=True, resumes=True)
    await gateway.finish(1)
    assert gateway.refused[1].code == error_pb2.ERROR_CODE_REQUEST_NOT_FOUND
    await gateway.submit(2, PROMPT, request_id="a", resumable=True)
    await gateway.submit(3, PROMPT, request_id="a", resumable=True, resumes=True)
    await gateway.finish(3)
    assert gateway.tokens[3] == continue_greedily(PROMPT, 8, SIM)


async def test_a_session_is_told_that_another_took_its_request_over(cluster: Cluster) -> None:
    cluster.workers[0].config = replace(SIM, step_us=2000)
    await cluster.start()
    first, second = await cluster.gateway(), await cluster.gateway()
    await first.submit(7, PROMPT, 100, n=2, request_id="a", resumable=True)
    await first.until(lambda: len(first.tokens.get(7, [])) > 5)
    await second.send(attaches=[session_pb2.Attach(handle=1, request_id="a")])
    await second.finish(1, 2)
    await first.until(lambda: 7 in first.refused)
    assert first.refused[7].code == error_pb2.ERROR_CODE_CANCELLED
    assert second.tokens[1] == continue_greedily(PROMPT, 100, SIM)
    assert 7 not in first.finished


async def test_a_gateway_that_comes_back_takes_nothing_from_the_one_its_client_went_to(
    cluster: Cluster,
) -> None:
    cluster.workers[0].config = replace(SIM, step_us=2000)
    await cluster.start()
    first, second = await cluster.gateway(), await cluster.gateway()
    await first.submit(7, PROMPT, 60, request_id="a", resumable=True)
    await first.until(lambda: 7 in first.admitted)
    await second.submit(1, PROMPT, 60, request_id="a", resumable=True)
    await second.until(lambda: 1 in second.admitted)
    assert second.admitted[1].claim > first.admitted[7].claim
    await first.send(attaches=[session_pb2.Attach(handle=8, request_id="a", claim=first.admitted[7].claim)])
    await first.finish(8)
    assert first.refused[8].code == error_pb2.ERROR_CODE_CANCELLED
    await second.finish(1)
    assert second.tokens[1] == continue_greedily(PROMPT, 60, SIM)


async def test_the_newer_session_of_a_gateway_ends_the_older(cluster: Cluster) -> None:
    await cluster.start()
    older = await cluster.gateway()
    newer = Gateway(cluster.address)
    cluster.gateways.append(newer)
    newer.gateway_id = older.gateway_id
    await newer.open()
    await older.until(lambda: older.error is not None)
    assert older.error is not None and older.error.code() is grpc.StatusCode.UNAVAILABLE
    await newer.submit(1, PROMPT)
    await newer.finish(1)
    assert newer.tokens[1] == continue_greedily(PROMPT, 8, SIM)


class Archived(MemoryStore):
    """``away``: what has ended cannot be read. Counts how often it is asked."""

    away = False
    num_finds = 0

    async def find(self, names: Sequence[Name]) -> list[StoredRequest]:
        self.num_finds += 1
        await asyncio.sleep(0.01)
        if self.away:
            raise StoreUnavailable("away")
        return await super().find(names)


async def change_leader(cluster: Cluster) -> Gateway:
    """A session with the next scheduler, which has the same store."""
    for gateway in cluster.gateways:
        await gateway.close()
    cluster.gateways.clear()
    await cluster.stop_scheduler()
    await cluster.start_scheduler()
    return await cluster.gateway()


async def test_what_ended_under_an_earlier_leader_is_read_when_it_is_asked_for(cluster: Cluster) -> None:
    store = cluster.store = Archived()
    await cluster.start()
    gateway = await cluster.gateway()
    for number in range(20):
        await gateway.submit(10 * number, PROMPT, 8, n=2, request_id=f"named-{number}", resumable=True)
    await gateway.finish(*range(0, 200, 10), *range(1, 200, 10))
    assert store.num_finds == 0, "the first leader has no predecessor"
    expected = gateway.tokens[0]
    for _ in range(2):
        gateway = await change_leader(cluster)
        assert len((await store.load()).requests) == 0
        await gateway.send(
            submits=[
                make_submit(1, PROMPT, 8, n=2, request_id="named-3", resumable=True),
                make_submit(3, [9, 9], 8, request_id="named-4", resumable=True),
                make_submit(5, PROMPT, 8, request_id="new"),
                make_submit(7, PROMPT, 8, n=2, request_id="named-5", resumable=True, resumes=True),
            ],
            attaches=[
                session_pb2.Attach(handle=20, request_id="named-6", next_index=[3, 8]),
                session_pb2.Attach(handle=30, request_id="never"),
            ],
        )
        await gateway.finish(1, 2, 3, 5, 7, 8, 20, 21, 30)
        assert gateway.tokens[1] == gateway.tokens[5] == gateway.tokens[7] == expected
        assert gateway.tokens[20] == expected[3:] and 21 not in gateway.tokens
        assert gateway.refused[3].code == error_pb2.ERROR_CODE_REQUEST_ID_CONFLICT
        assert gateway.refused[30].code == error_pb2.ERROR_CODE_REQUEST_NOT_FOUND
        assert store.num_finds == 1, "one message, one question"
        await gateway.send(attaches=[session_pb2.Attach(handle=40, request_id="named-6")])
        await gateway.finish(40, 41)
        assert store.num_finds == 1, "it is known by now"
        store.num_finds = 0


async def test_while_the_store_is_away_new_requests_are_refused_and_attached_ones_wait(
    cluster: Cluster,
) -> None:
    store = cluster.store = Archived()
    await cluster.start()
    gateway = await cluster.gateway()
    await gateway.submit(1, PROMPT, 8, request_id="named", resumable=True)
    await gateway.finish(1)
    gateway = await change_leader(cluster)
    store.away = True
    await gateway.send(
        submits=[make_submit(1, PROMPT, 8, request_id="new")],
        attaches=[session_pb2.Attach(handle=2, request_id="named")],
    )
    await gateway.finish(1)
    assert gateway.refused[1].code == error_pb2.ERROR_CODE_UNAVAILABLE
    assert gateway.refused[1].retry_after_ms > 0
    assert 2 not in gateway.admitted and 2 not in gateway.refused
    store.away = False
    await gateway.finish(2)
    assert gateway.tokens[2] == continue_greedily(PROMPT, 8, SIM)


async def test_a_cancel_finds_the_submit_that_waits_for_the_store(cluster: Cluster) -> None:
    cluster.store = Archived()
    cluster.workers[0].config = replace(SIM, step_us=2000)
    await cluster.start()
    gateway = await cluster.gateway()
    await gateway.submit(1, PROMPT, 8, request_id="named", resumable=True)
    await gateway.finish(1)
    gateway = await change_leader(cluster)
    await gateway.submit(5, PROMPT, 300, request_id="new", resumable=True)
    await gateway.send(cancels=[session_pb2.CancelHandle(handle=5)])
    await gateway.finish(5)
    assert gateway.finished[5].reason == sampling_pb2.FINISH_REASON_ABORT
    assert len(gateway.tokens.get(5, [])) < 300
