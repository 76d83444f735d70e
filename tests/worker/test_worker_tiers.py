"""KV tiers of a real model: the same tokens from loaded blocks, and no block that is not what it should be."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity.families import FAMILIES
from parity.local_engine import LocalEngine
from scheduler.scheduler_harness import Cluster, SimWorker
from worker.conftest import load_executor

from kvern.errors import KvernError
from kvern.rpc.server import Server
from kvern.v1 import worker_pb2, worker_pb2_grpc
from kvern_kernels import kv_cache
from kvern_worker.executor import ModelExecutor
from kvern_worker.layers.attention import KvCache
from kvern_worker.parallel.topology import Topology
from kvern_worker.service import Progress, WorkerServicer
from kvern_worker.tiers.disk import HEADER_BYTES, DiskTier
from kvern_worker.tiers.memory import DeviceBlocks, MemoryTier

PROMPT = [(11 * i) % 250 + 3 for i in range(100)]
OTHER = [(7 * i) % 240 + 5 for i in range(350)]


def engine(folder: Path, root: Path | None, **more: Any) -> LocalEngine:
    """A device of 25 blocks of 16 tokens, on which PROMPT does not survive OTHER."""
    flags = {"kv_offloading_dir": str(root)} if root is not None else {}
    executor = load_executor(
        folder, kv_offloading_gib=0.01, threads=1, block_size=16, max_model_len=400, **flags, **more
    )
    return LocalEngine(executor, num_blocks=25)


def ask(local: LocalEngine, prompt: list[int] = PROMPT) -> tuple[list[int], int]:
    """What it says, and the prompt tokens that were not computed."""
    before = local.group.num_prefix_hits
    [said] = local.generate([prompt], 8)
    return said, local.group.num_prefix_hits - before


@pytest.mark.parametrize("dtype", ["auto", "int8", "fp8"])
def test_evicted_blocks_come_back_from_memory_and_from_disk(
    checkpoint: Callable[[str], Path], tmp_path: Path, dtype: str
) -> None:
    local = engine(checkpoint("llama"), tmp_path, kv_cache_dtype=dtype)
    first, cached = ask(local)
    assert cached == 0
    ask(local, OTHER)
    assert len(local.group.pool.match(local.cell.requests[1].sequences[0].hashes, 9)) < 6
    assert ask(local) == (first, 96)
    again = engine(checkpoint("llama"), tmp_path, kv_cache_dtype=dtype)
    assert again.group.tiers is not None and again.group.tiers.sizes()["memory"] == 0
    assert ask(again) == (first, 96)


def damage_data(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES + 5] ^= 1
    path.write_bytes(content)


def damage_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[9] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_transfer_that_fails_is_computed_again(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    """Whatever went wrong: nobody waits for it for ever, and no row of memory is believed that was not filled."""
    local = engine(checkpoint("llama"), None)
    broken = [True]
    move = getattr(DeviceBlocks, direction)

    def fail(*args: Any) -> None:
        if broken:
            broken.clear()
            raise RuntimeError("no more of that")
        move(*args)

    monkeypatch.setattr(DeviceBlocks, direction, fail)
    first, _ = ask(local)
    ask(local, OTHER)
    said, _ = ask(local)
    assert said == first and not broken
    ask(local, OTHER)
    assert ask(local) == (first, 96)


@pytest.mark.parametrize("damage", [damage_data, damage_header, cut, lengthen, Path.unlink])
def test_a_damaged_file_is_computed_again(
    checkpoint: Callable[[str], Path], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    first, _ = ask(engine(checkpoint("llama"), tmp_path))
    again = engine(checkpoint("llama"), tmp_path)
    third = again.submit(PROMPT, 1).sequences[0].hashes[2]
    again.cell.cancel(again.cell.requests[1].sequences[0], 0.0)
    [path] = tmp_path.glob(f"*/*/{third.hex()}.kv")
    damage(path)
    # Two blocks before it hold; the load also brought those behind it.
    said, cached = ask(again)
    assert said == first and cached == 32
    if damage is not Path.unlink:
        assert (
            again.group.tiers is not None
            and again.group.tiers.traffic[worker_pb2.TRANSFER_KIND_LOAD].num_failed == 1
        )
    # It was written anew.
    assert ask(engine(checkpoint("llama"), tmp_path)) == (first, 96)


def test_files_of_another_model_are_not_used(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    ask(engine(checkpoint("llama"), tmp_path))
    for name, more in (("llama-tied", {}), ("llama", {"kv_cache_dtype": "bf16"})):
        other = engine(checkpoint(name), tmp_path, **more)
        assert other.group.tiers is not None and other.group.tiers.sizes()["disk"] == 0
        assert ask(other)[1] == 0


def test_a_file_that_lies_under_another_name_is_not_used(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, bytes(32), 10)
    data, into = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    one, two = bytes([1]) * 32, bytes([2]) * 32
    assert tier.write(one, data) and tier.write(two, data[::-1].copy())
    assert tier.read(one, into) and (into == data).all()
    tier._path(one).replace(tier._path(two))
    assert not tier.read(two, into)
    assert not tier._path(two).exists()


WRITE_FOR_EVER = """
import sys, numpy as np
from pathlib import Path
from kvern_worker.tiers.disk import DiskTier
tier, number = DiskTier(Path(sys.argv[1]), bytes(32), 10**6), int(sys.argv[2])
while True:
    tier.write(number.to_bytes(32, "little"), np.full(200_000, number % 251, np.uint8))
    number += 1
