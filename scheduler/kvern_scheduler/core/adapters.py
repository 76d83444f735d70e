"""Which LoRA adapters lie in a group's slots."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _Slot:
    """``number`` 0: empty. A slot that is closing takes no new sequences, so that another adapter gets it."""

    number: int = 0
    ready: bool = False
    closing: bool = False
    users: int = 0
    last_step: int = 0


class SlotTable:
    """The slots of one group::

        empty ─place─▶ loading ─ready─▶ ready ─close─▶ closing ─(no users, none in flight)─▶ loading, for another
                                          └──(no users, least recently used)──────────────────────┘

    What is loading is in ``loads`` until it is taken."""

    def __init__(self, count: int) -> None:
        self._slots = [_Slot() for _ in range(count)]
        self.loads: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def users(self) -> list[int]:
        """Sequences of each slot."""
        return [slot.users for slot in self._slots]

    def number(self, index: int) -> int:
        """Of the adapter in a slot; 0: none."""
        return self._slots[index].number

    def find(self, number: int) -> int | None:
        """The slot in which a sequence may use the adapter now."""
        for index, slot in enumerate(self._slots):
            if slot.number == number and slot.ready and not slot.closing:
                return index
        return None

    def enter(self, index: int) -> None:
        self._slots[index].users += 1

    def leave(self, index: int, step: int) -> None:
        """A sequence is gone, which steps up to ``step`` may still compute."""
        slot = self._slots[index]
        slot.users -= 1
        slot.last_step = step

    def ready(self, index: int, number: int) -> None:
        slot = self._slots[index]
        if slot.number == number:
            slot.ready = True

    def clear(self, index: int) -> None:
        self._slots[index] = _Slot()

    def assign(self, wanted: Iterable[int], oldest_in_flight: int) -> None:
        """Slots for the adapters that sequences wait for, the most urgent first: an empty one, else that of the least
        recently used adapter that no one has, else one is closed. ``oldest_in_flight``: steps from there on may still
        be computing."""
        unmet = [number for number in wanted if not self.holds(number)]
        for number in unmet:
            free = [s for s in self._slots if self._is_free(s, oldest_in_flight)]
            if free:
                # Those that are empty come first, then those that were closed, then by age.
                slot = min(free, key=lambda s: (s.number != 0, not s.closing, s.last_step))
                slot.number, slot.ready, slot.closing = number, False, False
                self.loads.append((self._slots.index(slot), number))
                continue
            closing = sum(s.closing for s in self._slots)
            open_ = [s for s in self._slots if s.ready and not s.closing]
            if open_ and closing < len(unmet):
                min(open_, key=lambda s: s.users).closing = True

    def holds(self, number: int) -> bool:
        """Whether the adapter is in a slot for good, or on its way there."""
        return any(s.number == number and not s.closing for s in self._slots)

    @staticmethod
    def _is_free(slot: _Slot, oldest_in_flight: int) -> bool:
        if slot.number == 0:
            return True
        return slot.ready and slot.users == 0 and slot.last_step < oldest_in_flight

    def take_loads(self) -> list[tuple[int, int]]:
        """(slot, adapter number) that the worker must be asked for."""
        loads, self.loads = self.loads, []
        return loads
