"""Which of a cell's schedulers leads."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from typing import Any, cast

import grpc.aio

from kvern.rpc.channel import Dial, create_channel
from kvern.v1 import session_pb2, session_pb2_grpc

PROBE_TIMEOUT_S = 0.5


class NoLeader(Exception):
    """None of them says that it leads."""


class Leaders:
    """The schedulers at ``addresses``, with a channel to each that was asked."""

    def __init__(self, addresses: Sequence[str], dial: Dial = create_channel) -> None:
        self._addresses = list(addresses)
        self._dial = dial
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def find(self, pause_s: float, patience_s: float) -> str:
        """The address whose scheduler says first that it leads. Each is asked again and again by itself, so that a
        frozen one holds up nobody. Raises NoLeader when none does within ``patience_s``."""
        if len(self._addresses) == 1:
            return self._addresses[0]
        asking = [asyncio.create_task(self._until_leading(address, pause_s)) for address in self._addresses]
        try:
            done, _ = await asyncio.wait(asking, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in asking:
                task.cancel()
        if not done:
            raise NoLeader("no scheduler leads")
        return done.pop().result()

    async def _until_leading(self, address: str, pause_s: float) -> str:
        request = session_pb2.GetStatusRequest()
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                if (await self.stub(address).GetStatus(request, timeout=PROBE_TIMEOUT_S)).leader:
                    return address
            await asyncio.sleep(random.uniform(0.5, 1.0) * pause_s)

    def channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._dial(address)
        return channel

    def stub(self, address: str) -> Any:
        return cast(Any, session_pb2_grpc.SchedulerServiceStub(self.channel(address)))

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)
