"""Clients that do not read what they asked for."""

from __future__ import annotations

import asyncio
import socket

import grpc.aio
import pytest
from gateway.conftest import Serve, Served, text_of
from gateway.fake_scheduler import FakeScheduler, until

from kvern.v1 import generation_pb2, sampling_pb2
from kvern.v1.generation_pb2_grpc import GenerationServiceStub
from kvern_gateway.http.protocol import Connection
from kvern_gateway.limits import Limits


async def test_a_client_that_does_not_read_holds_up_nobody(serve: Serve) -> None:
    served = await serve(FakeScheduler(max_model_len=4000), Limits(max_unread_bytes=2**22))
    stuck, connection = await stuck_client(served, b"")
    assert await text_of(served)
    await until(lambda: not connection.writable, 30)
    # What waits is tokens; the transport holds little more than its high-water mark.
    for _ in range(10):
        assert connection.transport.get_write_buffer_size() < 2**18
        await asyncio.sleep(0.03)
    # Then it reads: everything comes, in order, once.
    assert (await read_to_end(stuck)).count(b'"index":0') == 3000


@pytest.mark.parametrize("named", [True, False])
async def test_what_waits_for_a_client_that_does_not_read_is_bounded(serve: Serve, named: bool) -> None:
    limits = Limits(max_unread_bytes=2**16)
    served = await serve(FakeScheduler(max_model_len=4000, tokens_per_step=20, step_s=0.02), limits)
    stuck, connection = await stuck_client(served, b', "request_id": "unread"' if named else b"")
    if named:
        # It goes on, and nothing of it is kept here.
        [submit] = served.scheduler.submits
        await until(lambda: served.scheduler.requests["unread"].sent == [3000], 30)
        assert submit.resumable and not served.scheduler.cancels
    else:
        await until(lambda: served.scheduler.cancels, 30)
    assert not connection.writable
    data = await read_to_end(stuck)
    assert b'"code":"unavailable"' in data and b"was not read" in data
    assert 0 < data.count(b'"index":0') < 3000
    if named:
        ids = [line for line in data.split(b"\n") if line.startswith(b"id: ")]
        answer = await served.http.post(
            "/v1/completions",
            content=BODY % b', "request_id": "unread"',
            headers={"Last-Event-ID": ids[-1][4:].decode()},
        )
        assert answer.status_code == 200
        assert data.count(b'"index":0') + answer.text.count('"index":0') == 3000


async def test_what_waits_for_a_call_that_is_not_read_is_bounded(serve: Serve) -> None:
    scheduler = FakeScheduler(max_model_len=40_000, tokens_per_step=100, step_s=0.02)
    served = await serve(scheduler, Limits(max_unread_bytes=2**14))
    # One that takes no more than 64 KiB ahead.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(served.grpc_address, options=options) as channel:
        sampling = sampling_pb2.SamplingParams(max_tokens=20_000, logprobs=20, ignore_eos=True)
        request = generation_pb2.GenerateRequest(prompt="y", sampling=sampling)
        call = GenerationServiceStub(channel).Generate(request)
        await call.read()
        await until(lambda: scheduler.cancels, 30)
        with pytest.raises(grpc.aio.AioRpcError, match="was not read") as raised:
            while await call.read():
                pass
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE


BODY = b'{"prompt": "y", "max_tokens": 3000, "stream": true, "logprobs": 20%b}'


async def stuck_client(served: Served, more: bytes) -> tuple[socket.socket, Connection]:
    """A client that has sent its request and reads nothing, and the server's side of it."""
    stuck = socket.socket()
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    stuck.connect(("127.0.0.1", int(served.base_url.rsplit(":", 1)[1])))
    await until(lambda: served.server.http_connections)
    [connection] = served.server.http_connections
    sending = connection.transport.get_extra_info("socket")
    sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
    body = BODY % more
    stuck.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    await until(lambda: served.scheduler.submits)
    return stuck, connection


async def read_to_end(stuck: socket.socket) -> bytes:
    stuck.setblocking(False)
    loop = asyncio.get_running_loop()
    data = b""
    async with asyncio.timeout(60):
        while b"[DONE]" not in data[-200:]:
            data += await loop.sock_recv(stuck, 2**20)
    stuck.close()
    return data
