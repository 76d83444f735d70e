"""The Execute calls of one worker group: plans go to every rank, results come from the one that samples.

A worker alone is a group of one rank. Whatever happens to one call happens to all: a group lives and dies as one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from kvern.v1 import worker_pb2, worker_pb2_grpc

# What reading or writing a call that is over raises.
CALL_ERRORS = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it


class WorkerLost(Exception):
    """The worker died, froze, or said something impossible."""


def rank_targets(address: str, description: worker_pb2.DescribeResponse) -> list[str]:
    """Where the ranks are dialled, by rank, of a group whose first one answers at ``address``."""
    others = description.rank_addresses[1:]
    host = address.rpartition(":")[0]
    return [address, *(f"{host}{other}" if other.startswith(":") else other for other in others)]


class RankCalls:
    """Open calls, by rank. ``sampler``: the rank whose results :meth:`read` gives; the others' are counted only."""

    def __init__(self, stubs: Sequence[worker_pb2_grpc.WorkerServiceAsyncStub], sampler: int = 0) -> None:
        self._calls: list[Any] = [stub.Execute() for stub in stubs]  # type: ignore[call-arg]  # the stubs want an iterator
        self._sampler = sampler
        self._silent = [0] * len(stubs)
        self._ran = [asyncio.Event() for _ in stubs]
        self._lost: BaseException | None = None
        self._readers = [
            asyncio.create_task(self._drain(rank)) for rank in range(len(stubs)) if rank != sampler
        ]

    async def write(self, request: worker_pb2.ExecuteRequest) -> None:
        if len(self._calls) == 1:
            await self._calls[0].write(request)
        else:
            await asyncio.gather(*(call.write(request) for call in self._calls))

    async def read(self) -> worker_pb2.ExecuteResponse:
        """The next message of the rank that samples. Raises what ended any of the calls."""
        try:
            return await self._read(self._sampler)
        except (WorkerLost, asyncio.CancelledError, *CALL_ERRORS):
            if self._lost is None or asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            raise self._lost from None

    async def all_ran(self) -> None:
        """Returns when every other rank has answered a plan. Raises WorkerLost where one never will."""
        await asyncio.gather(*(ran.wait() for rank, ran in enumerate(self._ran) if rank != self._sampler))
        if self._lost is not None:
            raise self._lost

    def beat(self) -> int:
        """A heartbeat's time has passed: for how many the most silent rank has been."""
        self._silent = [count + 1 for count in self._silent]
        return max(self._silent) - 1

    def cancel(self) -> None:
        for reader in self._readers:
            reader.cancel()
        for call in self._calls:
            call.cancel()

    async def _read(self, rank: int) -> worker_pb2.ExecuteResponse:
        response = await self._calls[rank].read()
        if response is EOF:
            # Raises what the worker ended the stream with.
            where = f"rank {rank}" if len(self._calls) > 1 else "it"
            raise WorkerLost(f"{where} ended the stream: {await self._calls[rank].details()}")
        self._silent[rank] = 0
        return response  # type: ignore[no-any-return]

    async def _drain(self, rank: int) -> None:
        try:
            while True:
                if (await self._read(rank)).results:
                    self._ran[rank].set()
        except (WorkerLost, *CALL_ERRORS) as error:
            said = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
            self._lost = WorkerLost(f"rank {rank}: {said}")
        self._ran[rank].set()
        with contextlib.suppress(*CALL_ERRORS):
            self._calls[self._sampler].cancel()
