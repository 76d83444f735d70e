"""`kvern bench observe`: what logs of each request and step, scrapes and looks at the status cost in throughput.

One stack on a simulated worker; rounds with all of it on and with all of it off take turns, so that what else the machine does
falls on both.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kvern_gateway.cli import bench_stack
from kvern_gateway.cli.ports import claim_port
from kvern_gateway.cli.report import print_result

SCRAPE_S = 1.0


@dataclass(frozen=True)
class ObserveOptions:
    """``prompts`` are those of one round."""

    streams: int
    step_us: int
    pairs: int
    prompts: int
    output_len: int = 64

    @property
    def tokens(self) -> int:
        return self.prompts * self.output_len


def observe(
    streams: Annotated[int, typer.Option(min=1, help="Requests at once")] = 32,
    step_us: Annotated[int, typer.Option(min=0, help="What the simulated worker takes for a step")] = 10_000,
    pairs: Annotated[int, typer.Option(min=2, help="Rounds with and without, in turns")] = 10,
    num_prompts: Annotated[int, typer.Option(min=1, help="Of each round")] = 128,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Throughput with logs, metrics and status against without, in the same run."""
    options = ObserveOptions(streams, step_us, pairs, num_prompts)
    print_result(run(options), render, as_json)


async def run(options: ObserveOptions) -> dict[str, Any]:
    """Raises ChildFailed, ConnectionError, TimeoutError."""
    import httpx

    from kvern_gateway.cli.load_client import Target

    ports = [claim_port("127.0.0.1", 0, flag) for flag in ("--http-port", "--grpc-port", "--metrics-port")]
    flags = {
        "sim_step_us": options.step_us,
        "max_num_seqs": options.streams,
        "metrics_port": ports[2],
        "log_format": "json",
    }
    async with bench_stack.running(
        *("worker", "scheduler", "gateway"),
        store="memory",
        appendfsync="always",
        flags=flags,
        http_port=ports[0],
        grpc_port=ports[1],
    ) as bench:
        base_url = f"http://127.0.0.1:{ports[0]}"
        await bench_stack.until_healthy(Target("127.0.0.1", ports[0]))
        bench.supervisor.mark_ready()
        throughput: dict[bool, list[float]] = {False: [], True: []}
        cpu: dict[bool, list[float]] = {False: [], True: []}
        async with httpx.AsyncClient(base_url=base_url) as client:
            await _load(base_url, options)
            for pair in range(options.pairs):
                # The second of a pair may find the machine warmer: each kind is it in turn.
                for on in (True, False) if pair % 2 else (False, True):
                    async with _observed(client, ports[2], on):
                        before = sum(bench.cpu_seconds().values())
                        throughput[on].append(await _load(base_url, options))
                        cpu[on].append(sum(bench.cpu_seconds().values()) - before)
    ratios = [on / off for off, on in zip(throughput[False], throughput[True], strict=True)]
    return {
        "streams": options.streams,
        "sim_step_us": options.step_us,
        "pairs": options.pairs,
        "off_tokens_per_s": statistics.mean(throughput[False]),
        "on_tokens_per_s": statistics.mean(throughput[True]),
        "off_cpu_us_per_token": 1e6 * statistics.mean(cpu[False]) / options.tokens,
        "on_cpu_us_per_token": 1e6 * statistics.mean(cpu[True]) / options.tokens,
        "ratio": statistics.mean(ratios),
        "ratio_stderr": statistics.stdev(ratios) / math.sqrt(len(ratios)),
    }


async def _load(base_url: str, options: ObserveOptions) -> float:
    """Output tokens per second of a round."""
    from kvern_gateway.cli import bench_serve
    from kvern_gateway.cli.stack import DEFAULT_MODEL_VOCAB_SIZE

    result = await bench_serve.run(
        bench_serve.ServeOptions(
            base_url=base_url,
            num_prompts=options.prompts,
            random_input_len=32,
            random_output_len=options.output_len,
            random_vocab_size=DEFAULT_MODEL_VOCAB_SIZE,
            max_concurrency=options.streams,
            extra_body={"temperature": 0},
        )
    )
    return float(result["output_throughput"])


@contextlib.asynccontextmanager
async def _observed(client: Any, metrics_port: int, on: bool) -> AsyncIterator[None]:
    """Where ``on``: records of requests and steps, and a Prometheus and a `kvern top` that look once a second."""
    (await client.post("/v1/logging", json={"requests": on, "steps": on})).raise_for_status()
    watching = asyncio.create_task(_watch(client, metrics_port)) if on else None
    try:
        yield
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def _watch(client: Any, metrics_port: int) -> None:
    paths = ("/metrics", "/v1/status", "/v1/requests?limit=8", f"http://127.0.0.1:{metrics_port}/metrics")
    while True:
        for path in paths:
            (await client.get(path)).raise_for_status()
        await asyncio.sleep(SCRAPE_S)


def render(result: dict[str, Any]) -> str:
    lost = 100 * (1 - result["ratio"])
    return "\n".join(
        [
            f"streams {result['streams']}, simulated step {result['sim_step_us']} µs, {result['pairs']} pairs of rounds",
            f"without {result['off_tokens_per_s']:.0f} tokens/s",
            f"with    {result['on_tokens_per_s']:.0f} tokens/s (each request and step logged, all metrics scraped each second)",
            f"CPU of all services {result['off_cpu_us_per_token']:.1f} and {result['on_cpu_us_per_token']:.1f} µs a token",
            f"ratio   {result['ratio']:.4f} (standard error {result['ratio_stderr']:.4f}): {lost:.2f} % less",
        ]
    )
