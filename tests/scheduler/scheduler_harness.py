"""Fakes for the scheduler's service tests: simulated workers and a gateway, behind real in-process gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from kvern.block_hash import hash_prompt, join_hashes
from kvern.rpc.channel import create_channel
from kvern.rpc.packing import pack_i32, unpack_i32, unpack_u32
from kvern.rpc.server import Server
from kvern.v1 import adapter_pb2, sampling_pb2, session_pb2, session_pb2_grpc, worker_pb2_grpc
from kvern_scheduler.server import parse_args, serve
from kvern_scheduler.store.base import Store
from kvern_scheduler.store.memory import MemoryStore
from kvern_worker.service import Progress, WorkerServicer
from kvern_worker.sim import SimConfig, SimExecutor

SIM = SimConfig(num_blocks=256, block_size=4, max_model_len=400, vocab_size=997, max_num_seqs=16, strict=True)


class SimWorker:
    """A simulated worker on a unix socket that can die and come back."""

    servicer_class = WorkerServicer

    def __init__(self, address: str, config: SimConfig = SIM) -> None:
        self.address = address
        self.config = config
        self.executor = SimExecutor(config)

    async def start(self, *, fresh: bool = True) -> None:
        if fresh:
            self.executor = SimExecutor(self.config)
            self.servicer = self.servicer_class(Progress())
            self.servicer.attach(self.executor)
        self._server = Server(["kvern.v1.WorkerService"])
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self.servicer, self._server.grpc)
        await self._server.start(self.address)

    async def stop(self) -> None:
        await self._server.grpc.stop(None)


class Gateway:
    """One session; collects what arrives, and checks that indexes are contiguous."""

    def __init__(self, address: str) -> None:
        self.gateway_id = f"test-{id(self)}"
        self._channel = create_channel(address)
        self.stub = session_pb2_grpc.SchedulerServiceStub(self._channel)
        self.welcome: session_pb2.Welcome | None = None
        self.adapters: list[adapter_pb2.Adapter] = []
        self.admitted: dict[int, session_pb2.Admitted] = {}
        self.refused: dict[int, Any] = {}
        self.tokens: dict[int, list[int]] = {}
        self.first_index: dict[int, int] = {}
        self.logprobs: dict[int, list[session_pb2.ChoiceLogprobs]] = {}
        self.finished: dict[int, session_pb2.Finished] = {}
        # Of the messages so far, in tokens and log-probabilities.
        self.largest = 0
        self.error: grpc.aio.AioRpcError | None = None
        self.violation: AssertionError | None = None
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        self._call: Any = self.stub.Session()  # type: ignore[call-arg]
        await self._call.write(
            session_pb2.SessionRequest(hello=session_pb2.Hello(gateway_id=self.gateway_id))
        )
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]
        await self.until(lambda: self.welcome is not None)

    async def close(self) -> None:
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def send(self, **fields: Any) -> None:
        await self._call.write(session_pb2.SessionRequest(**fields))

    async def submit(self, handle: int, prompt: list[int], max_tokens: int = 8, **fields: Any) -> None:
        await self.send(submits=[make_submit(handle, prompt, max_tokens, **fields)])

    async def status(self) -> session_pb2.GetStatusResponse:
        return await self.stub.GetStatus(session_pb2.GetStatusRequest())

    async def until(self, condition: Callable[[], bool], timeout: float = 60.0) -> None:
        """Waits until what has arrived fulfils ``condition``."""
        async with asyncio.timeout(timeout):
            while not condition():
                if failure := self.violation or self.error:
                    raise failure
                self._changed.clear()
                await self._changed.wait()

    async def finish(self, *handles: int, timeout: float = 60.0) -> None:
        await self.until(lambda: all(h in self.finished or h in self.refused for h in handles), timeout)

    async def _beat(self) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                await asyncio.sleep(0.25)
                await self._call.write(session_pb2.SessionRequest())

    async def _read(self) -> None:
        try:
            async for response in self._call:
                self._take(response)
                self._changed.set()
        except grpc.aio.AioRpcError as error:
            self.error = error
        except AssertionError as error:
            self.violation = error
        finally:
            self._changed.set()

    def _take(self, response: session_pb2.SessionResponse) -> None:
        if response.HasField("welcome"):
            self.welcome = response.welcome
        if response.HasField("adapters"):
            self.adapters = list(response.adapters.adapters)
        for admitted in response.admitted:
            assert admitted.handle not in self.admitted
            self.admitted[admitted.handle] = admitted
        for refused in response.refused:
            self.refused[refused.handle] = refused.error
        entries = sum(1 + len(t.top_token_ids) for logprobs in response.logprobs for t in logprobs.tokens)
        self.largest = max(self.largest, len(response.token_ids) // 4 + entries)
        handles = unpack_u32(response.token_handles).tolist()
        indexes = unpack_u32(response.token_indexes).tolist()
        for handle, index, token in zip(
            handles, indexes, unpack_i32(response.token_ids).tolist(), strict=True
        ):
            first = self.first_index.setdefault(handle, index)
            assert handle not in self.finished, "a token after the end"
            assert index == first + len(self.tokens.setdefault(handle, [])), "a gap or a repeat"
            self.tokens[handle].append(token)
        for logprobs in response.logprobs:
            self.logprobs.setdefault(logprobs.handle, []).append(logprobs)
        for finished in response.finished:
            assert finished.handle not in self.finished, "two ends"
            self.finished[finished.handle] = finished


async def open_gateway(address: str, timeout: float = 60.0) -> Gateway:
    """A session with the leader, as soon as there is one."""
    async with asyncio.timeout(timeout):
        while True:
            gateway = Gateway(address)
            try:
                await gateway.open()
                return gateway
            except (grpc.RpcError, asyncio.InvalidStateError):
                await gateway.close()
                await asyncio.sleep(0.05)


def make_submit(
    handle: int,
    prompt: list[int],
    max_tokens: int = 8,
    *,
    request_id: str = "",
    params: dict[str, Any] | None = None,
    **fields: Any,
) -> session_pb2.Submit:
    values = {"temperature": 0.0, "seed": 7, "max_tokens": max_tokens, **(params or {})}
    return session_pb2.Submit(
        handle=handle,
        request_id=request_id or f"r{handle}",
        body_digest=bytes(str(prompt), "ascii"),
        prompt_token_ids=pack_i32(prompt),
        params=sampling_pb2.SamplingParams(**values),
        block_hashes=join_hashes(hash_prompt(prompt, SIM.block_size)),
        **fields,
    )


class Cluster:
    """Workers and a scheduler, each of which can be stopped and started."""

    def __init__(self, folder: Path, num_workers: int = 1, config: SimConfig = SIM) -> None:
        self.address = f"unix:{folder}/s"
        self.workers = [SimWorker(f"unix:{folder}/w{i}", config) for i in range(num_workers)]
        self.store: Store = MemoryStore()
        self.flags: list[str] = []
        self.gateways: list[Gateway] = []

    async def start(self) -> None:
        for worker in self.workers:
            await worker.start()
        await self.start_scheduler()

    async def start_scheduler(self, store: Store | None = None) -> None:
        workers = [flag for worker in self.workers for flag in ("--worker", worker.address)]
        args = parse_args(["--listen", self.address, *workers, *self.flags])
        self._stop = asyncio.Event()
        self.scheduler = asyncio.create_task(serve(args, store or self.store, self._stop))

    async def stop_scheduler(self) -> None:
        self._stop.set()
        await self.scheduler

    async def gateway(self) -> Gateway:
        gateway = await open_gateway(self.address)
        self.gateways.append(gateway)
        return gateway

    async def stop(self) -> None:
        for gateway in self.gateways:
            await gateway.close()
        if not self.scheduler.done():
            await self.stop_scheduler()
        for worker in self.workers:
            await worker.stop()
