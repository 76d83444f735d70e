"""What happened to each recent request and in each recent step: what `kvern explain` tells.

The core notes what is rare (a sequence enters, a chunk, a preemption), never a decoded token: what a sequence did while
it decoded stands in the rows of its group's steps. All of it is bounded, and the oldest goes first.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from kvern_scheduler.core.plan import Plan
    from kvern_scheduler.core.requests import Request, Sequence

MAX_REQUESTS = 4096
MAX_STEPS = 65_536
MAX_NEWEST = 4096
MAX_EVENTS = 512
"""Of one sequence; later chunks and preemptions are not kept."""


class Kind(enum.IntEnum):
    """Of an event, and what its ``x`` and ``y`` are."""

    QUEUED = 1
    """Cached tokens that routing found (−1: there was no choice of groups), and tokens that waited there already."""
    HOMELESS = 2
    """No group is there that could hold it."""
    HELD = 3
    """Until choice 0 has computed the prompt that they share."""
    RESTORED = 4
    """By a new leader. Output tokens so far."""
    ADMITTED = 5
    """Tokens found in the prefix cache, blocks that it holds from now on."""
    CHUNK = 6
    """Tokens of the prompt, and computed ones after it."""
    PREFILLED = 7
    """Its next token is sampled."""
    PREEMPTED = 8
    LOST = 9
    """With the worker."""
    FINISHED = 10
    """Reason, output tokens; ``step`` is the last one that was folded."""


class Blocked(enum.IntEnum):
    """Why a plan took in no more of what waits."""

    NOTHING = 0
    SLOTS = 1
    BLOCKS = 2
    TOKENS = 3
    LONG_PROMPTS = 4
    ADAPTER = 5
    LOADING = 6


class Event(NamedTuple):
    at: float
    kind: Kind
    group: int
    step: int
    x: int
    y: int


STEP = np.dtype(
    [
        *[("group", "u4"), ("step", "u8"), ("planned", "f8"), ("folded", "f8"), ("committed", "f8")],
        *[("decoded", "u4"), ("prefilled", "u4"), ("chunks", "u4"), ("waiting", "u4"), ("blocked", "u1")],
        *[("wait_us", "u4"), ("prepare_us", "u4"), ("forward_us", "u4"), ("sample_us", "u4")],
    ]
)
"""One step of a group: Unix seconds of its stations, what it computed, how many waited and why, and the worker's times."""


@dataclass(slots=True)
class Record:
    """A request, without its tokens. ``trails``: the events of each choice."""

    tenant: str
    request_id: str
    arrived: float
    num_prompt: int
    max_tokens: int
    priority: int
    trails: list[list[Event]] = field(default_factory=list)


class Journal:
    """``clock`` gives Unix seconds. With ``max_requests`` 0 no request is kept."""

    def __init__(self, clock: Callable[[], float] = lambda: 0.0, max_requests: int = MAX_REQUESTS) -> None:
        self.records: dict[tuple[str, str], Record] = {}
        self.num_steps = 0
        self._clock = clock
        self.max_requests = max_requests
        self._rows = np.zeros(MAX_STEPS if max_requests else 1, STEP)
        self._committed = self._rows["committed"]
        self._num_committed = 0

    def begin(self, request: Request) -> None:
        """Keeps what happens to the request from now on, instead of the oldest one's."""
        if not self.max_requests:
            return
        submission = request.submission
        record = Record(
            *(submission.tenant, submission.request_id, request.arrived, submission.prompt.size),
            submission.params.max_tokens,
            submission.priority,
        )
        self.records.pop(request.key, None)
        if len(self.records) >= self.max_requests:
            del self.records[next(iter(self.records))]
        self.records[request.key] = record
        for sequence in request.sequences:
            sequence.trail = []
            record.trails.append(sequence.trail)

    def note(
        self, sequence: Sequence, kind: Kind, group: int = 0, step: int = 0, x: int = 0, y: int = 0
    ) -> None:
        trail = sequence.trail
        if trail is not None and (len(trail) < MAX_EVENTS or kind is Kind.FINISHED):
            trail.append(Event(self._clock(), kind, group, step, x, y))

    def stepped(
        self,
        group: int,
        plan: Plan,
        waiting: int,
        wait_us: int,
        prepare_us: int,
        forward_us: int,
        sample_us: int,
    ) -> None:
        """A step was folded."""
        rows = self._rows
        prefilled = sum(plan.prefill_lengths) if plan.prefill_lengths else 0
        rows[self.num_steps % len(rows)] = (
            *(group, plan.step, plan.planned, self._clock(), 0.0, plan.decoded.size, prefilled),
            *(len(plan.prefill_lengths), waiting, plan.blocked, wait_us, prepare_us, forward_us, sample_us),
        )
        self.num_steps += 1

    def committed(self, num_steps: int) -> None:
        """The store has what the first ``num_steps`` steps gave."""
        size = len(self._rows)
        # Older rows are gone, newer ones in their places.
        first = max(self._num_committed, self.num_steps - size)
        self._num_committed = num_steps
        now, start, end = self._clock(), first % size, first % size + max(0, num_steps - first)
        self._committed[start:end] = now
        if end > size:
            self._committed[: end - size] = now

    def steps(self) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        """The rows that are kept, oldest first: a copy."""
        count, size = self.num_steps, len(self._rows)
        if count <= size:
            return self._rows[:count].copy()
        return np.roll(self._rows, -(count % size))

    def newest(self, since: float) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        """Of the newest MAX_NEWEST rows those that were folded after ``since``, in no order."""
        size = len(self._rows)
        places = np.arange(max(0, self.num_steps - min(MAX_NEWEST, size)), self.num_steps) % size
        rows = self._rows[places]
        return rows[rows["folded"] > since]

    def find(self, request_id: str, tenant: str | None) -> Record | None:
        """Of any tenant, where ``tenant`` is None: the newest of that name."""
        if tenant is not None:
            return self.records.get((tenant, request_id))
        named = (r for (_, name), r in reversed(self.records.items()) if name == request_id)
        return next(named, None)
