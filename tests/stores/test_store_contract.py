"""One contract, every store."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvern.v1 import sampling_pb2, session_pb2
from kvern_scheduler.store.base import (
    CommitStatus,
    Delta,
    Held,
    IndexEntries,
    Leadership,
    Store,
    StoredFinish,
)


def submit(n: int = 1) -> bytes:
    params = sampling_pb2.SamplingParams(logprobs=1)
    submit = session_pb2.Submit(request_id="a", n=n, prompt_token_ids=b"\1\0\0\0", params=params)
    return submit.SerializeToString()


def tokens(*entries: tuple[int, list[int]]) -> Delta:
    return Delta(
        seq_nos=np.array([seq for seq, _ in entries], np.int64),
        counts=np.array([len(ids) for _, ids in entries], np.uint32),
        tokens=np.array([token for _, ids in entries for token in ids], np.int32),
    )


async def lead(store: Store, owner: str = "a") -> Leadership:
    leadership = await store.acquire(owner, f"addr-{owner}")
    assert isinstance(leadership, Leadership)
    return leadership


async def commit(store: Store, epoch: int, step: int, delta: Delta) -> CommitStatus:
    return await store.commit(epoch, step, delta, delta.digest())


async def test_epochs_rise_and_a_held_lease_is_refused(store: Store) -> None:
    first = await lead(store)
    held = await store.acquire("b", "addr-b")
    assert isinstance(held, Held)
    assert (held.epoch, held.owner, held.address) == (first.epoch, "a", "addr-a")
    assert 0 < held.expires_in <= 0.3
    await asyncio.sleep(0.35)
    assert (await lead(store, "b")).epoch == first.epoch + 1


async def test_stealing_needs_the_current_epoch(store: Store) -> None:
    first = await lead(store)
    assert isinstance(await store.acquire("b", "addr-b", steal=first.epoch - 1), Held)
    second = await store.acquire("b", "addr-b", steal=first.epoch)
    assert isinstance(second, Leadership) and second.epoch == first.epoch + 1
    # The loser of the race names an epoch that is over.
    assert isinstance(await store.acquire("c", "addr-c", steal=first.epoch), Held)


async def test_renewing_keeps_the_lease_and_ends_with_the_epoch(store: Store) -> None:
    first = await lead(store)
    for _ in range(4):
        await asyncio.sleep(0.1)
        assert await store.renew(first.epoch)
    assert isinstance(await store.acquire("b", "addr-b"), Held)
    await store.acquire("b", "addr-b", steal=first.epoch)
    assert not await store.renew(first.epoch)


async def test_commits_prolong_the_lease(store: Store) -> None:
    first = await lead(store)
    for step in range(1, 5):
        await asyncio.sleep(0.1)
        assert await commit(store, first.epoch, step, Delta()) is CommitStatus.OK
    assert isinstance(await store.acquire("b", "addr-b"), Held)


async def test_resigning_lets_the_next_one_in_at_once(store: Store) -> None:
    first = await lead(store)
    await store.resign(first.epoch)
    second = await lead(store, "b")
    await store.resign(first.epoch)  # over already: it must not end the successor's
    assert isinstance(await store.acquire("c", "addr-c"), Held)
    assert second.epoch == first.epoch + 1


async def test_gap_dup_and_fenced_apply_nothing(store: Store) -> None:
    first = await lead(store)
    request = Delta(next_rid=2, requests=[(1, submit())])
    assert await commit(store, first.epoch, 1, request) is CommitStatus.OK
    delta = tokens((128, [5, 6]))
    assert await commit(store, first.epoch, 3, delta) is CommitStatus.GAP
    assert await commit(store, first.epoch, 2, delta) is CommitStatus.OK
    assert await commit(store, first.epoch, 2, delta) is CommitStatus.DUP
    assert await commit(store, first.epoch, 2, tokens((128, [7]))) is CommitStatus.GAP
    second = await store.acquire("b", "addr-b", steal=first.epoch)
    assert isinstance(second, Leadership)
    assert (second.step, second.next_rid) == (2, 2)
    assert await commit(store, first.epoch, 3, delta) is CommitStatus.FENCED
    state = await store.load()
    assert (state.epoch, state.step) == (second.epoch, 2)
    assert state.requests[1].tokens[0].tolist() == [5, 6]


async def test_a_request_s_life(store: Store) -> None:
    epoch = (await lead(store)).epoch
    await commit(store, epoch, 1, Delta(next_rid=8, requests=[(7, submit(n=2))]))
    seq = 7 * 128
    await commit(store, epoch, 2, tokens((seq, [1, 2, 3]), (seq + 1, [9])))
    delta = tokens((seq, [4]), (seq + 1, [2**31 - 1, 0]))
    delta.finished = [StoredFinish(seq, b"end-0", last=False, retain_s=0)]
    delta.logprobs = [(seq, b"one"), (seq + 1, b"two"), (seq, b"three")]
    await commit(store, epoch, 3, delta)
    stored = (await store.load()).requests[7]
    assert stored.record == submit(n=2)
    assert stored.tokens[0].tolist() == [1, 2, 3, 4]
    assert stored.tokens[1].tolist() == [9, 2**31 - 1, 0]
    assert stored.finishes == {0: b"end-0"}
    assert stored.logprobs == {0: b"onethree", 1: b"two"}
    last = Delta(finished=[StoredFinish(seq + 1, b"end-1", last=True, retain_s=100, num_choices=2)])
    await commit(store, epoch, 4, last)
    assert (await store.load()).requests[7].finishes == {0: b"end-0", 1: b"end-1"}


@pytest.mark.parametrize("retain_s", [0, 1])
async def test_finished_requests_go_after_their_retention(store: Store, retain_s: int) -> None:
    epoch = (await lead(store)).epoch
    await commit(store, epoch, 1, Delta(next_rid=2, requests=[(1, submit())]))
    delta = tokens((128, [1]))
    delta.finished = [StoredFinish(128, b"end", last=True, retain_s=retain_s, num_choices=1)]
    await commit(store, epoch, 2, delta)
    assert (1 in (await store.load()).requests) == bool(retain_s)
    await asyncio.sleep(retain_s + 0.1)
    state = await store.load()
    assert not state.requests
    assert state.next_rid == 2


async def test_index_entries_are_replaced_by_block_and_dropped_by_instance(store: Store) -> None:
    epoch = (await lead(store)).epoch

    def entries(instance: str, blocks: list[int], generation: int) -> IndexEntries:
        hashes = b"".join(bytes([block % 256, generation]) * 16 for block in blocks)
        return IndexEntries(
            instance, np.array(blocks, np.uint32), np.full(len(blocks), generation, np.uint32), hashes
        )

    await commit(store, epoch, 1, Delta(indexed=[entries("w1", [0, 63, 64, 5000], 1), entries("w2", [3], 9)]))
    await commit(store, epoch, 2, Delta(indexed=[entries("w1", [63], 2)]))
    index = (await store.load()).index
    w1 = index["w1"]
    found = {
        (block, generation, w1.hashes[32 * i : 32 * i + 32])
        for i, (block, generation) in enumerate(zip(w1.blocks.tolist(), w1.generations.tolist(), strict=True))
    }
    assert found == {
        (0, 1, bytes([0, 1]) * 16),
        (63, 2, bytes([63, 2]) * 16),
        (64, 1, bytes([64, 1]) * 16),
        (5000, 1, bytes([5000 % 256, 1]) * 16),
    }
    await commit(store, epoch, 3, Delta(dropped=["w1"]))
    assert set((await store.load()).index) == {"w2"}
