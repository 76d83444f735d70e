"""kvern.v1.OperationsService at a gateway: passes calls on to the leading scheduler, each tenant's for its own requests."""

from __future__ import annotations

from typing import Any

import grpc.aio

from kvern.errors import KvernError
from kvern.v1 import error_pb2, operations_pb2_grpc
from kvern.v1 import operations_pb2 as pb
from kvern_gateway.gateway import Gateway
from kvern_gateway.keys import current

SERVICE_NAME = "kvern.v1.OperationsService"
Context = grpc.aio.ServicerContext[Any, Any]


def own_tenant(gateway: Gateway) -> str | None:
    """Whose requests the caller may see; None: all."""
    return current().tenant.name if gateway.keys.required else None


async def get_timeline(gateway: Gateway, request_id: str) -> pb.Timeline:
    """Raises KvernError REQUEST_NOT_FOUND or UNAVAILABLE."""
    request = pb.GetTimelineRequest(request_id=request_id, tenant=own_tenant(gateway))
    answer: pb.GetTimelineResponse = await gateway.client.operate("GetTimeline", request)
    return answer.timeline


async def list_timelines(gateway: Gateway, limit: int) -> pb.ListTimelinesResponse:
    """Raises KvernError UNAVAILABLE."""
    request = pb.ListTimelinesRequest(tenant=own_tenant(gateway), limit=limit)
    answer: pb.ListTimelinesResponse = await gateway.client.operate("ListTimelines", request)
    return answer


async def set_logging(gateway: Gateway, request: pb.SetLoggingRequest) -> pb.SetLoggingResponse:
    """Raises KvernError UNIMPLEMENTED where tenants must not do it."""
    operators_only(gateway, "logging")
    answer: pb.SetLoggingResponse = await gateway.client.operate("SetLogging", request)
    return answer


async def profile(gateway: Gateway, request: pb.ProfileCellRequest) -> pb.ProfileCellResponse:
    """Raises KvernError UNIMPLEMENTED where tenants must not do it."""
    operators_only(gateway, "a profile")
    timeout_s = request.milliseconds / 1000 + 20
    answer: pb.ProfileCellResponse = await gateway.client.operate("ProfileCell", request, timeout_s)
    return answer


def operators_only(gateway: Gateway, what: str) -> None:
    """Raises KvernError UNIMPLEMENTED."""
    if gateway.keys.required:
        raise KvernError(
            error_pb2.ERROR_CODE_UNIMPLEMENTED,
            f"{what} concerns all tenants, and this gateway asks each for its key; call the scheduler's own "
            "kvern.v1.OperationsService instead",
        )


class OperationsService(operations_pb2_grpc.OperationsServiceServicer):
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def GetTimeline(self, request: pb.GetTimelineRequest, context: Context) -> pb.GetTimelineResponse:
        return pb.GetTimelineResponse(timeline=await get_timeline(self._gateway, request.request_id))

    async def ListTimelines(
        self, request: pb.ListTimelinesRequest, context: Context
    ) -> pb.ListTimelinesResponse:
        return await list_timelines(self._gateway, request.limit)

    async def SetLogging(self, request: pb.SetLoggingRequest, context: Context) -> pb.SetLoggingResponse:
        return await set_logging(self._gateway, request)

    async def ProfileCell(self, request: pb.ProfileCellRequest, context: Context) -> pb.ProfileCellResponse:
        return await profile(self._gateway, request)

    async def GetBlocks(self, request: pb.GetBlocksRequest, context: Context) -> Any:
        return await self._gateway.client.operate("GetBlocks", request)

    async def GetCellStatus(self, request: pb.GetCellStatusRequest, context: Context) -> Any:
        return await self._gateway.client.operate("GetCellStatus", request)
