"""Which key leaves a full cache: least recently used, or ARC.

ARC: N. Megiddo, D. S. Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Protocol

POLICIES = ("lru", "arc")


class Cache(Protocol):
    """At most ``capacity`` keys."""

    def __contains__(self, key: bytes) -> bool: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[bytes]:
        """Every key."""
        ...

    def touch(self, key: bytes) -> None:
        """The key was used, if it is there."""
        ...

    def insert(self, key: bytes) -> bytes | None:
        """Takes a key in that is not there. Returns the one that had to leave for it."""
        ...

    def discard(self, key: bytes) -> None:
        """The key is gone, if it was there."""
        ...


def new_cache(policy: str, capacity: int, keys: Iterable[bytes] = ()) -> Cache:
    """Of ``policy`` "lru" or "arc", ``capacity`` > 0, with ``keys``, the least recently used first."""
    cache: Cache = Arc(capacity) if policy == "arc" else Lru(capacity)
    for key in keys:
        if key not in cache:
            cache.insert(key)
    return cache


class Lru:
    """The least recently used key leaves."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def touch(self, key: bytes) -> None:
        if key in self._keys:
            self._keys.move_to_end(key)

    def insert(self, key: bytes) -> bytes | None:
        left = self._keys.popitem(last=False)[0] if len(self._keys) == self._capacity else None
        self._keys[key] = None
        return left

    def discard(self, key: bytes) -> None:
        self._keys.pop(key, None)


class Arc:
    """Keys used once (``_once``, the paper's T1) and more than once (``_often``, T2), and those that left either lately
    (``_left_once``, B1; ``_left_often``, B2): one that comes back says which of the two should have been larger."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._often: OrderedDict[bytes, None] = OrderedDict()
        self._left_once: OrderedDict[bytes, None] = OrderedDict()
        self._left_often: OrderedDict[bytes, None] = OrderedDict()
        # What _once may grow to (the paper's p).
        self.target = 0.0

    def __contains__(self, key: bytes) -> bool:
        return key in self._once or key in self._often

    def __len__(self) -> int:
        return len(self._once) + len(self._often)

    def __iter__(self) -> Iterator[bytes]:
        yield from self._once
        yield from self._often

    def touch(self, key: bytes) -> None:
        if key in self._once:
            del self._once[key]
            self._often[key] = None
        elif key in self._often:
            self._often.move_to_end(key)

    def insert(self, key: bytes) -> bytes | None:
        again = key in self._left_often
        if key in self._left_once:
            step = max(1.0, len(self._left_often) / len(self._left_once))
            self.target = min(float(self._capacity), self.target + step)
            left = self._replace(again)
            del self._left_once[key]
            self._often[key] = None
            return left
        if again:
            step = max(1.0, len(self._left_once) / len(self._left_often))
            self.target = max(0.0, self.target - step)
            left = self._replace(again)
            del self._left_often[key]
            self._often[key] = None
            return left
        if len(self._once) + len(self._left_once) == self._capacity:
            if not self._left_once:
                left = self._once.popitem(last=False)[0]
                self._once[key] = None
                return left
            self._left_once.popitem(last=False)
        elif len(self) + len(self._left_once) + len(self._left_often) >= 2 * self._capacity:
            self._left_often.popitem(last=False)
        left = self._replace(again)
        self._once[key] = None
        return left

    def _replace(self, again: bool) -> bytes | None:
        """Makes room for a key; ``again``: for one that left _often."""
        if len(self) < self._capacity:
            return None
        if self._once and (len(self._once) > self.target or (again and len(self._once) == self.target)):
            left = self._once.popitem(last=False)[0]
            self._left_once[left] = None
        elif self._often:
            left = self._often.popitem(last=False)[0]
            self._left_often[left] = None
        else:
            left = self._once.popitem(last=False)[0]
            self._left_once[left] = None
        return left

    def discard(self, key: bytes) -> None:
        for keys in (self._once, self._often, self._left_once, self._left_often):
            keys.pop(key, None)
