"""Times each call of a kernel for a while, by standing in for the ops of kvern_kernels. On CPUs, where a call returns when
its work is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import kvern_kernels
from kvern.v1 import worker_pb2
from kvern_kernels.dispatch import Unavailable

MAX_CALLS = 200_000
"""Kept one by one, for a trace; sums are of all."""


class KernelTimers:
    """``start`` to ``stop``; what other threads call meanwhile is timed too, so only one computes."""

    def __init__(self) -> None:
        self._originals: dict[str, Any] = {}
        self._names: list[str] = []
        self._calls: list[int] = []
        # Own time: without what an op had other ops do.
        self._seconds: list[float] = []
        self._kept: list[tuple[int, int, int]] = []
        self._within: list[float] = []

    def start(self) -> None:
        for op in kvern_kernels.OPS:
            try:
                original = getattr(kvern_kernels, op)
            except Unavailable:
                continue
            self._originals[op] = original
            setattr(kvern_kernels, op, self._timed(op, original))

    def stop(self) -> worker_pb2.ProfileResponse:
        """Ops are as before; a call that runs now is still counted by its end, in nobody's report."""
        for op, original in self._originals.items():
            setattr(kvern_kernels, op, original)
        response = worker_pb2.ProfileResponse(truncated=len(self._kept) >= MAX_CALLS)
        for name, calls, seconds in zip(self._names, self._calls, self._seconds, strict=True):
            response.kernels.add(name=name, calls=calls, seconds=seconds)
        kept = np.array(self._kept, np.uint64).reshape(-1, 3)
        response.call_kernels = kept[:, 0].astype("<u4").tobytes()
        response.call_starts = kept[:, 1].astype("<u8").tobytes()
        response.call_nanoseconds = kept[:, 2].astype("<u8").tobytes()
        return response

    def _timed(self, op: str, original: Callable[..., Any]) -> Callable[..., Any]:
        index = len(self._names)
        self._names.append(op)
        self._calls.append(0)
        self._seconds.append(0.0)
        within = self._within

        def call(*args: Any, **kwargs: Any) -> Any:
            within.append(0.0)
            began_ns, started = time.time_ns(), time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - started
                self._calls[index] += 1
                self._seconds[index] += seconds - within.pop()
                if within:
                    within[-1] += seconds
                if len(self._kept) < MAX_CALLS:
                    self._kept.append((index, began_ns, int(seconds * 1e9)))

        return call
