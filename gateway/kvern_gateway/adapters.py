"""The LoRA adapters of the cell, as its scheduler tells them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from kvern.v1 import adapter_pb2

TOLD_TIMEOUT_S = 5.0


class Adapters:
    """Adapters by name. A name may have a draining one beside the one that new requests get: it was unloaded, and
    requests that were admitted with it go on."""

    def __init__(self) -> None:
        self._served: dict[str, adapter_pb2.Adapter] = {}
        self._draining: dict[str, adapter_pb2.Adapter] = {}
        self._told = asyncio.Event()

    def told(self, adapters: Iterable[adapter_pb2.Adapter]) -> None:
        """These are all."""
        known = list(adapters)
        self._served = {adapter.name: adapter for adapter in known if not adapter.draining}
        self._draining = {adapter.name: adapter for adapter in known if adapter.draining}
        self._told.set()

    @property
    def served(self) -> list[adapter_pb2.Adapter]:
        return list(self._served.values())

    def find(self, name: object, *, admitted: bool = False) -> adapter_pb2.Adapter | None:
        """The adapter of this name that new requests get; with ``admitted``, else the one that older requests have."""
        if not isinstance(name, str):
            return None
        return self._served.get(name) or (self._draining.get(name) if admitted else None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits, for a while, until what is told fulfils ``condition``."""
        try:
            async with asyncio.timeout(TOLD_TIMEOUT_S):
                while not condition():
                    self._told.clear()
                    await self._told.wait()
        except TimeoutError:
            return
