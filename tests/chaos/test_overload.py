"""Too many requests, and clients that never read: what the benchmarks show, on real processes and briefly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KVERN = Path(sys.executable).parent / "kvern"


def bench(*words: str) -> dict[str, Any]:
    argv = [KVERN, "bench", *words, "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.slow
def test_overload_costs_no_goodput_and_drops_nothing() -> None:
    load = ["--seconds", "3", "--peak-seconds", "2", "--factor", "10"]
    result = bench(
        "overload", *load, "--slots", "8", "--queue", "16", "--step-us", "20000", "--output-len", "16"
    )
    assert result["admitted_but_unfinished"] == result["other_errors"] == result["not_sent"] == 0
    assert result["refused"] > 5 * result["admitted"] > 0
    # The worker is kept busy, however busy this machine is; 0.95 is what a quiet one shows.
    assert result["goodput_ratio"] > 0.8, result
    # A refusal waits for nothing that an admitted request waits for.
    assert result["refusal_ms_p50"] < result["ttft_ms_p50"] / 5, result


@pytest.mark.slow
def test_clients_that_never_read_cost_nobody_anything() -> None:
    result = bench(
        "slow-clients", "--clients", "40", "--output-len", "1024", "--logprobs", "5", "--step-us", "4000"
    )
    assert result["wrong_texts"] == 0
    assert result["step_ratio"] < 1.5, result
    assert result["kernel_bytes_per_client"] < 2**20, result
    # A quarter of what 4,096 tokens may cost.
    assert all(size < 2**18 for size in result["rss_bytes_per_client"].values()), result
