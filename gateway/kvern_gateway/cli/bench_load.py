"""The commands of the benchmarks that ask too much of a server, or try many ways to run one."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from kvern_gateway.cli.report import fail, print_result


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


def sweep(
    model: Annotated[
        str | None, typer.Argument(help="Hugging Face folder or .gguf file [default: SmolLM2-135M-Instruct]")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="FLAG=VALUE,VALUE of `kvern up`; all combinations are measured"),
    ] = None,
    fixed: Annotated[list[str] | None, typer.Option("--with", help="FLAG=VALUE for all of them")] = None,
    max_concurrency: Annotated[str, typer.Option(help="Loads: streams at once, with commas between")] = "",
    request_rate: Annotated[str, typer.Option(help="Loads: requests per second, with commas between")] = "",
    num_prompts: Annotated[int, typer.Option(min=1, help="Of each load")] = 64,
    input_len: Annotated[int, typer.Option(min=1)] = 128,
    output_len: Annotated[int, typer.Option(min=1)] = 64,
    goodput: Annotated[list[str] | None, typer.Option(help="ttft:MS, tpot:MS or e2el:MS")] = None,
    store: Annotated[LoadStore, typer.Option()] = LoadStore.redis,
    output: Annotated[Path | None, typer.Option(help="Folder for results.json and pareto.png")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Start `kvern up` with each combination of flags and load it in each way: a table, and the Pareto front."""
    from kvern_gateway.cli import bench_serve
    from kvern_gateway.cli import bench_sweep as benchmark

    try:
        load = bench_serve.ServeOptions(
            num_prompts=num_prompts,
            random_input_len=input_len,
            random_output_len=output_len,
            num_warmups=1,
            goodput_ms=bench_serve.parse_goodput(goodput or []),
        )
        loads = [
            *(replace(load, max_concurrency=int(word)) for word in max_concurrency.split(",") if word),
            *(replace(load, request_rate=float(word)) for word in request_rate.split(",") if word),
        ]
        if any((one.max_concurrency or 1) < 1 or one.request_rate <= 0 for one in loads):
            raise ValueError("--max-concurrency and --request-rate must be above 0")
        only = benchmark.parse_grid(fixed or [])
        if several := [name for name, values in only.items() if len(values) > 1]:
            raise ValueError(f"--with {several[0]} has several values; those go to --set")
        if output and find_spec("matplotlib") is None:
            raise ValueError("--output draws a picture: pip install matplotlib")
        options = benchmark.SweepOptions(
            model,
            loads or [replace(load, max_concurrency=8)],
            benchmark.parse_grid(settings or []),
            {name: values[0] for name, values in only.items()},
            store,
            output,
        )
    except ValueError as error:
        fail(error)
    print_result(benchmark.run(options), benchmark.render, as_json)
