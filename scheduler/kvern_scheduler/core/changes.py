"""What the core has done since it was last asked: the store's next delta, and the gateways' next events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvern.v1 import sampling_pb2
from kvern_scheduler.core.requests import Request, Sequence


@dataclass(slots=True)
class Tokens:
    """New output tokens in order of index for each sequence: parallel arrays of shape [n]."""

    rows: npt.NDArray[np.uint32]
    seq_nos: npt.NDArray[np.int64]
    indexes: npt.NDArray[np.uint32]
    token_ids: npt.NDArray[np.int32]


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of consecutive output (or prompt) tokens of one sequence, from ``first_index`` on."""

    sequence: Sequence
    first_index: int
    prompt: bool
    tokens: list[sampling_pb2.TokenLogprobs]
    packed: bytes = b""
    """As the store and the sequence keep them, once they are committed (kvern_scheduler.convert.pack_logprobs)."""


@dataclass(slots=True)
class Indexed:
    """Blocks that entered a group's prefix index: parallel."""

    group: int
    blocks: npt.NDArray[np.uint32]
    generations: npt.NDArray[np.uint32]
    hashes: bytes
    """32 bytes a block."""


@dataclass(slots=True)
class Changes:
    """Everything since the last ``take``."""

    requests: list[Request] = field(default_factory=list)
    tokens: list[Tokens] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    indexed: list[Indexed] = field(default_factory=list)
    num_steps: int = 0
    """Steps that the journal knew of when they were taken."""
    adapters: bytes | None = None
    """All adapters (core.registry.Registry.pack), where they have changed."""
    acknowledged: list[Callable[[], None]] = field(default_factory=list)
    """Called when all of this, and what came before it, is committed."""

    def __bool__(self) -> bool:
        return (
            bool(self.tokens or self.requests or self.finished or self.indexed or self.logprobs)
            or self.adapters is not None
            or bool(self.acknowledged)
        )

    def extend(self, later: Changes) -> None:
        self.requests += later.requests
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.finished += later.finished
        self.indexed += later.indexed
        self.num_steps = max(self.num_steps, later.num_steps)
        if later.adapters is not None:
            self.adapters = later.adapters
        self.acknowledged += later.acknowledged

    def take(self) -> Changes:
        """Hands everything over and starts anew."""
        taken = Changes(
            *(self.requests, self.tokens, self.logprobs, self.finished, self.indexed),
            *(self.num_steps, self.adapters, self.acknowledged),
        )
        self.requests, self.tokens, self.logprobs, self.finished, self.indexed = [], [], [], [], []
        self.adapters, self.acknowledged = None, []
        return taken
