"""`kvern bench serve`: load on any OpenAI-compatible server, reported as vLLM's `bench serve` reports it."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from kvern_gateway.cli import bench_metrics
from kvern_gateway.cli.bench_workload import LoadOptions, Prompt, draw
from kvern_gateway.cli.load_client import Pool, StreamRecord, Target

_WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "hand",
    "part",
]


@dataclass(frozen=True)
class ServeOptions(LoadOptions):
    """Meanings are those of vLLM's flags of the same names."""

    base_url: str = "http://127.0.0.1:8000"
    endpoint: str = "/v1/completions"
    model: str | None = None
    max_concurrency: int | None = None
    ignore_eos: bool = True
    num_warmups: int = 0
    metrics: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el")
    percentiles: tuple[float, ...] = (99.0,)
    goodput_ms: dict[str, float] = field(default_factory=dict)
    extra_body: dict[str, Any] = field(default_factory=dict)
    headers: tuple[tuple[str, str], ...] = ()
    save_detailed: bool = False


def request_body(options: ServeOptions, model: str, prompt: Prompt) -> dict[str, Any]:
    chat = "chat" in options.endpoint
    words = [_WORDS[token_id % len(_WORDS)] for token_id in prompt.token_ids]
    return {
        "model": model,
        **(
            {"messages": [{"role": "user", "content": " ".join(words)}]}
            if chat
            else {"prompt": prompt.token_ids}
        ),
        "max_completion_tokens" if chat else "max_tokens": prompt.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if options.ignore_eos else {}),
        **options.extra_body,
    }


async def run(options: ServeOptions) -> dict[str, Any]:
    """Sends the load and returns the result under vLLM's keys. Raises ConnectionError when no server answers."""
    pool = Pool(Target.parse(options.base_url, options.headers))
    model = options.model or (await pool.get_json("/v1/models"))["data"][0]["id"]
    prompts, arrivals = draw(options)
    requests = [
        pool.target.post(options.endpoint, request_body(options, model, prompt)) for prompt in prompts
    ]
    for index in range(options.num_warmups):
        warmup = StreamRecord(prompt_len=0)
        await pool.run(requests[index % len(requests)], warmup)
        if warmup.error:
            raise ConnectionError(f"the warm-up request failed: {warmup.error}")
    records = [StreamRecord(prompt_len=len(prompt.token_ids)) for prompt in prompts]
    gc.collect()
    gc.disable()
    try:
        cpu_start = _cpu_seconds()
        start = perf_counter()
        await _send_all(pool, requests, records, arrivals, options.max_concurrency)
        duration = perf_counter() - start
        cpu = _cpu_seconds() - cpu_start
    finally:
        gc.enable()
        pool.close()
    num_events = sum(sum(record.counts) for record in records)
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai-chat" if "chat" in options.endpoint else "openai",
        "backend": "openai-chat" if "chat" in options.endpoint else "openai",
        "label": None,
        "model_id": model,
        "tokenizer_id": None,
        "num_prompts": len(prompts),
        "dataset_name": options.dataset_name,
        "request_rate": "inf" if np.isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        **bench_metrics.summarize(
            records,
            duration,
            metrics=options.metrics,
            percentiles=options.percentiles,
            goodput_ms=options.goodput_ms,
        ),
        "num_stream_events": num_events,
        "client_cpu_us_per_event": cpu * 1e6 / max(num_events, 1),
        "first_error": next((record.error for record in records if record.error), None),
        **(bench_metrics.detail(records) if options.save_detailed else {}),
    }


async def _send_all(
    pool: Pool,
    requests: Sequence[bytes],
    records: Sequence[StreamRecord],
    arrivals: Sequence[float],
    max_concurrency: int | None,
) -> None:
    free = asyncio.Semaphore(max_concurrency or len(requests))
    loop = asyncio.get_running_loop()
    start = loop.time()

    async def send(index: int) -> None:
        try:
            await pool.run(requests[index], records[index])
        finally:
            free.release()

    tasks = []
    for index, arrival in enumerate(arrivals):
        if (delay := start + arrival - loop.time()) > 0:
            await asyncio.sleep(delay)
        await free.acquire()
        tasks.append(asyncio.create_task(send(index)))
    await asyncio.gather(*tasks)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """``["ttft:200", "tpot:50"]`` → milliseconds by metric. Raises ValueError."""
    limits: dict[str, float] = {}
    for word in words:
        name, _, limit = word.partition(":")
        if name not in bench_metrics.GOODPUT_METRICS:
            raise ValueError(
                f"--goodput {word!r}: the metric must be one of {', '.join(bench_metrics.GOODPUT_METRICS)}"
            )
        try:
            limits[name] = float(limit)
        except ValueError:
            raise ValueError(f"--goodput {word!r}: write it as {name}:MILLISECONDS") from None
        if limits[name] < 0:
            raise ValueError(f"--goodput {word!r}: the limit must not be negative")
    return limits


def parse_metrics(text: str) -> tuple[str, ...]:
    """Raises ValueError for a name that is no metric."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in bench_metrics.METRIC_TITLES:
            raise ValueError(
                f"--percentile-metrics {name!r}: choose from {', '.join(bench_metrics.METRIC_TITLES)}"
            )
    return names


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Raises ValueError for anything outside [0, 100]."""
    values = tuple(float(word) for word in text.split(","))
    for value in values:
        if not 0 <= value <= 100:
            raise ValueError(f"--metric-percentiles {value:g}: the range is 0 to 100")
    return values


def report(options: ServeOptions, result: dict[str, Any], as_json: bool, save_to: Path | None) -> int:
    """Prints, saves, and returns the exit code: 1 when nothing succeeded."""
    if save_to:
        save_to.parent.mkdir(parents=True, exist_ok=True)
        save_to.write_text(json.dumps(result))
    if as_json:
        print(json.dumps(result))
    else:
        print(bench_metrics.render_table(result, options.metrics, options.percentiles))
        if peer := result.get("compare"):
            print(f"\n{peer['backend']}, {peer['dtype']}")
            print(bench_metrics.render_table(peer, options.metrics, options.percentiles))
    if result["first_error"]:
        print(f"{result['failed']} requests failed; the first: {result['first_error']}", file=sys.stderr)
    return 0 if result["completed"] else 1


def default_filename(options: ServeOptions, result: dict[str, Any]) -> str:
    concurrency = f"-concurrency{options.max_concurrency}" if options.max_concurrency else ""
    model = str(result["model_id"]).split("/")[-1]
    return f"{result['backend']}-{options.request_rate}qps{concurrency}-{model}-{result['date']}.json"
