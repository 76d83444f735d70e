"""The session with the scheduler: what its loss means, cancels, duplicates, gaps, silence."""

from __future__ import annotations

import asyncio

import grpc.aio
import httpx
import openai
import pytest
from gateway.conftest import LONG, Serve, Served, text_of
from gateway.fake_scheduler import FakeScheduler, until

from kvern.errors import KvernError
from kvern.rpc.packing import pack_i32, pack_u32
from kvern.v1 import error_pb2, generation_pb2, sampling_pb2, session_pb2
from kvern.v1.generation_pb2_grpc import GenerationServiceStub
from kvern_gateway import scheduler_client
from kvern_gateway.generation import Choice
from kvern_gateway.open_requests import SessionLost
from kvern_gateway.outgoing import Outgoing
from kvern_gateway.room import Room
from kvern_gateway.scheduler_client import SchedulerClient
from kvern_gateway.text.tokenizer import TextModel


async def test_a_stream_goes_on_over_a_lost_session(serve: Serve) -> None:
    served = await serve(FakeScheduler(step_s=0.002))
    expected = await text_of(served)
    running = [asyncio.create_task(text_of(served)) for _ in range(3)]
    for _ in range(3):
        await asyncio.sleep(0.15)
        served.scheduler.drop_sessions()
    assert [await task for task in running] == [expected] * 3
    assert served.scheduler.num_sessions >= 2
    assert all(attach.next_index[0] > 0 for attach in served.scheduler.attaches)


async def test_a_message_that_cannot_be_read_reopens_the_session(serve: Serve) -> None:
    served = await serve(FakeScheduler(step_s=0.005))
    expected = await text_of(served)
    running = asyncio.create_task(text_of(served))
    await until(lambda: len(served.scheduler.submits) == 2)
    served.scheduler.malformed = True
    assert await running == expected
    assert served.scheduler.num_sessions == 2


async def test_a_forgotten_request_ends_with_a_retry_hint(serve: Serve) -> None:
    scheduler = FakeScheduler(step_s=0.005)
    scheduler.forget_on_reconnect = True
    served = await serve(scheduler)
    running = asyncio.create_task(served.http.post("/v1/completions", json=LONG))
    await until(lambda: scheduler.requests and next(iter(scheduler.requests.values())).sent[0] > 3)
    scheduler.drop_sessions()
    answer = await running
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "unavailable"


async def test_a_forgotten_request_of_which_nothing_was_said_starts_over(serve: Serve) -> None:
    scheduler = FakeScheduler()
    scheduler.forget_on_reconnect = True
    served = await serve(scheduler)
    scheduler.paused.clear()
    running = asyncio.create_task(text_of(served))
    await until(lambda: scheduler.submits)
    await asyncio.sleep(0.2)
    scheduler.drop_sessions()
    await until(lambda: len(scheduler.submits) == 2)
    scheduler.paused.set()
    assert await running
    assert scheduler.submits[0].request_id == scheduler.submits[1].request_id


async def test_a_silent_scheduler_is_left(serve: Serve) -> None:
    served = await serve()
    served.scheduler.silent = True
    await until(lambda: not served.gateway.client.connected.is_set() or served.scheduler.num_sessions > 1, 4)
    served.scheduler.silent = False
    await until(served.gateway.client.connected.is_set)
    assert await text_of(served)


async def test_no_scheduler_is_said_at_once(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_client, "ADMIT_PATIENCE_S", 0.1)
    served = await serve()
    await served.scheduler.stop()
    await until(lambda: not served.gateway.client.connected.is_set())
    await asyncio.sleep(0.15)
    answer = await served.http.post("/v1/completions", json=LONG)
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    await served.scheduler.start(served.scheduler.address)


async def test_open_requests_end_when_nobody_comes_back(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_client, "PATIENCE_S", 0.3)
    served = await serve(FakeScheduler(step_s=0.01))
    running = asyncio.create_task(served.http.post("/v1/completions", json=LONG))
    await until(lambda: served.scheduler.submits)
    await served.scheduler.stop()
    assert (await running).status_code == 503
    assert len(served.gateway.client.requests) == 0
    await served.scheduler.start(served.scheduler.address)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_at_once(serve: Serve, stream: bool) -> None:
    served = await serve(FakeScheduler(step_s=0.01))
    other = asyncio.create_task(text_of(served, {**LONG, "max_tokens": 60}))
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.base_url.rsplit(":", 1)[1]))
    body = b'{"prompt": "y", "max_tokens": 2000, "n": 2, "stream": %s}' % (b"true" if stream else b"false")
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    await until(lambda: len(served.scheduler.submits) == 2)
    if stream:
        await reader.readuntil(b"data: ")
    writer.close()
    await until(lambda: len(served.scheduler.cancels) == 2, 1)
    assert not any(cancel.stopped for cancel in served.scheduler.cancels)
    assert await other
    assert served.gateway.metrics.running == 0
    assert served.gateway.metrics.finished["abort"] == 2


