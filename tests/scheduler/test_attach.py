"""Going on with a request on another session: after a leader's death, and while somebody else has it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
from scheduler.scheduler_harness import SIM, Cluster, Gateway

from kvern.v1 import error_pb2, session_pb2
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
