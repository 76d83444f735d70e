"""What a worker logs when it starts equals what it then serves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from worker.conftest import load_executor

from kvern_kernels import cpu_base
from kvern_worker import start_log
from kvern_worker.device import Host


def test_each_phase_is_one_record_with_true_values(
    checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    executor = load_executor(checkpoint("llama"), dtype="float32", threads=2)
    served = executor.describe()
    phases: dict[str, Any] = {
        record.getMessage().removeprefix("phase="): vars(record)["fields"]
        for record in caplog.records
        if record.getMessage().startswith("phase=") and "fields" in vars(record)
    }
    device, kv, weights = phases["device"], phases["kv_cache"], phases["weights"]
    assert (device["device"], device["threads"]) == ("cpu", 2)
    assert device["capability"] == cpu_base.LIBRARY.kvern_variant().decode()
    assert 0 < device["free_bytes"] <= device["total_bytes"]
    assert (kv["blocks"], kv["block_size"], kv["tokens"]) == (
        *(served.num_blocks, served.block_size, served.num_blocks * served.block_size),
    )
    assert kv["bytes"] == served.num_blocks * served.bytes_per_block
    assert (weights["dtype"], weights["threads"]) == ("float32", 2)
    # Without the packed copies, every parameter is four bytes.
    assert weights["bytes"] >= 4 * served.model.num_parameters > 0 and weights["seconds"] >= 0


@pytest.mark.parametrize(("free", "warned"), [(2**29, True), (40 * 2**30, False), (3 * 2**30, True)])
def test_little_memory_is_warned_of(free: int, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Small(Host):
        place = torch.device("cpu")

        def memory(self) -> tuple[int, int]:
            return free, 80 * 2**30

    start_log.warn_of_low_memory(Small())
    assert bool(caplog.records) == warned
