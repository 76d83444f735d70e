"""The sequences that wait for a slot, in order of rank; short prompts may overtake long ones."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvern_scheduler.core.requests import Sequence, State
from kvern_scheduler.core.tiers import Transfer

Awaited = int | Transfer
"""What sequences wait for beside the queue: an adapter, by its number, or blocks on their way to the device."""


class WaitQueue:
    """Two heaps: ``long`` prompts, more tokens than the threshold, of which only a few are prefilled at a time, and all
    others. Cancelled sequences are skipped when they come up."""

    def __init__(self, long_threshold: int) -> None:
        self._threshold = long_threshold
        self._short: list[tuple[tuple[int, int], Sequence]] = []
        self._long: list[tuple[tuple[int, int], Sequence]] = []
        self._parked: dict[Awaited, list[tuple[tuple[int, int], Sequence]]] = {}
        self.num_waiting = 0
        self.num_tokens = 0

    def push(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        heap = self._long if sequence.num_tokens > self._threshold else self._short
        heapq.heappush(heap, (sequence.rank, sequence))
        self.num_waiting += 1
        self.num_tokens += sequence.num_tokens

    def peek(self, allow_long: bool) -> Sequence | None:
        """The next one to serve; not a long one unless ``allow_long``."""
        heads = [heap[0] for heap in self._heaps(allow_long)]
        return min(heads)[1] if heads else None

    def pop(self, sequence: Sequence) -> None:
        """Takes out what peek returned."""
        self._take(sequence)
        self.forget(sequence)

    def _take(self, sequence: Sequence) -> None:
        heap = self._long if self._long and self._long[0][1] is sequence else self._short
        heapq.heappop(heap)

    def park(self, sequence: Sequence, awaited: Awaited) -> None:
        """What peek returned waits, out of the others' way, until ``unpark`` of the same."""
        self._take(sequence)
        heapq.heappush(self._parked.setdefault(awaited, []), (sequence.rank, sequence))

    def unpark(self, awaited: Awaited) -> list[Sequence]:
        """Those that waited for it, counted as waiting still: the caller puts them back or ends them."""
        return [s for _, s in self._parked.pop(awaited, []) if s.state is State.WAITING]

    def put_back(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self.forget(sequence)
            self.push(sequence)

    def awaited_adapters(self) -> list[int]:
        """The adapters that sequences wait for, the best-ranked one's first."""
        heads = []
        for adapter, heap in list(self._parked.items()):
            if not isinstance(adapter, int):
                continue
            while heap and heap[0][1].state is not State.WAITING:
                heapq.heappop(heap)
            if heap:
                heads.append((heap[0][0], adapter))
            else:
                del self._parked[adapter]
        return [adapter for _, adapter in sorted(heads)]

    @property
    def has_parked(self) -> bool:
        return bool(self._parked)

    def forget(self, sequence: Sequence) -> None:
        """``sequence`` no longer counts: it was taken, or has been cancelled and finished."""
        self.num_waiting -= 1
        self.num_tokens -= sequence.num_tokens

    def drain(self) -> list[Sequence]:
        """Takes out everything, in order of rank."""
        heaps = (self._short, self._long, *self._parked.values())
        entries = sorted(e for heap in heaps for e in heap if e[1].state is State.WAITING)
        self._short, self._long, self._parked = [], [], {}
        self.num_waiting = self.num_tokens = 0
        return [sequence for _, sequence in entries]

    @property
    def num_long(self) -> int:
        """Of those, how many are long. Looks at each."""
        return sum(sequence.state is State.WAITING for _, sequence in self._long)

    def __iter__(self) -> Iterator[Sequence]:
        heaps = (self._short, self._long, *self._parked.values())
        return (s for heap in heaps for _, s in heap if s.state is State.WAITING)

    def _heaps(self, allow_long: bool) -> Iterator[list[tuple[tuple[int, int], Sequence]]]:
        for heap in (self._short, self._long) if allow_long else (self._short,):
            while heap and heap[0][1].state is not State.WAITING:
                heapq.heappop(heap)
            if heap:
                yield heap
