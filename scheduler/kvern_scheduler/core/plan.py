"""What the planner produces: the plan for the worker, and what fold needs to know when its result comes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvern.v1 import worker_pb2
from kvern_scheduler.core.requests import Sequence

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


@dataclass(slots=True)
class Plan:
    """One step of a group. Arrays are parallel where their names share the first word."""

    step: int
    released: list[int] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    append_slots: U32 = field(default_factory=lambda: EMPTY)
    append_blocks: U32 = field(default_factory=lambda: EMPTY)
    append_generations: U32 = field(default_factory=lambda: EMPTY)
    prefill_slots: list[int] = field(default_factory=list)
    prefill_lengths: list[int] = field(default_factory=list)
    decode_slots: U32 = field(default_factory=lambda: EMPTY)

    # For fold: the computed slots (prefill, then decode), the first ``num_unsampled`` of which sample nothing; then
    # ``num_prefilled`` that sample their first token after a prefill; then the decoding ones.
    slots: npt.NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))
    num_unsampled: int = 0
    num_prefilled: int = 0
    attempts: U32 = field(default_factory=lambda: EMPTY)
    computed_to: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def num_computed_tokens(self) -> int:
        return sum(self.prefill_lengths) + self.decode_slots.size


@dataclass(slots=True)
class Result:
    """What a worker answered, already converted. Slots that failed are in ``errors``, and not in ``slots``."""

    step: int
    slots: U32
    tokens: npt.NDArray[np.int32]
    errors: list[worker_pb2.SlotError] = field(default_factory=list)
    logprobs: list[worker_pb2.SlotLogprobs] = field(default_factory=list)
