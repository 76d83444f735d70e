"""Whoever leaves, or whose time is over, holds no KV blocks a few steps later: through real processes, on the
scheduler's own figures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import httpx
import pytest

from kvern.rpc.channel import create_channel
from kvern.rpc.errors import error_from_rpc
from kvern.v1 import error_pb2, generation_pb2, sampling_pb2, session_pb2, session_pb2_grpc
from kvern.v1.generation_pb2_grpc import GenerationServiceStub
from kvern_gateway.cli import bench_stack
from kvern_gateway.cli.load_client import Target
from kvern_gateway.cli.ports import claim_port

HOST = "127.0.0.1"
FLAGS = {"sim_step_us": 20_000, "sim_num_blocks": 4096, "max_model_len": 8192, "max_num_seqs": 64}
# Two in flight when the end is known, one in which the blocks are let go; the rest is for this machine's others.
STEPS = 25
LONG = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}


class Stack:
    """The ports of a whole Kvern, and what its scheduler says of itself."""

    def __init__(self, http_port: int, grpc_port: int, scheduler: Any, channel: grpc.aio.Channel) -> None:
        self.base_url = f"http://{HOST}:{http_port}"
        self.generation = GenerationServiceStub(channel)
        self._scheduler = scheduler

    async def status(self) -> session_pb2.GetStatusResponse:
        return await self._scheduler.GetStatus(session_pb2.GetStatusRequest())

    async def until(self, condition: Callable[[session_pb2.GroupStatus], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition((await self.status()).groups[0]):
                await asyncio.sleep(0.005)

    async def until_running(self, count: int = 1) -> None:
        await self.until(lambda group: group.num_running == count)

    async def steps_until_free(self) -> int:
        """Steps from now until nothing runs and every block is free or cached."""
        before = (await self.status()).timings.steps
        await self.until(lambda group: not group.num_running + group.num_waiting)
        group = (status := await self.status()).groups[0]
        assert group.num_free_blocks + group.num_cached_blocks == group.num_blocks
        return int(status.timings.steps - before)


@asynccontextmanager
async def stack() -> AsyncIterator[Stack]:
    http_port, grpc_port = claim_port(HOST, 0, "--http-port"), claim_port(HOST, 0, "--grpc-port")
    async with (
        bench_stack.running(
            *("worker", "scheduler", "gateway"),
            store="redis",
            appendfsync="everysec",
            flags=FLAGS,
            http_port=http_port,
            grpc_port=grpc_port,
        ) as bench,
        create_channel(bench.scheduler) as to_scheduler,
        create_channel(f"{HOST}:{grpc_port}") as to_gateway,
    ):
        await bench_stack.until_healthy(Target(HOST, http_port))
        stub = session_pb2_grpc.SchedulerServiceStub(to_scheduler)
        yield Stack(http_port, grpc_port, stub, to_gateway)


def request(**fields: Any) -> generation_pb2.GenerateRequest:
    sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
    return generation_pb2.GenerateRequest(prompt="Once upon a time", sampling=sampling, **fields)


@pytest.mark.slow
async def test_what_nobody_waits_for_frees_its_blocks_at_once() -> None:
    async with stack() as kvern:
        # An HTTP client that hangs up, while it is streamed to and while it waits for a whole answer.
        for body in ({**LONG, "stream": True}, {**LONG, "n": 3}):
            async with httpx.AsyncClient(base_url=kvern.base_url, timeout=60, verify=False) as client:
                asking = asyncio.create_task(client.post("/v1/completions", json=body))
                await kvern.until_running(int(body.get("n", 1)))
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            assert await kvern.steps_until_free() <= STEPS

        # A call that is cancelled.
        call = kvern.generation.Generate(request(n=2))
        await kvern.until_running(2)
        call.cancel()
        assert await kvern.steps_until_free() <= STEPS

        # A named one goes on without its client, until somebody cancels it.
        call = kvern.generation.Generate(request(request_id="named"))
        await call.read()
        await kvern.until_running()
        assert (await kvern.generation.Cancel(generation_pb2.CancelRequest(request_id="named"))).cancelled
        assert await kvern.steps_until_free() <= STEPS


@pytest.mark.slow
async def test_a_deadline_ends_the_computing_too() -> None:
    async with stack() as kvern:
        for name in ("", "named-with-a-deadline"):
            call = kvern.generation.Generate(request(request_id=name), timeout=2.0)
            await call.read()
            await kvern.until_running()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                while await call.read():
                    pass
            assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert error_from_rpc(raised.value).code == error_pb2.ERROR_CODE_DEADLINE_EXCEEDED
            # The scheduler has the deadline itself, and looks at it a few times a second.
            assert await kvern.steps_until_free() <= STEPS
