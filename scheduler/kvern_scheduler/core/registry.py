"""Which LoRA adapters a cell serves."""

from __future__ import annotations

import re

from kvern.errors import KvernError, invalid
from kvern.v1 import adapter_pb2, error_pb2

_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


class Registry:
    """All adapters by number: those that new requests may have, and *draining* ones, which only older requests have."""

    def __init__(self) -> None:
        self.adapters: dict[int, adapter_pb2.Adapter] = {}
        self._next = 1

    def named(self, name: str) -> adapter_pb2.Adapter | None:
        """The one that new requests of this name get."""
        return next((a for a in self.adapters.values() if a.name == name and not a.draining), None)

    def add(
        self, name: str, path: str, digest: bytes, rank: int, *, replace: bool, from_flags: bool
    ) -> adapter_pb2.Adapter:
        """Serves an adapter from now on; the one of the same name, path and files, if there is one. Raises KvernError
        where the name stands for another, unless that is to be replaced."""
        known = self.named(name)
        if known is not None:
            if (known.path, known.digest) == (path, digest):
                return known
            if not replace:
                raise _is_taken(known, path)
            known.draining = True
        adapter = adapter_pb2.Adapter(
            number=self._next, name=name, path=path, digest=digest, rank=rank, from_flags=from_flags
        )
        self._next += 1
        self.adapters[adapter.number] = adapter
        return adapter

    def drain(self, name: str) -> adapter_pb2.Adapter:
        """No new request gets it. Raises MODEL_NOT_FOUND."""
        adapter = self.named(name)
        if adapter is None:
            raise not_served("lora_name", name)
        adapter.draining = True
        return adapter

    def pack(self) -> bytes:
        """A kvern.v1.AdapterRegistry."""
        registry = adapter_pb2.AdapterRegistry(adapters=self.adapters.values(), next_number=self._next)
        return bytes(registry.SerializeToString())

    def restore(self, packed: bytes) -> None:
        registry = adapter_pb2.AdapterRegistry.FromString(packed)
        self.adapters = {adapter.number: adapter for adapter in registry.adapters}
        self._next = max(1, registry.next_number)


def check_name(name: str, model: str) -> None:
    """Raises KvernError where an adapter may not be called so. ``model``: the name of the base model."""
    if _NAME.fullmatch(name) is None:
        limit = "1 to 128 characters of A-Z a-z 0-9 . _ : / -"
        raise invalid("lora_name", f"lora_name must be {limit}", value=name[:200], limit=limit)
    if name == model:
        raise invalid("lora_name", f"{name} is the name of the model itself; choose another one", value=name)


def not_served(field: str, name: str) -> KvernError:
    return KvernError(
        error_pb2.ERROR_CODE_MODEL_NOT_FOUND,
        f"there is no adapter {name!r}: it was not loaded, or has been unloaded",
        field=field,
        value=name,
    )


def _is_taken(known: adapter_pb2.Adapter, path: str) -> KvernError:
    other = " with other files" if known.path == path else ""
    return invalid(
        "lora_name",
        f"adapter {known.name!r} is loaded from {known.path}{other}; unload it first, or load this one in its place",
        value=known.name,
    )
