"""The commands of the benchmarks that ask too much of a server."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from kvern_gateway.cli.report import print_result


class LoadStore(StrEnum):
    redis = "redis"
    memory = "memory"


def overload(
    seconds: Annotated[float, typer.Option(min=1, help="Of overload")] = 60.0,
    factor: Annotated[float, typer.Option(min=1, help="Times the rate that can be served")] = 10.0,
    slots: Annotated[int, typer.Option(min=1, help="Sequences in a step")] = 32,
    queue: Annotated[int, typer.Option(min=1, help="Sequences that may wait")] = 64,
    step_us: Annotated[
        int, typer.Option(min=1000, help="What the simulated worker takes for a step")
    ] = 20_000,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of an answer")] = 64,
    peak_seconds: Annotated[float, typer.Option(min=1, help="Of measuring the peak")] = 10.0,
    store: Annotated[LoadStore, typer.Option()] = LoadStore.memory,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Offer far more than can be served: goodput against the peak, time of a refusal, what was admitted and dropped."""
    from kvern_gateway.cli import bench_overload as benchmark

    options = benchmark.OverloadOptions(
        seconds,
        factor,
        slots=slots,
        queue=queue,
        step_us=step_us,
        output_len=output_len,
        peak_s=peak_seconds,
        store=store,
    )
    raise typer.Exit(benchmark.exit_code(print_result(benchmark.run(options), benchmark.render, as_json)))


def slow_clients(
    clients: Annotated[int, typer.Option(min=2, help="Half of them over HTTP, half over gRPC")] = 200,
    output_len: Annotated[int, typer.Option(min=64, help="Tokens that each of them asks for")] = 4096,
    logprobs: Annotated[
        int, typer.Option(min=0, max=20, help="Alternatives per token that they ask for")
    ] = 0,
    step_us: Annotated[
        int, typer.Option(min=1000, help="What the simulated worker takes for a step")
    ] = 10_000,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Clients that never read their streams: step time and memory with them, and what other clients see."""
    from kvern_gateway.cli import bench_slow as benchmark

    options = benchmark.SlowOptions(clients, output_len, logprobs, step_us)
    raise typer.Exit(benchmark.exit_code(print_result(benchmark.run(options), benchmark.render, as_json)))
