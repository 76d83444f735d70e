"""One worker group's pool of KV blocks, and the prefix index over them.

::

               allocate                    release, last reader
     ┌──────┐ ─────────▶ ┌──────┐ ───────────────────────────────▶ ┌────────┐
     │ free │            │ held │   not in the index → free         │ cached │ (in the index, no reader,
     └──────┘ ◀───────── └──────┘ ◀──────────────────────────────── └────────┘  least recently used first)
         ▲     release                    share (prefix hit)             │
         └──────────────────────── evicted when free runs out ──────────┘

free + cached + held = all. A block gets a new generation each time it is allocated, never when it is shared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvern_scheduler.core.errors import IntegrityError

U32 = npt.NDArray[np.uint32]


class BlockPool:
    """Block ids are 0 … num_blocks − 1."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.generations: U32 = np.zeros(num_blocks, np.uint32)
        self._readers = np.zeros(num_blocks, np.int32)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index: dict[bytes, int] = {}
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._indexed = np.zeros(num_blocks, bool)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that only the index still knows."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that allocate can hand out."""
        return len(self._free) + len(self._cached)

    @property
    def num_indexed(self) -> int:
        return len(self._index)

    def states(self) -> npt.NDArray[np.uint8]:
        """By block: 0 free, 1 cached, 2 read by several, 3 read by one."""
        states = np.minimum(self._readers + 2, 4).astype(np.uint8)
        states[self._readers == 0] = self._indexed[self._readers == 0]
        return np.where(states == 4, np.uint8(2), states)

    def allocate(self, count: int) -> U32:
        """``count`` blocks with new generations, one reader each. Evicts the least recently used cached ones where
        free blocks don't suffice. Raises ValueError where both together don't."""
        if count > self.num_available:
            raise ValueError(f"{count} blocks wanted, {self.num_available} available")
        taken = self._free[-count:][::-1] if count else []
        del self._free[len(self._free) - len(taken) :]
        for _ in range(count - len(taken)):
            block, _none = self._cached.popitem(last=False)
            self._forget(block)
            taken.append(block)
        blocks = np.array(taken, np.uint32)
        self._readers[blocks] = 1
        self.generations[blocks] += np.uint32(1)
        return blocks

    def release(self, blocks: U32) -> None:
        """One reader of each block leaves. ``blocks`` is a table in order of position; its tail is evicted first."""
        self._readers[blocks] -= 1
        idle = blocks[self._readers[blocks] == 0][::-1]
        kept = self._indexed[idle]
        self._free.extend(idle[~kept].tolist())
        for block in idle[kept].tolist():
            self._cached[block] = None

    def match(self, hashes: Sequence[bytes], limit: int) -> list[int]:
        """Blocks that hold the longest indexed prefix of ``hashes``, at most ``limit`` of them."""
        blocks: list[int] = []
        get = self._index.get
        for block_hash in hashes[:limit]:
            block = get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_idle(self, blocks: Sequence[int]) -> int:
        """How many of ``blocks`` have no reader: sharing them takes them from what is available."""
        return sum(block in self._cached for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """One more reader for each of these indexed blocks."""
        for block in blocks:
            self._cached.pop(block, None)
        self._readers[blocks] += 1

    def touch(self, block: int) -> None:
        """Makes an indexed block the most recently used, where it has no reader."""
        if block in self._cached:
            self._cached.move_to_end(block)

    def holds(self, block: int, block_hash: bytes) -> bool:
        """Whether the index has the block, under this hash."""
        return self._hashes[block] == block_hash

    def indexed(self) -> list[tuple[int, bytes]]:
        """Every indexed block with its hash."""
        return [(block, block_hash) for block_hash, block in self._index.items()]

    def enter(self, blocks: U32, hashes: Sequence[bytes]) -> list[int]:
        """Indexes held blocks whose content is final. Returns the positions in ``blocks`` of those that were taken:
        one whose hash is known already, by another block, or that is indexed itself, is not."""
        index, known = self._index, self._hashes
        entered = []
        for position, (block, block_hash) in enumerate(zip(blocks.tolist(), hashes, strict=True)):
            if known[block] is None and index.setdefault(block_hash, block) == block:
                known[block] = block_hash
                entered.append(position)
        self._indexed[blocks[entered]] = True
        return entered

    def restore(self, blocks: U32, hashes: Sequence[bytes], generations: U32) -> None:
        """Indexes blocks that a worker's inventory vouches for, least recently used first. Only for a new pool; of
        several blocks with the same hash, one is taken."""
        self.generations[blocks] = generations
        self._index = dict(zip(hashes, blocks.tolist(), strict=True))
        for block_hash, block in self._index.items():
            self._hashes[block] = block_hash
        self._cached = OrderedDict.fromkeys(self._index.values())
        self._indexed[list(self._cached)] = True
        self._free = np.flatnonzero(~self._indexed)[::-1].tolist()

    def drop_index(self) -> None:
        """Forgets every hash: cached blocks become free ones."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._index.clear()
        self._hashes = [None] * self.num_blocks
        self._indexed[:] = False

    def _forget(self, block: int) -> None:
        block_hash, self._hashes[block] = self._hashes[block], None
        assert block_hash is not None
        del self._index[block_hash]
        self._indexed[block] = False

    def adds_up(self) -> bool:
        """Whether free + cached + held = all; cheap enough to ask whenever idle."""
        held = int(np.count_nonzero(self._readers))
        return len(self._free) + len(self._cached) + held == self.num_blocks

    def check_integrity(self, tables: Sequence[U32]) -> None:
        """Raises IntegrityError unless the readers are exactly the entries of ``tables``, and all blocks add up."""
        readers = np.zeros(self.num_blocks, np.int32)
        for table in tables:
            np.add.at(readers, table, 1)
        if (readers != self._readers).any():
            block = int(np.flatnonzero(readers != self._readers)[0])
            raise IntegrityError(
                f"block {block} has {self._readers[block]} readers, in {readers[block]} tables"
            )
        free, cached = set(self._free), set(self._cached)
        held = set(np.flatnonzero(self._readers).tolist())
        if len(free) != len(self._free):
            raise IntegrityError("a block is free twice")
        if free & cached or free & held or cached & held:
            raise IntegrityError("a block is in two states")
        if len(free) + len(cached) + len(held) != self.num_blocks:
            raise IntegrityError(
                f"{len(free)} free + {len(cached)} cached + {len(held)} held is not {self.num_blocks}"
            )
        hashes = {block: h for block, h in enumerate(self._hashes) if h is not None}
        if {block: h for h, block in self._index.items()} != hashes:
            raise IntegrityError("the index and the blocks' hashes differ")
        if set(np.flatnonzero(self._indexed).tolist()) != hashes.keys():
            raise IntegrityError("the indexed flags and the blocks' hashes differ")
        if not cached <= hashes.keys():
            raise IntegrityError("a cached block has no hash")
