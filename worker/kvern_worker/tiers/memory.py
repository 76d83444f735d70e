"""A bounded number of blocks in this machine's memory, known by their hashes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class DeviceBlocks:
    """The bytes of a KV cache by block: every layer's keys and values, one behind the other."""

    def __init__(self, caches: Iterable[Tensor]) -> None:
        """``caches``: [num_blocks, ...] each, a block's bytes lying together (kvern_kernels.kv_cache)."""
        self._parts = [_as_bytes(cache) for cache in caches]
        self.block_bytes = sum(part.shape[1] for part in self._parts)

    def read(self, blocks: Tensor, into: Tensor, rows: Tensor) -> None:
        """Blocks [n] (int64) into ``rows`` [n] of ``into``, uint8 [m, block_bytes]."""
        start = 0
        for part in self._parts:
            end = start + part.shape[1]
            into[:, start:end].index_copy_(
                0, rows, part.index_select(0, blocks.to(part.device)).to(into.device)
            )
            start = end

    def write(self, blocks: Tensor, source: Tensor, rows: Tensor) -> None:
        """``rows`` [n] of ``source``, uint8 [m, block_bytes], into blocks [n]."""
        start = 0
        for part in self._parts:
            end = start + part.shape[1]
            part.index_copy_(
                0, blocks.to(part.device), source[:, start:end].index_select(0, rows).to(part.device)
            )
            start = end


def _as_bytes(cache: Tensor) -> Tensor:
    """uint8 [num_blocks, bytes of a block], a view."""
    size, start = cache.stride(0) * cache.itemsize, cache.storage_offset() * cache.itemsize
    view = torch.empty(0, dtype=torch.uint8, device=cache.device)
    return view.set_(cache.untyped_storage(), start, (cache.shape[0], size), (size, 1))


class MemoryTier:
    """``capacity`` blocks of ``block_bytes``. Memory is taken as it is first written."""

    def __init__(self, capacity: int, block_bytes: int) -> None:
        self.rows = torch.empty(capacity, block_bytes, dtype=torch.uint8)
        self._free = list(range(capacity - 1, -1, -1))
        self._row_of: dict[bytes, int] = {}

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._row_of

    def hashes(self) -> list[bytes]:
        """In the order in which they came."""
        return list(self._row_of)

    def rows_of(self, hashes: Sequence[bytes]) -> Tensor:
        """Where blocks that are here lie, int64."""
        return torch.tensor([self._row_of[block_hash] for block_hash in hashes], dtype=torch.int64)

    def take(self, block_hash: bytes) -> bool:
        """A row for the block; False where all are taken."""
        if block_hash not in self._row_of:
            if not self._free:
                return False
            self._row_of[block_hash] = self._free.pop()
        return True

    def drop(self, block_hash: bytes) -> None:
        row = self._row_of.pop(block_hash, None)
        if row is not None:
            self._free.append(row)
