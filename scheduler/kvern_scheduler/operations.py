"""OperationsService: timelines, blocks and status of the cell that this scheduler leads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import numpy as np

from kvern.errors import KvernError, invalid
from kvern.v1 import error_pb2, operations_pb2, operations_pb2_grpc, session_pb2, worker_pb2
from kvern_scheduler import profile, timelines
from kvern_scheduler.core.group import Group
from kvern_scheduler.engine import Engine
from kvern_scheduler.workers import Worker

SERVICE_NAME = "kvern.v1.OperationsService"
Context = grpc.aio.ServicerContext[Any, Any]

CACHED, SHARED, FIRST_OWNER = 1, 2, 3
NUM_OWNERS = 256 - FIRST_OWNER
MAX_PROFILE_MS = 60_000


class OperationsServicer(operations_pb2_grpc.OperationsServiceServicer):
    """``lead`` makes it answer. ``status``: what SchedulerService.GetStatus says."""

    def __init__(self, status: Callable[[], session_pb2.GetStatusResponse]) -> None:
        self._engine: Engine | None = None
        self._workers: Sequence[Worker] = ()
        self._status = status

    def lead(self, engine: Engine, workers: Sequence[Worker]) -> None:
        self._engine, self._workers = engine, workers

    def _leading(self) -> Engine:
        if self._engine is None:
            raise KvernError(
                error_pb2.ERROR_CODE_UNAVAILABLE, "this scheduler does not lead", retry_after_ms=200
            )
        return self._engine

    async def GetTimeline(
        self, request: operations_pb2.GetTimelineRequest, context: Context
    ) -> operations_pb2.GetTimelineResponse:
        engine = self._leading()
        tenant = request.tenant if request.HasField("tenant") else None
        found = timelines.timeline(engine.journal, request.request_id, tenant, engine.clock())
        return operations_pb2.GetTimelineResponse(timeline=found)

    async def ListTimelines(
        self, request: operations_pb2.ListTimelinesRequest, context: Context
    ) -> operations_pb2.ListTimelinesResponse:
        tenant = request.tenant if request.HasField("tenant") else None
        heads = timelines.heads(self._leading().journal, tenant, request.limit)
        return operations_pb2.ListTimelinesResponse(timelines=heads)

    async def GetBlocks(
        self, request: operations_pb2.GetBlocksRequest, context: Context
    ) -> operations_pb2.GetBlocksResponse:
        groups = self._leading().cell.groups.values()
        return operations_pb2.GetBlocksResponse(
            groups=[
                operations_pb2.GroupBlocks(
                    group_id=str(group.index), block_size=group.block_size, states=block_states(group)
                )
                for group in groups
            ]
        )

    async def ProfileCell(
        self, request: operations_pb2.ProfileCellRequest, context: Context
    ) -> operations_pb2.ProfileCellResponse:
        engine, milliseconds = self._leading(), request.milliseconds
        if not 0 < milliseconds <= MAX_PROFILE_MS:
            raise invalid(
                "milliseconds",
                f"milliseconds is {milliseconds}, it must be 1 to {MAX_PROFILE_MS}",
                value=milliseconds,
                limit=MAX_PROFILE_MS,
            )
        rings = {"plan": engine.timings.plan, "fold": engine.timings.fold, "commit": engine.timings.commit}
        counts = {name: ring.count for name, ring in rings.items()}
        began, started = engine.clock(), time.perf_counter()
        ready = [worker for worker in self._workers if worker.ready and worker.group is not None]
        tasks = [asyncio.create_task(_kernels(worker, milliseconds)) for worker in ready]
        await asyncio.gather(asyncio.sleep(milliseconds / 1000), *tasks)
        kernels = {
            str(worker.group.index): task.result()
            for worker, task in zip(ready, tasks, strict=True)
            if worker.group is not None
        }
        rows = engine.journal.newest(began)
        response = operations_pb2.ProfileCellResponse(steps=len(rows), seconds=time.perf_counter() - started)
        for name, ring in rings.items():
            response.phases.append(profile.phase("", name, ring.newest(ring.count - counts[name])))
        for group, answer in kernels.items():
            response.phases.extend(profile.worker_phases(group, rows[rows["group"] == int(group)]))
            response.kernels.add(group_id=group, kernels=answer.kernels, note=answer.note)
        response.trace = await asyncio.to_thread(profile.trace, rows, kernels)
        return response

    async def SetLogging(
        self, request: operations_pb2.SetLoggingRequest, context: Context
    ) -> operations_pb2.SetLoggingResponse:
        events = self._leading().events
        if request.HasField("requests"):
            events.requests = request.requests
        if request.HasField("steps"):
            events.steps = request.steps
        return operations_pb2.SetLoggingResponse(requests=events.requests, steps=events.steps)

    async def GetCellStatus(
        self, request: operations_pb2.GetCellStatusRequest, context: Context
    ) -> operations_pb2.GetCellStatusResponse:
        return operations_pb2.GetCellStatusResponse(status=self._status())


async def _kernels(worker: Worker, milliseconds: int) -> worker_pb2.ProfileResponse:
    try:
        return await worker.profile(milliseconds)
    except grpc.aio.AioRpcError as error:
        return worker_pb2.ProfileResponse(note=f"the worker gives no profile: {error.details()}")


def block_states(group: Group) -> bytes:
    """As in GroupBlocks.states."""
    states = group.pool.states()
    batch = group.batch
    for slot in np.flatnonzero(batch.active).tolist():
        table = batch.held(slot)
        alone = table[states[table] != SHARED]
        states[alone] = FIRST_OWNER + slot % NUM_OWNERS
    return states.tobytes()
