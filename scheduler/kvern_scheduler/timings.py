"""The last few thousand durations of each kind, for medians."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CAPACITY = 4096


class Ring:
    """The newest CAPACITY values, microseconds."""

    def __init__(self) -> None:
        self._values = np.zeros(CAPACITY, np.float32)
        self.count = 0

    def add(self, seconds: float) -> None:
        self._values[self.count % CAPACITY] = seconds * 1e6
        self.count += 1

    def newest(self, count: int) -> npt.NDArray[np.float32]:
        """The last ``count`` values, as far as they are kept, in no order."""
        places = np.arange(self.count - min(count, self.count, CAPACITY), self.count) % CAPACITY
        return self._values[places]

    def median(self) -> float:
        """0 when empty."""
        return float(np.median(self._values[: self.count])) if self.count else 0.0


class Timings:
    """Seconds in, medians of microseconds out."""

    def __init__(self) -> None:
        self.plan = Ring()
        self.fold = Ring()
        self.commit = Ring()
        self.step = Ring()
