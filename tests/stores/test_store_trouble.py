"""A store that is there and does not do what it should: what is said, and what becomes of a commit."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from stores.conftest import SERVERS, StoreServer

from kvern_scheduler.store.base import CommitStatus, Delta, Leadership, StoreRefused, StoreUnavailable
from kvern_scheduler.store.redis import RedisStore

Spoil = Callable[[redis.Redis], Any]

TROUBLES: dict[str, tuple[Spoil, Spoil, str, type[StoreUnavailable]]] = {
    "full": (
        lambda client: client.config_set("maxmemory", "100kb"),
        lambda client: client.config_set("maxmemory", 0),
        "it is full.*maxmemory",
        StoreUnavailable,
    ),
    "read-only": (
        lambda client: client.execute_command("REPLICAOF", "127.0.0.1", "1"),
        lambda client: client.execute_command("REPLICAOF", "NO", "ONE"),
        "read-only replica.*primary's address",
        StoreUnavailable,
    ),
    "password": (
        lambda client: (client.config_set("requirepass", "s3cret"), kill_others(client)),
        lambda client: client.config_set("requirepass", ""),
        "wants a password.*--redis-url",
        StoreRefused,
    ),
    "wrong type": (
        lambda client: client.eval("redis.call('DEL', KEYS[1]) redis.call('LPUSH', KEYS[1], 1)", 1, RECENT),
        lambda client: client.delete(RECENT),
        "not of the type.*--cell",
        StoreRefused,
    ),
}
RECENT = "kvern:{c}:recent"


def kill_others(client: redis.Redis) -> None:
    client.client_kill_filter(_type="normal", skipme=True)


def tokens(step: int) -> Delta:
    return Delta(seq_nos=np.array([128]), counts=np.array([1], np.uint32), tokens=np.array([step], np.int32))


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_a_commit_meets_trouble_and_is_repeated_when_that_is_over(server: Any, trouble: str) -> None:
    spoil, mend, message, kind = TROUBLES[trouble]
    store = RedisStore(server.url, "c")
    leadership = await store.acquire("a", "addr")
    assert isinstance(leadership, Leadership)
    await store.load()
    request = Delta(requests=[(1, b"\x38\x01")])
    assert await store.commit(leadership.epoch, 1, request, request.digest()) is CommitStatus.OK
    client = server.client()
    spoil(client)
    delta = tokens(7)
    for _ in range(2):
        with pytest.raises(StoreUnavailable) as failure:
            await store.commit(leadership.epoch, 2, delta, delta.digest())
    assert type(failure.value) is kind and re.search(message, str(failure.value))
    mend(client)
    assert await store.commit(leadership.epoch, 2, delta, delta.digest()) is CommitStatus.OK
    assert (await store.load()).requests[1].tokens[0].tolist() == [7], "applied once"
    await store.close()


@pytest.mark.parametrize("server_name", list(SERVERS))
async def test_a_server_that_loads_its_data_says_so(server_name: str, tmp_path: Path) -> None:
    server = StoreServer(SERVERS[server_name], tmp_path)
    with server.client().pipeline(transaction=False) as pipeline:
        for number in range(16_000):
            pipeline.set(f"key-{number}", "x")
        pipeline.execute()
    server.kill()
    # It takes 2 s over its file, and answers now and then meanwhile.
    server.start("--key-load-delay", "50", wait=False)
    store = RedisStore(server.url, "c")
    messages = set()
    async with asyncio.timeout(30):
        while True:
            try:
                assert isinstance(await store.acquire("a", "addr"), Leadership)
                break
            except StoreUnavailable as error:
                messages.add(str(error))
                await asyncio.sleep(0.01)
    assert any("still loading its data set" in message for message in messages), messages
    await store.close()
    server.kill()


# -- the process ----------------------------------------------------------------------------------------------------


class Scheduler:
    """``kvern-scheduler`` before a store."""

    def __init__(self, folder: Path, url: str) -> None:
        self.log = folder / "scheduler.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "kvern_scheduler.server", "--listen", f"unix:{folder}/s"),
                    *("--worker", f"unix:{folder}/w", "--redis-url", url, "--cell", "c"),
                ],
                stderr=log,
            )

    def wait_for(self, words: str, timeout_s: float = 60.0) -> float:
        """Seconds of patience that were left when it said so."""
        deadline = time.monotonic() + timeout_s
        while words not in self.log.read_text():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        return deadline - time.monotonic()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[StoreServer]:
    server = StoreServer(SERVERS["valkey"], tmp_path)
    yield server
    server.kill()


def test_what_only_an_operator_can_mend_ends_a_start(own_server: StoreServer, tmp_path: Path) -> None:
    client = own_server.client()
    client.set("kvern:{c}:leader", "mine")
    wrong_type = Scheduler(tmp_path, own_server.url)
    assert wrong_type.process.wait(60) == 1
    assert "a key of this cell is not of the type" in wrong_type.log.read_text()
    client.delete("kvern:{c}:leader")
    client.config_set("requirepass", "right")
    wrong_password = Scheduler(tmp_path, f"unix://:wr0ng@{own_server.socket}")
    assert wrong_password.process.wait(60) == 1
    said = wrong_password.log.read_text()
    assert "the store refuses us: it refuses our user or password" in said
    assert "wr0ng" not in said and "Traceback" not in said


def test_a_start_waits_for_a_store_that_will_come(own_server: StoreServer, tmp_path: Path) -> None:
    """Absent, frozen, full or read-only: each is said once, and none ends the process."""
    own_server.kill()
    scheduler = Scheduler(tmp_path, own_server.url)
    scheduler.wait_for("the store does not answer: ")
    own_server.start("--maxmemory", "100kb")
    scheduler.wait_for("it is full")
    client = own_server.client()
    client.execute_command("REPLICAOF", "127.0.0.1", "1")
    client.config_set("maxmemory", 0)
    scheduler.wait_for("read-only replica")
    os.kill(own_server.process.pid, signal.SIGSTOP)
    scheduler.wait_for("Timeout")
    os.kill(own_server.process.pid, signal.SIGCONT)
    client.execute_command("REPLICAOF", "NO", "ONE")
    scheduler.wait_for("leads cell c")
    assert scheduler.log.read_text().count("it is full") == 1
    scheduler.process.terminate()
    assert scheduler.process.wait(60) == 0


@pytest.mark.parametrize("binary", SERVERS)
async def test_a_store_that_was_restarted_since_the_last_read_is_not_away(
    binary: str, tmp_path: Path
) -> None:
    server = StoreServer(SERVERS[binary], tmp_path)
    store = RedisStore(server.url, "c")
    try:
        assert await store.find([("", "nobody")]) == []
        server.kill()
        server.start()
        assert await store.find([("", "nobody")]) == []
        server.kill()
        with pytest.raises(StoreUnavailable):
            await store.find([("", "nobody")])
    finally:
        await store.close()
        server.kill()
