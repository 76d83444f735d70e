"""Kernel timers count what the model calls, charge each op its own time, and leave no trace of themselves."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from worker.mini_scheduler import generate

import kvern_kernels
from kvern_worker import profiling
from kvern_worker.executor import ModelExecutor
from kvern_worker.profiling import KernelTimers


def test_calls_and_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def inner(seconds: float) -> None:
        time.sleep(seconds)

    def outer() -> None:
        time.sleep(0.02)
        kvern_kernels.rms_norm(0.05)  # type: ignore[call-arg, arg-type]

    monkeypatch.setattr(kvern_kernels, "rms_norm", inner)
    monkeypatch.setattr(kvern_kernels, "linear", outer)
    timers = KernelTimers()
    timers.start()
    started = time.perf_counter()
    kvern_kernels.linear()  # type: ignore[call-arg]
    kvern_kernels.rms_norm(0.03)  # type: ignore[call-arg, arg-type]
    whole = time.perf_counter() - started
    answer = timers.stop()
    assert kvern_kernels.rms_norm is inner and kvern_kernels.linear is outer  # type: ignore[comparison-overlap]
    kvern_kernels.linear()  # type: ignore[call-arg]
    used = {kernel.name: kernel for kernel in answer.kernels if kernel.calls}
    assert {name: kernel.calls for name, kernel in used.items()} == {"linear": 1, "rms_norm": 2}
    assert used["rms_norm"].seconds >= 0.08 and used["linear"].seconds >= 0.02
    assert used["rms_norm"].seconds + used["linear"].seconds <= whole
    names = [answer.kernels[i].name for i in np.frombuffer(answer.call_kernels, "<u4")]
    assert names == ["rms_norm", "linear", "rms_norm"]
    # In the trace a call spans those that it makes.
    starts = np.frombuffer(answer.call_starts, "<u8").astype(np.int64)
    lasted = np.frombuffer(answer.call_nanoseconds, "<u8").astype(np.int64)
    assert starts[1] <= starts[0] and starts[0] + lasted[0] <= starts[1] + lasted[1] + 10**6


def test_a_failing_kernel_is_counted_and_calls_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ValueError("wrong shape")

    monkeypatch.setattr(kvern_kernels, "linear", fails)
    monkeypatch.setattr(profiling, "MAX_CALLS", 3)
    timers = KernelTimers()
    timers.start()
    for _ in range(5):
        with pytest.raises(ValueError, match="wrong shape"):
            kvern_kernels.linear()  # type: ignore[call-arg]
    answer = timers.stop()
    (used,) = [kernel for kernel in answer.kernels if kernel.calls]
    assert (used.calls, len(answer.call_kernels) // 4, answer.truncated) == (5, 3, True)


def test_a_model_s_kernels_are_seen(executor: Callable[[str], ModelExecutor]) -> None:
    model = executor("llama")
    plain = generate(model, [[5, 6, 7, 8]], 4)
    timers = KernelTimers()
    timers.start()
    timed = generate(model, [[5, 6, 7, 8]], 4)
    answer = timers.stop()
    assert timed == plain
    used = {kernel.name for kernel in answer.kernels if kernel.calls}
    assert used & {"run_decoder", "linear", "paged_attention"}
