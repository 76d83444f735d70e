"""gRPC between simulated processes: the part of grpc.aio that the services use, over links that delay, stall and break.

A stream is reliable and in order until it breaks, as TCP is; what was under way then is lost. Messages pass by
reference. Where ``Weather`` says so, messages of worker streams are lost or come twice, which TCP would not do; the
protocol's step numbers have to notice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from simulation.streams import UNAVAILABLE, ClientCall, Stream, rpc_error
from simulation.world import Process, World

from kvern.errors import KvernError
from kvern.rpc.errors import status_of


@dataclass
class Weather:
    """Probabilities per message. ``spike``: it takes up to ``spike_s`` longer."""

    spike: float = 0.0
    spike_s: float = 0.3
    lose: float = 0.0
    repeat: float = 0.0
    suspend: float = 0.1
    """A write waits for a moment, as when buffers are full."""


@dataclass
class Watchers:
    """What the oracle wants to see of a session: a request as it arrives, a response as it leaves."""

    requested: Callable[[Any, Any], None] = lambda stream, message: None
    responded: Callable[[Any, Any], None] = lambda stream, message: None
    broke: Callable[[str, Exception], None] = lambda who, error: None


class Network:
    """Addresses, links and their weather."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.weather = Weather()
        self.watchers = Watchers()
        self.servers: dict[str, SimServer] = {}
        self.streams: set[Stream] = set()
        self.stalled: dict[frozenset[str], float] = {}
        self.num_messages = 0
        self.step_s = 0.0
        """How long workers compute, at most."""

    def arrival(self, source: Process, target: Process) -> float:
        """When a message that leaves now arrives."""
        world = self.world
        self.num_messages += 1
        draw = world.random.random
        delay = 0.0002 + 0.004 * draw() ** 2
        if self.weather.spike and draw() < self.weather.spike:
            delay += self.weather.spike_s * draw()
        when = world.now + delay
        if self.stalled:
            when = max(when, self.stalled.get(frozenset((source.name, target.name)), 0.0) + delay)
        return when

    def stall(self, a: str, b: str, seconds: float) -> None:
        """Nothing passes between two processes for a while; then it all arrives."""
        self.stalled[frozenset((a, b))] = self.world.now + seconds

    def sever(self, process: Process) -> None:
        """A dead process's streams break, at either end."""
        for stream in sorted(self.streams, key=lambda stream: stream.number):
            if process in (stream.client, stream.server):
                stream.break_off("connection lost")


class SimServer:
    """Stands in for kvern.rpc.server.Server; ``grpc`` is itself, as far as generated code looks."""

    def __init__(self, network: Network, process: Process) -> None:
        self.network = network
        self.process = process
        self.grpc = self
        self.serving = True
        self._methods: dict[str, Any] = {}
        self._address = ""

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        pass

    def add_registered_method_handlers(self, service: str, methods: dict[str, Any]) -> None:
        self._methods |= {f"/{service}/{name}": handler for name, handler in methods.items()}

    def method(self, path: str) -> Any:
        handler = self._methods[path]
        return handler.stream_stream or handler.unary_unary

    async def start(self, address: str) -> int:
        self.listen(address)
        return 0

    def listen(self, address: str) -> None:
        self._address = address
        self.network.servers[address] = self
        self.process.at_death.append(self._close)

    def _close(self) -> None:
        if self.network.servers.get(self._address) is self:
            del self.network.servers[self._address]
        self.network.sever(self.process)

    async def set_serving(self, serving: bool) -> None:
        pass

    async def drain(self, grace_s: float) -> None:
        self.serving = False
        own = [s for s in self.network.streams if s.server is self.process]
        if own:
            await asyncio.sleep(grace_s)
        for stream in sorted(own, key=lambda stream: stream.number):
            stream.context.cancel_handler()
        await asyncio.sleep(0)


class SimChannel:
    """Stands in for grpc.aio.Channel, in the process that runs when it is made."""

    def __init__(self, network: Network, target: str) -> None:
        process = network.world.current
        assert process is not None
        self.network, self.process, self.target = network, process, target

    def stream_stream(self, path: str, **_: Any) -> Callable[[], ClientCall]:
        return lambda: ClientCall(self, path)

    def unary_unary(self, path: str, **_: Any) -> Callable[..., Any]:
        async def call(request: Any, timeout: float = 10.0, wait_for_ready: bool = False) -> Any:
            return await self._unary(path, request, timeout)

        return call

    async def _unary(self, path: str, request: Any, timeout: float) -> Any:
        network, me = self.network, self.process
        world = network.world
        if me.burns_out():
            await me.for_ever()
        answer: asyncio.Future[Any] = me.loop.create_future()

        def settle(value: Any) -> None:
            if answer.done():
                return
            if isinstance(value, Exception):
                answer.set_exception(value)
            else:
                answer.set_result(value)

        server = network.servers.get(self.target)
        if server is None or not server.serving:
            refused = rpc_error(UNAVAILABLE, "connection refused")
            world.at(world.now + 0.001, me, settle, refused)
        else:
            world.at(
                network.arrival(me, server.process),
                server.process,
                self._serve,
                server,
                path,
                request,
                settle,
            )
            server.process.at_death.append(
                lambda: (
                    world.at(world.now + 0.002, me, settle, rpc_error(UNAVAILABLE, "connection lost"))
                    and None
                )
            )
        late = rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "too late")
        timer = world.at(world.now + timeout, me, settle, late)
        try:
            return await answer
        finally:
            timer.cancel()

    def _serve(self, server: SimServer, path: str, request: Any, settle: Callable[[Any], None]) -> None:
        async def handle() -> None:
            try:
                value = await server.method(path)(request, None)
            except KvernError as error:
                value = rpc_error(status_of(error), error.message)
            except Exception as error:
                self.network.watchers.broke(server.process.name, error)
                value = rpc_error(grpc.StatusCode.INTERNAL, repr(error))
            if server.process.burns_out():
                await server.process.for_ever()
            self.network.world.at(
                self.network.arrival(server.process, self.process), self.process, settle, value
            )

        server.process.spawn(handle())

    async def close(self, grace: float | None = None) -> None:
        pass

    async def __aenter__(self) -> SimChannel:
        return self

    async def __aexit__(self, *_: Any) -> None:
        pass