async def test_a_full_queue_refuses_before_the_scheduler_is_asked(served: Served) -> None:
    scheduler, room = served.scheduler, served.gateway.client.requests.room
    scheduler.room = 0
    await until(lambda: room.full)
    answer = await served.http.post("/v1/completions", json=LONG)
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "overloaded"
    assert int(answer.headers["retry-after"]) >= 1
    stub = GenerationServiceStub(served.channel)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Generate(generation_pb2.GenerateRequest(prompt="x")).read()
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(raised.value.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "1000"
    assert scheduler.submits == []
    assert served.gateway.metrics.refused == {"overloaded": 2}
    # One that has a name may have been admitted long ago.
    named = await served.http.post("/v1/completions", json={**LONG, "request_id": "named"})
    assert named.status_code == 200
    scheduler.room = 5
    await until(lambda: not room.full)
    assert await text_of(served)
    # Another scheduler, another queue.
    scheduler.room = 0
    await until(lambda: room.full)
    scheduler.room = None
    served.scheduler.drop_sessions()
    await until(lambda: not room.full)


def test_requests_on_their_way_take_room() -> None:
    room = Room()
    room.sent(1, 2)
    assert not room.full
    room.told(3)
    assert not room.full
    room.sent(3, 1)
    assert room.full
    room.answered(1)
    room.answered(1)
    assert not room.full
    room.told(1)
    assert room.full


async def test_two_gateways_one_dies(serve: Serve) -> None:
    scheduler = FakeScheduler(step_s=0.003)
    first, second = await serve(scheduler), await serve(scheduler)
    expected = await text_of(second)
    dying = asyncio.create_task(first.http.post("/v1/completions", json=LONG))
    living = asyncio.create_task(text_of(second))
    await until(lambda: len(scheduler.submits) == 3)
    await first.server.stop(0)
    with pytest.raises(httpx.TransportError):
        await dying
    assert await living == expected
    assert await text_of(second) == expected


async def test_it_waits_for_the_model_and_is_not_ready_before(smollm2: TextModel) -> None:
    scheduler = FakeScheduler()
    scheduler.model_loaded.clear()
    client = SchedulerClient([await scheduler.start()])
    running = asyncio.create_task(client.run())
    await until(lambda: scheduler.num_sessions)
    await asyncio.sleep(scheduler_client.SILENCE_S + 0.3)
    assert not client.connected.is_set()
    scheduler.model_loaded.set()
    await asyncio.wait_for(client.connected.wait(), 0.5)
    assert scheduler.num_sessions == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await scheduler.stop()


async def test_a_request_that_is_given_up_at_once_is_not_left_running(serve: Serve) -> None:
    served = await serve(FakeScheduler(step_s=0.01))
    generation = served.gateway.client.submit(
        session_pb2.Submit(request_id="a", n=2, params={"max_tokens": 500})
    )
    generation.cancel()
    await until(lambda: len(served.scheduler.cancels) == 2)
    assert len(served.scheduler.requests["a"].closed) == 2


async def test_a_stopped_choice_stays_stopped_over_a_lost_session(serve: Serve) -> None:
    served = await serve(FakeScheduler(step_s=0.005))
    submit = session_pb2.Submit(request_id="a", n=2, params={"max_tokens": 500})
    generation = served.gateway.client.submit(submit)
    recorder = Recorder()
    generation.attach_sink(recorder)
    await until(lambda: len(recorder.tokens) > 4)
    generation.stop(generation.choices[0])
    served.scheduler.drop_sessions()
    await until(lambda: served.scheduler.attaches)
    await until(lambda: len(served.scheduler.requests["a"].closed) == 1)
    before = len(recorder.tokens)
    await until(lambda: len(recorder.tokens) > before + 5)
    generation.cancel()


@pytest.mark.parametrize("admitted", [True, False])
async def test_a_cancel_that_its_session_lost_is_said_again(serve: Serve, admitted: bool) -> None:
    scheduler = FakeScheduler(step_s=0.01)
    served = await serve(scheduler)
    requests = served.gateway.client.requests
    generation = served.gateway.client.submit(
        session_pb2.Submit(request_id="a", n=2, params={"max_tokens": 500})
    )
    await until(lambda: scheduler.requests)
    if admitted:
        await generation.admitted
    scheduler.drop_sessions()
    await until(lambda: not served.gateway.client.connected.is_set())
    if not admitted:
        generation.admitted = asyncio.get_running_loop().create_future()  # its answer was lost, too
    generation.cancel()
    assert len(requests) == 0 and scheduler.cancels == []
    await until(lambda: len(scheduler.requests["a"].closed) == 2)
    assert [attach.request_id for attach in scheduler.attaches] == ["a"]
    assert len(scheduler.submits) == 1
    # Once the scheduler has ended them, nothing is said again.
    await until(lambda: not requests._cancelled)
    scheduler.drop_sessions()
    await until(lambda: scheduler.num_sessions == 3 and served.gateway.client.connected.is_set())
    assert len(scheduler.attaches) == 1 and len(scheduler.cancels) == 2


async def test_a_cancel_of_what_the_scheduler_does_not_know_is_forgotten(serve: Serve) -> None:
    scheduler = FakeScheduler(step_s=0.01)
    scheduler.forget_on_reconnect = True
    served = await serve(scheduler)
    generation = served.gateway.client.submit(
        session_pb2.Submit(request_id="a", n=1, params={"max_tokens": 500})
    )
    await generation.admitted
    scheduler.drop_sessions()
    await until(lambda: not served.gateway.client.connected.is_set())
    generation.cancel()
    await until(lambda: scheduler.attaches and not served.gateway.client.requests._cancelled)
    assert scheduler.requests == {}


async def test_the_newest_call_of_a_named_request_takes_it_over(serve: Serve) -> None:
    served = await serve(FakeScheduler(step_s=0.005))
    body = {"prompt": "x", "max_tokens": 100, "request_id": "mine"}
    first = asyncio.create_task(served.http.post("/v1/completions", json=body))
    await until(lambda: served.scheduler.requests and served.scheduler.requests["mine"].sent[0] > 5)
    # Another body is refused, and the call that is open goes on.
    other = await served.http.post("/v1/completions", json=body | {"prompt": "y"})
    assert other.status_code == 409 and not first.done()
    second = await served.http.post("/v1/completions", json=body)
    assert second.json()["usage"]["completion_tokens"] == 100
    assert (await first).status_code == 499
    assert "taken this one over" in (await first).json()["error"]["message"]
    assert len(served.gateway.client.requests) == 0


async def test_an_orphan_is_not_taken_back_by_a_gateway_that_reconnects(serve: Serve) -> None:
    scheduler = FakeScheduler(step_s=0.01)
    served = await serve(scheduler)
    body = {"prompt": "x", "max_tokens": 500, "request_id": "mine"}
    leaving = asyncio.create_task(served.http.post("/v1/completions", json=body))
    await until(lambda: scheduler.requests and scheduler.requests["mine"].sent[0] > 2)
    leaving.cancel()
    await until(lambda: served.gateway.metrics.running == 0)
    assert len(served.gateway.client.requests) == 1
    scheduler.drop_sessions()
    await until(lambda: scheduler.num_sessions == 2 and served.gateway.client.connected.is_set())
    assert len(served.gateway.client.requests) == 0
    assert scheduler.attaches == [] and scheduler.cancels == []


async def test_an_error_after_acceptance_belongs_to_its_request(serve: Serve) -> None:
    served = await serve()
    served.scheduler.ends_with = KvernError(error_pb2.ERROR_CODE_NUMERICAL, "the logits are NaN")
    answer = await served.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "numerical"
    async with served.openai() as client:
        stream = await client.completions.create(model="test-model", prompt="x", max_tokens=2, stream=True)
        with pytest.raises(openai.APIError, match="the logits are NaN"):
            async for _ in stream:
                pass
    stub = GenerationServiceStub(served.channel)
    request = generation_pb2.GenerateRequest(prompt="x", sampling={"max_tokens": 2})
    responses = [response async for response in stub.Generate(request)]
    assert responses[-1].finished.reason == sampling_pb2.FINISH_REASON_ERROR
    assert responses[-1].finished.error.code == error_pb2.ERROR_CODE_NUMERICAL


# Without a server: the dispatcher alone.


class Recorder:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.error: KvernError | None = None
        self.broken = False

    def flush(self, choice: Choice) -> None:
        if self.broken:
            raise RuntimeError("a defect")
        self.tokens += choice.take()[1]

    def fail(self, error: KvernError) -> None:
        self.error = error


def tokens(handle: int, first: int, *ids: int) -> session_pb2.SessionResponse:
    return session_pb2.SessionResponse(
        token_handles=pack_u32([handle] * len(ids)),
        token_indexes=pack_u32(range(first, first + len(ids))),
        token_ids=pack_i32(ids),
    )


async def opened() -> tuple[SchedulerClient, Recorder, Recorder]:
    client = SchedulerClient(["127.0.0.1:1"])
    client.connected.set()
    recorders = []
    for _ in range(2):
        generation = client.submit(session_pb2.Submit(n=1))
        recorders.append(Recorder())
        generation.attach_sink(recorders[-1])
    return client, recorders[0], recorders[1]


async def test_duplicates_are_dropped_and_gaps_reopen_the_session() -> None:
    client, first, second = await opened()
    client.requests.take(tokens(1, 0, 5, 6, 7))
    client.requests.take(tokens(1, 1, 6, 7, 8))
    client.requests.take(tokens(99, 0, 1))
    assert (first.tokens, second.tokens) == ([5, 6, 7, 8], [])
    with pytest.raises(SessionLost, match="token 6 came where 4 was due"):
        client.requests.take(tokens(1, 6, 1))


async def test_a_defect_in_one_request_ends_that_one_only() -> None:
    client, first, second = await opened()
    first.broken = True
    both = tokens(1, 0, 5)
    both.MergeFrom(session_pb2.SessionResponse())
    client.requests.take(both)
    client.requests.take(tokens(2, 0, 6))
    assert first.error is not None and first.error.code == error_pb2.ERROR_CODE_INTERNAL
    assert second.tokens == [6]
    assert len(client.requests) == 1


def test_messages_are_bounded_and_cancels_come_after_submits() -> None:
    outgoing = Outgoing()
    outgoing.cancel([1], stopped=True)
    for handle in range(3):
        outgoing.submit(session_pb2.Submit(handle=handle, prompt_token_ids=bytes(5 * 2**20)))
    outgoing.attach(session_pb2.Attach(handle=9))
    messages = []
    while outgoing.waiting:
        messages.append(outgoing.take())
    assert [[submit.handle for submit in message.submits] for message in messages] == [[0], [1], [2], []]
    assert [len(message.attaches) for message in messages] == [1, 0, 0, 0]
    assert [cancel.stopped for cancel in messages[-1].cancels] == [True]
    assert outgoing.take() == session_pb2.SessionRequest()


async def test_a_name_belongs_to_its_tenant() -> None:
    client = SchedulerClient(["127.0.0.1:1"])
    client.connected.set()
    first, other, again = (
        client.submit(session_pb2.Submit(request_id="a", tenant=tenant, n=1, resumable=True))
        for tenant in ("x", "y", "x")
    )
    for generation, failed in ((first, []), (other, []), (again, [first])):
        admitted = session_pb2.Admitted(handle=generation.submit.handle)
        client.requests.take(session_pb2.SessionResponse(admitted=[admitted]))
        assert [g for g in (first, other, again) if g.error is not None] == failed


async def test_handles_of_open_choices_are_not_given_out_again() -> None:
    client, _, _ = await opened()
    client.requests._next_handle = 2**32 - 3
    generation = client.submit(session_pb2.Submit(n=4))
    assert [choice.handle for choice in generation.choices] == [5, 6, 7, 8]


async def test_a_frozen_leader_does_not_hold_up_the_way_to_the_next() -> None:
    first, second = FakeScheduler(), FakeScheduler()
    first.leads = False
    await first.start()
    await second.start()
    client = SchedulerClient([first.address, second.address])
    running = asyncio.create_task(client.run())
    try:
        await client.connected.wait()
        assert (first.num_sessions, second.num_sessions) == (0, 1)
        first.leads, second.silent = True, True
        # The silence itself takes 1.25 s; waiting for the silent one's answer would take as long again.
        await until(lambda: first.num_sessions == 1, 2.0)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        second.silent = False
        await first.stop()
        await second.stop()
