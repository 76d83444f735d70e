"""The gateway's one multiplexed session with the scheduler.

Requests of every surface share the stream.

::

    connecting ──welcome──▶ serving ──stream broke, silence, or a gap──▶ connecting (open requests re-attach)
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Sequence
from typing import Any, NoReturn

import grpc.aio
from google.protobuf.message import Message  # type: ignore[import-untyped]

from kvern.rpc.channel import Dial, create_channel
from kvern.rpc.errors import error_from_rpc
from kvern.v1 import operations_pb2_grpc, session_pb2, session_pb2_grpc
from kvern_gateway.adapters import Adapters
from kvern_gateway.generation import Generation, unavailable
from kvern_gateway.leaders import Leaders, NoLeader
from kvern_gateway.open_requests import OpenRequests, SessionLost

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
OPERATE_TIMEOUT_S = 5.0
SILENCE_S = 1.25
_WATCH_S = 0.05
# Open requests wait this long for a scheduler to come back before they end with UNAVAILABLE.
PATIENCE_S = 10.0
# New requests are refused at once when it has been away for longer than this.
ADMIT_PATIENCE_S = 1.0
BACKOFF_S = (0.02, 0.3)


class SchedulerClient:
    """Holds the session; ``run()`` keeps it up until cancelled.

    ``addresses`` are the leader's and its standbys'.
    """

    def __init__(self, addresses: Sequence[str], gateway_id: str = "", dial: Dial = create_channel) -> None:
        self.gateway_id = gateway_id or uuid.uuid4().hex
        self.welcome: session_pb2.Welcome | None = None
        self.connected = asyncio.Event()
        self.requests = OpenRequests()
        self.adapters = Adapters()
        self._leaders = Leaders(addresses, dial)
        # Of the leader that the session is with, or was.
        self._address = ""
        self._lost_at: float | None = None
        self._heard_at = 0.0

    def submit(self, submit: session_pb2.Submit) -> Generation:
        """Queues the request (its ``handle`` is set here); await ``generation.admitted`` for the answer.

        Raises:
            KvernError: UNAVAILABLE, when no scheduler is there.
        """
        self._check_connected()
        return self.requests.submit(submit)

    def attach(self, request_id: str, tenant: str = "") -> Generation:
        """As :meth:`OpenRequests.attach`.

        Raises:
            KvernError: UNAVAILABLE, when no scheduler is there.
        """
        self._check_connected()
        return self.requests.attach(request_id, tenant)

    async def operate(self, method: str, request: Message, timeout_s: float = OPERATE_TIMEOUT_S) -> Any:
        """The leader's answer to a method of its OperationsService.

        Raises:
            KvernError: What it refuses, or UNAVAILABLE.
        """
        if not self.connected.is_set():
            raise unavailable("no scheduler is connected; try again shortly")
        stub = operations_pb2_grpc.OperationsServiceStub(self._leaders.channel(self._address))
        try:
            return await getattr(stub, method)(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None

    def leader(self) -> session_pb2_grpc.SchedulerServiceAsyncStub:
        """Whom to ask for more than requests.

        Raises:
            KvernError: UNAVAILABLE, when no scheduler is there.
        """
        self._check_connected()
        return self._leaders.stub(self._address)

    def _check_connected(self) -> None:
        if not self.connected.is_set():
            away = None if self._lost_at is None else time.monotonic() - self._lost_at
            if away is None or away > ADMIT_PATIENCE_S:
                raise unavailable("no scheduler is connected; try again shortly")

    async def run(self) -> None:
        failures = 0
        try:
            while True:
                low, high = BACKOFF_S
                pause = min(high, low * 2 ** min(failures, 8))
                address = ""
                try:
                    address = await self._leaders.find(pause, SILENCE_S)
                    await self._session(address)
                except Exception as error:
                    reason = str(error)
                    if isinstance(error, grpc.aio.AioRpcError):
                        reason = error_from_rpc(error).message
                    elif not isinstance(error, SessionLost | NoLeader):
                        log.exception("the session with %s broke on a message", address)
                    was_up = self._session_ended()
                    failures = 1 if was_up else failures + 1
                    if was_up or failures in (1, 10):
                        log.warning(
                            "scheduler %s: %s; %d open requests wait", address, reason, len(self.requests)
                        )
                self._expire()
                await asyncio.sleep(random.uniform(0.5, 1.0) * pause)
        finally:
            self._session_ended()
            await self._leaders.close()

    def _session_ended(self) -> bool:
        was_up = self.connected.is_set()
        self.connected.clear()
        self.requests.room.told(None)
        if was_up:
            self._lost_at = time.monotonic()
        return was_up

    def _expire(self) -> None:
        if self._lost_at is not None and time.monotonic() - self._lost_at > PATIENCE_S:
            self.requests.fail_all(unavailable("the scheduler went away and did not come back in time"))

    async def _session(self, address: str) -> None:
        call: Any = self._leaders.stub(address).Session()
        tasks: list[asyncio.Task[None]] = []
        self._heard_at = time.monotonic()
        try:
            tasks.append(asyncio.create_task(self._watch(call)))
            await call.write(session_pb2.SessionRequest(hello=session_pb2.Hello(gateway_id=self.gateway_id)))
            tasks.append(asyncio.create_task(self._write_loop(call)))
            while True:
                response = await call.read()
                if not isinstance(response, session_pb2.SessionResponse):  # EOF
                    await _raise_status(call)
                self._heard_at = time.monotonic()
                if response.HasField("adapters"):
                    self.adapters.told(response.adapters.adapters)
                # It comes when the scheduler knows its model; until then there are heartbeats.
                if response.HasField("welcome"):
                    self._welcomed(address, response.welcome)
                self.requests.take(response)
        except asyncio.CancelledError:
            if not call.cancelled() or (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise SessionLost("silent for too long") from None
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()

    def _welcomed(self, address: str, welcome: session_pb2.Welcome) -> None:
        self.welcome, self._address = welcome, address
        self._lost_at = None
        self.requests.resume()
        self.connected.set()
        self.requests.outgoing.wake.set()
        log.info(
            "session with %s: cell %s, epoch %d, model %s",
            address,
            welcome.cell,
            welcome.epoch,
            welcome.model.name,
        )

    async def _write_loop(self, call: Any) -> None:
        try:
            while True:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self.requests.outgoing.wake.wait()
                except TimeoutError:
                    pass
                self.requests.outgoing.wake.clear()
                # Before the welcome there are heartbeats only: what waits is said anew then.
                await call.write(
                    self.requests.outgoing.take() if self.connected.is_set() else session_pb2.SessionRequest()
                )
                while self.connected.is_set() and self.requests.outgoing.waiting:
                    await call.write(self.requests.outgoing.take())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            call.cancel()  # The reader sees the status.

    async def _watch(self, call: Any) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_S)
            now = time.monotonic()
            # When this loop itself was late, the silence may be ours.
            if now - self._heard_at > SILENCE_S and now - last < HEARTBEAT_S:
                log.warning("the scheduler has been silent for %.2f s; reconnecting", now - self._heard_at)
                call.cancel()
                return
            last = now


async def _raise_status(call: Any) -> NoReturn:
    """The stream ended: its status as an exception."""
    code = await call.code()
    if code != grpc.StatusCode.OK:
        trailers = await call.trailing_metadata()
        raise grpc.aio.AioRpcError(code, await call.initial_metadata(), trailers, await call.details(), None)
    raise SessionLost("the scheduler closed the session")
