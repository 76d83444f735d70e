"""The adapters that a worker has read, the least recently used of which it forgets."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import torch

from kvern_worker.adapters.peft import Adapter, changed, read_adapter
from kvern_worker.adapters.slots import AdapterSlots


class AdapterLibrary:
    """Called from one thread, beside the one that computes. ``max_held``: adapters in memory besides the slots."""

    def __init__(self, slots: AdapterSlots, max_held: int, dtype: torch.dtype) -> None:
        self.slots = slots
        self._max_held = max_held
        self._dtype = dtype
        self._held: OrderedDict[tuple[str, bytes], Adapter] = OrderedDict()

    def load(self, path: str, digest: bytes, slot: int | None) -> Adapter:
        """The adapter in the folder ``path``, put into ``slot`` if given. ``digest``: which one it must be; empty:
        whatever the files hold now. Raises KvernError."""
        adapter = self._held.get((path, digest))
        if adapter is None:
            adapter = read_adapter(Path(path), self.slots.targets, self.slots.max_rank, self._dtype)
            if digest and adapter.digest != digest:
                raise changed(path)
            self._held[path, adapter.digest] = adapter
        self._held.move_to_end((path, adapter.digest))
        while len(self._held) > self._max_held:
            self._held.popitem(last=False)
        if slot is not None:
            self.slots.fill(slot, adapter)
        return adapter
