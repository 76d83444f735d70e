"""What the committer knows of its lease by its own clock."""

from __future__ import annotations

import pytest

from kvern_scheduler import committer
from kvern_scheduler.committer import Committer
from kvern_scheduler.core.changes import Changes
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
