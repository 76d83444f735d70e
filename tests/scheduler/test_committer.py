"""What the committer knows of its lease by its own clock."""

from __future__ import annotations

import numpy as np
import pytest

from kvern.v1 import media_pb2
from kvern.v1.sampling_pb2 import FINISH_REASON_LENGTH, SamplingParams
from kvern.v1.session_pb2 import Submit
from kvern_scheduler import committer
from kvern_scheduler.committer import Committer
from kvern_scheduler.core.changes import Changes
from kvern_scheduler.core.group import finish_sequence
from kvern_scheduler.core.journal import Journal
from kvern_scheduler.core.requests import Request, Submission
from kvern_scheduler.store.base import Delta, Leadership, StoreUnavailable
from kvern_scheduler.store.memory import MemoryStore
from kvern_scheduler.timings import Timings


class AwayStore(MemoryStore):
    away = False

    async def renew(self, epoch: int) -> bool:
        if self.away:
            raise StoreUnavailable("away")
        return await super().renew(epoch)


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


async def test_it_leads_for_as_long_as_the_store_has_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, store = Clock(), AwayStore(lease_s=1.0)
    monkeypatch.setattr(committer, "time", clock)
    leadership = await store.acquire("me", "here")
    assert isinstance(leadership, Leadership)
    leader = Committer(
        *(store, leadership, lambda _: None, lambda _: "", Timings()), retention_s=1, lease_s=1.0
    )
    assert leader.leads
    clock.now += 0.99
    assert leader.leads
    clock.now += 0.02
    assert not leader.leads
    await leader._renew()
    assert leader.leads
    store.away = True
    clock.now += 0.9
    await leader._renew()
    clock.now += 0.2
    assert not leader.leads, "the store has promised nothing since"
    leader.add(Changes())
    assert leader.leads


async def test_a_lease_counts_from_when_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(committer, "time", clock)

    class SlowStore(AwayStore):
        async def renew(self, epoch: int) -> bool:
            clock.now += 0.8
            return await super().renew(epoch)

        async def commit(self, epoch: int, step: int, delta: Delta, digest: bytes) -> object:  # type: ignore[override]
            clock.now += 0.8
            return self.commit_now(epoch, step, delta, digest)

    store = SlowStore(lease_s=1.0)
    leadership = await store.acquire("me", "here")
    assert isinstance(leadership, Leadership)
    leader = Committer(
        *(store, leadership, lambda _: None, lambda _: "", Timings()), retention_s=1, lease_s=1.0
    )
    for ask in (leader._renew, lambda: leader._commit(Delta())):
        await ask()
        assert leader.leads
        clock.now += 0.3
        assert not leader.leads


async def test_an_ended_request_keeps_no_pixels_in_the_store() -> None:
    """While it runs, a successor needs them; once it has ended, they would only lie there as long as it is readable."""
    store = MemoryStore()
    leadership = await store.acquire("me", "here")
    assert isinstance(leadership, Leadership)
    leader = Committer(
        *(store, leadership, lambda _: None, lambda _: "", Timings()), retention_s=60, lease_s=1.0
    )
    image = media_pb2.MediaItem(hash=bytes(32), offset=1, length=2, pixels=bytes(1000))
    submission = Submission(
        *("named", "", b"", np.arange(4, dtype=np.int32), SamplingParams(max_tokens=4)),
        resumable=True,
        media=[image],
    )
    request = Request(7, submission, 0.0)
    changes = Changes(requests=[request])
    leader.add(changes)
    (stored,) = (await store.load()).requests.values()
    assert Submit.FromString(stored.record).media[0].pixels == image.pixels
    finish_sequence(request.sequences[0], FINISH_REASON_LENGTH, 1.0, changes := Changes(), Journal())
    leader.add(changes)
    assert not (await store.load()).requests
    (stored,) = await store.find([("", "named")])
    (kept,) = Submit.FromString(stored.record).media
    assert (kept.pixels, kept.hash, kept.length) == (b"", image.hash, 2)
