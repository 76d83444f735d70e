"""The benchmarks, briefly: that they run, and that their figures hold together."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from e2e.running import BIN


def bench(*words: str) -> dict[str, Any]:
    answer = subprocess.run(
        [BIN / "kvern", "bench", *words, "--json"], capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 0, answer.stderr
    parsed: dict[str, Any] = json.loads(answer.stdout)
    return parsed


@pytest.mark.parametrize("store", ["memory", "redis"])
def test_control(store: str) -> None:
    words = ["--sequences", "8", "--steps", "100", "--step-us", "2000", "--store", store]
    result = bench("control", *words)
    assert (result["sequences"], result["store"]) == (8, store)
    assert result["steps"] >= 100
    for key in ("plan_us_p50", "fold_us_p50", "commit_us_p50"):
        assert 0 < result[key] < 50_000, key
    assert result["step_us_p50"] >= 2000
    assert (result["fdatasync_us_p50"] > 0) == (store == "redis")
    assert 10 < result["steps_per_s"] <= 500
    assert result["tokens_per_s"] == pytest.approx(8 * result["steps_per_s"], rel=0.3)
    assert result["cpu_us_per_step"].keys() == {"worker", "scheduler"} | (
        {"store"} if store == "redis" else set()
    )


def test_recovery_costs_what_is_live_and_not_what_has_ended() -> None:
    def measure(requests: int, finished: int) -> dict[str, Any]:
        sizes = ["--blocks", "10000", "--requests", str(requests), "--finished", str(finished)]
        return bench("recovery", *sizes)

    # Twice, in turns: whatever else runs only adds to the CPU time of one, and the least is compared.
    (plain, ended), (plain_again, ended_again) = ((measure(100, 0), measure(100, 20_000)) for _ in range(2))
    for result in (plain, ended):
        phases = [result[f"{phase}_s"] for phase in ("listening", "leads", "worker", "first_live_token")]
        assert phases == sorted(phases) and phases[0] > 0
        assert result["new_token_s"] >= result["worker_s"]
        # The whole index, and what the new request added.
        assert result["blocks_known"] >= 10_000
    assert plain["store_reads_until_leading"] >= 100, "the live ones are read"
    assert abs(ended["store_reads_until_leading"] - plain["store_reads_until_leading"]) < 60
    least = min(ended["cpu_s"], ended_again["cpu_s"])
    assert least <= 1.5 * min(plain["cpu_s"], plain_again["cpu_s"])
    assert ended["ended_answer_s"] > 0


def test_path() -> None:
    result = bench("path", "--streams", "4", "--num-prompts", "8", "--output-len", "32")
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (8, 0, 8 * 32)
    assert result["max_concurrent_requests"] == 4
    assert result["cpu_us_per_token"].keys() == {"client", "gateway", "scheduler", "worker"}
    assert result["output_throughput"] > 100
    # One event per token, and at most one more at a request's end.
    assert 8 * 32 <= result["num_stream_events"] <= 8 * 33


def test_start() -> None:
    result = bench("start")
    phases = [
        result[f"{phase}_s"] for phase in ("worker_listening", "weights_loaded", "serving", "first_token")
    ]
    assert phases == sorted(phases)
    assert phases[0] > 0
    # 8 s is the goal on two idle cores; `kvern bench start` shows it. Tests share theirs.
    assert phases[-1] < 60
