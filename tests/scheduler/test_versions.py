"""Two versions of the scheduler share a store while one replaces the other, and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from scheduler.scheduler_harness import SIM, Gateway, SimWorker, make_submit, open_gateway
from stores.conftest import SERVERS, StoreServer

from kvern.v1 import session_pb2
from kvern_scheduler.committer import Fenced
from kvern_scheduler.server import parse_args, serve
from kvern_scheduler.store.redis import RedisStore, library
from kvern_worker.sim import continue_greedily

PROMPT = list(range(30, 60))
TOKENS = 300


def next_library() -> tuple[str, str]:
    """The functions of a later version: of other names, and with a field of its own in the leader's record."""
    source, version = library()
    later = source.replace(version, "_later")
    changed = later.replace(
        "redis.call('HSET', leader, 'step'", "redis.call('HSET', leader, 'later', '1', 'step'"
    )
    assert changed != later
    return changed, "_later"


class Versions:
    """A worker, a store server, and schedulers of either version at addresses of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = StoreServer(SERVERS["valkey"], folder)
        self.worker = SimWorker(f"unix:{folder}/w", replace(SIM, step_us=8000))
        self.running: dict[str, tuple[asyncio.Task[None], asyncio.Event]] = {}

    def start(self, name: str, *, later: bool) -> str:
        address = f"unix:{self.folder}/{name}"
        store = RedisStore(self.server.url, "c", functions=next_library() if later else library())
        stop = asyncio.Event()
        args = parse_args(["--listen", address, "--worker", self.worker.address, "--store", "memory"])
        self.running[name] = asyncio.create_task(serve(args, store, stop)), stop
        return address

    async def stop(self, name: str) -> None:
        task, stop = self.running.pop(name)
        stop.set()
        await task


@pytest.fixture
async def versions(tmp_path: Path) -> AsyncIterator[Versions]:
    versions = Versions(tmp_path)
    await versions.worker.start()
    yield versions
    for name in list(versions.running):
        await versions.stop(name)
    await versions.worker.stop()
    versions.server.kill()


async def resume(address: str, output: list[int]) -> Gateway:
    gateway = await open_gateway(address)
    await gateway.send(
        attaches=[session_pb2.Attach(handle=1, request_id="long", next_index=[len(output)])],
        submits=[make_submit(2, PROMPT, 4, request_id="short", resumable=True)],
    )
    await gateway.until(lambda: len(gateway.tokens.get(1, [])) > 20 and 2 in gateway.finished)
    return gateway


async def test_rolling_to_the_next_version_and_back_loses_nothing(versions: Versions) -> None:
    address = versions.start("n", later=False)
    gateway = await open_gateway(address)
    await gateway.submit(1, PROMPT, TOKENS, request_id="long", resumable=True)
    await gateway.submit(2, PROMPT, 4, request_id="short", resumable=True)
    await gateway.until(lambda: len(gateway.tokens.get(1, [])) > 10 and 2 in gateway.finished)
    short = gateway.tokens[2]
    output: list[int] = []
    for name, later in (("n+1", True), ("n again", False), ("n+1 again", True)):
        address = versions.start(name, later=later)
        await asyncio.sleep(0.1)  # side by side, as a standby
        await versions.stop(next(iter(versions.running)))
        await gateway.close()
        output += gateway.tokens[1]
        gateway = await resume(address, output)
        assert gateway.tokens[2] == short, "what ended under the other version"
    await gateway.finish(1, timeout=30)
    assert output + gateway.tokens[1] == continue_greedily(PROMPT, TOKENS, SIM)
    libraries = {row[b"library_name"] for row in versions.server.client().execute_command("FUNCTION", "LIST")}
    assert libraries == {b"kvern" + library()[1].encode(), b"kvern_later"}
    await gateway.close()


@pytest.mark.parametrize("later", [True, False])
async def test_either_version_fences_the_other(versions: Versions, later: bool) -> None:
    first = versions.start("first", later=not later)
    gateway = await open_gateway(first)
    await gateway.submit(1, PROMPT, TOKENS, request_id="long", resumable=True)
    await gateway.until(lambda: len(gateway.tokens.get(1, [])) > 20)
    thief = RedisStore(versions.server.url, "c", functions=next_library() if later else library())
    await thief.acquire("thief", "unix:/nowhere", steal=1)
    task, _ = versions.running.pop("first")
    with pytest.raises(Fenced):
        await asyncio.wait_for(task, 10)
    seen = gateway.tokens[1]
    await gateway.close()
    # Nobody answers at the thief's address.
    second = await resume(versions.start("second", later=later), seen)
    assert second.welcome is not None and second.welcome.epoch == 3
    await second.finish(1, timeout=30)
    assert seen + second.tokens[1] == continue_greedily(PROMPT, TOKENS, SIM)
    await second.close()
    await thief.close()
