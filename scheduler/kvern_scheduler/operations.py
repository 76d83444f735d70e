"""OperationsService: timelines, blocks and status of the cell that this scheduler leads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc.aio
import numpy as np

from kvern.errors import KvernError
from kvern.v1 import error_pb2, operations_pb2, operations_pb2_grpc, session_pb2
from kvern_scheduler import timelines
from kvern_scheduler.core.group import Group
from kvern_scheduler.engine import Engine

SERVICE_NAME = "kvern.v1.OperationsService"
Context = grpc.aio.ServicerContext[Any, Any]

CACHED, SHARED, FIRST_OWNER = 1, 2, 3
NUM_OWNERS = 256 - FIRST_OWNER


class OperationsServicer(operations_pb2_grpc.OperationsServiceServicer):
    """``lead`` makes it answer. ``status``: what SchedulerService.GetStatus says."""

    def __init__(self, status: Callable[[], session_pb2.GetStatusResponse]) -> None:
        self._engine: Engine | None = None
        self._status = status

    def lead(self, engine: Engine) -> None:
        self._engine = engine

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


def block_states(group: Group) -> bytes:
    """As in GroupBlocks.states."""
    states = group.pool.states()
    batch = group.batch
    for slot in np.flatnonzero(batch.active).tolist():
        table = batch.table[slot, : batch.num_blocks[slot]]
        alone = table[states[table] != SHARED]
        states[alone] = FIRST_OWNER + slot % NUM_OWNERS
    return states.tobytes()
