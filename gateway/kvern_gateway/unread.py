"""The bound on what a gateway holds for a stream whose client does not read.

Nothing is lost by it: a request that its client named goes on in the scheduler, and can be read from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvern.errors import KvernError
from kvern_gateway.generation import ORPHAN_GRACE_S, Generation, unavailable

CHECK_S = 1.0


class Unread:
    """Watches a stream from :meth:`stalled` to :meth:`went_on`. When more than ``limit_bytes`` wait and the client
    takes nothing for ``CHECK_S``, all of it is dropped, ``error`` says so, and ``on_too_much`` is called."""

    def __init__(
        self, generations: Sequence[Generation], limit_bytes: int, on_too_much: Callable[[], object]
    ) -> None:
        self.error: KvernError | None = None
        self._generations = generations
        self._limit_bytes = limit_bytes
        self._on_too_much = on_too_much
        self._timer: asyncio.TimerHandle | None = None
        self._taken = 0

    def stalled(self) -> None:
        """Something could not be given to the client. Idempotent."""
        if self._timer is None and self.error is None:
            self._watch()

    def went_on(self) -> None:
        """The client reads, or is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self) -> None:
        self._taken = self._count_taken()
        self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._look)

    def _look(self) -> None:
        choices = [choice for generation in self._generations for choice in generation.choices]
        waiting = sum(choice.waiting_bytes for choice in choices)
        if waiting <= self._limit_bytes or self._count_taken() != self._taken:
            self._watch()
            return
        self._timer = None
        limit = self._limit_bytes
        self.error = unavailable(
            f"this stream was not read while {waiting} bytes waited, and at most {limit} are kept; go on by the "
            "request's id where it has one, else send it again",
            100,
        )
        for generation in self._generations:
            generation.abandon(ORPHAN_GRACE_S)
            generation.drop()
        self._on_too_much()

    def _count_taken(self) -> int:
        return sum(choice.first_index for generation in self._generations for choice in generation.choices)
