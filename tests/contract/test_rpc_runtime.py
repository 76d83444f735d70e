"""The shared gRPC runtime against a real in-process server: errors, health, reflection, packing."""

import asyncio
import sys

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from kvern.errors import KvernError, invalid
from kvern.rpc import errors, health, packing
from kvern.rpc.channel import create_channel
from kvern.rpc.server import Server
from kvern.v1 import error_pb2, worker_pb2, worker_pb2_grpc

SERVICE = "kvern.v1.WorkerService"


class FailingWorker(worker_pb2_grpc.WorkerServiceServicer):
    async def Describe(self, request, context):
        raise KvernError(
            error_pb2.ERROR_CODE_OVERLOADED,
            "the queue holds 10 requests, its limit",
            field="queue",
            value=11,
            limit=10,
            retry_after_ms=250,
        )

    async def GetInventory(self, request, context):
        raise ZeroDivisionError("a secret")

    async def Execute(self, request_iterator, context):
        yield worker_pb2.ExecuteResponse()
        raise invalid("plans", "a plan is malformed")


@pytest.fixture
async def address():
    server = Server([SERVICE])
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(FailingWorker(), server.grpc)
    port = await server.start("127.0.0.1:0")
    await server.set_serving(True)
    yield f"127.0.0.1:{port}"
    await server.drain(0)


async def test_a_typed_error_crosses_the_wire_whole(address):
    async with create_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.WorkerServiceStub(channel).Describe(worker_pb2.DescribeRequest())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = errors.error_from_rpc(caught.value)
    assert (error.field, error.value, error.limit, error.retry_after_ms) == ("queue", "11", "10", 250)


async def test_an_unforeseen_error_is_internal_and_says_nothing_of_itself(address, caplog):
    async with create_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.WorkerServiceStub(channel).GetInventory(worker_pb2.GetInventoryRequest())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (caught.value.details() or "")
    assert "ZeroDivisionError" in caplog.text


async def test_a_stream_that_fails_later_keeps_what_it_sent(address):
    async with create_channel(address) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Execute(iter(()))
        assert await call.read() == worker_pb2.ExecuteResponse()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert errors.error_from_rpc(caught.value).field == "plans"


def test_every_error_code_has_a_status():
    internal = {
        error_pb2.ERROR_CODE_UNSPECIFIED,
        error_pb2.ERROR_CODE_INTERNAL,
        error_pb2.ERROR_CODE_NUMERICAL,
    }
    for code in error_pb2.ErrorCode.values():
        status = errors.status_of(KvernError(code, "m"))
        assert (status is grpc.StatusCode.INTERNAL) == (code in internal)


async def test_health_follows_serving_and_reflection_lists_services(address):
    async with create_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
    with grpc.insecure_channel(address) as blocking:
        import asyncio

        names = await asyncio.to_thread(
            lambda: list(ProtoReflectionDescriptorDatabase(blocking).get_services())
        )
    assert SERVICE in names
    assert "grpc.health.v1.Health" in names


async def test_a_taken_port_is_named(address):
    with pytest.raises(OSError, match=address):
        await Server([]).start(address)


def test_packing_round_trips_and_refuses_torn_arrays():
    values = np.array([0, 1, 2**31 - 1], dtype=np.int32)
    assert packing.unpack_i32(packing.pack_i32(values)).tolist() == values.tolist()
    assert packing.unpack_u32(packing.pack_u32([2**32 - 1])).tolist() == [2**32 - 1]
    assert packing.pack_u32([1]) == b"\x01\x00\x00\x00"
    with pytest.raises(ValueError):
        packing.unpack_i32(b"\x00" * 5)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [((), 0), (("--alive",), 0), (("--service", "kvern.v1.WorkerService"), 0), (("--service", "nobody"), 1)],
)
async def test_the_health_command_tells_by_its_exit_status(address, arguments, status):
    command = (sys.executable, "-m", "kvern.rpc.health", address, *arguments)
    probe = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await probe.communicate()
    assert probe.returncode == status
    assert printed.decode().startswith("NOT_FOUND" if status else "SERVING")


async def test_what_is_not_ready_is_alive():
    server = Server([SERVICE])
    port = await server.start("127.0.0.1:0")
    try:
        statuses = [
            await asyncio.to_thread(health.check, f"127.0.0.1:{port}", name, 5.0)
            for name in ("", health.LIVENESS)
        ]
    finally:
        await server.drain(0)
    assert statuses == ["NOT_SERVING", "SERVING"]
    assert health.check(f"127.0.0.1:{port}", "", 1.0).startswith("UNAVAILABLE")
