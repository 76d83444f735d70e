"""Bidirectional streams of the simulated gRPC: the client's call, the handler's context, and the wire between them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from simulation.world import Process

from kvern.errors import KvernError
from kvern.rpc.errors import status_of

if TYPE_CHECKING:
    from simulation.network import Network, SimChannel

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    empty = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, empty, empty, details)


@dataclass
class Inbox:
    """What one end of a stream has received and not read."""

    messages: deque[Any] = field(default_factory=deque)
    waiter: asyncio.Future[None] | None = None
    last: float = 0.0

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Stream:
    """The wire between a client's call and its handler. ``open``: no end has seen it break or end yet."""

    def __init__(self, network: Network, number: int, path: str, client: Process, server: Process) -> None:
        self.network, self.number, self.path = network, number, path
        self.client, self.server = client, server
        self.to_client, self.to_server = Inbox(), Inbox()
        self.context = ServerContext(self)
        self.call: ClientCall
        self.is_session = path.endswith("Session")
        network.streams.add(self)

    def post(
        self, source: Process, target: Process, inbox: Inbox, deliver: Callable[..., None], *args: Any
    ) -> None:
        """In order, after what was posted before."""
        network = self.network
        when = network.arrival(source, target)
        if inbox is self.to_client and not self.is_session:
            when += network.step_s * network.world.random.random()
        inbox.last = max(inbox.last, when)
        network.world.at(inbox.last, target, deliver, *args)

    def send(
        self, source: Process, target: Process, inbox: Inbox, deliver: Callable[..., None], message: Any
    ) -> None:
        weather, draw = self.network.weather, self.network.world.random.random
        if not self.is_session:
            if weather.lose and draw() < weather.lose:
                self.network.world.note(source.name, "a message is lost")
                return
            if weather.repeat and draw() < weather.repeat:
                self.network.world.note(source.name, "a message comes twice")
                self.post(source, target, inbox, deliver, message)
        self.post(source, target, inbox, deliver, message)

    def break_off(self, why: str) -> None:
        """Both ends notice, each in its time; what is under way to them after that is lost."""
        if self not in self.network.streams:
            return
        self.network.streams.discard(self)
        world = self.network.world
        delay = 0.0005 + 0.004 * world.random.random()
        error = rpc_error(UNAVAILABLE, why)
        world.at(world.now + delay, self.client, self.call.end, error)
        world.at(world.now + delay, self.server, self.context.cancel_handler)


class ClientCall:
    """Stands in for grpc.aio.StreamStreamCall."""

    def __init__(self, channel: SimChannel, path: str) -> None:
        network = self.network = channel.network
        self.process = channel.process
        self._status: grpc.aio.AioRpcError | None = None
        self._ended = self._cancelled = False
        self._inbox = Inbox()
        self.stream: Stream | None = None
        server = network.servers.get(channel.target)
        world = network.world
        if server is None or not server.serving:
            world.at(world.now + 0.001, self.process, self.end, rpc_error(UNAVAILABLE, "connection refused"))
            return
        stream = self.stream = Stream(network, network.num_messages, path, self.process, server.process)
        stream.call = self
        stream.to_client = self._inbox
        self._server = server.process
        stream.post(self.process, self._server, stream.to_server, stream.context.begin, server.method(path))

    async def write(self, message: Any) -> None:
        if self._ended:
            raise asyncio.InvalidStateError("the call is over")
        if self.process.burns_out():
            await self.process.for_ever()
        stream = self.stream
        if stream is not None:
            stream.send(self.process, self._server, stream.to_server, stream.context.receive, message)
        if self.process.burns_out():
            await self.process.for_ever()
        await _suspend(self.network)

    async def read(self) -> Any:
        while not self._inbox.messages:
            if self._cancelled:
                raise asyncio.CancelledError
            if self._ended:
                if self._status is not None:
                    raise self._status
                return EOF
            self._inbox.waiter = self.process.loop.create_future()
            try:
                await self._inbox.waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self._inbox.messages.popleft()

    def receive(self, message: Any) -> None:
        if not self._ended:
            self._inbox.messages.append(message)
            self._inbox.wake()

    def end(self, status: grpc.aio.AioRpcError | None) -> None:
        """The server ended the call, or the connection did."""
        if not self._ended:
            self._ended, self._status = True, status
            self._inbox.wake()

    def cancel(self) -> bool:
        if self._ended:
            return False
        self._ended = self._cancelled = True
        self._inbox.messages.clear()
        self._inbox.wake()
        stream = self.stream
        if stream is not None:
            self.network.streams.discard(stream)
            stream.post(self.process, self._server, stream.to_server, stream.context.cancel_handler)
        return True

    def cancelled(self) -> bool:
        return self._cancelled

    def done(self) -> bool:
        return self._ended

    async def code(self) -> grpc.StatusCode:
        return self._status.code() if self._status is not None else grpc.StatusCode.OK

    async def details(self) -> str:
        return (self._status.details() if self._status is not None else "") or ""

    async def initial_metadata(self) -> Any:
        return grpc.aio.Metadata()

    trailing_metadata = initial_metadata


class ServerContext:
    """Stands in for grpc.aio.ServicerContext, and runs the handler."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._over = False
        self._task: asyncio.Task[None] | None = None

    def begin(self, behaviour: Any) -> None:
        if not self._over:
            self._task = self.stream.server.spawn(self._handle(behaviour))

    async def _handle(self, behaviour: Any) -> None:
        stream = self.stream
        status: grpc.aio.AioRpcError | None = None
        try:
            async for response in behaviour(None, self):
                await self.write(response)
        except KvernError as error:
            status = rpc_error(status_of(error), error.message)
        except asyncio.CancelledError:
            status = rpc_error(grpc.StatusCode.CANCELLED, "the handler was cancelled")
        except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            status = rpc_error(UNAVAILABLE, str(error))
        except Exception as error:
            stream.network.watchers.broke(stream.server.name, error)
            status = rpc_error(grpc.StatusCode.INTERNAL, repr(error))
        self._over = True
        stream.network.streams.discard(stream)
        stream.post(stream.server, stream.client, stream.to_client, stream.call.end, status)

    def cancel_handler(self) -> None:
        """The client is gone, or the server stops."""
        self._over = True
        self.stream.to_server.wake()
        if self._task is not None:
            self._task.cancel()

    def receive(self, message: Any) -> None:
        if self._over:
            return
        stream = self.stream
        if stream.is_session:
            stream.network.watchers.requested(stream, message)
        stream.to_server.messages.append(message)
        stream.to_server.wake()

    async def read(self) -> Any:
        inbox = self.stream.to_server
        while not inbox.messages:
            if self._over:
                return EOF
            inbox.waiter = self.stream.server.loop.create_future()
            await inbox.waiter
        return inbox.messages.popleft()

    async def write(self, message: Any) -> None:
        stream = self.stream
        process = stream.server
        if self._over:
            raise asyncio.InvalidStateError("the call is over")
        if process.burns_out():
            await process.for_ever()
        if stream.is_session:
            stream.network.watchers.responded(stream, message)
        stream.send(process, stream.client, stream.to_client, stream.call.receive, message)
        if process.burns_out():
            await process.for_ever()
        await _suspend(stream.network)


async def _suspend(network: Network) -> None:
    draw = network.world.random.random
    if draw() < network.weather.suspend:
        await asyncio.sleep(0.003 * draw())
