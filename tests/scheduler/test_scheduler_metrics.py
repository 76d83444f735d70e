"""What a scrape shows, under the names that dashboards know."""

from __future__ import annotations

import asyncio
import urllib.request
from typing import Any

import pytest
from scheduler.scheduler_harness import Cluster

from kvern_scheduler.metrics import WINDOW_S
from kvern_scheduler.server import limits_of, parse_args

PROMPT = list(range(30, 60))


async def test_a_scrape_has_vllm_s_names_and_the_model_s_label(
    cluster: Cluster, unused_tcp_port: int
) -> None:
    cluster.flags = ["--metrics-port", str(unused_tcp_port), "--max-queued-requests", "1"]
    await cluster.start()
    gateway = await cluster.gateway()
    await gateway.submit(1, PROMPT, 9)
    await gateway.finish(1)
    await gateway.submit(2, PROMPT, 9)
    await gateway.submit(3, [], 9)
    await gateway.finish(2, 3)
    url = f"http://127.0.0.1:{unused_tcp_port}/metrics"
    text = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = '{engine="0",model_name="sim"}'
    block = "block_size"
    expected = {
        f"vllm:request_decode_time_seconds_count{label}": 2,
        f"vllm:request_queue_time_seconds_count{label}": 2,
        f"vllm:request_max_num_generation_tokens_sum{label}": 18,
        f"vllm:request_prefill_kv_computed_tokens_sum{label}": 32,
        f"vllm:prefix_cache_queries_total{label}": 60,
        f"vllm:prefix_cache_hits_total{label}": 28,
        f"vllm:num_requests_running{label}": 0,
        f"kvern_num_requests_executing{label}": 0,
        f"kvern_num_requests_waiting{label}": 0,
        f"kvern_pending_tokens{label}": 0,
        f"kvern_cache_hit_rate{label}": 28 / 60,
        "kvern_groups": 1,
    }
    expected |= {
        f'vllm:{name}{{engine="0",model_name="sim",{key}="{value}"}}': count
        for name, key, value, count in (
            ("admission_rejections_total", "reason", "invalid_argument", 1),
            ("prompt_tokens_by_source_total", "source", "local_compute", 32),
            ("prompt_tokens_by_source_total", "source", "local_cache_hit", 28),
            ("num_requests_waiting_by_reason", "reason", "deferred", 0),
        )
    }
    assert {name: float(samples[name]) for name in expected} == expected
    assert sum(name.startswith("vllm:cache_config_info{" + block) for name in samples) == 1
    assert float(samples["kvern_scheduler_fold_us_p50"]) > 0


def test_flags_become_limits() -> None:
    args = parse_args(
        [
            "--listen",
            "unix:a",
            "--worker",
            "unix:b",
            "--max-num-seqs",
            "3",
            "--no-enable-prefix-caching",
            "--long-prefill-token-threshold",
            "9",
        ]
    )
    limits = limits_of(args)
    assert (limits.max_num_seqs, limits.enable_prefix_caching, limits.long_threshold) == (3, False, 9)


@pytest.mark.parametrize(
    "flags",
    [
        ["--store", "redis"],
        ["--store", "memory", "--redis-url", "redis://x"],
        ["--max-num-seqs", "0"],
    ],
)
def test_flags_that_contradict_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--listen", "unix:a", "--worker", "unix:b", *flags])


async def test_utilization_and_phases_are_what_the_worker_measured(
    cluster: Cluster, unused_tcp_port: int
) -> None:
    cluster.flags = ["--metrics-port", str(unused_tcp_port)]
    await cluster.start()
    executor = cluster.workers[0].executor
    run = executor.run

    def slower(plan: Any) -> Any:
        result = run(plan)
        result.prepare_us, result.forward_us, result.sample_us = 1000, 200_000, 3000
        return result

    executor.run = slower  # type: ignore[method-assign]
    gateway = await cluster.gateway()
    await gateway.submit(1, PROMPT, 9)
    await gateway.finish(1)
    url = f"http://127.0.0.1:{unused_tcp_port}/metrics"
    text = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = 'engine="0",model_name="sim"'
    assert float(samples[f"kvern_gpu_utilization{{{label}}}"]) == pytest.approx(9 * 0.204 / WINDOW_S)
    assert float(samples[f'kvern_step_phase_seconds{{{label},phase="forward"}}']) == pytest.approx(0.2)
    assert float(samples[f'kvern_step_phase_seconds{{{label},phase="sample"}}']) == pytest.approx(0.003)
