"""What only the Redis store has: a server that dies, several versions at once, keys that people read."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from kvern_scheduler.store import redis as redis_store
from kvern_scheduler.store.base import (
    CommitStatus,
    Delta,
    IndexEntries,
    Leadership,
    StoredFinish,
    StoreUnavailable,
)
from kvern_scheduler.store.redis import RedisStore


async def test_acknowledged_commits_survive_a_kill_and_the_commit_in_doubt_is_repeated(server: Any) -> None:
    store = RedisStore(server.url, "c")
    leadership = await store.acquire("a", "addr")
    assert isinstance(leadership, Leadership)
    epoch = leadership.epoch
    deltas = [
        Delta(seq_nos=np.array([128]), counts=np.array([1], np.uint32), tokens=np.array([i], np.int32))
        for i in range(4)
    ]
    deltas[0].requests = [(1, b"\x38\x01")]
    for step in (1, 2, 3):
        await store.commit(epoch, step, deltas[step - 1], deltas[step - 1].digest())
    server.kill()
    with pytest.raises(StoreUnavailable):
        await store.commit(epoch, 4, deltas[3], deltas[3].digest())
    server.start()
    status = await store.commit(epoch, 4, deltas[3], deltas[3].digest())
    assert status in (CommitStatus.OK, CommitStatus.DUP)
    assert (await store.load()).requests[1].tokens[0].tolist() == [0, 1, 2, 3]
    await store.close()


async def test_a_frozen_server_blocks_no_caller_for_long(server: Any) -> None:
    store = RedisStore(server.url, "c")
    leadership = await store.acquire("a", "addr")
    assert isinstance(leadership, Leadership)
    await store.load()
    os.kill(server.process.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(StoreUnavailable):
        await store.commit(leadership.epoch, 1, Delta(), b"x")
    assert time.monotonic() - started < 1.5
    os.kill(server.process.pid, signal.SIGCONT)
    await asyncio.sleep(0.1)
    # It was applied while nobody listened; its late answer is not taken for the next one's.
    assert await store.commit(leadership.epoch, 1, Delta(), b"x") is CommitStatus.DUP
    assert await store.commit(leadership.epoch, 2, Delta(), b"y") is CommitStatus.OK
    await store.close()


async def test_a_lost_library_is_loaded_again(server: Any) -> None:
    store = RedisStore(server.url, "c")
    leadership = await store.acquire("a", "addr")
    assert isinstance(leadership, Leadership)
    server.client().function_flush()
    with pytest.raises(StoreUnavailable):
        await store.commit(leadership.epoch, 1, Delta(), b"x")
    assert await store.commit(leadership.epoch, 1, Delta(), b"x") is CommitStatus.OK
    await store.close()


async def test_keys_share_a_hash_tag_and_a_step_costs_one_append(server: Any) -> None:
    store = RedisStore(server.url, "c")
    leadership = await store.acquire("a", "addr")
    assert isinstance(leadership, Leadership)
    epoch = leadership.epoch
    blocks = np.arange(2500, dtype=np.uint32)
    delta = Delta(
        requests=[(rid, b"\x38\x01") for rid in range(1, 257)],
        indexed=[IndexEntries("w", blocks, blocks + np.uint32(1), os.urandom(32 * 2500))],
    )
    assert await store.commit(epoch, 1, delta, delta.digest()) is CommitStatus.OK
    client = server.client()
    client.config_resetstat()
    seq_nos = np.arange(1, 257, dtype=np.int64) << 7
    for step in range(2, 2 + redis_store.FOLD_AFTER - 1):
        delta = Delta(seq_nos=seq_nos, counts=np.ones(256, np.uint32), tokens=np.full(256, step, np.int32))
        assert await store.commit(epoch, step, delta, delta.digest()) is CommitStatus.OK
    calls = {name: stat["calls"] for name, stat in client.info("commandstats").items()}
    assert calls["cmdstat_append"] == calls["cmdstat_fcall"] == redis_store.FOLD_AFTER - 1
    done = StoredFinish(seq_no=128, record=b"end", last=True, retain_s=9, name=("t", "my-id"))
    for step in range(redis_store.FOLD_AFTER + 1, redis_store.FOLD_AFTER + 4):
        delta.finished, delta.requests = [done], [(999, b"\x38\x01")]
        assert await store.commit(epoch, step, delta, delta.digest()) is CommitStatus.OK
    names = {key.decode() for key in client.scan_iter()}
    assert all(name.startswith("kvern:{c}:") for name in names)
    assert {name for name in names if ":index:" in name} == {f"kvern:{{c}}:index:w:{i}" for i in range(3)}
    assert client.strlen("kvern:{c}:recent") < 3 * 256 * 12
    assert client.strlen("kvern:{c}:tokens:2.0") >= 4 * redis_store.FOLD_AFTER
    # Everything of a request that has ended goes by itself.
    assert client.get("kvern:{c}:name:t/my-id") == b"1"
    assert all(
        0 < client.ttl(f"kvern:{{c}}:{name}") <= 9 for name in ("request:1", "tokens:1.0", "name:t/my-id")
    )
    await store.close()


async def test_a_configuration_that_can_lose_commits_is_named(server: Any) -> None:
    store = RedisStore(server.url, "c")
    assert await store.concerns() == []
    client = server.client()
    client.config_set("appendfsync", "everysec")
    client.config_set("maxmemory", "1gb")
    client.config_set("maxmemory-policy", "allkeys-lru")
    fsync, eviction = await store.concerns()
    assert "everysec" in fsync and "allkeys-lru" in eviction
    client.config_set("appendonly", "no")
    assert "appendonly is no" in (await store.concerns())[0]
    await store.close()
