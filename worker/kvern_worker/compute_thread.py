"""The one thread that computes."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any


class ComputeThread:
    """Runs calls one after another in one thread; each result goes to ``done`` in the event loop.

    A SimpleQueue wakes the thread within tens of microseconds; a pool's future would cost twice that.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """``done`` gets the result, or the exception that ``call`` raised."""
        self._calls.put((call, done))

    def stop(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, done = item
            try:
                outcome = call()
            except BaseException as error:
                outcome = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for the outcome
                self._loop.call_soon_threadsafe(done, outcome)
