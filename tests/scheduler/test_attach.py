"""Going on with a request on another session: after a leader's death, and while somebody else has it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import grpc
import pytest
from scheduler.scheduler_harness import SIM, Cluster, Gateway, make_submit

from kvern.v1 import error_pb2, sampling_pb2, session_pb2
from kvern_scheduler import sessions
from kvern_scheduler.store.base import Name, StoredRequest, StoreUnavailable
from kvern_scheduler.store.memory import MemoryStore
from kvern_scheduler.subscriptions import REPLAY_UNITS
from kvern_worker.sim import continue_greedily

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


async def test_an_unnamed_request_that_ends_before_its_gateway_is_back(cluster: Cluster) -> None:
    cluster.workers[0].config = replace(SIM, step_us=10_000)
    await cluster.start()
    first = await cluster.gateway()
    await first.submit(1, PROMPT, 60)
    await first.until(lambda: len(first.tokens.get(1, [])) > 5)
    await cluster.stop_scheduler()
    await first.close()
    await cluster.start_scheduler()
    second = await cluster.gateway()
    async with asyncio.timeout(60):
        while (await cluster.store.load()).requests:
            await asyncio.sleep(0.01)
    await second.send(
        attaches=[session_pb2.Attach(handle=1, request_id="r1", next_index=[len(first.tokens[1])])]
    )
    await second.finish(1)
    assert 1 not in second.refused
    assert first.tokens[1] + second.tokens[1] == continue_greedily(PROMPT, 60, SIM)


async def test_a_session_that_breaks_costs_an_unnamed_request_nothing(cluster: Cluster) -> None:
    """Be it before the request ends, or just when its last tokens are on their way."""
    cluster.workers[0].config = replace(SIM, step_us=2000)
    await cluster.start()
    first = await cluster.gateway()
    await first.submit(1, PROMPT, 150, n=2, params={"temperature": 1.0})
    await first.submit(4, PROMPT, 8)
    await first.finish(4)
    await first.until(lambda: len(first.tokens.get(2, [])) > 20)
    await first.close()
    second = await cluster.gateway()
    lacks = [len(first.tokens[1]), len(first.tokens[2])]
    await second.send(
        attaches=[
            session_pb2.Attach(handle=1, request_id="r1", next_index=lacks, claim=first.admitted[1].claim),
            session_pb2.Attach(handle=4, request_id="r4", next_index=[5], claim=first.admitted[4].claim),
        ]
    )
    await second.finish(1, 2, 4)
    assert not second.refused and not second.admitted[1].prompt_token_ids
    assert second.tokens[4] == first.tokens[4][5:]
    assert first.tokens[1] + second.tokens[1] == continue_greedily(PROMPT, 150, SIM, 7)
    assert {second.finished[handle].reason for handle in (1, 2)} == {sampling_pb2.FINISH_REASON_LENGTH}


async def test_long_replays_come_in_pieces_and_stay_in_order(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tokens than a session may buffer, and log-probabilities, while new ones are being made."""
    monkeypatch.setattr(sessions, "MAX_BUFFERED", 2 * REPLAY_UNITS)
    config = replace(SIM, num_blocks=8192, max_model_len=2400, step_us=200, strict=False)
    cluster.workers[0].config = config
    await cluster.start()
    first = await cluster.gateway()
    for handle in range(1, 15):
        asked = {"logprobs": 2, "prompt_logprobs": 1} if handle < 3 else {}
        await first.submit(handle, PROMPT, 1500, resumable=True, params=asked)
    await first.until(lambda: len(first.tokens.get(14, [])) > 900, 30)
    second = await cluster.gateway()
    await second.send(attaches=[session_pb2.Attach(handle=h, request_id=f"r{h}") for h in range(1, 15)])
    await second.finish(*range(1, 15), timeout=30)
    assert not second.refused
    assert second.largest < 2 * REPLAY_UNITS
    expected = continue_greedily(PROMPT, 1500, config)
    for handle in range(1, 15):
        assert second.admitted[handle].prompt_token_ids
        assert second.tokens[handle] == expected
    for handle in (1, 2):
        entries = second.logprobs[handle]
        indexes = [
            entry.first_index + i for entry in entries if not entry.prompt for i in range(len(entry.tokens))
        ]
        assert indexes == list(range(1500))
        assert sum(len(entry.tokens) for entry in entries if entry.prompt) == len(PROMPT) - 1


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


async def test_what_was_asked_first_and_is_read_last_takes_nothing(cluster: Cluster) -> None:
    """As when we were frozen while a gateway died, and its client asked another one."""
    cluster.workers[0].config = replace(SIM, step_us=2000)
    await cluster.start()
    dead, alive = await cluster.gateway(), await cluster.gateway()
    await alive.submit(1, PROMPT, 60, request_id="a", resumable=True, asked_unix_ms=2000)
    await alive.until(lambda: 1 in alive.admitted)
    await dead.submit(7, PROMPT, 60, request_id="a", resumable=True, asked_unix_ms=1999)
    await dead.send(attaches=[session_pb2.Attach(handle=8, request_id="a", asked_unix_ms=1)])
    await dead.finish(7, 8)
    for handle in (7, 8):
        assert dead.refused[handle].code == error_pb2.ERROR_CODE_UNAVAILABLE
        assert dead.refused[handle].retry_after_ms > 0
    await alive.finish(1)
    assert alive.tokens[1] == continue_greedily(PROMPT, 60, SIM)
    await dead.submit(9, PROMPT, 60, request_id="a", resumable=True, asked_unix_ms=2001)
    await dead.finish(9)
    assert dead.tokens[9] == alive.tokens[1]


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