"""


def test_a_process_that_is_killed_while_it_writes_leaves_no_bad_block(tmp_path: Path) -> None:
    partial = 0
    for round_ in range(6):
        child = subprocess.Popen([sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path), str(1000 * round_)])
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("*/*/*"))) < 20 * (round_ + 1) and time.monotonic() < deadline:
            time.sleep(0.001)
        child.kill()
        child.wait()
        partial += len(list(tmp_path.glob("*/*/*.tmp")))
        tier, into = DiskTier(tmp_path, bytes(32), 10**6), np.zeros(200_000, np.uint8)
        assert not list(tmp_path.glob("*/*/*.tmp"))
        assert len(tier.hashes()) >= 19
        for block_hash in tier.hashes():
            assert tier.read(block_hash, into)
            assert (into == int.from_bytes(block_hash, "little") % 251).all()
    assert partial, "no kill came while a file was written: this shows nothing"


def test_a_smaller_disk_keeps_the_newest(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, bytes(32), 10)
    names = [bytes([i]) * 32 for i in range(5)]
    for i, name in enumerate(names):
        assert tier.write(name, np.zeros(8, np.uint8))
        os.utime(tier._path(name), (i, i))
    assert DiskTier(tmp_path, bytes(32), 2).hashes() == names[3:]
    assert len(list(tmp_path.glob("*/*/*.kv"))) == 2


def test_a_full_disk_fails_the_write_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path, bytes(32), 10)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert not tier.write(bytes(32), np.zeros(8, np.uint8))
    assert tier.hashes() == [] and not list(tmp_path.glob("*/*/*"))


@pytest.mark.parametrize("dtype", kv_cache.DTYPES.values())
def test_a_block_s_bytes_are_all_of_it(dtype: torch.dtype) -> None:
    """Copied to memory and back into another block, every layer's keys and values (and int8's scales) are the same."""
    cache = KvCache([0, 2], 6, 2, 16, 24, dtype)
    torch.manual_seed(1)
    offsets = torch.arange(16)
    for pair in cache.layers.values():
        for part in pair:
            for block in range(6):
                kv_cache.write_tokens(part, torch.full((16,), block), offsets, torch.randn(16, 2, 24))
    device = DeviceBlocks(part for pair in cache.layers.values() for part in pair)
    before = [
        kv_cache.read_blocks(part, torch.arange(6)).clone() for pair in cache.layers.values() for part in pair
    ]
    memory = MemoryTier(3, device.block_bytes)
    assert memory.take(b"a") and memory.take(b"b")
    rows = memory.rows_of([b"b", b"a"])
    device.read(torch.tensor([4, 1]), memory.rows, rows)
    device.write(torch.tensor([0, 5]), memory.rows, rows)
    after = [kv_cache.read_blocks(part, torch.arange(6)) for pair in cache.layers.values() for part in pair]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[[1, 2, 3, 4]], old[[1, 2, 3, 4]])
        assert torch.equal(new[[0, 5]], old[[4, 1]])


def test_what_has_no_room_or_no_use_is_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(KvernError, match="holds no block"):
        load_executor(checkpoint("llama"), kv_offloading_gib=1e-9)
    with pytest.raises(KvernError, match="several ranks are not offloaded yet"):
        load_executor(checkpoint("llama"), kv_offloading_gib=0.01, topology=Topology(tensor=2))
    family = FAMILIES["Bamba"]
    hybrid = family.save(family.make(), tmp_path / "hybrid")
    with pytest.raises(KvernError, match="keeps states is not offloaded yet"):
        load_executor(hybrid, kv_offloading_gib=0.01)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(KvernError, match="--kv-offloading-dir cannot be used"):
        load_executor(checkpoint("llama"), kv_offloading_gib=0.01, kv_offloading_dir=str(file))


class RealWorker(SimWorker):
    """A real worker process's inside, on a unix socket; each start is another process, with the same disk."""

    def __init__(self, address: str, load: Callable[[], ModelExecutor]) -> None:
        self.address = address
        self._load = load

    async def start(self, *, fresh: bool = True) -> None:
        self.executor = await asyncio.to_thread(self._load)  # type: ignore[assignment]
        self.servicer = WorkerServicer(Progress())
        self.servicer.attach(self.executor)
        self._server = Server(["kvern.v1.WorkerService"])
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self.servicer, self._server.grpc)
        await self._server.start(self.address)


