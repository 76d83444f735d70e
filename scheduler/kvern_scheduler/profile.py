"""What steps and kernels took within a few seconds: sums by phase, and a trace that chrome://tracing and Perfetto show."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvern.v1 import operations_pb2, worker_pb2

Rows = npt.NDArray[np.void]
STEP_PHASES = ("wait", "prepare", "forward", "sample")
_STEPS, _PHASES, _KERNELS = 1, 2, 3


def phase(group: str, name: str, microseconds: npt.NDArray[Any]) -> operations_pb2.PhaseTime:
    """``microseconds``: one for each step, or commit."""
    count = len(microseconds)
    return operations_pb2.PhaseTime(
        group_id=group,
        name=name,
        count=count,
        seconds=float(microseconds.sum()) / 1e6,
        p50=float(np.median(microseconds)) / 1e6 if count else 0.0,
        longest=float(microseconds.max()) / 1e6 if count else 0.0,
    )


def worker_phases(group: str, rows: Rows) -> Iterator[operations_pb2.PhaseTime]:
    for name in STEP_PHASES:
        yield phase(group, f"worker {name}", rows[f"{name}_us"].astype(np.float64))


def trace(rows: Rows, kernels: dict[str, worker_pb2.ProfileResponse]) -> bytes:
    """Gzipped JSON in Chrome's format. Kernels lie where the worker's clock put them, the phases of a step where its result
    came in: a network and two clocks lie between."""
    events: list[dict[str, Any]] = []
    for group in sorted({str(group) for group in rows["group"].tolist()} | set(kernels)):
        events.append(_named("process_name", int(group), 0, f"group {group}"))
        for thread, name in ((_STEPS, "steps"), (_PHASES, "worker phases"), (_KERNELS, "kernels")):
            events.append(_named("thread_name", int(group), thread, name))
    for row in rows:
        events += _step(row)
    for group, answer in kernels.items():
        names = [kernel.name for kernel in answer.kernels]
        called = np.frombuffer(answer.call_kernels, "<u4").tolist()
        starts = (np.frombuffer(answer.call_starts, "<u8") / 1e3).tolist()
        lasted = (np.frombuffer(answer.call_nanoseconds, "<u8") / 1e3).tolist()
        for kernel, start, microseconds in zip(called, starts, lasted, strict=True):
            events.append(_span(names[kernel], int(group), _KERNELS, start, microseconds))
    return gzip.compress(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode(), 6)


def _step(row: Any) -> Iterator[dict[str, Any]]:
    group, end = int(row["group"]), float(row["folded"]) * 1e6
    start = float(row["planned"]) * 1e6
    did = {name: int(row[name]) for name in ("step", "decoded", "prefilled", "chunks", "waiting")}
    yield _span(f"step {did['step']}", group, _STEPS, start, end - start) | {"args": did}
    for name in reversed(STEP_PHASES[1:]):
        microseconds = float(row[f"{name}_us"])
        end -= microseconds
        yield _span(name, group, _PHASES, end, microseconds)


def _span(name: str, group: int, thread: int, start_us: float, microseconds: float) -> dict[str, Any]:
    return {"name": name, "ph": "X", "pid": group, "tid": thread, "ts": start_us, "dur": microseconds}


def _named(kind: str, group: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": group, "tid": thread, "args": {"name": name}}
