"""Which blocks of a group lie in the tiers below its device, and which are on their way.

Every block that enters the prefix index is stored to memory, and from there to disk, so that evicting it from the device
loses nothing. In the tiers a block is known by its hash alone. The worker does what it is told one transfer after
another, so a block that is dropped after it was asked for is still loaded.

A block that moves has a reader until the worker has answered: nobody else gets it meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvern.v1 import worker_pb2
from kvern_scheduler.core.blocks import BlockPool
from kvern_scheduler.core.errors import ProtocolError
from kvern_scheduler.core.eviction import Cache, new_cache

U32 = npt.NDArray[np.uint32]
EMPTY: U32 = np.empty(0, np.uint32)

MAX_STORING = 64
"""Blocks on their way to memory at a time: a load waits for no more than these."""

STORE, LOAD = worker_pb2.TRANSFER_KIND_STORE, worker_pb2.TRANSFER_KIND_LOAD
WRITE = worker_pb2.TRANSFER_KIND_WRITE
DROP, UNLINK = worker_pb2.TRANSFER_KIND_DROP, worker_pb2.TRANSFER_KIND_UNLINK


@dataclass(slots=True, eq=False)
class Transfer:
    """``blocks`` [n] of the device, where it is one of its ends, and ``hashes`` [n]. ``pinned``: the blocks that have a
    reader because of it, in order of position."""

    id: int
    kind: worker_pb2.TransferKind.ValueType
    hashes: list[bytes]
    blocks: U32 = field(default_factory=lambda: EMPTY)
    generations: U32 = field(default_factory=lambda: EMPTY)
    pinned: U32 = field(default_factory=lambda: EMPTY)


@dataclass(slots=True)
class Traffic:
    """What went one way since the start."""

    num_blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    num_failed: int = 0


class Tiers:
    """``memory_blocks`` and ``disk_blocks``: capacities; the first is not 0."""

    def __init__(self, pool: BlockPool, policy: str, memory_blocks: int, disk_blocks: int) -> None:
        self._pool = pool
        self._policy = policy
        self.capacities = {"memory": memory_blocks, "disk": disk_blocks}
        self.memory: Cache = new_cache(policy, memory_blocks)
        self.disk: Cache | None = new_cache("lru", disk_blocks) if disk_blocks else None
        # Indexed blocks that may not have been stored yet.
        self._unstored: deque[tuple[int, bytes]] = deque()
        # Begun and not answered.
        self._moving: dict[int, Transfer] = {}
        self._num_storing = 0
        # By the hash of each block that is being loaded.
        self._loads: dict[bytes, Transfer] = {}
        self._next_id = 1
        # What the next plan takes along.
        self._planned: list[Transfer] = []
        self.traffic = {kind: Traffic() for kind in (STORE, LOAD, WRITE)}
        self.num_queries = 0
        self.num_hits = 0

    @property
    def num_loading(self) -> int:
        return sum(transfer.kind == LOAD for transfer in self._moving.values())

    @property
    def is_moving(self) -> bool:
        return bool(self._moving)

    @property
    def has_work(self) -> bool:
        """There is something to send although no sequence has a step to run."""
        return bool(self._planned or (self._unstored and self._num_storing < MAX_STORING))

    def sizes(self) -> dict[str, int]:
        """Blocks in each tier."""
        return {"memory": len(self.memory), "disk": len(self.disk) if self.disk is not None else 0}

    def indexed(self, blocks: Iterable[int], hashes: Iterable[bytes]) -> None:
        """These blocks of the device have entered the prefix index."""
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block_hash in self.memory:
                self.memory.touch(block_hash)
            else:
                self._unstored.append((block, block_hash))

    # -- loads --------------------------------------------------------------------------------------------------

    def find(self, hashes: Sequence[bytes], limit: int) -> list[bytes]:
        """The longest prefix of ``hashes``, of at most ``limit``, that lies in the tiers."""
        found = []
        for block_hash in hashes[:limit]:
            if block_hash not in self.memory and (self.disk is None or block_hash not in self.disk):
                break
            found.append(block_hash)
        return found

    def count(self, hashes: Sequence[bytes]) -> int:
        """How many blocks of the prefix ``hashes`` lie in the tiers."""
        return len(self.find(hashes, len(hashes)))

    def loading(self, block_hash: bytes) -> Transfer | None:
        """What brings the block to the device already."""
        return self._loads.get(block_hash)

    def load(self, hits: Sequence[int], hashes: list[bytes]) -> Transfer:
        """Loads ``hashes`` into new blocks, behind the indexed blocks ``hits``, which stay meanwhile."""
        pool = self._pool
        pool.share(hits)
        blocks = pool.allocate(len(hashes))
        for block_hash in hashes:
            self.memory.touch(block_hash)
            if self.disk is not None:
                self.disk.touch(block_hash)
        pinned = np.concatenate([np.array(hits, np.uint32), blocks])
        transfer = self._begin(LOAD, hashes, blocks, pool.generations[blocks], pinned)
        self._loads.update(dict.fromkeys(hashes, transfer))
        return transfer

    # -- stores -------------------------------------------------------------------------------------------------

    def store(self, num_spare: int) -> None:
        """Begins to store what is not stored yet. ``num_spare``: blocks without a reader that may get one."""
        pool = self._pool
        blocks: list[int] = []
        hashes: list[bytes] = []
        while self._unstored and self._num_storing + len(blocks) < MAX_STORING:
            block, block_hash = self._unstored[0]
            if pool.holds(block, block_hash) and block_hash not in self.memory:
                idle = pool.count_idle([block])
                if idle > num_spare:
                    break
                num_spare -= idle
                pool.share([block])
                left = self.memory.insert(block_hash)
                if left in hashes:  # it has to come before it can go
                    self._store(blocks, hashes)
                    blocks, hashes = [], []
                self._leaves(DROP, left)
                blocks.append(block)
                hashes.append(block_hash)
            self._unstored.popleft()
        self._store(blocks, hashes)

    def _store(self, blocks: list[int], hashes: list[bytes]) -> None:
        if not blocks:
            return
        self._num_storing += len(blocks)
        stored = np.array(blocks, np.uint32)
        self._begin(STORE, hashes, stored, pinned=stored)
        if self.disk is not None:
            fresh = [block_hash for block_hash in hashes if block_hash not in self.disk]
            for block_hash in fresh[: self.capacities["disk"]]:
                self._leaves(UNLINK, self.disk.insert(block_hash))
            if fresh:
                self._begin(WRITE, fresh[: self.capacities["disk"]])

    def _leaves(self, kind: worker_pb2.TransferKind.ValueType, block_hash: bytes | None) -> None:
        if block_hash is not None:
            self._planned.append(Transfer(0, kind, [block_hash]))

    def _begin(
        self,
        kind: worker_pb2.TransferKind.ValueType,
        hashes: list[bytes],
        blocks: U32 = EMPTY,
        generations: U32 = EMPTY,
        pinned: U32 = EMPTY,
    ) -> Transfer:
        transfer = Transfer(self._next_id, kind, hashes, blocks, generations, pinned)
        self._next_id += 1
        self._moving[transfer.id] = transfer
        self._planned.append(transfer)
        return transfer

    def take_planned(self) -> list[Transfer]:
        planned, self._planned = self._planned, []
        return planned

    # -- answers ------------------------------------------------------------------------------------------------

    def done(self, done: worker_pb2.TransferDone, failed: set[int]) -> Transfer:
        """The worker has done a transfer, but for the blocks at the positions ``failed``. Those of a load that arrived
        have a reader still: the caller indexes them, and then calls ``release``. Raises ProtocolError for a transfer that
        was never begun."""
        transfer = self._moving.pop(done.id, None)
        if transfer is None or any(position >= len(transfer.hashes) for position in failed):
            raise ProtocolError(f"transfer {done.id} was not begun, or has fewer blocks than failed")
        for position in failed:
            self._forget(transfer.hashes[position], transfer.kind)
        traffic = self.traffic[transfer.kind]
        traffic.num_blocks += len(transfer.hashes) - len(failed)
        traffic.num_bytes += done.num_bytes
        traffic.seconds += done.microseconds / 1e6
        traffic.num_failed += len(failed)
        if transfer.kind == STORE:
            self._num_storing -= len(transfer.hashes)
        elif transfer.kind == LOAD:
            for block_hash in transfer.hashes:
                del self._loads[block_hash]
        return transfer

    def release(self, transfer: Transfer) -> None:
        self._pool.release(transfer.pinned)

    def _forget(self, block_hash: bytes, kind: worker_pb2.TransferKind.ValueType) -> None:
        """A copy in a tier is no good, or was never made: one on disk of a WRITE, one in memory of a STORE. What could not
        be loaded may have been stored behind the load's back, by a sequence that computed it: that copy goes too."""
        if kind != WRITE:
            self.memory.discard(block_hash)
        if kind != STORE and self.disk is not None:
            self.disk.discard(block_hash)
        if kind == LOAD:
            self._leaves(DROP, block_hash)
            if self.disk is not None:
                self._leaves(UNLINK, block_hash)

    def lose(self) -> None:
        """The worker's stream is gone, and with it what moved."""
        for transfer in self._moving.values():
            self.release(transfer)
        self._moving.clear()
        self._loads.clear()
        self._planned.clear()
        self._unstored.clear()
        self._num_storing = 0

    def restore(self, memory: list[bytes], disk: list[bytes]) -> None:
        """A worker says what its tiers hold, the least recently used first."""
        self.memory = new_cache(self._policy, self.capacities["memory"], memory)
        if self.disk is not None:
            self.disk = new_cache("lru", self.capacities["disk"], disk)
        self._unstored.extend(self._pool.indexed())

    def pinned(self) -> list[U32]:
        """The blocks that have a reader because they move, by transfer."""
        return [transfer.pinned for transfer in self._moving.values() if transfer.pinned.size]
