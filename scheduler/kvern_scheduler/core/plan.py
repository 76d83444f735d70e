"""What the planner produces: the plan for the worker, and what fold needs to know when its result comes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvern.media import MAX_MEDIA_BYTES
from kvern.v1 import worker_pb2
from kvern_scheduler.core.batch import Cohort
from kvern_scheduler.core.journal import Blocked
from kvern_scheduler.core.requests import Sequence
from kvern_scheduler.core.tiers import Transfer

U32 = npt.NDArray[np.uint32]
EMPTY: U32 = np.empty(0, np.uint32)


@dataclass(slots=True)
class Entry:
    """A sequence that enters a slot."""

    slot: int
    sequence: Sequence
    tokens: npt.NDArray[np.int32]
    num_computed: int
    blocks: U32
    generations: U32
    state_block: int | None = None
    """Of a hybrid: the checkpoint of the state after ``num_computed`` tokens, if that is not 0."""
    adapter_slot: int = 0
    """1 + the slot of its adapter; 0: none."""


@dataclass(slots=True)
class Saves:
    """States that are kept when the step is done: parallel. ``num_blocks``: filled blocks of the sequence then."""

    slots: list[int] = field(default_factory=list)
    num_blocks: list[int] = field(default_factory=list)
    blocks: U32 = field(default_factory=lambda: EMPTY)
    generations: U32 = field(default_factory=lambda: EMPTY)


@dataclass(slots=True)
class Plan:
    """One step of a group. Arrays are parallel where their names share the first word."""

    step: int
    decoded: Cohort
    """The sequences that decode."""
    sampled: Cohort
    """The sequences that sample a token: those that end their prompt, then those that decode."""
    released: list[int] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    append_slots: U32 = field(default_factory=lambda: EMPTY)
    append_blocks: U32 = field(default_factory=lambda: EMPTY)
    append_generations: U32 = field(default_factory=lambda: EMPTY)
    prefill_slots: list[int] = field(default_factory=list)
    prefill_lengths: list[int] = field(default_factory=list)
    """Those that end their prompt, and sample, come last."""

    saves: Saves = field(default_factory=Saves)
    planned: float = 0.0
    """Unix seconds."""
    blocked: Blocked = Blocked.NOTHING
    """Why what waits was not taken in."""
    transfers: list[Transfer] = field(default_factory=list)

    # For fold.
    prefill_ends: list[int] = field(default_factory=list)
    """Positions that each chunk's sequence has computed after it."""
    prefill_attempts: list[int] = field(default_factory=list)
    num_unsampled: int = 0
    """Chunks that do not end their prompt."""
    num_departures: int = 0
    """Sequences that had left the batch by then: while none leaves, all that is planned is of use."""
    filled_slots: npt.NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))
    """Decoding ones that fill a block."""
    filled_blocks: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """How many blocks each of them has filled then."""

    def takes_media(self, sequence: Sequence) -> bool:
        """Whether its images fit the message that this plan becomes; those of one sequence always do."""
        media = sequence.request.submission.media
        if not media or not self.entries:
            return True
        pixels = sum(
            len(item.pixels) for entry in self.entries for item in entry.sequence.request.submission.media
        )
        return pixels + sum(len(item.pixels) for item in media) <= MAX_MEDIA_BYTES

    @property
    def num_computed_tokens(self) -> int:
        return sum(self.prefill_lengths) + self.decoded.size


@dataclass(slots=True)
class Result:
    """What a worker answered, already converted. Slots that failed are in ``errors``, and not in ``slots``, which is
    packed (uint32, little endian)."""

    step: int
    slots: bytes
    tokens: npt.NDArray[np.int32]
    errors: list[worker_pb2.SlotError] = field(default_factory=list)
    logprobs: list[worker_pb2.SlotLogprobs] = field(default_factory=list)
    embeddings: bytes = b""
    """float32, one vector after another, where the model pools."""