async def test_whole_services_lose_the_worker_and_find_its_blocks_on_disk(
    checkpoint: Callable[[str], Path], tmp_path: Path, unused_tcp_port: int
) -> None:
    def load() -> ModelExecutor:
        return load_executor(
            checkpoint("llama"),
            kv_offloading_gib=0.01,
            kv_offloading_dir=str(tmp_path / "kv"),
            threads=1,
            block_size=4,
            max_model_len=400,
            kv_cache_memory_bytes=2 * 3 * 3 * 4 * 16 * 4 * 100,
        )

    cluster = Cluster(tmp_path)
    cluster.workers = [RealWorker(f"unix:{tmp_path}/w0", load)]
    cluster.flags = ["--metrics-port", str(unused_tcp_port), "--kv-offloading-policy", "arc"]
    try:
        await cluster.start()
        gateway = await cluster.gateway()

        async def ask(handle: int, prompt: list[int] = PROMPT) -> list[int]:
            await gateway.submit(handle, prompt, 8)
            await gateway.finish(handle)
            return gateway.tokens[handle]

        first = await ask(1)
        for handle in (2, 3):
            await ask(handle, OTHER[: 200 * (handle - 1)])
        assert await ask(4) == first
        assert gateway.finished[4].num_cached_tokens == 96
        samples = await _scrape(unused_tcp_port)
        assert samples["vllm:external_prefix_cache_hits_total"] > 0
        assert samples["vllm:kv_offload_load_bytes_total"] > 0
        cluster.workers[0].servicer.drain()
        await cluster.workers[0].stop()
        await cluster.workers[0].start()
        assert await ask(5) == first
        assert gateway.finished[5].num_cached_tokens == 96
        samples = await _scrape(unused_tcp_port)
        assert samples["kvern_kv_load_failures_total"] == 0
    finally:
        await cluster.stop()


async def _scrape(port: int) -> dict[str, float]:
    url = f"http://127.0.0.1:{port}/metrics"
    text = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name.partition("{")[0]: float(value) for name, value in lines}
