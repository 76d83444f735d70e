"""The store across a network: MemoryStore's transitions (tests/stores compares them with a real server's, call by call)
behind calls that may be lost, answered by nobody, executed twice, or executed long after the caller gave up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from simulation.network import Network
from simulation.world import Process

from kvern_scheduler.store.base import (
    CommitStatus,
    Delta,
    Held,
    IndexEntries,
    Leadership,
    Name,
    State,
    StoredRequest,
    StoreUnavailable,
)
from kvern_scheduler.store.memory import MemoryStore

TIMEOUT_S = 1.0
LATE_S = 2.5
DOOM_S = 0.25


@dataclass
class StoreWeather:
    """Probabilities per call. ``lose``: it never arrives. ``mute``: it is executed, and the answer is lost. ``repeat``:
    it is executed again, later. ``linger``: it arrives up to LATE_S late."""

    lose: float = 0.0
    mute: float = 0.0
    repeat: float = 0.0
    linger: float = 0.0


class StoreServer:
    """What is durable. ``down``: connections are refused; ``stalled_until``: calls wait in its buffers."""

    def __init__(self, network: Network, lease_s: float) -> None:
        self.network = network
        self.memory = MemoryStore(lease_s, clock=network.world.time)
        self.weather = StoreWeather()
        self.down = False
        self.stalled_until = 0.0
        self.doomed: Process | None = None
        """It dies when it has sent its next commit, which takes up to DOOM_S."""
        self.committed: Callable[[int, int, Delta, CommitStatus], None] = lambda *_: None
        self.acquired: Callable[[int], None] = lambda _: None

    def commit(self, epoch: int, step: int, delta: Delta, digest: bytes) -> CommitStatus:
        status = self.memory.commit_now(epoch, step, delta, digest)
        self.committed(epoch, step, delta, status)
        return status

    def acquire(self, owner: str, address: str, steal: int | None) -> Leadership | Held:
        answer: Leadership | Held = now(self.memory.acquire(owner, address, steal=steal))
        if isinstance(answer, Leadership):
            self.acquired(answer.epoch)
        return answer


class SimStore:
    """One scheduler's connections: one call at a time on each, as RedisStore's."""

    name = "sim"
    inline = False

    def __init__(self, server: StoreServer, process: Process) -> None:
        self._server = server
        self._process = process
        self._lock = asyncio.Lock()
        self._reading = asyncio.Lock()

    async def acquire(self, owner: str, address: str, *, steal: int | None = None) -> Leadership | Held:
        return await self._call("acquire", lambda: self._server.acquire(owner, address, steal))  # type: ignore[no-any-return]

    async def renew(self, epoch: int) -> bool:
        return await self._call("renew", lambda: now(self._server.memory.renew(epoch)))  # type: ignore[no-any-return]

    async def resign(self, epoch: int) -> None:
        await self._call("resign", lambda: now(self._server.memory.resign(epoch)))

    async def commit(self, epoch: int, step: int, delta: Delta, digest: bytes) -> CommitStatus:
        return await self._call(f"commit {step}", lambda: self._server.commit(epoch, step, delta, digest))  # type: ignore[no-any-return]

    def commit_now(self, epoch: int, step: int, delta: Delta, digest: bytes) -> CommitStatus:
        raise NotImplementedError

    async def load(self) -> State:
        return await self._call("load", lambda: now(self._server.memory.load()))  # type: ignore[no-any-return]

    async def find(self, names: Sequence[Name]) -> list[StoredRequest]:
        return await self._call("find", lambda: now(self._server.memory.find(names)), self._reading)  # type: ignore[no-any-return]

    async def load_index(self, instance: str) -> IndexEntries:
        return await self._call(  # type: ignore[no-any-return]
            "load index", lambda: now(self._server.memory.load_index(instance)), self._reading
        )

    async def concerns(self) -> list[str]:
        return []

    async def close(self) -> None:
        pass

    async def _call(
        self, name: str, execute: Callable[[], Any], connection: asyncio.Lock | None = None
    ) -> Any:
        async with connection or self._lock:
            return await self._exchange(name, execute)

    async def _exchange(self, name: str, execute: Callable[[], Any]) -> Any:
        me, server = self._process, self._server
        network, world, weather = server.network, server.network.world, server.weather
        draw = world.random.random
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

        def reset() -> None:
            world.at(world.now + 0.001, me, settle, StoreUnavailable("connection reset"))

        def arrive(mute: bool) -> None:
            if server.down:
                reset()
                return
            if server.stalled_until > world.now:
                world.at(server.stalled_until, world.outside, arrive, mute)
                return
            value = execute()
            if mute:
                world.note("store", f"{name} of {me.name}: executed, the answer is lost")
                if draw() < 0.7:
                    reset()
            else:
                world.at(network.arrival(world.outside, me), me, settle, value)

        when = network.arrival(me, world.outside)
        if weather.linger and draw() < weather.linger:
            when += LATE_S * draw()
        if me is server.doomed:
            when += DOOM_S * draw()
        if weather.lose and draw() < weather.lose:
            world.note("store", f"{name} of {me.name} is lost")
            if draw() < 0.7:
                reset()
        else:
            world.at(when, world.outside, arrive, bool(weather.mute and draw() < weather.mute))
        if me is server.doomed and name.startswith("commit"):
            server.doomed = None
            me.kill("a commit is under way")
            await me.for_ever()
        if weather.repeat and draw() < weather.repeat:
            world.at(when + LATE_S * draw() ** 2, world.outside, arrive, True)
        timer = world.at(world.now + TIMEOUT_S, me, settle, StoreUnavailable("timed out"))
        try:
            value = await answer
        finally:
            timer.cancel()
        if me.burns_out():
            await me.for_ever()
        return value


def now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The value of a coroutine that awaits nothing."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it awaits something")
