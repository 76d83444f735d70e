"""What every store does. One suite (tests/stores) runs against all of them.

A commit names the leader's epoch and the next step. It is applied whole or not at all::

    epoch is not the leader's                 → FENCED   the caller leads no longer
    step == last and the digest is the same   → DUP      it was applied before: as good as OK
    step != last + 1                          → GAP      nothing applied
    else                                      → OK
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvern_scheduler.core.requests import CHOICE_BITS


class CommitStatus(enum.Enum):
    OK = 1
    DUP = 2
    GAP = -1
    FENCED = -2


Name = tuple[str, str]
"""Tenant and request id."""


class StoreUnavailable(Exception):
    """The store did not answer, or not as it should. A commit may or may not have been applied: repeat it with the
    same step."""


class StoreRefused(StoreUnavailable):
    """The store answers, and nothing but an operator will change what it says: a wrong password, no Functions, a key
    of another type."""


@dataclass(frozen=True, slots=True)
class Leadership:
    """The caller leads: ``step`` is the last committed step, ``next_rid`` the first unused request number."""

    epoch: int
    step: int
    next_rid: int


@dataclass(frozen=True, slots=True)
class Held:
    """Someone else leads, for ``expires_in`` seconds more unless it renews."""

    epoch: int
    owner: str
    address: str
    expires_in: float


@dataclass(slots=True)
class StoredFinish:
    """The end of one sequence. ``last``: no choice of its request is left. ``retain_s``: how long the request stays
    readable after that, under ``name``; 0 removes it."""

    seq_no: int
    record: bytes
    last: bool
    retain_s: int
    num_choices: int = 1
    name: Name = ("", "")


@dataclass(slots=True)
class IndexEntries:
    """Blocks of one worker instance that entered its prefix index: parallel; ``hashes`` has 32 bytes a block."""

    instance: str
    blocks: npt.NDArray[np.uint32]
    generations: npt.NDArray[np.uint32]
    hashes: bytes


@dataclass(slots=True)
class Delta:
    """What one commit applies. Token arrays: ``seq_nos`` int64 [k] and ``counts`` uint32 [k], one per sequence with new
    tokens; ``tokens`` int32, the sequences' new tokens one after another."""

    next_rid: int = 0
    requests: list[tuple[int, bytes]] = field(default_factory=list)
    seq_nos: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    counts: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    tokens: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: list[tuple[int, bytes]] = field(default_factory=list)
    """Sequence number, and what to append to its log-probabilities (kvern_scheduler.convert.pack_logprobs)."""
    finished: list[StoredFinish] = field(default_factory=list)
    indexed: list[IndexEntries] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    """Worker instances that are gone, and their index with them."""
    adapters: bytes | None = None
    """What ``State.adapters`` is from now on."""

    def digest(self) -> bytes:
        """16 bytes that tell this delta from any other."""
        h = hashlib.blake2b(digest_size=16)
        for rid, record in self.requests:
            h.update(b"r%d %d " % (rid, len(record)))
            h.update(record)
        for array in (self.seq_nos, self.counts, self.tokens):
            h.update(b"t%d " % array.size)
            h.update(array.tobytes())
        for seq_no, packed in self.logprobs:
            h.update(b"l%d %d " % (seq_no, len(packed)))
            h.update(packed)
        for finish in self.finished:
            h.update(b"f%d %d " % (finish.seq_no, len(finish.record)))
            h.update(finish.record)
        for entries in self.indexed:
            h.update(b"i%s " % entries.instance.encode())
            h.update(entries.blocks.tobytes() + entries.generations.tobytes() + entries.hashes)
        for instance in self.dropped:
            h.update(b"d%s " % instance.encode())
        if self.adapters is not None:
            h.update(b"a%d " % len(self.adapters) + self.adapters)
        return h.digest()


@dataclass(slots=True)
class StoredRequest:
    """A request as the store knows it. Keys of the dicts are choices."""

    rid: int
    record: bytes
    tokens: dict[int, npt.NDArray[np.int32]] = field(default_factory=dict)
    finishes: dict[int, bytes] = field(default_factory=dict)
    logprobs: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class State:
    """What a new leader must know before it serves. Requests that have ended are read by name, and indexes by
    instance, when they are asked for."""

    epoch: int
    step: int
    next_rid: int
    requests: dict[int, StoredRequest] = field(default_factory=dict)
    """By number: those that have not ended."""
    instances: set[str] = field(default_factory=set)
    """Worker instances that have an index."""
    retained_s: float = 0.0
    """For so long there may be requests that have ended; ``find`` knows them."""
    adapters: bytes = b""
    """All adapters of the cell, as one record."""


class Store(Protocol):
    """All methods but ``commit_now`` raise StoreUnavailable."""

    name: str
    inline: bool
    """True: commits take microseconds; ``commit_now`` does them without a task switch."""

    async def acquire(self, owner: str, address: str, *, steal: int | None = None) -> Leadership | Held:
        """Takes the lease with a new epoch, if nobody holds it or ``steal`` is the epoch of who does."""
        ...

    async def renew(self, epoch: int) -> bool:
        """Prolongs the lease. False: fenced."""
        ...

    async def resign(self, epoch: int) -> None:
        """Ends the lease at once, if ``epoch`` still holds it."""
        ...

    async def commit(self, epoch: int, step: int, delta: Delta, digest: bytes) -> CommitStatus:
        """Applies ``delta`` and prolongs the lease. Never cancel it halfway."""
        ...

    def commit_now(self, epoch: int, step: int, delta: Delta, digest: bytes) -> CommitStatus:
        """The same, where ``inline``."""
        ...

    async def load(self) -> State:
        """The committed state, in time proportional to what has not ended."""
        ...

    async def find(self, names: Sequence[Name]) -> list[StoredRequest]:
        """The requests of these names that have ended and are still retained. May run beside commits."""
        ...

    async def load_index(self, instance: str) -> IndexEntries:
        """The committed prefix index of a worker instance; empty where there is none. May run beside commits."""
        ...

    async def concerns(self) -> list[str]:
        """What of its configuration can lose something that was committed, said for an operator."""
        ...

    async def close(self) -> None: ...


def split_seq_no(seq_no: int) -> tuple[int, int]:
    """Request number and choice."""
    return seq_no >> CHOICE_BITS, seq_no & (1 << CHOICE_BITS) - 1
