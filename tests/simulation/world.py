"""Virtual time: many simulated processes, each with an event loop of its own, in one deterministic order of events.

A process is what may be killed or frozen. Killing one drops whatever it had left to do, without running a ``finally``;
freezing one keeps it until it is thawed, while the others and the clock go on. Callbacks take no time; only timers
move the clock. Every choice is drawn from one ``random.Random(seed)``.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

START = 1_700_000_000.0
"""Unix time at which every simulation begins."""


class Handle:
    """A callback of one process, due now or later."""

    __slots__ = ("args", "callback", "process")

    def __init__(self, process: Process, callback: Callable[..., Any] | None, args: tuple[Any, ...]) -> None:
        self.process = process
        self.callback = callback
        self.args = args

    def cancel(self) -> None:
        self.callback = None

    def cancelled(self) -> bool:
        return self.callback is None


class Process:
    """``fuse``: effects (messages and store calls, each counted before and after) until it dies; None: none burns."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.loop = ProcessLoop(world, self)
        self.alive = True
        self.frozen = False
        self.fuse: int | None = None
        self.at_death: list[Callable[[], None]] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.held: list[Handle] = []

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.loop.create_task(coroutine)

    def call(self, callback: Callable[..., Any], *args: Any) -> None:
        """Runs ``callback`` in this process, soon."""
        self.loop.call_soon(callback, *args)

    def kill(self, why: str) -> None:
        if not self.alive:
            return
        self.world.note(self.name, f"dies: {why}")
        self.alive = False
        for told in self.at_death:
            told()

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        if not self.alive:
            return
        self.frozen = False
        self.world.ready.extend(self.held)
        self.held.clear()

    def burns_out(self) -> bool:
        """Counts an effect. True: the process is dead, and its coroutine must await :meth:`for_ever`."""
        if not self.alive:
            return True
        if self.fuse is None:
            return False
        self.fuse -= 1
        if self.fuse <= 0:
            self.kill("at an effect")
            return True
        return False

    async def for_ever(self) -> Any:
        await self.loop.create_future()


class World:
    """The clock, the order of events, and the trace."""

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.num_events = 0
        self.ready: deque[Handle] = deque()
        self.processes: list[Process] = []
        self.current: Process | None = None
        self.tracing = tracing
        self.trace: list[str] = []
        self._timers: list[tuple[float, int, Handle]] = []
        self._num_timers = 0
        self.outside = self.process("world")
        """What no fault touches: the store's server, clients, the faults themselves."""

    def process(self, name: str) -> Process:
        process = Process(self, name)
        self.processes.append(process)
        return process

    def time(self) -> float:
        """Unix seconds."""
        return START + self.now

    def note(self, who: str, what: str) -> None:
        if self.tracing:
            self.trace.append(f"{self.now:9.4f}  {who:<12} {what}")

    def at(self, when: float, process: Process, callback: Callable[..., Any], *args: Any) -> Handle:
        """Runs ``callback`` in ``process`` at time ``when``."""
        handle = Handle(process, callback, args)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, handle))
        return handle

    def after(self, delay: float, callback: Callable[..., Any], *args: Any) -> Handle:
        return self.at(self.now + delay, self.outside, callback, *args)

    def run(self, done: Callable[[], bool], until: float, max_events: int) -> bool:
        """Runs until ``done`` (then True), or time or events are spent. ``done`` is asked when the clock moves."""
        ready, timers, pop = self.ready, self._timers, heapq.heappop
        set_running = events._set_running_loop
        previous = events._get_running_loop()
        set_running(None)
        try:
            while True:
                while ready:
                    handle = ready.popleft()
                    callback, process = handle.callback, handle.process
                    if callback is None:
                        continue
                    if process.frozen or not process.alive:
                        process.held.append(handle)
                        continue
                    if process is not self.current:
                        self.current = process
                        set_running(process.loop)
                    self.num_events += 1
                    callback(*handle.args)
                if done():
                    return True
                while timers and (timers[0][2].callback is None or not timers[0][2].process.alive):
                    pop(timers)
                if not timers or timers[0][0] > until or self.num_events > max_events:
                    return False
                when, _, handle = pop(timers)
                self.now = max(self.now, when)
                ready.append(handle)
        finally:
            self.current = None
            set_running(previous)

    def close(self) -> None:
        """Cancels what is still suspended, in the dead processes too, so that nothing complains when it is collected.
        No timer fires any more; nobody hears of it."""
        self._timers.clear()
        for process in self.processes:
            process.alive, process.fuse = True, None
            process.at_death.clear()
            process.thaw()
        for _ in range(8):
            pending = [task for process in self.processes for task in process.tasks if not task.done()]
            if not pending:
                break
            for task in pending:
                task.cancel()
            self.run(lambda: True, self.now, self.num_events)
        for process in self.processes:
            for task in process.tasks:
                if not task.cancelled():
                    task.exception()
            process.tasks.clear()


class ProcessLoop(asyncio.AbstractEventLoop):
    """As much of an event loop as services use. First in, first out, as asyncio's own."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process

    def time(self) -> float:
        return self._world.now

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        handle = Handle(self._process, callback, args)
        self._world.ready.append(handle)
        return handle

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.call_soon(callback, *args)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self._world.at(self._world.now + max(0.0, delay), self._process, callback, *args)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self._world.at(when, self._process, callback, *args)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self)
        self._process.tasks.append(task)
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._world.note(self._process.name, f"{context.get('message')}: {context.get('exception')!r}")
