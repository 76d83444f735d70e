"""Moves blocks between the device and its tiers in a thread of its own, beside the steps.

Transfers are done one after the other, in the order in which the plans name them: a block may be dropped from a tier in
the plan that loads it. The scheduler keeps all steps off the blocks of the device that are on their way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kvern.block_hash import split_hashes
from kvern.rpc.packing import pack_u32, unpack_u32
from kvern.v1 import worker_pb2
from kvern_worker.tiers.disk import DiskTier
from kvern_worker.tiers.memory import DeviceBlocks, MemoryTier

log = logging.getLogger(__name__)

AT_ONCE = 8
"""Blocks that are copied in one call: what a step may have to wait for the memory bus."""


class TierTransfers:
    """See :class:`kvern_worker.service.Transfers`."""

    def __init__(self, device: DeviceBlocks, memory: MemoryTier, disk: DiskTier | None) -> None:
        self.notify: Callable[[], None] = lambda: None
        self._device, self._memory, self._disk = device, memory, disk
        self._waiting: deque[worker_pb2.Transfer] = deque()
        self._done: list[worker_pb2.TransferDone] = []
        self._busy = False
        self._changed = threading.Condition()
        # A block on its way from disk.
        self._read = torch.empty(AT_ONCE, device.block_bytes, dtype=torch.uint8)
        threading.Thread(target=self._run, name="transfers", daemon=True).start()

    def begin(self, transfers: Iterable[worker_pb2.Transfer]) -> None:
        """Behind what was begun before."""
        with self._changed:
            self._waiting.extend(transfers)
            self._changed.notify_all()

    def reset(self) -> None:
        """Forgets what was begun, and waits until nothing moves any more."""
        with self._changed:
            self._waiting.clear()
            self._changed.wait_for(lambda: not self._busy)
            self._done.clear()

    def take_done(self) -> list[worker_pb2.TransferDone]:
        with self._changed:
            done, self._done = self._done, []
        return done

    def inventory(self) -> tuple[bytes, bytes]:
        """Of a new leader's worker, whose transfers have been reset."""
        disk = self._disk.hashes() if self._disk is not None else []
        return b"".join(self._memory.hashes()), b"".join(disk)

    @torch.inference_mode()
    def _run(self) -> None:
        torch.set_num_threads(1)
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._waiting))
                transfer = self._waiting.popleft()
                self._busy = True
            started = time.perf_counter()
            hashes = split_hashes(transfer.hashes)
            blocks = torch.from_numpy(unpack_u32(transfer.block_ids).astype("int64"))
            try:
                failed = self._do(transfer.kind, hashes, blocks)
            except Exception:
                # Sequences wait for the answer, and the next transfers for this thread.
                log.exception("transfer %d failed", transfer.id)
                failed = list(range(len(hashes)))
                if transfer.kind == worker_pb2.TRANSFER_KIND_STORE:
                    for block_hash in hashes:  # their rows may hold anything
                        self._memory.drop(block_hash)
            if not transfer.id:
                continue
            done = worker_pb2.TransferDone(
                id=transfer.id,
                failed=pack_u32(failed),
                num_bytes=(len(hashes) - len(failed)) * self._device.block_bytes,
                microseconds=int((time.perf_counter() - started) * 1e6),
            )
            with self._changed:
                self._done.append(done)
            self.notify()

    def _do(self, kind: worker_pb2.TransferKind.ValueType, hashes: list[bytes], blocks: Tensor) -> list[int]:
        """Returns the positions of the blocks that did not arrive."""
        failed: list[int] = []
        for at in range(0, len(hashes), AT_ONCE):
            some = hashes[at : at + AT_ONCE]
            if kind == worker_pb2.TRANSFER_KIND_STORE:
                lost = self._store(some, blocks[at : at + AT_ONCE])
            elif kind == worker_pb2.TRANSFER_KIND_LOAD:
                lost = self._load(some, blocks[at : at + AT_ONCE])
            else:
                lost = [
                    position for position, block_hash in enumerate(some) if not self._keep(kind, block_hash)
                ]
            failed += [at + position for position in lost]
        return failed

    def _store(self, hashes: list[bytes], blocks: Tensor) -> list[int]:
        kept = [position for position, block_hash in enumerate(hashes) if self._memory.take(block_hash)]
        if kept:
            rows = self._memory.rows_of([hashes[position] for position in kept])
            self._device.read(blocks[kept], self._memory.rows, rows)
        return [position for position in range(len(hashes)) if position not in kept]

    def _load(self, hashes: list[bytes], blocks: Tensor) -> list[int]:
        near = [position for position, block_hash in enumerate(hashes) if block_hash in self._memory]
        if near:
            rows = self._memory.rows_of([hashes[position] for position in near])
            self._device.write(blocks[near], self._memory.rows, rows)
        far: list[int] = []
        lost: list[int] = []
        for position, block_hash in enumerate(hashes):
            if position in near:
                continue
            read = self._disk is not None and self._disk.read(block_hash, self._read[position].numpy())
            (far if read else lost).append(position)
        if far:
            self._device.write(blocks[far], self._read, torch.tensor(far))
        return lost

    def _keep(self, kind: worker_pb2.TransferKind.ValueType, block_hash: bytes) -> bool:
        """WRITE, DROP and UNLINK of one block."""
        if kind == worker_pb2.TRANSFER_KIND_DROP:
            self._memory.drop(block_hash)
        elif kind == worker_pb2.TRANSFER_KIND_UNLINK and self._disk is not None:
            self._disk.remove(block_hash)
        elif kind == worker_pb2.TRANSFER_KIND_WRITE:
            if self._disk is None or block_hash not in self._memory:
                return False
            row = int(self._memory.rows_of([block_hash])[0])
            return self._disk.write(block_hash, self._memory.rows[row].numpy())
        return True
