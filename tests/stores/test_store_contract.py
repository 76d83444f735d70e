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

NAME = ("tenant", "a")


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


async def test_adapters_are_one_record(store: Store) -> None:
    epoch = (await lead(store)).epoch
    assert (await store.load()).adapters == b""
    assert await commit(store, epoch, 1, Delta(adapters=b"one\0two")) is CommitStatus.OK
    assert await commit(store, epoch, 2, tokens((128, [5]))) is CommitStatus.OK
    assert (await store.load()).adapters == b"one\0two"
    assert await commit(store, epoch, 3, Delta(adapters=b"")) is CommitStatus.OK
    assert (
        await commit(store, epoch, 3, Delta(adapters=b"other")) is CommitStatus.GAP
    )  # another commit: not a DUP
    assert (await store.load()).adapters == b""


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
    assert await store.find([NAME]) == []
    last = Delta(
        finished=[StoredFinish(seq + 1, b"end-1", last=True, retain_s=100, num_choices=2, name=NAME)]
    )
    await commit(store, epoch, 4, last)
    state = await store.load()
    assert not state.requests
    assert 99 < state.retained_s <= 100
    [ended] = await store.find([("", "b"), NAME])
    assert ended.finishes == {0: b"end-0", 1: b"end-1"}
    assert {choice: log.tolist() for choice, log in ended.tokens.items()} == {
        0: [1, 2, 3, 4],
        1: [9, 2**31 - 1, 0],
    }
    assert ended.logprobs == {0: b"onethree", 1: b"two"}


async def test_names_are_told_apart(store: Store) -> None:
    epoch = (await lead(store)).epoch
    names = [("", "a"), ("a", ""), ("t", "a/b"), ("t/a", "b"), ("t%2Fa", "b"), ("", "t/a/b"), ("ü", "é ")]
    delta = Delta(
        requests=[(rid, submit()) for rid in range(1, 8)],
        finished=[
            StoredFinish(rid << 7, b"end", last=True, retain_s=9, name=name)
            for rid, name in enumerate(names, 1)
        ],
    )
    await commit(store, epoch, 1, delta)
    assert [stored.rid for stored in await store.find(names)] == list(range(1, 8))
    # The same name once more, its first owner being over.
    again = Delta(
        requests=[(8, submit())],
        finished=[StoredFinish(8 << 7, b"end", last=True, retain_s=9, name=("", "a"))],
    )
    await commit(store, epoch, 2, again)
    assert [stored.rid for stored in await store.find(names[:2])] == [8, 2]


async def test_a_long_log_is_whole_whoever_leads(store: Store) -> None:
    """Over many more commits than a store keeps unsorted, and several leaders."""
    first = await lead(store)
    await commit(store, first.epoch, 1, Delta(requests=[(rid, submit(n=2)) for rid in (1, 2, 3)]))
    expected: dict[int, list[int]] = {}
    epoch = first.epoch
    for step in range(2, 500):
        delta = tokens(*((seq, [step * 7 + seq] * (step % 3)) for seq in (128, 129, 256, 384) if step % 3))
        if step == 150:  # with tokens that no log has yet
            delta.finished = [
                StoredFinish(256, b"end", last=False, retain_s=60, num_choices=2),
                StoredFinish(257, b"end", last=True, retain_s=60, num_choices=2, name=("", "two")),
            ]
        if step >= 150:
            delta = Delta(**{f: getattr(delta, f) for f in ("seq_nos", "counts", "tokens", "finished")})
            keep = delta.seq_nos != 256 if step > 150 else delta.seq_nos > 0
            delta.tokens = delta.tokens[np.repeat(keep, delta.counts)]
            delta.seq_nos, delta.counts = delta.seq_nos[keep], delta.counts[keep]
        start = 0
        for seq, count in zip(delta.seq_nos.tolist(), delta.counts.tolist(), strict=True):
            expected.setdefault(seq, []).extend(delta.tokens[start : start + count].tolist())
            start += count
        assert await commit(store, epoch, step, delta) is CommitStatus.OK
        if step % 97 == 0:
            assert await commit(store, epoch, step, delta) is CommitStatus.DUP
        if step in (60, 300):
            successor = await store.acquire("b", "addr-b", steal=epoch)
            assert isinstance(successor, Leadership)
            epoch = successor.epoch
            if step == 300:
                await store.load()
    state = await store.load()
    logs = {rid << 7 | c: log.tolist() for rid, r in state.requests.items() for c, log in r.tokens.items()}
    assert logs == {seq: log for seq, log in expected.items() if seq != 256}
    [ended] = await store.find([("", "two")])
    assert ended.tokens[0].tolist() == expected[256]


@pytest.mark.parametrize("retain_s", [0, 1])
async def test_finished_requests_go_after_their_retention(store: Store, retain_s: int) -> None:
    epoch = (await lead(store)).epoch
    await commit(store, epoch, 1, Delta(next_rid=2, requests=[(1, submit())]))
    delta = tokens((128, [1]))
    delta.finished = [StoredFinish(128, b"end", last=True, retain_s=retain_s, num_choices=1, name=NAME)]
    await commit(store, epoch, 2, delta)
    assert len(await store.find([NAME])) == bool(retain_s)
    await asyncio.sleep(retain_s + 0.1)
    assert await store.find([NAME]) == []
    state = await store.load()
    assert not state.requests and state.retained_s == 0
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
    assert (await store.load()).instances == {"w1", "w2"}
    w1 = await store.load_index("w1")
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
    assert (await store.load()).instances == {"w2"}
    assert (await store.load_index("w1")).blocks.size == 0
    assert (await store.load_index("w2")).blocks.tolist() == [3]
