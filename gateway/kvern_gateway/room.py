"""Whether the scheduler's queue is full: a request that it would refuse is refused before anything is spent on it."""

from __future__ import annotations

from kvern.errors import KvernError
from kvern.v1 import error_pb2

RETRY_AFTER_MS = 1_000


class Room:
    """What the scheduler said last that its queue takes, less what was sent and is not answered yet. Those may be
    counted twice for a moment, which refuses one too many rather than one too few."""

    def __init__(self) -> None:
        self._told: int | None = None
        self._unanswered: dict[int, int] = {}
        self._num_unanswered = 0

    def told(self, room: int | None) -> None:
        """``None``: not known, as after a lost session."""
        self._told = room

    def sent(self, handle: int, num_sequences: int) -> None:
        self._unanswered[handle] = num_sequences
        self._num_unanswered += num_sequences

    def answered(self, handle: int) -> None:
        """Admitted, refused, or of no interest any more. Idempotent."""
        self._num_unanswered -= self._unanswered.pop(handle, 0)

    @property
    def full(self) -> bool:
        return self._told is not None and self._told <= self._num_unanswered


def overloaded() -> KvernError:
    return KvernError(
        error_pb2.ERROR_CODE_OVERLOADED,
        "overloaded: as many requests wait as may; try again later",
        retry_after_ms=RETRY_AFTER_MS,
    )
