"""Commits the core's changes, one commit at a time, beside the steps; what is acknowledged may be seen by gateways.

While a commit is in flight the changes of later steps are merged, so under load many steps share a commit. A step
never waits for one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import numpy as np

from kvern.media import without_pixels
from kvern_scheduler.convert import finish_to_pb, pack_logprobs, submission_to_pb
from kvern_scheduler.core.changes import Changes, Indexed, Tokens
from kvern_scheduler.core.requests import Request
from kvern_scheduler.store.base import (
    CommitStatus,
    Delta,
    IndexEntries,
    Leadership,
    Store,
    StoredFinish,
    StoreUnavailable,
)
from kvern_scheduler.timings import Timings

RENEW_S = 0.3
RETRY_S = 0.05
UNNAMED_RETENTION_S = 30
"""So that a gateway whose leader died right after the last commit can still fetch the last tokens."""

log = logging.getLogger(__name__)


class Fenced(Exception):
    """Another scheduler leads."""


class Committer:
    """``release`` gets the changes of each acknowledged commit, in order. ``instance_of`` names the worker instance
    behind a group's index."""

    def __init__(
        self,
        store: Store,
        leadership: Leadership,
        release: Callable[[Changes], None],
        instance_of: Callable[[int], str],
        timings: Timings,
        retention_s: int,
        lease_s: float,
    ) -> None:
        self.epoch = leadership.epoch
        self.step = leadership.step
        self._store = store
        self._release = release
        self._instance_of = instance_of
        self._timings = timings
        self._retention_s = retention_s
        self._pending = Changes()
        self._dropped: list[str] = []
        self._wake = asyncio.Event()
        self._busy = False
        self._failing_since: float | None = None
        self._failure = ""
        self._lease_s = lease_s
        self._leads_until = time.monotonic() + lease_s

    @property
    def leads(self) -> bool:
        """False once the lease has run out by our own clock: another may lead, and the store will say."""
        return time.monotonic() < self._leads_until

    @property
    def stalled(self) -> bool:
        """The store has not answered for a while: nothing new should be accepted."""
        return self._failing_since is not None and time.monotonic() - self._failing_since > 0.5

    def drop_instance(self, instance: str) -> None:
        """A worker instance is gone: its index goes with the next commit."""
        self._dropped.append(instance)
        self._wake.set()

    def add(self, changes: Changes) -> None:
        """Commits ``changes`` at once where the store is inline, or with the next commit."""
        if self._store.inline:
            started = time.perf_counter()
            delta = self._delta(changes)
            status = self._store.commit_now(self.epoch, self.step + 1, delta, b"")
            if status is not CommitStatus.OK:
                raise Fenced(f"commit of step {self.step + 1} answered {status.name}")
            self.step += 1
            self._timings.commit.add(time.perf_counter() - started)
            self._leads_until = time.monotonic() + self._lease_s
            self._release(changes)
            return
        self._pending.extend(changes)
        self._wake.set()

    async def run(self) -> None:
        """Commits until cancelled. Raises Fenced when another scheduler leads."""
        while True:
            try:
                await asyncio.wait_for(self._wake.wait(), RENEW_S)
            except TimeoutError:
                await self._renew()
                continue
            self._wake.clear()
            while self._pending or self._dropped:
                changes = self._pending.take()
                self._busy = True
                await asyncio.shield(self._commit(self._delta(changes)))
                self._busy = False
                self._release(changes)

    async def flush(self, timeout: float) -> None:
        """Waits until everything is committed, or for ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while (self._busy or self._pending) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)

    async def resign(self) -> None:
        """Gives the lease back. ``run`` must have been cancelled: what it had not committed, nobody has seen."""
        try:
            await self._store.resign(self.epoch)
        except StoreUnavailable as error:
            log.warning("the lease runs out by itself: %s", error)

    async def _renew(self) -> None:
        asked = time.monotonic()
        try:
            renewed = await self._store.renew(self.epoch)
        except StoreUnavailable as error:
            self._note_failure(error)
            return
        self._failing_since, self._failure = None, ""
        if not renewed:
            raise Fenced(f"the lease of epoch {self.epoch} went to another scheduler")
        self._leads_until = asked + self._lease_s

    async def _commit(self, delta: Delta) -> None:
        """Repeats the same commit until the store has it. Nothing is exposed meanwhile."""
        started = time.perf_counter()
        digest = delta.digest()
        while True:
            asked = time.monotonic()
            try:
                status = await self._store.commit(self.epoch, self.step + 1, delta, digest)
                break
            except StoreUnavailable as error:
                self._note_failure(error)
                await asyncio.sleep(RETRY_S)
        if status not in (CommitStatus.OK, CommitStatus.DUP):
            raise Fenced(f"commit of step {self.step + 1} in epoch {self.epoch} answered {status.name}")
        self.step += 1
        if status is CommitStatus.OK:
            self._leads_until = asked + self._lease_s
        if self._failing_since is not None:
            log.info("the store answers again after %.1f s", time.monotonic() - self._failing_since)
            self._failing_since, self._failure = None, ""
        self._timings.commit.add(time.perf_counter() - started)

    def _note_failure(self, error: Exception) -> None:
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        if str(error) != self._failure:
            self._failure = str(error)
            log.warning("the store does not answer (%s); computing goes on, nothing is shown", error)

    def _delta(self, changes: Changes) -> Delta:
        delta = Delta(adapters=changes.adapters)
        for request in changes.requests:
            delta.requests.append((request.rid, submission_to_pb(request.submission).SerializeToString()))
            delta.next_rid = max(delta.next_rid, request.rid + 1)
        if changes.tokens:
            _pack_tokens(changes.tokens, delta)
        for entry in changes.logprobs:
            entry.packed = pack_logprobs(entry)
        delta.logprobs = [(entry.sequence.seq_no, entry.packed) for entry in changes.logprobs]
        for sequence in changes.finished:
            assert sequence.finish is not None
            request = sequence.request
            delta.finished.append(
                StoredFinish(
                    sequence.seq_no,
                    finish_to_pb(sequence.finish).SerializeToString(),
                    last=False,
                    retain_s=self._retention_s if request.submission.resumable else UNNAMED_RETENTION_S,
                    num_choices=request.submission.n,
                    name=request.key,
                )
            )
        _mark_last(changes, delta)
        delta.dropped, self._dropped = self._dropped, []
        if changes.indexed:
            packed = self._pack_index(changes.indexed)
            delta.indexed = [entries for entries in packed if entries.instance not in delta.dropped]
        return delta

    def _pack_index(self, indexed: list[Indexed]) -> list[IndexEntries]:
        by_group: dict[int, list[Indexed]] = {}
        for entry in indexed:
            by_group.setdefault(entry.group, []).append(entry)
        return [
            IndexEntries(
                self._instance_of(group),
                np.concatenate([e.blocks for e in entries]),
                np.concatenate([e.generations for e in entries]),
                b"".join([e.hashes for e in entries]),
            )
            for group, entries in by_group.items()
        ]


def _mark_last(changes: Changes, delta: Delta) -> None:
    """A request's last finish is the one after which none of its sequences is unfinished, in this commit's order."""
    last: dict[int, int] = {}
    for index, sequence in enumerate(changes.finished):
        if sequence.request.num_uncommitted == 1:
            last[sequence.request.rid] = index
        sequence.request.num_uncommitted -= 1
    for index in last.values():
        delta.finished[index].last = True
        _drop_pixels(changes.finished[index].request, delta)


def _drop_pixels(request: Request, delta: Delta) -> None:
    """Of a request that ends nobody computes anything again: its images need not stay as long as it is readable."""
    submission = request.submission
    if submission.media:
        submission.media = [without_pixels(item) for item in submission.media]
        delta.requests.append((request.rid, submission_to_pb(submission).SerializeToString()))


def _pack_tokens(batches: list[Tokens], delta: Delta) -> None:
    """Sorts the tokens of all steps by sequence, in order of index for each."""
    first = batches[0]
    if all(batch.seq_nos is first.seq_nos for batch in batches):  # the same sequences decode: nothing to sort
        delta.seq_nos = first.seq_nos
        delta.counts = np.full(first.seq_nos.size, len(batches), np.uint32)
        delta.tokens = np.array([batch.token_ids for batch in batches]).ravel("F")
        return
    seq_nos = np.concatenate([batch.seq_nos for batch in batches])
    tokens = np.concatenate([batch.token_ids for batch in batches])
    order = np.argsort(seq_nos, kind="stable")
    seq_nos = seq_nos[order]
    starts = np.flatnonzero(np.diff(seq_nos, prepend=-1))
    delta.seq_nos = seq_nos[starts]
    delta.counts = np.diff(starts, append=seq_nos.size).astype(np.uint32)
    delta.tokens = tokens[order]
