"""The contract in memory: for tests, and for ``--store memory``. A restart of the scheduler loses everything."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvern_scheduler.core.requests import CHOICE_BITS
from kvern_scheduler.store.base import (
    CommitStatus,
    Delta,
    Held,
    IndexEntries,
    Leadership,
    Name,
    State,
    StoredRequest,
    split_seq_no,
)

_COMPACT_AFTER = 64
# What the index knows of a block, at the place of its number.
_BLOCK = np.dtype([("known", "?"), ("generation", "<u4"), ("hash", "V32")])


class MemoryStore:
    """Token logs are appended to lazily: the arrays of the last commits are sorted into them together."""

    name = "memory"
    inline = True

    def __init__(self, lease_s: float = 1.0, clock: Callable[[], float] = time.time) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._epoch = 0
        self._owner = self._address = ""
        self._expiry = 0.0
        self._step = 0
        self._digest = b""
        self._next_rid = 1
        self._records: dict[int, bytes] = {}
        self._finishes: dict[int, dict[int, bytes]] = {}
        # When, request number, choices, name: of those that have ended and are retained.
        self._expires: list[tuple[float, int, int, Name]] = []
        self._names: dict[Name, int] = {}
        self._logs: dict[int, bytearray] = {}
        self._logprobs: dict[int, bytearray] = {}
        self._unsorted: list[Delta] = []
        self._index: dict[str, npt.NDArray[np.void]] = {}
        self._adapters = b""

    async def acquire(self, owner: str, address: str, *, steal: int | None = None) -> Leadership | Held:
        left = self._expiry - self._clock()
        if left > 0 and owner != self._owner and steal != self._epoch:
            return Held(self._epoch, self._owner, self._address, left)
        self._epoch += 1
        self._owner, self._address = owner, address
        self._expiry = self._clock() + self._lease_s
        return Leadership(self._epoch, self._step, self._next_rid)

    async def renew(self, epoch: int) -> bool:
        if epoch != self._epoch:
            return False
        self._expiry = self._clock() + self._lease_s
        return True

    async def resign(self, epoch: int) -> None:
        if epoch == self._epoch:
            self._expiry = 0.0

    async def commit(self, epoch: int, step: int, delta: Delta, digest: bytes) -> CommitStatus:
        return self.commit_now(epoch, step, delta, digest)

    def commit_now(self, epoch: int, step: int, delta: Delta, digest: bytes) -> CommitStatus:
        if epoch != self._epoch:
            return CommitStatus.FENCED
        if step == self._step and digest == self._digest:
            return CommitStatus.DUP
        if step != self._step + 1:
            return CommitStatus.GAP
        self._step, self._digest = step, digest
        self._expiry = self._clock() + self._lease_s
        self._next_rid = max(self._next_rid, delta.next_rid)
        for rid, record in delta.requests:
            self._records[rid] = record
        if delta.seq_nos.size:
            self._unsorted.append(delta)
        if delta.finished or len(self._unsorted) >= _COMPACT_AFTER:
            self._compact()
        for seq_no, packed in delta.logprobs:
            self._logprobs.setdefault(seq_no, bytearray()).extend(packed)
        for finish in delta.finished:
            rid, choice = split_seq_no(finish.seq_no)
            self._finishes.setdefault(rid, {})[choice] = finish.record
            if finish.last and finish.retain_s:
                expiry = self._clock() + finish.retain_s
                heapq.heappush(self._expires, (expiry, rid, finish.num_choices, finish.name))
                self._names[finish.name] = rid
            elif finish.last:
                self._drop(rid, finish.num_choices, finish.name)
        if self._expires:
            self._drop_expired()
        for instance in delta.dropped:
            self._index.pop(instance, None)
        for entries in delta.indexed:
            self._enter(entries)
        if delta.adapters is not None:
            self._adapters = delta.adapters
        return CommitStatus.OK

    async def load(self) -> State:
        self._compact()
        self._drop_expired()
        ended = {rid for _, rid, _, _ in self._expires}
        return State(
            self._epoch,
            self._step,
            self._next_rid,
            {rid: self._stored(rid) for rid in self._records if rid not in ended},
            set(self._index),
            max((expiry - self._clock() for expiry, *_ in self._expires), default=0.0),
            self._adapters,
        )

    async def find(self, names: Sequence[Name]) -> list[StoredRequest]:
        self._compact()
        self._drop_expired()
        return [self._stored(self._names[name]) for name in names if name in self._names]

    async def load_index(self, instance: str) -> IndexEntries:
        index = self._index.get(instance, np.empty(0, _BLOCK))
        blocks = index["known"].nonzero()[0]
        return IndexEntries(
            instance,
            blocks.astype(np.uint32),
            index["generation"][blocks],
            index["hash"][blocks].tobytes(),
        )

    def _stored(self, rid: int) -> StoredRequest:
        stored = StoredRequest(rid, self._records[rid], finishes=dict(self._finishes.get(rid, {})))
        for choice in range(1 << CHOICE_BITS):
            seq_no = rid << CHOICE_BITS | choice
            if seq_no in self._logs:
                stored.tokens[choice] = np.frombuffer(bytes(self._logs[seq_no]), np.int32)
            if seq_no in self._logprobs:
                stored.logprobs[choice] = bytes(self._logprobs[seq_no])
        return stored

    async def concerns(self) -> list[str]:
        return []

    async def close(self) -> None:
        pass

    def _enter(self, entries: IndexEntries) -> None:
        index = self._index.get(entries.instance, np.empty(0, _BLOCK))
        missing = int(entries.blocks.max(initial=0)) + 1 - index.size
        if missing > 0:
            index = np.concatenate([index, np.zeros(max(missing, index.size), _BLOCK)])
            self._index[entries.instance] = index
        index["known"][entries.blocks] = True
        index["generation"][entries.blocks] = entries.generations
        index["hash"][entries.blocks] = np.frombuffer(entries.hashes, "V32")

    def _compact(self) -> None:
        """Sorts the arrays of the last commits into the sequences' logs."""
        if not self._unsorted:
            return
        seq_nos = np.concatenate([np.repeat(d.seq_nos, d.counts) for d in self._unsorted])
        tokens = np.concatenate([d.tokens for d in self._unsorted])
        self._unsorted.clear()
        order = np.argsort(seq_nos, kind="stable")
        seq_nos, packed = seq_nos[order], tokens[order].astype("<i4").tobytes()
        starts = np.flatnonzero(np.diff(seq_nos, prepend=-1)).tolist()
        for start, end, seq_no in zip(
            starts, [*starts[1:], seq_nos.size], seq_nos[starts].tolist(), strict=True
        ):
            self._logs.setdefault(seq_no, bytearray()).extend(packed[4 * start : 4 * end])

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._expires and self._expires[0][0] <= now:
            self._drop(*heapq.heappop(self._expires)[1:])

    def _drop(self, rid: int, num_choices: int, name: Name) -> None:
        if self._names.get(name) == rid:
            del self._names[name]
        self._records.pop(rid, None)
        self._finishes.pop(rid, None)
        for choice in range(num_choices):
            self._logs.pop(rid << CHOICE_BITS | choice, None)
            self._logprobs.pop(rid << CHOICE_BITS | choice, None)
